"""Choose the drafter that a machine decodes fastest with.

1. *Latency*: what a step costs by the nodes it verifies and by the nodes it drafts, with the real drafters in place.
2. *Acceptance*: plain decoding of the prompts, with the drafts that would have been made at every position recorded.
3. *Prediction*: every candidate is replayed from the recording (``analysis.simulate``), and its steps are priced.
4. *Check*: the best candidate and plain decoding decode the prompts in turns; both numbers go into the profile.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from anabranch.analysis.simulate import Cut, Latency, Prediction, simulate
from anabranch.analysis.trace import Trace, TraceWriter, read_trace
from anabranch.engine import Engine, Request
from anabranch.errors import InputError
from anabranch.methods import Context, Drafter, Observation, StepCosts, make_drafter, with_costs
from anabranch.methods.base import Wrapped
from anabranch.methods.beliefs import Width
from anabranch.methods.combined import CombinedDrafter
from anabranch.methods.none import NoDrafter
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.draft import DraftOptions
from anabranch.model.decoder import Rider
from anabranch.model.load import Target
from anabranch.tree import DraftTree
from anabranch.tune.latency import Measured, measure_steps

__all__ = ["Candidate", "Fit", "candidates", "fit"]

BUDGETS = (3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
THRESHOLDS = (0.02, 0.05, 0.1)
BOUNDS = (8, 16, 32)
LOOKUPS = (2, 3, 6, 10)
DRIFT = 0.1  # of plain decoding's speed between the timed steps and the check, above which the choice is doubtful
Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Candidate:
    """A drafter, and how it is replayed from the recording of its method's widest one.

    cut    what is drafted
    most   nodes that are verified at most, where trees are merged or fitted
    auto   the nodes that are verified are chosen at every step
    """

    spec: str
    method: str
    cut: Cut = field(default_factory=Cut)
    most: int | None = None
    auto: bool = False

    @property
    def nodes(self) -> int | None:
        """The node budget, if there is one."""
        return self.cut.nodes if self.most is None else self.most

    def full_spec(self, latency: Measured) -> str:
        """With the costs that trees are fitted to, as measured."""
        return with_costs(self.spec, self.costs(latency)) if self.auto else self.spec

    def costs(self, latency: Measured) -> StepCosts:
        """What steps cost by the nodes they verify, as ``tree=auto`` reads them again."""
        table = self._table(latency)
        return StepCosts.parse(str(StepCosts(table.widths, table.ms)))

    def replay(self, traces: Sequence[Trace], latency: Measured) -> list[Prediction]:
        """One prediction a recording."""
        width = None if self.most is None else Width(self.most, self.costs(latency) if self.auto else None)
        return [simulate(trace, self.cut, latency=self._table(latency), width=width) for trace in traces]

    def _table(self, latency: Measured) -> Latency:
        return latency.table(self.method, self.nodes, merged=self.most is not None)


@dataclass
class Fit:
    """What was found. Tokens a second of decoding, prompts not counted; ``interval`` is 90 % over prompts.

    spec              the chosen drafter in full
    measured, plain   over all prompts, of the chosen drafter and of plain decoding in turns
    costs             of steps by width, a method that can fit its trees to them
    """

    chosen: Candidate
    spec: str
    prediction: float
    interval: tuple[float, float]
    predicted_plain: float
    measured: float
    plain: float
    latency: Measured
    costs: dict[str, StepCosts] = field(default_factory=dict)
    tried: list[tuple[Candidate, Prediction, float]] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        """Measured, over plain decoding."""
        return self.measured / self.plain

    @property
    def drift(self) -> float:
        """How fast plain decoding was in the check, over how fast the timed steps said: 1 on a machine at rest."""
        return self.plain / self.predicted_plain if self.predicted_plain else 1.0

    @property
    def doubtful(self) -> bool:
        """Whether other jobs disturbed the measurement so much that the choice may be wrong."""
        return self.latency.busy or abs(self.drift - 1) > DRIFT


def candidates(*, streams: bool) -> list[Candidate]:
    """What is tried: plain decoding, prompt lookup, and with an adapter streams alone and merged with prompt lookup."""
    found = [Candidate("none", "none")]
    found += [Candidate(f"prompt_lookup:tokens={n}", "prompt_lookup", Cut(depth=n)) for n in LOOKUPS]
    if not streams:
        return found
    alone, merged = "streams", "streams+prompt_lookup"
    for n in BUDGETS:
        cut = Cut(nodes=n, depth=DraftOptions(nodes=n).streams(n))
        found.append(Candidate(f"streams:tree={n}", alone, cut))
        found += [Candidate(f"streams:tree={n},threshold={t}", alone, replace(cut, threshold=t)) for t in THRESHOLDS]
        found.append(Candidate(f"streams:tree={n}+prompt_lookup", merged, most=n))
    for n in BOUNDS:
        found.append(Candidate(f"streams:tree=auto,nodes={n}", alone, Cut(nodes=n), most=n, auto=True))
        found.append(Candidate(f"streams:tree=auto,nodes={n}+prompt_lookup", merged, most=n, auto=True))
    return found


def fit(
    target: Target,
    adapter: StreamAdapter | None,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 96,
    seed: int = 0,
    report: Report = lambda what, done, total: None,
) -> Fit:
    """Measure, replay, choose and check. ``report`` is told what is being done and how far it is."""
    if not prompts:
        raise InputError("tuning needs at least one prompt")
    tried = candidates(streams=adapter is not None)
    # attention grows with the text, and time is a sum: so a prompt of the mean length
    usual = max(prompts, key=len)[: round(statistics.mean(map(len, prompts)))]
    latency = measure_steps(target, adapter, usual, max_new_tokens=max_new_tokens, report=report)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        traces = _record(target, adapter, prompts, max_new_tokens, Path(folder), report)
        for done, candidate in enumerate(tried):
            report("replays", done, len(tried))
            results.append((candidate, candidate.replay(traces[candidate.method], latency)))
    totals = [(candidate, _sum(parts), _rate(parts)) for candidate, parts in results]
    best = max(range(len(totals)), key=lambda i: totals[i][2])
    chosen, _, prediction = totals[best]
    spec = chosen.full_spec(latency)
    measured = _check(target, adapter, spec, prompts, max_new_tokens, report)
    return Fit(
        chosen=chosen,
        spec=spec,
        prediction=prediction,
        interval=_interval(results[best][1], seed),
        predicted_plain=next(rate for candidate, _, rate in totals if candidate.spec == "none"),
        measured=measured[spec],
        plain=measured["none"],
        latency=latency,
        costs={candidate.method: candidate.costs(latency) for candidate in tried if candidate.auto},
        tried=totals,
    )


class _Shared(Wrapped):
    """A drafter that takes part in several recordings: it drafts and observes once a step."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self._trees: list[DraftTree] | None = None

    def draft(self, contexts: Sequence[Context]) -> list[DraftTree]:
        if self._trees is None:
            self._trees = self.drafter.draft(contexts)
        return self._trees

    def observe(self, contexts: Sequence[Context], seen: Observation) -> None:
        if self._trees is not None:
            self.drafter.observe(contexts, seen)
            self._trees = None


