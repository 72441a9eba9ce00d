"""What a step costs by the nodes that it verifies.

``anabranch tune`` measures whole steps. Until it has run, forward passes of a few widths are timed in half a second:
how much arithmetic hides behind reading the weights differs even between processors of one kind. Each width is compared
with a pass over one row right before it, so that a clock that changes slowly does not matter. Where other jobs take
the processor away, no number of passes gives the same answer twice; then typical costs are used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from anabranch.errors import InputError
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder
from anabranch.model.inputs import Inputs
from anabranch.model.stack import stack_of

try:
    import resource
except ImportError:  # Windows does not count context switches
    resource = None  # type: ignore[assignment]

__all__ = [
    "Costs",
    "DraftTables",
    "PassCosts",
    "PassTimes",
    "StepCosts",
    "costs_of",
    "disturbed",
    "known_costs",
    "measure_passes",
    "pass_costs",
]

ROWS = (3, 6, 8, 9, 12, 16, 17, 24)  # int4 and int8 products take eight rows at a time: a ninth costs as much as two
ENOUGH = 2.0  # a pass that takes that many times what one over one row takes is the widest that is tried
ROUNDS = 3  # at least, unless one takes longer than ``SECONDS``
CONTEXT = 1024  # tokens in the cache at which passes are timed too
CONTEXT_ROUNDS = 3
WRITING = 0.2  # seconds in which the target writes the text that is timed
SECONDS = 0.5  # in which rounds begin
PRECISE = 0.03  # standard error of a cost, over the cost, at which no more rounds are needed
# The machine is busy where a pass over one row takes between 1 and more than BUSY times the one before it (quartiles),
# or where the process is interrupted more often, a second. Measured beside two busy loops on two cores: 1.1 to 3.2,
# and 1,240 interruptions.
BUSY = 1.3
INTERRUPTED = 100.0
# what passes cost where that cannot be measured, by the kernels' form and the kind of weights, in passes over one row
TYPICAL = {
    ("avx2", "bfloat16"): "1:1/5:1.22/8:1.38/12:1.75/24:3.1",
    ("avx512", "bfloat16"): "1:1/8:1.06/12:1.14/16:1.5/24:2",
    ("native", "float32"): "1:1/5:1.22/8:1.38/12:1.75/24:3.1",
    ("native", "quantised"): "1:1/3:1.05/6:1.3/8:1.5/12:1.9/24:3.2",
    ("torch", "bfloat16"): "1:1/8:1.07/16:1.15/32:1.3",
    ("torch", "float32"): "1:1/4:2/8:3.3/16:5.5",
}
# what drafting and the streams that trail take, in passes over one row, by what weights are (benchmarks/, "What
# speculation did"): what only drafts read is as large for all of them
DRAFT = {"float32": 0.2, "bfloat16": 0.3, "int8": 0.5, "int4": 0.7}
UNPACKED = 0.6  # the same in PyTorch

_known: WeakKeyDictionary[Decoder, PassCosts] = WeakKeyDictionary()


@dataclass(frozen=True)
class StepCosts:
    """What a whole step costs by the width of its tree, in milliseconds or any other unit; widths ascend.

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
        """What ``parse`` reads."""
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
    """What passes cost by rows at an empty cache, and whether that is a guess, in any unit: on a busy machine or a GPU.

    row_ms, node_ms  what 1,000 tokens in a row's cache add, for each row and for each of its nodes
    """

    costs: StepCosts
    busy: bool = False
    row_ms: float = 0.0
    node_ms: float = 0.0


# what was measured of a drafter's drafts and of preparing them; None: nothing
DraftTables = tuple[StepCosts | None, StepCosts | None]

