"""Choose the drafter that a machine decodes fastest with.

1. *Latency*: what a step costs by the width of its tree, and what drafting costs beside it, measured in turns.
2. *Acceptance*: plain decoding of the prompts, with the drafts that would have been made at every position recorded.
3. *Prediction*: every candidate is replayed from the recording (``analysis.simulate``), and its steps are priced.
4. *Check*: the best candidate and plain decoding decode the prompts in turns; both numbers go into the profile.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from anabranch.analysis.simulate import Cut, Latency, Prediction, simulate
from anabranch.analysis.trace import Trace, TraceWriter, read_trace
from anabranch.drafters import Context, Drafter, make_drafter
from anabranch.engine import Engine, Request
from anabranch.errors import InputError
from anabranch.model.load import Target
from anabranch.streams.adapter import StreamAdapter
from anabranch.tree import DraftTree

__all__ = ["WIDTHS", "Candidate", "Fit", "Measured", "candidates", "fit", "measure_steps"]

WIDTHS = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48)
BUDGETS = (4, 6, 8, 10, 12, 16, 20, 24, 32)
THRESHOLDS = (0.0, 0.02, 0.05, 0.1)
LOOKUPS = (3, 6, 10)
Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Candidate:
    """A drafter, the recording that it is replayed from, and how that is cut."""

    spec: str
    recorded: str
    cut: Cut
    streams: bool


@dataclass(frozen=True)
class Measured:
    """Milliseconds of a step of plain decoding with a tree of each width, and what streams add to a step."""

    step_ms: Latency
    streams_ms: float

    def table(self, *, streams: bool) -> Latency:
        """What a whole step costs by width."""
        more = self.streams_ms if streams else 0.0
        return Latency(self.step_ms.widths, tuple(ms + more for ms in self.step_ms.ms))


@dataclass
class Fit:
    """What was found. Tokens a second of decoding, prompts not counted; ``interval`` is 90 % over prompts.

    measured, plain   medians over prompts of the chosen drafter and of plain decoding, in turns
    """

    chosen: Candidate
    prediction: float
    interval: tuple[float, float]
    predicted_plain: float
    measured: float
    plain: float
    latency: Measured
    tried: list[tuple[Candidate, Prediction, float]] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        """Measured, over plain decoding."""
        return self.measured / self.plain


class _Fixed(Drafter):
    """Proposes a chain of one token, as wide as asked: for the cost of a pass, not for its tokens."""

    name = "fixed"

    def __init__(self, width: int) -> None:
        self.max_nodes = self.width = width

    def draft(self, contexts: Sequence[Context]) -> list[DraftTree]:
        return [DraftTree.chain(c.root, [c.root] * min(self.width - 1, c.room), source=self.name) for c in contexts]


def candidates(*, streams: bool, longest: int = BUDGETS[-1]) -> list[Candidate]:
    """What is tried: plain decoding, prompt lookup, and with an adapter streams alone and merged with prompt lookup."""
    found = [Candidate("none", "prompt_lookup:tokens=10", Cut(nodes=1), streams=False)]
    for tokens in LOOKUPS:
        found.append(
            Candidate(f"prompt_lookup:tokens={tokens}", "prompt_lookup:tokens=10", Cut(depth=tokens), streams=False)
        )
    if not streams:
        return found
    wide = f"streams:tree={longest}"
    for nodes in BUDGETS:
        for least in THRESHOLDS:
            words = f"streams:tree={nodes}" + (f",threshold={least:g}" if least else "")
            found.append(Candidate(words, wide, Cut(nodes=nodes, threshold=least), streams=True))
        merged = f"streams:tree={nodes}+prompt_lookup"
        found.append(Candidate(merged, f"{wide}+prompt_lookup", Cut(nodes=nodes), streams=True))
    return found


def measure_steps(
    target: Target,
    adapter: StreamAdapter | None,
    prompt: Sequence[int],
    *,
    widths: Sequence[int] = WIDTHS,
    rounds: int = 8,
    steps: int = 3,
    report: Report = lambda what, done, total: None,
) -> Measured:
    """Medians of step times behind ``prompt``, widths in turns so that a machine that drifts drifts for all."""
    if rounds < 2 or steps < 1 or 1 not in widths:
        raise InputError("measuring steps takes at least 2 rounds, 1 step a round, and the width 1 among the widths")
    drafters: dict[str, Drafter] = {str(width): _Fixed(width) for width in widths}
    if adapter is not None:
        drafters["streams"] = make_drafter("streams:tree=8", target.decoder, adapter)
    request = Request(prompt, min(4 * max(widths), target.config.max_positions - len(prompt)))
    capacity = len(prompt) + request.max_new_tokens
    engines = {name: Engine(target.decoder, drafter, capacity=capacity) for name, drafter in drafters.items()}
    whole: dict[str, list[float]] = {name: [] for name in engines}
    beside: dict[str, list[float]] = {name: [] for name in engines}
    for done in range(rounds):
        report("step times", done, rounds)
        for name, engine in engines.items():
            counted = 0
            while counted < steps:
                if not engine.active:
                    engine.add(request)
                    engine.step()  # the first step of a text knows no draft
                for step in engine.step():
                    counted += 1
                    # near the end of the text trees are cut
                    if step.tree.size == engine.drafter.max_nodes or name == "streams":
                        whole[name].append(1e3 * step.timings.total)
                        beside[name].append(1e3 * (step.timings.draft + step.timings.commit))
    known = [width for width in widths if whole[str(width)]]
    streams = 0.0
    if adapter is not None:
        streams = max(0.0, statistics.median(beside["streams"]) - statistics.median(beside["1"]))
    # a wider pass does no less: what noise says otherwise is levelled
    rising = np.maximum.accumulate([statistics.median(whole[str(width)]) for width in known])
    return Measured(Latency(tuple(known), tuple(float(ms) for ms in rising)), streams)


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
    usual = sorted(prompts, key=len)[len(prompts) // 2]  # attention grows with the text
    latency = measure_steps(target, adapter, usual, report=report)
    with tempfile.TemporaryDirectory() as folder:
        traces = {
            spec: _record(target, adapter, spec, prompts, max_new_tokens, Path(folder) / str(number), report)
            for number, spec in enumerate(dict.fromkeys(candidate.recorded for candidate in tried))
        }
        results = []
        for done, candidate in enumerate(tried):
            report("replays", done, len(tried))
            table = latency.table(streams=candidate.streams)
            parts = [simulate(trace, candidate.cut, latency=table) for trace in traces[candidate.recorded]]
            results.append((candidate, parts))
    totals = [(candidate, _sum(parts), _rate(parts)) for candidate, parts in results]
    best = max(range(len(totals)), key=lambda i: totals[i][2])
    chosen, _, prediction = totals[best]
    plain = next(rate for candidate, _, rate in totals if candidate.spec == "none")
    measured = _check(target, adapter, chosen.spec, prompts, max_new_tokens, report)
    return Fit(
        chosen=chosen,
        prediction=prediction,
        interval=_interval(results[best][1], seed),
        predicted_plain=plain,
        measured=measured[chosen.spec],
        plain=measured["none"],
        latency=latency,
        tried=totals,
    )


def _record(
    target: Target,
    adapter: StreamAdapter | None,
    spec: str,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    folder: Path,
    report: Report,
) -> list[Trace]:
    """One recording a prompt, of drafts at every position."""
    traces = []
    stop = frozenset(target.config.eos_token_ids)
    drafter = make_drafter(spec, target.decoder, adapter)
    for number, prompt in enumerate(prompts):
        report(f"recording {spec}", number, len(prompts))
        path = folder / f"{number}.jsonl"
        with TraceWriter(path, settings={"drafter": spec}, every_position=True) as writer:
            engine = Engine(target.decoder, writer.watch(drafter), capacity=len(prompt) + max_new_tokens + 1)
            engine.add(Request(prompt, max_new_tokens, stop_ids=stop))
            for step in engine.run():
                writer.add(step)
        traces.append(read_trace(path))
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
            engine.add(Request(prompt, max_new_tokens, stop_ids=stop))
            began = time.perf_counter()
            tokens[name] += sum(len(step.tokens) for step in engine.run())
            seconds[name] += time.perf_counter() - began
    return {name: tokens[name] / seconds[name] for name in engines}
