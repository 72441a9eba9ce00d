"""Alternating measurement: every prompt goes through all contenders before the next prompt, in a rotating order.

What is compared is the ratio to the first contender on the same prompt, minutes apart at most, so that a machine that
drifts drifts for all. Nothing is timed before every contender has decoded one prompt as a warm-up.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from anabranch.bench.contenders import Contender, Run
from anabranch.bench.suites import Prompt
from anabranch.engine import Step
from anabranch.errors import AnabranchError
from anabranch.stats import Stats

__all__ = ["Measured", "measure", "summarise"]


@dataclass
class Measured:
    """All runs of one contender, by prompt; ``error`` says why it stopped, and then nothing of it is reported."""

    name: str
    runs: list[list[Run]] = field(default_factory=list)
    error: str | None = None


def measure(
    contenders: Sequence[Contender],
    prompts: Sequence[tuple[Prompt, list[int]]],
    *,
    max_new_tokens: int,
    repeats: int = 1,
    report: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> list[Measured]:
    """Decode every prompt ``repeats`` times with each contender; ``report`` gets work done, work in all, and a name."""
    found = [Measured(contender.name) for contender in contenders]
    total = len(prompts) * repeats * len(contenders)
    done = 0
    for contender, measured in zip(contenders, found, strict=True):
        _guarded(contender, measured, prompts[0][1], min(16, max_new_tokens))
    for index, (prompt, ids) in enumerate(prompts):
        for measured in found:
            measured.runs.append([])
        for repeat in range(repeats):
            turn = (index * repeats + repeat) % len(contenders)
            for place in [*range(turn, len(contenders)), *range(turn)]:
                run = _guarded(contenders[place], found[place], ids, max_new_tokens)
                if run is not None:
                    found[place].runs[index].append(run)
                done += 1
                report(done, total, f"{found[place].name} on {prompt.task}")
    return found


def _guarded(contender: Contender, measured: Measured, ids: Sequence[int], limit: int) -> Run | None:
    if measured.error is not None:
        return None
    try:
        return contender.decode(ids, max_new_tokens=limit)
    except (AnabranchError, RuntimeError, ValueError) as error:
        # an error is an error and never a timed answer; the others go on
        measured.error = f"{type(error).__name__}: {error}"
        return None


def _quartiles(values: Sequence[float]) -> list[float]:
    if len(values) < 2:
        return [values[0]] * 3 if values else []
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return [round(low, 4), round(middle, 4), round(high, 4)]


def _speculation(steps: Sequence[Step]) -> dict[str, Any]:
    """What speculation did: see docs/metrics.md for the definitions."""
    stats = Stats.of(steps)
    return {
        "steps": stats.steps,
        "mean_acceptance_length": round(stats.mean_acceptance_length, 4),
        "acceptance_by_depth": [round(share, 4) for share in stats.acceptance_by_depth()],
        "draft_nodes_per_step": round(statistics.fmean(step.drafted for step in steps), 2) if steps else 0.0,
        "step_ms_by_part": {
            part: round(1e3 * statistics.median(getattr(step.timings, part) for step in steps), 3)
            for part in stats.parts
        },
        "step_ms": round(1e3 * statistics.median(step.timings.total for step in steps), 3),
    }


def summarise(
    found: Sequence[Measured], prompts: Sequence[tuple[Prompt, list[int]]], *, baseline: str = "none"
) -> list[dict[str, Any]]:
    """One record a contender; ratios are to ``baseline`` on the same prompt (medians and quartiles over prompts)."""
    reference = next((m for m in found if m.name == baseline and m.error is None), None)
    records: list[dict[str, Any]] = []
    for measured in found:
        record: dict[str, Any] = {"name": measured.name}
        records.append(record)
        if measured.error is not None:
            record["error"] = measured.error
            continue
        rates = [_rate(runs) for runs in measured.runs]
        flat = [run for runs in measured.runs for run in runs]
        record["tokens"] = sum(len(run.token_ids) for run in flat)
        record["tokens_per_second"] = round(record["tokens"] / sum(run.seconds for run in flat), 3)
        record["tokens_per_second_quartiles"] = _quartiles(rates)
        steps = [step for run in flat for step in run.steps]
        if steps:
            record |= _speculation(steps)
        if reference is not None:
            base = [_rate(runs) for runs in reference.runs]
            record["speedup_quartiles"] = _quartiles([a / b for a, b in zip(rates, base, strict=True)])
            pairs = zip(measured.runs, reference.runs, strict=True)
            record["equal_outputs"] = sum(mine[0].token_ids == theirs[0].token_ids for mine, theirs in pairs)
        record["by_task"] = {
            task: _task(measured, reference, [i for i, (p, _) in enumerate(prompts) if p.task == task])
            for task in _ordered(p.task for p, _ in prompts)
        }
    return records


def _task(measured: Measured, reference: Measured | None, indices: Sequence[int]) -> dict[str, Any]:
    runs = [run for i in indices for run in measured.runs[i]]
    record: dict[str, Any] = {
        "prompts": len(indices),
        "tokens_per_second": round(sum(len(r.token_ids) for r in runs) / sum(r.seconds for r in runs), 3),
    }
    steps = [step for run in runs for step in run.steps]
    if steps:
        record["mean_acceptance_length"] = round(sum(len(s.tokens) for s in steps) / len(steps), 4)
    if reference is not None:
        ratios = [_rate(measured.runs[i]) / _rate(reference.runs[i]) for i in indices]
        record["speedup"] = round(statistics.median(ratios), 4)
    return record


def _rate(runs: Sequence[Run]) -> float:
    return statistics.median(len(run.token_ids) / run.seconds for run in runs)


def _ordered(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