GRID = np.array([*range(1, 17), *range(18, 33, 2), *range(36, 65, 4), *range(72, 129, 8), *range(144, 513, 16)])
LEARNING = 0.05  # weight of the newest step, in logarithms, once enough of them were seen
OUTLIER = 0.4  # the largest difference, in logarithms, that one step is taken to show, of several from their median
OCTAVES = 0.25  # how far, in doublings of the nodes, a pass tells what others cost
FADING = 0.98  # weight of a pass relative to the next one
TOGETHER = 16  # passes that are learned from together: alone, each would take as long as a thirtieth of a small one
FIRST = 4  # as many of the very first ones where costs are a guess, and measurements that replace a guess
UNSEEN = 0.5  # passes that the measured curve is worth at each width


class _Estimate:
    """A running estimate of a positive quantity that one odd measurement does not move far.

    guessed  whether the starting value is a guess, which the first measurement replaces, as it does a value of 0. The
             least of the first few counts then: they include what happens only once, such as packing weights
    """

    def __init__(self, value: float, *, guessed: bool = False) -> None:
        self.value, self.seen, self._guessed = value, 0, guessed and value > 0

    @property
    def measured(self) -> bool:
        """Whether this is more than a guess."""
        return self.seen >= FIRST or not self._guessed

    def learn(self, value: float) -> None:
        """Take in a measurement."""
        if value <= 0:
            return
        self.seen += 1
        if self.value <= 0 or (self._guessed and (self.seen == 1 or (self.seen <= FIRST and value < self.value))):
            self.value = value
            return
        rate = max(LEARNING, 1 / (2 + self.seen))
        self.value *= math.exp(rate * _bounded(math.log(value / self.value)))


class _ByRows:
    """A running estimate of milliseconds a step that has a fixed part and one for each row.

    Loads are kept apart by the binary order of their rows: what a step of 32 rows takes says little of one row's.
    """

    def __init__(self) -> None:
        self._each: dict[int, _Estimate] = {}  # milliseconds a row

    def __call__(self, rows: int) -> float:
        """Of a step of so many rows; before such a load was seen, as at the nearest one, and 0 before any was."""
        if not self._each:
            return 0.0
        order = rows.bit_length()
        found = self._each.get(order) or self._each[min(self._each, key=lambda seen: abs(seen - order))]
        return found.value * rows

    def learn(self, ms: float, rows: int) -> None:
        """Take in a measurement."""
        self._each.setdefault(rows.bit_length(), _Estimate(0.0)).learn(ms / rows)


def _bounded(difference: float) -> float:
    return max(-OUTLIER, min(OUTLIER, difference))


def _draft_shape(budget: NDArray[np.int64] | int, rows: int) -> NDArray[np.float64]:
    """What a draft costs relative to one of a dozen nodes for one row; fitted to 1 to 16 rows and 2 to 32 nodes."""
    shape: NDArray[np.float64] = 0.44 + rows * (0.1 + 0.46 * np.log(budget) / math.log(12))
    return shape


@lru_cache(maxsize=1024)
def _draft_share(budget: int, rows: int) -> float:
    """``_draft_shape`` of one number: every step asks for it."""
    return float(_draft_shape(budget, rows))


class _Drafting:
    """What one drafter's drafts cost.

    draft    of a dozen nodes for one row
    prepare  in passes over as many rows as positions are prepared
    free     of drafts that cost next to nothing
    """

    def __init__(self, draft: float, prepare: float, *, guessed: bool = False) -> None:
        self.draft, self.prepare = _Estimate(draft, guessed=guessed), _Estimate(prepare, guessed=guessed)
        self.free = _ByRows()


