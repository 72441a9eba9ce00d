"""Costs of forward passes: milliseconds by nodes, rows and context.

``anabranch tune`` measures them in whole steps. Until it has run, passes over a few widths are timed when a model is
loaded, each right after a pass over one row, so that a clock that drifts does not matter. On a machine that other jobs
disturb, no two timings agree; typical costs are used then. While decoding, every pass corrects the curve.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from anabranch.errors import InputError
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder
from anabranch.model.inputs import Inputs
from anabranch.model.native_backend import stack_of

__all__ = ["Costs", "PassCosts", "StepCosts", "costs_of", "disturbed", "known_costs", "measure_passes", "plain_ms"]

WIDTHS = (3, 4, 6, 8, 9, 12, 16, 17, 24)  # nodes of timed passes: quantised products take four or eight rows at a time
SECONDS = 0.5  # in which rounds of timed passes begin, at most ten
CONTEXT = 1024  # tokens in the cache at which passes are timed too
BUSY = 1.3  # ratio of neighbouring equal passes (quartiles) on a busy machine; 1.1 to 3.2 beside two busy loops
TYPICAL = {  # passes by nodes where they cannot be timed, in passes over one row; float32 is PyTorch's
    "native": "1:1/8:1.2/12:1.5/24:2.6",
    "float32": "1:1/4:2/8:3.3/16:5.5",
    "cuda": "1:1/129:2",
}
RATE = 0.02  # weight of the newest step in a moving average; of a pass, half of it at all other widths
CLIP = 1.5  # times the expected milliseconds that a timing counts for at most: one that was interrupted says little
LARGEST = 512  # nodes of the curve; beyond, costs grow in proportion

_known: WeakKeyDictionary[Decoder, PassCosts] = WeakKeyDictionary()


@dataclass(frozen=True)
class StepCosts:
    """Milliseconds, or another unit, by width; widths ascend.

    Between two widths it is linear, beyond the last as steep as from the first to the last: it may be a staircase.
    """

    widths: tuple[int, ...]
    ms: tuple[float, ...]

    @staticmethod
    def parse(text: str) -> StepCosts:
        """From ``"1:8.7/8:9.4/16:11.2"``, nodes and milliseconds. Raises InputError."""
        try:
            pairs = [item.split(":") for item in text.split("/")]
            table = sorted((int(width), float(ms)) for width, ms in pairs)
        except ValueError as error:
            raise InputError(f"step costs are given as NODES:MS/NODES:MS, as in 1:8.7/16:11.2, not {text!r}") from error
        widths, costs = zip(*table, strict=True)
        if widths[0] < 1 or len(set(widths)) < len(widths) or not all(0 < ms < math.inf for ms in costs):
            raise InputError(f"step costs have positive milliseconds for different numbers of nodes, unlike {text!r}")
        return StepCosts(widths, costs)

    def __str__(self) -> str:
        """In the format of ``parse``."""
        return "/".join(f"{width}:{ms:.4g}" for width, ms in zip(self.widths, self.ms, strict=True))

    def __call__(self, widths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Costs of these widths, of the same shape."""
        inside = np.interp(widths, self.widths, self.ms)
        if len(self.widths) == 1:
            return inside
        steep = max(0.0, (self.ms[-1] - self.ms[0]) / (self.widths[-1] - self.widths[0]))
        beyond: NDArray[np.float64] = inside + steep * np.maximum(0, widths - self.widths[-1])
        return beyond


@dataclass(frozen=True)
class PassCosts:
    """Costs of passes by nodes with an empty cache.

    busy              whether they are typical ones, in passes over one row: on a busy machine or a GPU
    row_ms, node_ms   added by 1,000 tokens in the cache of a row, for the row and for each of its nodes
    """

    costs: StepCosts
    busy: bool = False
    row_ms: float = 0.0
    node_ms: float = 0.0