class _Beside(Drafter):
    """Drafters that are all recorded beside plain decoding; none of their trees is verified."""

    def __init__(self, watched: Sequence[Drafter]) -> None:
        self.watched = watched

    @property
    def room(self) -> int:
        return max(drafter.room for drafter in self.watched)

    @property
    def rider(self) -> Rider | None:
        return next((drafter.rider for drafter in self.watched if drafter.rider is not None), None)

    def draft(self, contexts: Sequence[Context]) -> list[DraftTree]:
        for drafter in self.watched:
            drafter.draft(contexts)
        return [DraftTree.root(context.root) for context in contexts]

    def observe(self, contexts: Sequence[Context], seen: Observation) -> None:
        for drafter in self.watched:
            drafter.observe(contexts, seen)

    def leave(self, context: Context) -> None:
        for drafter in self.watched:
            drafter.leave(context)


def _record(
    target: Target,
    adapter: StreamAdapter | None,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    folder: Path,
    report: Report,
) -> dict[str, list[Trace]]:
    """By method, one recording a prompt of its widest drafts at every position; merged trees are not cut.

    The text does not depend on drafts, so each prompt is decoded once for all methods.
    """
    lookup = _Shared(make_drafter("prompt_lookup", target.decoder))
    drafters: dict[str, Drafter] = {"none": NoDrafter(), "prompt_lookup": lookup}
    if adapter is not None:
        streams = _Shared(make_drafter(f"streams:tree={BUDGETS[-1]}", target.decoder, adapter))
        nodes = streams.max_nodes + lookup.max_nodes
        drafters |= {"streams": streams, "streams+prompt_lookup": CombinedDrafter([streams, lookup], nodes=nodes)}
    traces: dict[str, list[Trace]] = {method: [] for method in drafters}
    stop = frozenset(target.config.eos_token_ids)
    for number, prompt in enumerate(prompts):
        report("recording drafts", number, len(prompts))
        paths = {method: folder / f"{number}-{method}.jsonl" for method in drafters}
        with ExitStack() as stack:
            writers = [
                stack.enter_context(TraceWriter(path, settings={"drafter": method}, every_position=True))
                for method, path in paths.items()
            ]
            watched = [writer.watch(drafter) for writer, drafter in zip(writers, drafters.values(), strict=True)]
            engine = Engine(target.decoder, _Beside(watched), capacity=len(prompt) + max_new_tokens + 1)
            engine.add(Request(prompt, max_new_tokens, stop_ids=stop))
            for step in engine.run():
                for writer in writers:
                    writer.add(step)
        for method, path in paths.items():
            traces[method].append(read_trace(path))
    return traces


