"""The costs of the parts of a step, measured in the engine.

A step is timed from call to return, which includes draft, pass, verification, commit, what a drafter prepares after it,
and the Python code in between. The real drafters take part, because they affect threads and caches.

    a step that drafts m nodes of depth d and verifies n  =  pass(n) + draft(m) + prepare(d)

``pass`` is measured with chains of n nodes that take no time to draft, ``draft`` and ``prepare`` with drafts of several
sizes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from anabranch.bench.shapes import wrong_chain
from anabranch.control.costs import StepCosts, disturbed
from anabranch.decoding.engine import Engine, Request
from anabranch.drafting.drafter import Drafter, Observation, Row, altered
from anabranch.errors import InputError
from anabranch.model.decoder import Decoder
from anabranch.tree import DraftTree

__all__ = ["DRAFTS", "WIDTHS", "DraftTimes", "MeasuredTimes", "measure_times"]

WIDTHS = (1, 2, 4, 6, 8, 9, 12, 16, 17, 20, 24, 25, 32)  # verified nodes, on both sides of the kernels' tile sizes
DRAFTS = (2, 4, 8, 16, 32)  # drafted nodes
LEAST = 1e-3  # milliseconds: less than that is noise
Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class DraftTimes:
    """Milliseconds of the parts of a step of one row with one drafter.

    passes   a step without its draft, by verified nodes
    draft    a draft, by drafted nodes; None: nothing is drafted
    prepare  preparing the next draft after the pass, by its depth; None: nothing is prepared
    """

    passes: StepCosts
    draft: StepCosts | None = None
    prepare: StepCosts | None = None

    def step_ms(self, verified: int, drafted: int, depth: int) -> float:
        """Milliseconds of a whole step."""
        whole = float(self.passes(np.array(verified)))
        for table, size in ((self.draft, drafted), (self.prepare, depth)):
            if table is not None:
                whole += float(np.interp(size, table.widths, table.ms))
        return whole

    def to_dict(self) -> dict[str, str]:
        """As stored in profiles: ``{"pass": "1:7.1/8:7.6", "draft": "2:0.4/8:0.5", "prepare": "1:0.9/5:1.3"}``."""
        tables = {"pass": self.passes, "draft": self.draft, "prepare": self.prepare}
        return {name: str(table) for name, table in tables.items() if table is not None}


@dataclass(frozen=True)
class MeasuredTimes:
    """Times by group of candidates.

    busy  whether other jobs disturbed the measurement
    """

    groups: Mapping[str, DraftTimes]
    busy: bool = False


def _chains(drafter: Drafter, nodes: int) -> Drafter:
    """A drafter whose drafts are replaced by chains of ``nodes`` nodes; it observes and prepares as usual."""

    def draft(rows: Sequence[Row], budget: int) -> list[DraftTree]:
        return [wrong_chain(row, nodes) for row in rows]

    def observe(rows: Sequence[Row], seen: Observation) -> None:
        type(drafter).observe(made, rows, seen._replace(budget=min(seen.budget, drafter.max_nodes)))

    made = altered(drafter, draft=draft, observe=observe, adaptive=False, max_nodes=nodes)
    return made


@dataclass
class _Timed:
    """An engine whose steps are timed.

    nodes                   number of nodes that a step must verify to be counted; None: any
    passes, draft, prepare  milliseconds of the counted steps: of all but drafting, of drafting before the pass, and of
                            preparing the next draft after it
    """

    engine: Engine
    nodes: int | None
    passes: list[float] = field(default_factory=list)
    draft: list[float] = field(default_factory=list)
    prepare: list[float] = field(default_factory=list)

    def run(self, request: Request, steps: int) -> None:
        """Run ``steps`` counted steps; the first step after another engine has decoded is not counted."""
        counted = -1
        while counted < steps:
            if not self.engine.active:
                self.engine.add(request)
                self.engine.step()  # the first step of a sequence has no draft
            began = time.perf_counter()
            (step,) = self.engine.step()
            whole = 1e3 * (time.perf_counter() - began)
            counted += 1
            # drafts are shorter near the end of the text
            if counted and (self.nodes is None or step.tree.size == self.nodes):
                draft, prepare = 1e3 * step.timings.draft, 1e3 * step.timings.prepare
                self.passes.append(whole - draft - prepare)
                self.draft.append(draft)
                self.prepare.append(prepare)

    def clear(self) -> None:
        """Discard the counted steps."""
        for values in (self.passes, self.draft, self.prepare):
            values.clear()


def measure_times(
    target: Decoder,
    drafters: Mapping[str, Drafter],
    prompt: Sequence[int],
    *,
    max_new_tokens: int = 96,
    rounds: int = 6,
    steps: int = 4,
    report: Report = lambda what, done, total: None,
) -> MeasuredTimes:
    """Time steps after ``prompt`` with each of several drafters, the first of which drafts nothing.

    All kinds of steps alternate, so that drift of the machine affects all alike. A warm-up round is not counted. Each
    result is the median of its steps, scaled by the ratio of mean to median over all steps, because the times are used
    to predict sums of steps, slow ones included.
    """
    if rounds < 2 or steps < 1:
        raise InputError(f"timing needs at least 2 rounds and 1 step per round, got {rounds} and {steps}")
    request = Request(prompt, min(max(max_new_tokens, 2 * WIDTHS[-1]), target.config.max_positions - len(prompt)))
    capacity = len(prompt) + request.max_new_tokens

    def timed(drafter: Drafter, nodes: int | None) -> _Timed:
        return _Timed(Engine(target, drafter, capacity=capacity), nodes)

    kind = {group: (drafter.needs.layers, drafter.needs.rider is not None) for group, drafter in drafters.items()}
    first = {kind[group]: drafter for group, drafter in reversed(list(drafters.items()))}
    passes = {(k, n): timed(_chains(drafter, n), n) for k, drafter in first.items() for n in WIDTHS}
    sizes = {group: _sizes(drafter) for group, drafter in drafters.items() if drafter.max_nodes > 1}
    drafts = {
        (group, n): timed(altered(drafters[group], adaptive=False, max_nodes=n), None)
        for group, ns in sizes.items()
        for n in ns
    }
    for done in range(rounds + 1):
        report("step times", done, rounds + 1)
        for one in (*passes.values(), *drafts.values()):
            if done == 0:
                one.engine.rehearse(request)
            one.run(request, steps)
            if done == 0:  # warm-up
                one.clear()
    plain = passes[kind[next(iter(drafters))], 1]
    samples = [one.passes for one in passes.values() if one.passes]  # of one width each: they differ only by noise
    slow = sum(map(sum, samples)) / sum(len(by_size) * statistics.median(by_size) for by_size in samples)
    base = statistics.median(plain.prepare)
    groups = {}
    for group, drafter in drafters.items():
        by_size = {n: one.passes for (k, n), one in passes.items() if k == kind[group]}
        times = DraftTimes(_table(by_size, slow, base))
        if group in sizes:
            depths: dict[int, list[float]] = {}
            for n in sizes[group]:
                depths.setdefault(drafter.depth_of(n), []).extend(drafts[group, n].prepare)
            drafted = {n: drafts[group, n].draft for n in sizes[group]}
            times = DraftTimes(times.passes, _table(drafted, slow, 0.0), _table(depths, slow, -base))
        groups[group] = times
    return MeasuredTimes(groups, busy=disturbed(plain.passes))


def _sizes(drafter: Drafter) -> list[int]:
    """The sizes of drafts to time."""
    return [*(n for n in DRAFTS if n < drafter.max_nodes), drafter.max_nodes]


def _table(samples: Mapping[int, Sequence[float]], slow: float, more: float) -> StepCosts:
    """(Median + ``more``) times ``slow`` by size, made monotonic: a larger size costs at least as much."""
    sizes = [n for n in sorted(samples) if samples[n]]
    ms = np.maximum.accumulate([max(LEAST, slow * (statistics.median(samples[n]) + more)) for n in sizes])
    return StepCosts(tuple(sizes), tuple(map(float, ms)))