class Costs:
    """Milliseconds of the parts of a step on this machine: the pass, drafting, preparing the next draft, the rest.

    They begin as measured when the model was loaded (or tuned) and follow the steps as they are timed: the curve of
    passes by nodes keeps its measured shape where no step was seen, and is corrected locally where steps were. Costs of
    drafting and preparing are those of the drafter that is named; all begin alike, unless tuned.

    passes   of passes by nodes
    draft    of drafting and preparing a draft of a dozen nodes for one row
    """

    def __init__(self, passes: PassCosts, draft: float) -> None:
        self.passes = passes
        self._base = np.maximum.accumulate(passes.costs(GRID))
        self._difference = np.zeros(len(GRID))  # mean of the logarithms of seen over base milliseconds
        self._seen = np.zeros(len(GRID))  # recent passes of about that many nodes
        self._recent: list[tuple[int, float]] = []  # passes not learned from yet: nodes, logarithm of milliseconds
        self._together = FIRST if passes.busy else 1  # as many of them are learned from together
        self.timed = False  # whether passes were
        self._set_passes(self._base)
        self._usual = 0.5 * draft, 0.5 * draft / float(self._pass[4])  # drafting and preparing, of any drafter
        self._guessed = True  # what drafting and preparing usually take was not measured
        self._drafting: dict[str, _Drafting] = {}
        self._rest = _ByRows()

    @staticmethod
    def tuned(
        passes: StepCosts,
        draft: StepCosts | None,
        prepare: StepCosts | None,
        others: Mapping[str, DraftTables] | None = None,
    ) -> Costs:
        """From tables that were measured step by step: drafts by nodes drafted, preparing by depth, for one row.

        others  the two tables of some drafters, by name; ``draft`` and ``prepare`` are for those that are not named
        """
        made = Costs(PassCosts(passes), 0.0)

        def parts(tables: DraftTables) -> tuple[float, float]:
            draft, prepare = tables
            return (
                0.0 if draft is None else float(draft(np.array([12]))[0]),
                0.0 if prepare is None else float(prepare(np.array([4]))[0]) / float(np.interp(4, GRID, made._pass)),
            )

        made._usual, made._guessed = parts((draft, prepare)), False
        made._drafting = {name: _Drafting(*parts(tables)) for name, tables in (others or {}).items()}
        return made

    def _of(self, drafter: str) -> _Drafting:
        found = self._drafting.get(drafter)
        if found is None:
            found = self._drafting[drafter] = _Drafting(*self._usual, guessed=self._guessed)
        return found

    def times_measured(self, drafter: str) -> int:
        """How often preparing its drafts was timed."""
        return self._of(drafter).prepare.seen

    def measured(self, drafter: str) -> bool:
        """Whether what preparing its drafts takes was measured a few times."""
        return self._of(drafter).prepare.measured

    def pass_ms(self, nodes: NDArray[np.int64], rows: int, context: float) -> NDArray[np.float64]:
        """Of passes over ``nodes`` nodes in all, in ``rows`` rows that have ``context`` tokens each in the cache."""
        found: NDArray[np.float64] = np.interp(nodes, GRID, self._pass) + self._context_ms(nodes, rows, context)
        beyond = np.maximum(0, nodes - GRID[-1])
        return found + beyond * (self._pass[-1] / GRID[-1]) if beyond.any() else found

    def passes_ms(self, first: int, count: int, rows: int, context: float) -> list[float]:
        """Of passes over ``first``, ``first`` + 1, ... nodes, ``count`` numbers; as ``pass_ms``, but faster."""
        if first + count > len(self._by_nodes):
            return list(map(float, self.pass_ms(np.arange(first, first + count), rows, context)))
        of_rows, of_node = self.passes.row_ms * rows * context / 1000, self.passes.node_ms * context / 1000
        known = self._by_nodes[first : first + count]
        return [ms + of_rows + of_node * nodes for nodes, ms in enumerate(known, first)]

    def _context_ms(self, nodes: NDArray[np.int64] | int, rows: int, context: float) -> NDArray[np.float64] | float:
        return (self.passes.row_ms * rows + self.passes.node_ms * nodes) * context / 1000

    def draft_ms(self, drafter: str, budget: NDArray[np.int64] | int, rows: int) -> NDArray[np.float64] | float:
        """Of drafting trees of ``budget`` nodes for so many rows."""
        one = self._of(drafter).draft.value
        return one * (_draft_share(budget, rows) if isinstance(budget, int) else _draft_shape(budget, rows))

    def free_ms(self, drafter: str, rows: int) -> float:
        """Of a drafter's drafts that are free, which is next to nothing."""
        return self._of(drafter).free(rows)

    def prepare_ms(self, drafter: str, positions: NDArray[np.int64] | int) -> NDArray[np.float64] | float:
        """Of what follows the pass, for so many positions: rows times the depth of their next drafts."""
        share = self._of(drafter).prepare.value
        if isinstance(positions, int) and positions < len(self._by_nodes):  # the same, but faster
            return share * self._by_nodes[positions] if positions else 0.0
        found: NDArray[np.float64] = share * np.interp(positions, GRID, self._pass) * np.sign(positions)
        return found

    def rest_ms(self, rows: int) -> float:
        """Of verification and of what is left to Python."""
        return self._rest(rows)

    def saw_pass(self, ms: float, nodes: int, rows: int, context: float) -> None:
        """Take in a timed pass; it has an effect with the next few."""
        ms = max(ms - float(self._context_ms(nodes, rows, context)), 0.1 * ms)
        self._recent.append((min(nodes, int(GRID[-1])), math.log(ms)))
        if len(self._recent) >= self._together:
            self._learn_passes()

    def _learn_passes(self) -> None:
        """Correct the curve of passes by the recent ones.

        What they took relative to the measured curve has two parts: a factor common to all widths, since clocks change
        and other jobs come and go, and one for each width. A width that was not seen for a while has the common factor
        only.
        """
        nodes, seen = (np.array(column) for column in zip(*self._recent, strict=True))
        self._recent.clear()
        expected = np.log(np.interp(nodes, GRID, self._pass))
        if not self.timed:  # typical costs have no unit, and measured ones may be of another hour
            expected += np.median(seen - expected)
        self.timed, self._together = True, min(TOGETHER, 2 * self._together)
        usual = float(np.median(seen - expected)) if len(nodes) >= FIRST else 0.0
        found = expected + usual + np.clip(seen - expected - usual, -OUTLIER, OUTLIER)
        found -= np.log(np.interp(nodes, GRID, self._base))
        near = np.maximum(0.0, 1 - np.abs(np.log2(GRID[:, None] / nodes)) / OCTAVES)
        near *= FADING ** np.arange(len(nodes))[::-1]
        before = FADING ** len(nodes) * self._seen
        self._seen = before + near.sum(axis=1)
        self._difference = (before * self._difference + near @ found) / np.maximum(self._seen, 1e-9)
        known = self._seen / (self._seen + UNSEEN)
        common = float(known @ self._difference) / float(known.sum())
        self._set_passes(self._base * np.exp(common + known * (self._difference - common)))

    def _set_passes(self, ms: NDArray[np.float64]) -> None:
        self._pass = np.maximum.accumulate(ms)
        self._by_nodes: list[float] = np.interp(np.arange(GRID[-1] + 1), GRID, self._pass).tolist()

    def saw_draft(self, drafter: str, ms: float, budget: int, rows: int) -> None:
        """Take in a timed draft."""
        self._of(drafter).draft.learn(ms / _draft_share(budget, rows))

    def saw_free(self, drafter: str, ms: float, rows: int) -> None:
        """Take in timed drafts that were free."""
        self._of(drafter).free.learn(ms, rows)

    def saw_prepare(self, drafter: str, ms: float, positions: int) -> None:
        """Take in what followed a timed pass."""
        self._of(drafter).prepare.learn(ms / float(np.interp(positions, GRID, self._pass)))

    def saw_rest(self, ms: float, rows: int) -> None:
        """Take in what else a step took."""
        self._rest.learn(ms, rows)


