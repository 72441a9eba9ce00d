"""Call the compiled kernels on torch tensors.

``library()`` loads them once per process (``selection`` chooses an instruction set, ``build`` finds or compiles its
library); it is None if they cannot run, and ``shortfall()`` says why. C functions are called by the methods of
``Library`` and by the bindings of methods with their own C++ (``Calls.function``), which check every tensor, count and
type. Each C function checks its arguments again. Invalid calls raise AssertionError; a lack of memory raises
OutOfMemoryError.

A stored weight [N, D] consists of blocks of 32 outputs, each in a format of GGUF files: integers with scales, or
floats. A weight of floats alone is either a "stored" one, multiplied by rows in int8 like the others of its layer, or
of the kind "floats", multiplied by rows of floats. Its memory holds no addresses, so it can be written to a file and
used from there.

M rows, D width, N outputs.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.errors import InputError
from anabranch.native import build, selection
from anabranch.native.arguments import (
    BLOCK,
    IN_FILE_FORMATS,
    KINDS,
    address,
    filled,
    packable,
    require,
    row_bytes,
    row_kind,
    rows_for,
    scores,
)
from anabranch.native.calls import Calls
from anabranch.native.structs import Ends, Layers, Packed, RaggedBatch, Rider, Screen, Shape, Taps
from anabranch.support.forks import renewed_after_fork
from anabranch.support.log import LOGGER

__all__ = ["MAX_EMBEDDING_WIDTH", "Library", "forget", "library", "packed", "shortfall", "why_not"]

MAX_EMBEDDING_WIDTH = 8192  # of rows that kernels read embeddings into


class Library(Calls):
    """The compiled kernels, with as many threads as torch.

    Scores that are not finite: ``choose`` and ``draw`` return -1 for a row whose largest score is not finite or that
    has a NaN; ``best`` ignores such scores.
    """

    @property
    def instruction_set(self) -> str:
        """One of ``recipe.INSTRUCTION_SETS``."""
        return str(self._c.anabranch_instruction_set().decode())

    @property
    def expands(self) -> bool:
        """True if compact weights are multiplied faster than bf16 ones; with AVX2, expanding them takes too long."""
        return not self.instruction_set.startswith("avx2")

    def pack(
        self, kind: str, weight: Tensor, scale: Tensor | None = None, least: Tensor | None = None
    ) -> tuple[Packed, Tensor]:
        """Pack a weight [N, D] in blocks of 32 outputs, the last one padded; the second value is its memory.

        ``weight`` has the dtype given by ``kind`` (in bfloat16, D must be even), or is uint8 with quantised values (D a
        multiple of 32) and has the ``scale`` and ``least`` of ``model.quantize``. A "compact" weight is given like an
        int4 one, and is the bf16 weight that this rounds to.
        """
        packable(kind, weight, scale, least)
        outputs, width = weight.shape
        tensors = [None if x is None else x.detach().cpu().contiguous() for x in (weight, scale, least)]
        packed = Packed(None, outputs, width, KINDS[kind])
        memory = self.allocate(self._packed_bytes(packed))
        packed.data = memory.data_ptr()
        self._c.anabranch_pack(ctypes.byref(packed), *(None if x is None else x.data_ptr() for x in tensors))
        return packed, memory

    def room(self, like: Packed, outputs: int) -> tuple[Packed, Tensor]:
        """A packed weight of zeros with the format and width of another; the second value is its memory.

        A stored weight has the format of the other one's first block.
        """
        for name in IN_FILE_FORMATS:
            if like.kind == KINDS[name]:
                kind = ctypes.c_int32.from_address(like.data or 0).value
                return self.stored([kind] * -(-outputs // BLOCK), outputs, like.width, kind=name)
        packed = Packed(None, outputs, like.width, like.kind)
        memory = torch.zeros(self._packed_bytes(packed), dtype=torch.uint8)
        packed.data = memory.data_ptr()
        return packed, memory

    def _packed_bytes(self, packed: Packed) -> int:
        size = ctypes.c_int64()
        self._c.anabranch_packed_bytes(ctypes.byref(packed), ctypes.byref(size))
        return size.value

    def copy_outputs(self, source: Packed, outputs: NDArray[np.int64], to: Packed, first: int) -> None:
        """Copy outputs of a packed weight, not in four bits, to another of its format, from output ``first`` on."""
        outputs = np.ascontiguousarray(outputs, np.int64)
        self._c.anabranch_copy_outputs(ctypes.byref(source), address(outputs), len(outputs), ctypes.byref(to), first)

    # -- weights in the formats of GGUF files, packed with the same values (``stored.h``) --------------------
    def stored_bytes(self, types: Sequence[int], width: int) -> int:
        """The size of a stored weight, given the format of each block of 32 outputs (``STORED_TYPES``)."""
        kinds, size = np.array(types, np.int32), ctypes.c_int64()
        self._c.anabranch_stored_bytes(address(kinds), len(kinds), width, ctypes.byref(size))
        return size.value

    def stored(self, types: Sequence[int], outputs: int, width: int, *, kind: str = "stored") -> tuple[Packed, Tensor]:
        """Room for a weight of this kind (``IN_FILE_FORMATS``); the second value is its memory."""
        require(len(types) == -(-outputs // BLOCK), "{} formats for {} outputs", len(types), outputs)
        memory = self.allocate(self.stored_bytes(types, width))
        packed, kinds = Packed(memory.data_ptr(), outputs, width, KINDS[kind]), np.array(types, np.int32)
        self._c.anabranch_start_stored(ctypes.byref(packed), address(kinds))
        return packed, memory

    def adopt(self, memory: Tensor, outputs: int, width: int, *, kind: str = "stored") -> Packed:
        """A weight of this kind in memory that was read from a file. Raises AssertionError if it does not fit."""
        require(memory.is_cpu and memory.dtype == torch.uint8 and memory.is_contiguous(), "memory of another kind")
        require(memory.data_ptr() % 8 == 0, "memory of a stored weight is not aligned")
        packed = Packed(memory.data_ptr(), outputs, width, KINDS[kind])
        self._c.anabranch_check_stored(ctypes.byref(packed), memory.numel())
        return packed

    def pack_stored(
        self,
        to: Packed,
        first: int,
        kind: int,
        raw: NDArray[np.uint8],
        order: NDArray[np.int64] | None = None,
        *,
        every: int = 1,
    ) -> bool:
        """Pack rows of a file's tensor [rows, bytes of a row] into a stored weight; False if a scale is not finite.

        first  the block that receives the first 32 rows; the next ones go to every ``every``-th block
        kind   the number of the tensor's format, which these blocks have
        order  the rows to pack, in this order; None: all
        """
        require(raw.ndim == 2 and raw.dtype == np.uint8 and raw.flags.c_contiguous, "rows are not bytes")
        require(raw.shape[1] == row_bytes(kind, to.width), "a row has {} bytes", raw.shape[1])
        count = len(raw)
        if order is not None:
            order = np.ascontiguousarray(order, np.int64)
            count = len(order)
            require(count > 0 and order.min() >= 0 and order.max() < len(raw), "a row is not in the tensor")
        with self.lock:
            finite = self._c.anabranch_pack_stored(
                *(self.runner(), ctypes.byref(to), first, every, kind, address(raw), raw.shape[1]),
                *(None if order is None else address(order), count),
            )
        return bool(finite)

    def unpack_stored(self, packed: Packed, outputs: NDArray[np.int64] | None = None) -> Tensor:
        """Outputs of a stored weight (None: all), exactly: float32 [n, D]."""
        wanted = np.arange(packed.outputs) if outputs is None else np.ascontiguousarray(outputs, np.int64)
        y = torch.empty(len(wanted), packed.width)
        if len(wanted):
            self._c.anabranch_unpack_stored(ctypes.byref(packed), address(wanted), len(wanted), y.data_ptr())
        return y

    def raw_rows(self, kind: int, raw: NDArray[np.uint8], width: int, rows: NDArray[np.int64]) -> Tensor:
        """Rows of a file's tensor in the format with the number ``kind``, exactly: float32 [n, D]."""
        require(raw.ndim == 2 and raw.dtype == np.uint8 and raw.flags.c_contiguous, "rows are not bytes")
        require(raw.shape[1] == row_bytes(kind, width), "a row has {} bytes", raw.shape[1])
        rows = np.ascontiguousarray(rows, np.int64)
        y = torch.empty(len(rows), width)
        if len(rows):
            self._c.anabranch_raw_rows(kind, address(raw), len(raw), width, address(rows), len(rows), y.data_ptr())
        return y

    # -- products and layers ---------------------------------------------------------------------------------
    def linear(self, x_MD: Tensor, packed: Packed, bias_N: Tensor | None) -> Tensor:
        """Rows times a packed weight, plus a float32 bias: float32 [M, N].

        Rows have the weight's dtype, or for a quantised weight bf16 or float32.
        """
        x_MD, bias = rows_for(packed, x_MD, bias_N)
        y = torch.empty(len(x_MD), packed.outputs)
        with self.lock:
            self._c.anabranch_linear(
                *(row_kind(x_MD), self.runner(), x_MD.data_ptr(), len(x_MD), ctypes.byref(packed), bias, y.data_ptr())
            )
        return y

    def norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        dtype: torch.dtype,
        *,
        bias: Tensor | None = None,
        layer: bool = False,
    ) -> Tensor:
        """RMS norm or LayerNorm (``layer``) of float32 rows [..., D] by a float32 weight and bias, as ``dtype``."""
        width = x.shape[-1]
        require(x.dtype == torch.float32 and x.is_cpu, "rows to norm are float32 on the CPU")
        require(weight.dtype == torch.float32 and weight.shape == (width,), "a norm's weight is not float32 [D]")
        require(width > 0 and width % BLOCK == 0, "a norm's width {} is not a multiple of {}", width, BLOCK)
        if bias is not None:
            require(bias.dtype == torch.float32 and bias.shape == (width,), "a norm's bias is not float32 [D]")
        x, weight, bias = x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous()
        y = torch.empty(x.shape, dtype=dtype)
        of_rows = row_kind(y), x.data_ptr(), x.numel() // width, width
        added = None if bias is None else bias.data_ptr()
        self._c.anabranch_norm(*of_rows, weight.data_ptr(), added, int(layer), eps, y.data_ptr())
        return y

    def best(self, z_MN: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The ``count`` largest log probabilities of float32 scores [M, N], descending, and their indices [M, count].

        Scores that are not finite are ignored; if there are too few others, the rest is -inf at index 0.
        """
        z_MN = scores(z_MN)
        require(count >= 1, "count must be at least 1, got {}", count)
        values, places = torch.empty(len(z_MN), count), torch.empty(len(z_MN), count, dtype=torch.long)
        self._c.anabranch_best(z_MN.data_ptr(), *z_MN.shape, count, values.data_ptr(), places.data_ptr())
        return values, places

    def choose(self, x_MD: Tensor, packed: Packed, bias_N: Tensor | None, screen: Screen | None = None) -> Tensor:
        """The first index of the largest entry of each row of ``linear``: int64 [M]. The scores are not stored.

        -1 for a row whose largest score is not finite, or that has a NaN. With a ``screen`` of the weight, and then
        without a bias, it is found in less time.
        """
        x_MD, bias = rows_for(packed, x_MD, bias_N)
        places = torch.empty(len(x_MD), dtype=torch.long)
        with self.lock:
            self._c.anabranch_choose(
                *(row_kind(x_MD), self.runner(), x_MD.data_ptr(), len(x_MD), ctypes.byref(packed), bias),
                *(None if screen is None else ctypes.byref(screen), places.data_ptr()),
            )
        return places

    def draw(self, z_MN: Tensor, temperature: float, keys_M: NDArray[np.uint64]) -> Tensor:
        """Sample from rows of float32 scores [M, N]: argmax of score / temperature + ``sampling.gumbels``, int64 [M].

        -1 for a row whose largest score is not finite, or that has a NaN.
        """
        z_MN, keys_M = scores(z_MN), np.ascontiguousarray(keys_M, np.uint64)
        require(keys_M.shape == (len(z_MN),), "{} keys for {} rows", keys_M.shape, len(z_MN))
        require(temperature > 0, "scores are drawn at temperature {}", temperature)
        places = torch.empty(len(z_MN), dtype=torch.long)
        with self.lock:
            self._c.anabranch_draw(
                *(self.runner(), z_MN.data_ptr(), *z_MN.shape, temperature, address(keys_M), places.data_ptr())
            )
        return places

    def gumbels(self, low: Tensor, high: Tensor, tokens: Tensor) -> Tensor:
        """``sampling.gumbels_of``: noise in float32 of int64 tensors that broadcast."""
        noise = torch.empty(np.broadcast_shapes(low.shape, high.shape, tokens.shape))
        parts = [part.expand(noise.shape).contiguous() for part in (low, high, tokens)]
        for part in parts:
            filled(part, noise.numel(), torch.long)
        self._c.anabranch_gumbels(*(part.data_ptr() for part in parts), noise.numel(), noise.data_ptr())
        return noise

    def layers(
        self,
        shape: Shape,
        layers: Layers,
        batch: RaggedBatch,
        ends: Ends | None = None,
        rider: Rider | None = None,
        taps: Taps | None = None,
    ) -> None:
        """Run layers over ``batch.x`` in place; keys and values are written after the committed ones.

        The cache is float32 if the weights are, else bf16. Either all weights of a layer are quantised or none. With
        ``ends`` the pass starts with tokens and ends with the last norm and, if requested, with tokens, and a ``rider``
        may take part.
        """
        require(len(layers) > 0, "a pass has no layers")
        with self.lock:
            self._c.anabranch_layers(
                *(layers[0].qkv.kind, self.runner(), ctypes.byref(shape), layers, len(layers), ctypes.byref(batch)),
                *(None if each is None else ctypes.byref(each) for each in (ends, rider, taps)),
            )

    def move(
        self, keys: Tensor, values: Tensor, layers: range, slot: int, start: int, nodes: NDArray[np.int64]
    ) -> None:
        """Copy start + nodes[i] to start + i in one row and some layers of a cache [layers, rows, K, C, E].

        ``nodes`` are in ascending order.
        """
        same = (keys.shape, keys.stride(), keys.dtype) == (values.shape, values.stride(), values.dtype)
        require(same and keys.dim() == 5 and keys.is_cpu and values.is_cpu, "keys and values differ")
        whole = keys.stride(4) == 1 and keys.stride(3) == keys.shape[4]
        require(whole and keys.stride(2) == keys.shape[3] * keys.shape[4], "the cache's heads are not contiguous")
        inside = 0 <= layers.start <= layers.stop <= len(keys) and layers.step == 1 and 0 <= slot < keys.shape[1]
        require(inside, "row {} of layers {} is not in a cache of {}", slot, layers, keys.shape)
        nodes = np.ascontiguousarray(nodes, np.int64)
        size = keys.element_size()
        layer, row, head, token, _ = (size * stride for stride in keys.stride())
        first = layers.start * layer + slot * row
        self._c.anabranch_move(
            *(keys.data_ptr() + first, values.data_ptr() + first, len(layers), keys.shape[2], layer, head, token),
            *(start, address(nodes), len(nodes)),
        )


class _Outcome(NamedTuple):
    library: Library | None
    shortfall: selection.Shortfall | None
    packed: bool = False


class _Kernels:
    """The kernels of this process, loaded or compiled on first use."""

    def __init__(self) -> None:
        self.outcome: _Outcome | None = None
        self.after_fork()

    def after_fork(self) -> None:
        """Replace the lock, in a forked child: a thread of the parent may hold it."""
        self.lock = threading.Lock()

    def look(self) -> _Outcome:
        """The outcome of the search, which happens once."""
        with self.lock:
            self.outcome = self.outcome or _find()
            return self.outcome


_kernels = renewed_after_fork(_Kernels())


def library() -> Library | None:
    """The kernels, compiled if necessary; None if they are not available.

    ANABRANCH_KERNELS=none disables them, and the name of an instruction set requires it. Raises InputError for other
    values, and where the required instruction set cannot be used.
    """
    return _kernels.look().library


def packed() -> bool:
    """True if the kernels came with the package; False if they were compiled on this machine, or there are none."""
    return _kernels.look().packed


def shortfall() -> selection.Shortfall | None:
    """The reason why these kernels, or none, are used; None if they are the fastest that the processor supports."""
    return _kernels.look().shortfall


def why_not() -> str:
    """The reason why ``library()`` is None; empty if it is not."""
    result = _kernels.look()
    return "" if result.shortfall is None or result.library is not None else result.shortfall.why


def forget() -> None:
    """Discard the result of ``library()``, so that the next call looks for the kernels again."""
    with _kernels.lock:
        _kernels.outcome = None


def _find() -> _Outcome:
    if (lacking := selection.unfit()) is not None:
        return _Outcome(None, lacking)
    failures: dict[str, build.BuildError] = {}
    for name in selection.instruction_sets():
        try:
            opened = build.opened(build.compiler_flags(name), tiles=name == "amx")
        except build.BuildError as failed:
            failures[name] = failed
            continue
        LOGGER.info("the native kernels use %s", name)
        lacking = selection.shortfall_of(name, failures, opened.not_kept)
        return _Outcome(Library(opened.library), lacking, opened.packed)
    first = next(iter(failures.values()))
    if selection.forced():
        raise InputError(f"ANABRANCH_KERNELS is {selection.forced()}, but {first.why}; {first.advice or 'unset it'}")
    LOGGER.info("there are no native kernels: %s", first.why)
    return _Outcome(None, selection.Shortfall(f"the native kernels are missing: {first.why}", first.advice))