class Costs:
    """Milliseconds of forward passes on this machine: measured at load or by ``tune``, corrected by every pass since.

    drafts  milliseconds of drafting a dozen nodes for one row, by drafter, where ``tune`` measured it; "" is any other
    """

    def __init__(self, passes: PassCosts, drafts: Mapping[str, float] | None = None) -> None:
        self.passes, self.drafts = passes, drafts or {}
        self._base = np.log(np.maximum.accumulate(passes.costs(np.arange(LARGEST + 1))))
        self._local = np.zeros(LARGEST + 1)  # logarithm of seen over base milliseconds, beside what all widths share
        self._seen = np.zeros(LARGEST + 1)  # passes of about that width
        self._shared = 0.0
        self.timed = 0  # passes so far
        self._set_curve()

    def _set_curve(self) -> None:
        curve = np.exp(self._base + self._local + self._shared)
        curve[0] = 0.0
        self._curve: list[float] = np.maximum.accumulate(curve).tolist()

    def draft_ms(self, drafter: str) -> float:
        """Milliseconds of drafting for a row, before any draft was timed; 0: unknown."""
        return self.drafts.get(drafter, self.drafts.get("", 0.0))

    def pass_ms(self, nodes: int, rows: int, context: float) -> float:
        """Milliseconds of a pass over ``nodes`` nodes in all, in rows with ``context`` tokens each in the cache."""
        ms = self._curve[nodes] if nodes <= LARGEST else self._curve[LARGEST] * nodes / LARGEST
        return ms + (self.passes.row_ms * rows + self.passes.node_ms * nodes) * context / 1000

    def saw_pass(self, ms: float, nodes: int, rows: int, context: float) -> None:
        """Update the curve with a timed pass: most at its own width, and some at all others."""
        nodes = min(nodes, LARGEST)
        ms = max(0.1 * ms, ms - (self.passes.row_ms * rows + self.passes.node_ms * nodes) * context / 1000)
        self.timed += 1
        error = math.log(ms) - float(self._base[nodes] + self._local[nodes]) - self._shared
        if self.timed == 1 or (self.timed <= 4 and error < 0):  # the unit of typical costs, and another hour's clock
            self._shared += error
            self._set_curve()
            return
        error = max(-math.log(CLIP), min(math.log(CLIP), error))
        near = slice(math.ceil(0.85 * nodes), int(1.18 * nodes) + 1)
        self._seen[near] += 1
        rate = max(RATE, 1 / (1 + float(self._seen[nodes])))
        self._shared += RATE * error / 2  # clocks and other jobs slow passes of all widths down
        self._local[near] += (rate - RATE / 2) * error
        if self.timed % 4 == 0:
            self._set_curve()


def disturbed(ms: Sequence[float]) -> bool:
    """Return whether times of the same work, in order, vary as they do on a busy machine.

    Neighbours are compared, so a clock that drifts slowly does not count.
    """
    times = np.array(ms)
    if len(times) < 3:
        return False
    low, high = np.quantile(times[1:] / times[:-1], (0.25, 0.75))
    return bool(high > BUSY * low)


def known_costs(target: Decoder, measured: PassCosts | None = None) -> PassCosts:
    """Costs of passes of a target on the CPU: those ``measured`` before, else those known, else measured now."""
    if measured is not None:
        _known[target] = measured
    elif target not in _known:
        _known[target] = measure_passes(target)
    return _known[target]


def measure_passes(target: Decoder) -> PassCosts:
    """Time passes for about half a second, or twice that; typical costs if the machine is busy both times."""
    for _ in range(2):
        one, ratios, row_ms, node_ms = _time_passes(target)
        if not disturbed(one):
            return PassCosts(tabulated(one, ratios), row_ms=row_ms, node_ms=node_ms)
    return PassCosts(_typical(target), busy=True)


def tabulated(one: Sequence[float], ratios: Mapping[int, Sequence[float]]) -> StepCosts:
    """The median pass over one row times the median ratio of each width to the pass over one row before it."""
    widths = [width for width, seen in ratios.items() if 2 * len(seen) >= len(next(iter(ratios.values())))]
    costs = np.maximum.accumulate([1.0, *(float(np.median(ratios[width])) for width in widths)])
    return StepCosts((1, *widths), tuple((float(np.median(one)) * costs).tolist()))


