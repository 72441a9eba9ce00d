"""Choose the fastest drafter for a machine.

1. *Times*: the cost of a step by verified nodes, drafted nodes and prepared depth, measured with the real drafters. The
   controller of speculation starts from these costs afterwards.
2. *Acceptance*: plain decoding of the prompts, recording the draft at every position.
3. *Prediction*: every candidate is replayed from the recordings (``analysis.simulate``) with the measured step times.
4. *Check*: the best candidate, each choice of "auto" and plain decoding decode the prompts in turns; the fastest is
   chosen.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from anabranch.analysis.simulate import Prediction
from anabranch.analysis.trace import TraceRow, TraceWriter, read_trace
from anabranch.decoding.engine import Engine
from anabranch.drafting.combined import DrafterGroup
from anabranch.errors import InputError
from anabranch.methods import AUTO, Drafter, Row, Spec, make_drafter
from anabranch.model.load import Target
from anabranch.options import requests
from anabranch.tree import DraftTree
from anabranch.tune.candidates import PLAIN, Candidate, Candidates, find_candidates
from anabranch.tune.timing import MeasuredTimes, measure_times

__all__ = ["Fit", "Tried", "fit"]

LEAD = 1.03  # times the rate of "auto" above which a fixed drafter becomes the default
DRIFT = 0.1  # change of plain decoding's speed between timing and check above which the choice is doubtful
Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Tried:
    """A candidate with its predicted tokens/s while decoding, over all prompts."""

    candidate: Candidate
    prediction: Prediction
    rate: float


@dataclass
class Fit:
    """The result. All rates are tokens/s while decoding, without the time for prompts.

    predicted              the candidate with the best prediction
    prediction, interval   its predicted rate, and a 90 % interval over prompts
    predicted_plain        plain decoding's predicted rate
    measured, plain        measured rates over all prompts, in alternation: ``predicted`` and plain decoding
    choices                those of the choices of "auto", by specification
    times                  the step costs
    tried                  every candidate
    """

    predicted: Candidate
    prediction: float
    interval: tuple[float, float]
    predicted_plain: float
    measured: float
    plain: float
    choices: dict[Spec, float]
    times: MeasuredTimes
    tried: list[Tried] = field(default_factory=list)

    @property
    def auto_spec(self) -> Spec:
        """The fastest choice of "auto"."""
        return max(self.choices, key=self.choices.__getitem__)

    @property
    def auto(self) -> float:
        """The measured rate of the fastest choice of "auto"."""
        return max(self.choices.values())

    @property
    def spec(self) -> Spec:
        """The fastest drafter as measured; in a tie, the predicted one."""
        plain = self.tried[0].candidate.spec
        rates = [(self.measured, self.predicted.spec), (self.auto, self.auto_spec), (self.plain, plain)]
        return max(rates, key=lambda pair: pair[0])[1]

    @property
    def lead(self) -> float:
        """The fastest measured rate divided by that of "auto"."""
        return max(self.measured, self.plain, self.auto) / self.auto

    @property
    def default(self) -> str:
        """The drafter that is used from now on where none is named: "auto" unless the fastest is clearly faster."""
        return str(self.spec) if self.lead > LEAD else AUTO

    @property
    def speedup(self) -> float:
        """The fastest measured rate divided by plain decoding's."""
        return max(self.measured, self.auto, self.plain) / self.plain

    @property
    def costs(self) -> dict[str, str]:
        """The costs of the parts of a step with the drafter that "auto" stands for, as stored in profiles."""
        return self.times.groups[self._auto_group].to_dict()

    @property
    def _auto_group(self) -> str:
        return next(one.candidate.group for one in self.tried if one.candidate.spec == self.auto_spec)

    @property
    def drift(self) -> float:
        """Plain decoding's rate in the check divided by the rate predicted from timed steps: 1 on an idle machine."""
        return self.plain / self.predicted_plain if self.predicted_plain else 1.0

    @property
    def doubtful(self) -> bool:
        """Return whether other jobs may have disturbed the measurement enough to make the choice wrong."""
        return self.times.busy or abs(self.drift - 1) > DRIFT

    def record(self, *, prompts: int, max_new_tokens: int) -> dict[str, Any]:
        """The measurements and predictions, for profiles and --json, without the drafter and its costs."""
        return {
            "prompts": prompts,
            "max_new_tokens": max_new_tokens,
            "predicted_drafter": str(self.predicted.spec),
            "predicted_tokens_per_second": round(self.prediction, 2),
            "interval_90": [round(value, 2) for value in self.interval],
            "measured_tokens_per_second": round(self.measured, 2),
            "default": self.default,
            "auto_drafter": str(self.auto_spec),
            "auto_tokens_per_second": round(self.auto, 2),
            "choices": {str(each): round(rate, 2) for each, rate in self.choices.items()},
            "plain_tokens_per_second": round(self.plain, 2),
            "predicted_plain_tokens_per_second": round(self.predicted_plain, 2),
            "speedup": round(self.speedup, 3),
            "drift": round(self.drift, 3),
            "doubtful": self.doubtful,
            "date": date.today().isoformat(),
            "times": {group: times.to_dict() for group, times in self.times.groups.items()},
            "candidates": [
                {
                    "drafter": str(one.candidate.spec),
                    "tokens_per_second": round(one.rate, 2),
                    "tokens_a_step": round(one.prediction.mean_acceptance_length, 3),
                }
                for one in self.tried
            ],
        }