def disturbed(ms: Sequence[float]) -> bool:
    """Whether times of the same work, in order, vary as they do on a busy machine.

    Neighbours are compared, so a clock that drifts slowly does not count.
    """
    times = np.array(ms)
    if len(times) < 3:
        return False
    low, high = np.quantile(times[1:] / times[:-1], (0.25, 0.75))
    return bool(high > BUSY * low)


@dataclass
class PassTimes:
    """Timed passes.

    one            milliseconds of passes over one row, in order
    ratios         by rows, what a wider pass took over the pass over one row right before it
    rounds         how often all widths were timed
    interruptions  how often a second other processes took the processor; None where the system does not count
    row_ms         what 1,000 tokens in the cache add to a pass for a row, and ``node_ms`` for each of its nodes
    """

    one: list[float] = field(default_factory=list)
    ratios: dict[int, list[float]] = field(default_factory=dict)
    rounds: int = 0
    interruptions: float | None = None
    row_ms: float = 0.0
    node_ms: float = 0.0

    def add(self, rows: int, ms: float) -> float:
        """Take in a pass over ``rows`` rows that followed a pass over one; returns their ratio."""
        ratio = ms / self.one[-1]
        self.ratios.setdefault(rows, []).append(ratio)
        return ratio

    @property
    def busy(self) -> bool:
        """Whether other jobs disturbed the passes too much to tell what they cost."""
        if self.interruptions is not None and self.interruptions > INTERRUPTED + 5 * torch.get_num_threads():
            return True
        return disturbed(self.one)

    @property
    def settled(self) -> bool:
        """Whether more rounds would change little."""
        return self.rounds >= ROUNDS and all(self._error(ratios) < PRECISE for ratios in self.ratios.values())

    @staticmethod
    def _error(ratios: list[float]) -> float:
        """Standard error of the median over the median, from the quartiles, as for normal noise."""
        low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
        return float(1.25 * (high - low) / 1.35 / middle / math.sqrt(len(ratios)))

    def costs(self) -> StepCosts:
        """Median ratios times the median of one row's milliseconds; more rows cost no less.

        A width counts if at least half of the rounds came to it, up to the first that takes ``ENOUGH`` times one row.
        """
        widths, costs = [1], [1.0]
        for rows, ratios in sorted(self.ratios.items()):
            if 2 * len(ratios) < self.rounds or costs[-1] > ENOUGH:
                break
            widths.append(rows)
            costs.append(max(costs[-1], float(np.median(ratios))))
        one = float(np.median(self.one))
        return StepCosts(tuple(widths), tuple(one * cost for cost in costs))