def _sum(parts: Sequence[Prediction]) -> Prediction:
    total = Prediction(parts[0].cut, ms=0.0)
    for part in parts:
        total.tokens += part.tokens
        total.steps += part.steps
        total.draft_nodes += part.draft_nodes
        total.drafted_steps += part.drafted_steps
        total.accepted.update(part.accepted)
        total.ms = None if total.ms is None or part.ms is None else total.ms + part.ms
    return total


def _rate(parts: Sequence[Prediction]) -> float:
    ms = sum(part.ms or 0.0 for part in parts)
    return 1e3 * sum(part.tokens for part in parts) / ms if ms else 0.0


def _interval(parts: Sequence[Prediction], seed: int) -> tuple[float, float]:
    """5 % and 95 % of the prediction over prompts drawn again (bootstrap)."""
    rng = np.random.default_rng(seed)
    drawn = [_rate([parts[i] for i in rng.integers(0, len(parts), len(parts))]) for _ in range(500)]
    low, high = np.quantile(drawn, (0.05, 0.95))
    return float(low), float(high)


def _check(
    target: Target,
    adapter: StreamAdapter | None,
    spec: str,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    report: Report,
) -> dict[str, float]:
    """Tokens a second while decoding, over all prompts, of ``spec`` and plain decoding in turns."""
    stop = frozenset(target.config.eos_token_ids)
    capacity = max(map(len, prompts)) + max_new_tokens + 1
    engines = {
        name: Engine(target.decoder, make_drafter(name, target.decoder, adapter), capacity=capacity)
        for name in dict.fromkeys(("none", spec))
    }
    tokens, seconds = dict.fromkeys(engines, 0), dict.fromkeys(engines, 0.0)
    for number, prompt in enumerate(prompts):
        report("check", number, len(prompts))
        for name, engine in engines.items():
            request = Request(prompt, max_new_tokens, stop_ids=stop)
            engine.rehearse(request)
            engine.add(request)
            began = time.perf_counter()
            tokens[name] += sum(len(step.tokens) for step in engine.run())
            seconds[name] += time.perf_counter() - began
    return {name: tokens[name] / seconds[name] for name in engines}
