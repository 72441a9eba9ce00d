"""The arithmetic of a training: the target's own type, float32 where this processor multiplies that faster, or int8.

oneDNN's products in bf16 are faster than in float32 on some processors (those with AMX, for example) and slower on
others. The weights are the same either way, and float32 rounds less.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F

from anabranch.errors import CapabilityError
from anabranch.model.decoder import Decoder
from anabranch.model.learner import learner_of_packed
from anabranch.model.training_formats import Int8Linear, multiply_in_int8, quantize_to_nf4

__all__ = ["ARITHMETIC", "INT8", "Arithmetic", "chosen_dtype", "chosen_for_packed", "learner_of", "packed_learner"]

ARITHMETIC = "arithmetic"  # in the plan of a run's checkpoint
INT8 = "int8"
ROWS, ROUNDS = 512, 5
K = TypeVar("K")
FASTER = 1.2  # how much faster float32 must be: its activations take twice the memory


class Arithmetic(NamedTuple):
    """How a training on a packed target computes; its name is kept in the plan of the run's checkpoint.

    dtype  of rows, and of all products but those of the target's layers
    int8   whether these are in int8, forward and backward
    """

    dtype: torch.dtype
    int8: bool

    @property
    def name(self) -> str:
        """Such as "int8, torch.float32"."""
        return f"{INT8}, {self.dtype}" if self.int8 else str(self.dtype)

    @classmethod
    def named(cls, name: str, own: torch.dtype) -> Arithmetic:
        """That of a name; ``own``: the target's type, which a name without a type has."""
        products, _, dtype = name.rpartition(", ")
        known = {str(each): each for each in (torch.float32, own)}
        return cls(known.get(dtype, own), INT8 in (products, dtype))


def chosen_dtype(decoder: Decoder, form: str, stored: Mapping[str, Any] | None = None) -> torch.dtype:
    """The type to compute gradients in.

    form    the recipe's ``target_format``: what the kernels return in int8 is float32, and nf4 computes in the target's
    stored  the record of a checkpoint, whose choice is kept

    Times products of one width of the target on a CPU; elsewhere, and for other types than bf16, it is the target's.
    """
    own = decoder.dtype
    if form == "int8":
        return torch.float32
    if form == "nf4" or own != torch.bfloat16 or decoder.device.type != "cpu":
        return own
    names = {str(dtype): dtype for dtype in (torch.float32, own)}
    if stored is not None:
        return names.get((stored.get("plan") or {}).get(ARITHMETIC, ""), own)
    return _faster_dtype(own, decoder.config.hidden_size)


def _faster_dtype(own: torch.dtype, width: int) -> torch.dtype:
    """float32 where its products of one width are faster than those of the type ``own``, by enough to pay."""
    works = {}
    for dtype in (torch.float32, own):
        rows, weight = torch.ones(ROWS, width, dtype=dtype), torch.ones(4 * width, width, dtype=dtype)
        works[dtype] = partial(F.linear, rows, weight)
    best = _least_seconds(works, time.perf_counter)
    return torch.float32 if best[own] > FASTER * best[torch.float32] else own


def chosen_for_packed(
    decoder: Decoder, form: str, stored: Mapping[str, Any] | None = None, *, lowest: int = 0
) -> Arithmetic:
    """The arithmetic of a training on a packed target whose gradients pass through the layers from ``lowest`` on.

    The other arguments are those of ``chosen_dtype``. Rows are float32 where this processor multiplies that faster. The
    format "stored" takes the faster products of layers: times one of them, forward and backward, on one thread. Raises
    CapabilityError for nf4.
    """
    if form == "nf4":
        raise CapabilityError(
            "a target that is packed as its file stores it is not held in nf4; leave --target-format out, or load it "
            "with --quantize none"
        )
    own, size = decoder.dtype, decoder.config.hidden_size
    if stored is not None:
        return Arithmetic.named((stored.get("plan") or {}).get(ARITHMETIC, str(own)), own)
    dtype, width = _faster_dtype(own, size), size // 32 * 32
    if lowest >= decoder.config.num_layers or not width:
        return Arithmetic(dtype, int8=False)
    if form == INT8:
        return Arithmetic(dtype, int8=True)
    weight, rows = torch.ones(4 * width, width, dtype=dtype), torch.ones(ROWS, width, dtype=dtype)
    slopes, int8 = torch.ones(ROWS, 4 * width, dtype=dtype), Int8Linear(weight, None)

    def narrow() -> None:
        int8.product(rows)
        int8.gradient(slopes)

    def plain() -> None:
        F.linear(rows, weight)
        slopes @ weight

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # the processor's time: time by the clock, and that of threads that wait, is others' too
        best = _least_seconds({True: narrow, False: plain}, time.process_time)
    finally:
        torch.set_num_threads(threads)
    return Arithmetic(dtype, best[True] < best[False])


def _least_seconds(works: Mapping[K, Callable[[], object]], clock: Callable[[], float]) -> dict[K, float]:
    """The shortest time of each of some works, which alternate."""
    best = dict.fromkeys(works, float("inf"))
    for _ in range(ROUNDS):
        for kind, work in works.items():
            began = clock()
            work()
            best[kind] = min(best[kind], clock() - began)
    return best


def packed_learner(decoder: Decoder, lowest: int, arithmetic: Arithmetic) -> Decoder:
    """The decoder for gradients through the layers of a packed target from ``lowest`` on."""
    return learner_of_packed(decoder, lowest, int8=arithmetic.int8, dtype=arithmetic.dtype)


def learner_of(decoder: Decoder, form: str, dtype: torch.dtype) -> Decoder:
    """The decoder for passes with gradients, whose weights stay as they are: ``decoder`` itself, or a copy.

    With the format nf4, ``decoder`` is changed in place. Raises CapabilityError where the format cannot be had.
    """
    if form == "nf4":
        quantize_to_nf4(decoder)
        return decoder
    if form == "stored" and dtype == decoder.dtype:
        return decoder
    learner = copy.deepcopy(decoder).to(dtype)
    if form == "int8":
        multiply_in_int8(learner)
    return learner