def fit(
    target: Target,
    modules: Sequence[nn.Module | None],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 96,
    seed: int = 0,
    report: Report = lambda what, done, total: None,
) -> Fit:
    """Measure, replay, choose and check.

    modules  the modules trained for the target, as for ``make_drafter``
    prompts  token ids of each prompt
    report   called with the current activity, steps done and steps in total

    Raises InputError without prompts.
    """
    if not prompts:
        raise InputError("tuning needs at least one prompt")
    candidates = find_candidates(target.decoder, modules)
    # attention grows linearly with the context, so times are measured with a prompt of mean length
    typical = max(prompts, key=len)[: round(statistics.mean(map(len, prompts)))]
    times = measure_times(target.decoder, candidates.timed, typical, max_new_tokens=max_new_tokens, report=report)
    recorded = _record(target, candidates, prompts, max_new_tokens, report)
    tried: list[Tried] = []
    parts: list[list[Prediction]] = []
    for done, candidate in enumerate(candidates.tried):
        report("replays", done, len(candidates.tried))
        rows = [recorded[method] for method in candidate.methods] or [next(iter(recorded.values()))]
        parts.append(candidate.replay(rows, times.groups[candidate.group]))
        tried.append(Tried(candidate, _sum(parts[-1]), _rate(parts[-1])))
    best = max(range(len(tried)), key=lambda i: tried[i].rate)
    predicted = tried[best].candidate
    measured = _check(
        target, modules, [tried[0].candidate, predicted, *candidates.choices], prompts, max_new_tokens, report
    )
    return Fit(
        predicted=predicted,
        prediction=tried[best].rate,
        interval=_interval(parts[best], seed),
        predicted_plain=tried[0].rate,
        measured=measured[str(predicted.spec)],
        plain=measured[PLAIN],
        choices={each.spec: measured[str(each.spec)] for each in candidates.choices},
        times=times,
        tried=tried,
    )


class _Recorded(DrafterGroup):
    """Drafters that are recorded during plain decoding; none of their trees is verified."""

    def __init__(self, parts: Sequence[Drafter]) -> None:
        super().__init__(parts)
        self.needs = replace(self.needs, probes=0)

    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        for part in self.parts:
            part.draft(rows, part.max_nodes)
        return DraftTree.roots([row.root for row in rows])


def _record(
    target: Target, candidates: Candidates, prompts: Sequence[Sequence[int]], max_new_tokens: int, report: Report
) -> dict[str, list[TraceRow]]:
    """One recording per prompt of each method's largest drafts at every position, by method.

    The text does not depend on drafts, so each prompt is decoded only once for all methods that can share a pass.
    """
    batch = requests(prompts, target, {"max_new_tokens": max_new_tokens})
    rows: dict[str, list[TraceRow]] = {method: [] for method in candidates.recorded}
    groups = _together(candidates.recorded)
    with tempfile.TemporaryDirectory() as folder:
        for number, request in enumerate(batch):
            report("recording drafts", number, len(prompts))
            paths = {method: Path(folder) / f"{number}-{method}.jsonl" for method in candidates.recorded}
            for group in groups:
                with ExitStack() as stack:
                    writers = {
                        method: stack.enter_context(
                            TraceWriter(paths[method], settings={"drafter": method}, every_position=True)
                        )
                        for method in group
                    }
                    watched = [writer.watch(candidates.recorded[method]) for method, writer in writers.items()]
                    engine = Engine(
                        target.decoder, _Recorded(watched), capacity=len(request.prompt_ids) + max_new_tokens + 1
                    )
                    engine.add(request)
                    for step in engine.run():
                        for writer in writers.values():
                            writer.add(step)
            for method, path in paths.items():
                rows[method] += read_trace(path).rows()
    return rows


def _together(drafters: Mapping[str, Drafter]) -> list[list[str]]:
    """Groups of methods that can be recorded together: a pass can have only one rider."""
    riding = [method for method, drafter in drafters.items() if drafter.needs.rider is not None]
    rest = [method for method in drafters if method not in riding]
    groups = [[method] for method in riding] or [[]]
    return [[*groups[0], *rest], *groups[1:]]


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
    """The 5 % and 95 % quantiles of the predicted rate over resampled prompts (bootstrap)."""
    rng = np.random.default_rng(seed)
    drawn = [_rate([parts[i] for i in rng.integers(0, len(parts), len(parts))]) for _ in range(500)]
    low, high = np.quantile(drawn, (0.05, 0.95))
    return float(low), float(high)


def _check(
    target: Target,
    modules: Sequence[nn.Module | None],
    candidates: Sequence[Candidate],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    report: Report,
) -> dict[str, float]:
    """Decode all prompts with each candidate in alternation; returns tokens/s while decoding, by specification."""
    capacity = max(map(len, prompts)) + max_new_tokens + 1
    engines = {
        str(spec): Engine(target.decoder, make_drafter(spec, target.decoder, *modules), capacity=capacity)
        for spec in dict.fromkeys(candidate.spec for candidate in candidates)
    }
    tokens, seconds = dict.fromkeys(engines, 0), dict.fromkeys(engines, 0.0)
    for number, request in enumerate(requests(prompts, target, {"max_new_tokens": max_new_tokens})):
        report("check", number, len(prompts))
        for name, engine in engines.items():
            engine.rehearse(request)
            engine.add(request)
            began = time.perf_counter()
            tokens[name] += sum(len(step.tokens) for step in engine.run())
            seconds[name] += time.perf_counter() - began
    return {name: tokens[name] / seconds[name] for name in engines}