def _typical(target: Decoder) -> StepCosts:
    torch_float32 = stack_of(target.backend) is None and target.dtype == torch.float32
    return StepCosts.parse(TYPICAL["float32" if torch_float32 else "native"])


@torch.inference_mode()
def plain_ms(target: Decoder) -> float:
    """Time a pass over one row, without a source: the faster of two, after one that touches the weights."""
    cache = target.new_cache(1, 1 if target.rider is None else target.rider.positions(1))
    cache.add_row(0)
    times = []
    with target.decoding():
        for _ in range(3):
            began = time.perf_counter()
            target(Inputs.of_prompt([target.config.bos_token_id or 0]), cache, rider=target.rider, need="tokens")
            times.append(1e3 * (time.perf_counter() - began))
            cache.commit([[]])
    return min(times[1:])


@torch.inference_mode()
def _time_passes(target: Decoder) -> tuple[list[float], dict[int, list[float]], float, float]:
    """Times of passes over one row, ratios of wider ones by width, and the two costs of 1,000 tokens in the cache."""
    kernels, longest = target.backend.kernels, target.config.max_positions
    widths = [width for width in WIDTHS if width <= longest]
    context, widest = max(0, min(CONTEXT, longest - WIDTHS[-1])), WIDTHS[-1]
    capacity = context + (widest if target.rider is None else target.rider.positions(widest))
    cache = target.new_cache(1, capacity)
    cache.add_row(0, None if target.encoder is None else target.encode(target.encoder.some(CONTEXT)))

    def once(width: int, length: int, need: Literal["hidden", "tokens"] = "tokens") -> float:
        """Time a pass over some tokens of the text with ``length`` tokens in the cache."""
        cache.lengths[0] = length
        inputs = Inputs.of_prompt([text[(length + i) % len(text)] for i in range(width)])
        began = time.perf_counter()
        target(inputs, cache, rider=target.rider, need=need)
        ms = 1e3 * (time.perf_counter() - began)
        cache.commit([[]])
        return ms

    one: list[float] = []
    ratios: dict[int, list[float]] = {}
    with target.decoding():
        text = _own_text(target, cache, min(2 * WIDTHS[-1], longest))
        half, began, few = len(text) // 2 if 2 * WIDTHS[-1] <= longest else 0, time.perf_counter(), min(WIDTHS)
        for width in [1, *widths] if kernels is None else [1]:
            once(width, half)  # memory is touched for the first time, and PyTorch prepares itself for each shape
        for turn in range(10):
            for width in widths:
                if turn and time.perf_counter() - began > SECONDS:
                    break
                one.append(once(1, half))
                ratios.setdefault(width, []).append(once(width, half) / one[-1])
                if ratios[width][-1] > 2 and width > 8 and turn == 0:
                    widths = widths[: widths.index(width) + 1]
                    break
        if not context or few > longest:
            return one or [once(1, half)], ratios, 0.0, 0.0
        pairs = [(once(n, context, "hidden") - once(n, 0, "hidden")) * 1000 / context for n in 3 * (1, few)]
        single, more = max(0.0, float(np.median(pairs[::2]))), max(0.0, float(np.median(pairs[1::2])))
        node_ms = max(0.0, more - single) / (few - 1)
        return one, ratios, max(0.0, single - node_ms), node_ms


def _own_text(target: Decoder, cache: Cache, most: int) -> list[int]:
    """Generate up to ``most`` tokens to time, in ``SECONDS``: random tokens cost a screened head more."""
    text, began = [target.config.bos_token_id or 0], time.perf_counter()
    while len(text) < most and (len(text) == 1 or time.perf_counter() - began < SECONDS):
        passed = target(Inputs.of_prompt(text[-1:]), cache, rider=target.rider, need="tokens")
        cache.commit([[0]])
        assert passed.tokens_M is not None
        text.append(max(0, int(passed.tokens_M[-1])))  # -1: no score is finite
    return text


def costs_of(target: Decoder) -> Costs:
    """Costs with which decoding begins: as known, or typical ones on a GPU, where shapes would be captured."""
    if target.device.type != "cpu":
        return Costs(PassCosts(StepCosts.parse(TYPICAL["cuda"]), busy=True))
    return Costs(known_costs(target))