def pass_costs(target: Decoder) -> StepCosts:
    """Milliseconds, or another unit, of a pass over 1 to at most 24 rows behind an empty cache.

    Measured when they are first asked for. Not on a GPU, where shapes would be recorded: there a row is taken to cost
    1/128 of a pass.
    """
    if target.device.type != "cpu":
        return StepCosts((1, 129), (1.0, 2.0))
    return known_costs(target).costs


def known_costs(target: Decoder, found: PassCosts | None = None) -> PassCosts:
    """The costs of passes of a target on the CPU: those ``found`` elsewhere, else those known, else measured now."""
    if found is not None:
        _known[target] = found
    elif target not in _known:
        _known[target] = measure_passes(target)
    return _known[target]


def measure_passes(target: Decoder) -> PassCosts:
    """Time passes for about half a second, or twice that; typical costs where the machine is too busy both times."""
    for _ in range(2):
        times = _time_passes(target)
        if not times.busy:
            return PassCosts(times.costs(), row_ms=times.row_ms, node_ms=times.node_ms)
    return PassCosts(_typical(target), busy=True)


def _typical(target: Decoder) -> StepCosts:
    stack = stack_of(target.backend)
    if stack is None:
        name = ("torch", "float32" if target.dtype == torch.float32 else "bfloat16")
    elif stack.kind == "bfloat16":
        name = ("avx2" if stack.kernels.instruction_set == "avx2" else "avx512", "bfloat16")
    else:
        name = ("native", "float32" if stack.kind == "float32" else "quantised")
    return StepCosts.parse(TYPICAL[name])


@torch.inference_mode()
def _time_passes(target: Decoder) -> PassTimes:
    kernels = target.backend.kernels
    context = max(0, min(CONTEXT, target.config.max_positions - ROWS[-1]))
    widest = min(ROWS[-1], target.config.max_positions)
    places = 1 if target.rider is None else target.rider.places
    capacity = context + places * widest
    cache = Cache(target.config, rows=1, capacity=capacity, dtype=target.dtype, device=target.device, kernels=kernels)
    cache.add_row()

    def once(rows: int, length: int | None = None) -> float:
        """Time a pass over rows of the text, or one without a head over any tokens behind ``length`` others."""
        cache.lengths[0] = half if length is None else length
        inputs = Inputs.of_prompt([text[(half + i) % len(text)] for i in range(rows)])
        need: Literal["hidden", "tokens"] = "tokens" if length is None else "hidden"
        began = time.perf_counter()
        target(inputs, cache, rider=target.rider, need=need)
        ms = 1e3 * (time.perf_counter() - began)
        cache.commit([[]])
        return ms

    times = PassTimes()
    tried = [rows for rows in ROWS if rows <= widest]
    with target.decoding():
        text = _own_text(target, cache, 2 * min(widest, target.config.max_positions - widest))
        half = len(text) // 2
        for rows in [1, *tried] if kernels is None else [1]:
            once(rows)  # memory is touched for the first time, and PyTorch prepares itself for each shape
        with _counting(times):
            began = time.perf_counter()
            while times.rounds < 1 or (not times.settled and time.perf_counter() - began < SECONDS):
                times.rounds += 1
                for rows in tried:
                    times.one.append(once(1))
                    if times.add(rows, once(rows)) > ENOUGH:
                        break
        few = tried[0] if tried else 1
        if context and few > 1:
            pairs = [(once(1, context) - once(1, 0), once(few, context) - once(few, 0)) for _ in range(CONTEXT_ROUNDS)]
            one, more = (max(0.0, float(np.median(ms))) * 1000 / context for ms in zip(*pairs, strict=True))
            times.node_ms = max(0.0, more - one) / (few - 1)
            times.row_ms = max(0.0, one - times.node_ms)
    return times


def _own_text(target: Decoder, cache: Cache, most: int) -> list[int]:
    """What the target writes by itself, at most ``most`` tokens, of which it may take ``WRITING`` seconds.

    Its passes choose tokens at the usual cost: of other tokens a screened head has to look at more outputs.
    """
    text, began = [target.config.bos_token_id or 0], time.perf_counter()
    while len(text) < most and (len(text) == 1 or time.perf_counter() - began < WRITING):
        passed = target(Inputs.of_prompt(text[-1:]), cache, rider=target.rider, need="tokens")
        cache.commit([[0]])
        assert passed.tokens_M is not None
        text.append(max(0, int(passed.tokens_M[-1])))  # -1: no score is finite
    return text


@contextmanager
def _counting(times: PassTimes) -> Iterator[None]:
    """Count how often this process is interrupted meanwhile."""

    def interruptions() -> int:
        return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw

    began, before = time.perf_counter(), interruptions()
    yield
    if resource is not None:
        times.interruptions = (interruptions() - before) / (time.perf_counter() - began)


def costs_of(target: Decoder) -> Costs:
    """What steps of a target are taken to cost when decoding begins: its passes as known, drafts as they usually do."""
    if target.device.type != "cpu":
        return Costs(PassCosts(StepCosts((1, 129), (1.0, 2.0)), busy=True), 0.3)
    known, stack = known_costs(target), stack_of(target.backend)
    return Costs(known, known.costs.ms[0] * (UNPACKED if stack is None else DRAFT[stack.kind]))
