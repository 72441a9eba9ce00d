"""Summarise answers into one record per contender; docs/metrics.md defines all numbers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from anabranch.bench.calls import calls_per_token
from anabranch.bench.run import Answer, ContenderAnswers, Encoded
from anabranch.decoding.stats import Stats

__all__ = ["quartiles", "summarise"]


def quartiles(values: Sequence[float | None], digits: int = 4) -> list[float] | None:
    """[lower quartile, median, upper quartile] of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    if len(known) == 1:
        return [round(known[0], digits)] * 3
    return [round(value, digits) for value in statistics.quantiles(known, n=4, method="inclusive")]


def summarise(
    found: Sequence[ContenderAnswers],
    prompts: Sequence[Encoded],
    *,
    baseline: Callable[[str], str] = lambda name: "none",
    floor_ms: Mapping[str, float] | None = None,
    comparable: Callable[[str], bool] = lambda name: True,
) -> list[dict[str, Any]]:
    """One record per contender. Ratios and equality are relative to its ``baseline`` on the same prompt.

    prompts     the decoded prompts
    floor_ms    milliseconds to read a contender's weights once, by name
    comparable  whether a contender's tokens should equal the baseline's
    """
    good = {measured.name: measured for measured in found if measured.error is None}
    records: list[dict[str, Any]] = []
    for measured in found:
        if measured.error is not None:
            records.append({"name": measured.name, "error": measured.error})
            continue
        reference = good.get(baseline(measured.name))
        record: dict[str, Any] = {"name": measured.name} | _rates(measured.answers)
        middle, floor = record["token_ms_quartiles"], (floor_ms or {}).get(measured.name)
        if floor is not None and middle is not None:
            record["floor_share"] = round(floor / middle[1], 4)
            if record["step_ms_quartiles"] is not None:
                record["floor_share_step"] = round(floor / record["step_ms_quartiles"][1], 4)
        record |= _speculation(measured.answers)
        everywhere = range(len(prompts))
        if reference is not None:
            record |= _ratios(measured, reference, everywhere)
            if comparable(measured.name):
                record |= _equality(measured, reference)
        record["by_task"] = {}
        for task in dict.fromkeys(prompt.task for prompt, _ in prompts):
            where = [i for i in everywhere if prompts[i][0].task == task]
            record["by_task"][task] = _task(measured, reference, where)
        record["tokens_per_second_by_prompt"] = [round(_rate(answers), 4) for answers in measured.answers]
        records.append(record)
    return records


def _rate(answers: Sequence[Answer]) -> float:
    """Tokens/s for a prompt: the median over repeats."""
    return statistics.median(answer.tokens_per_second for answer in answers)


def _middle(answers: Sequence[Answer], value: Callable[[Answer], float | None]) -> float | None:
    """Milliseconds for a prompt: the median over the repeats for which they are known."""
    known = [seconds for seconds in map(value, answers) if seconds is not None]
    return 1e3 * statistics.median(known) if known else None


def _flat(many: Sequence[Sequence[Answer]]) -> list[Answer]:
    return [answer for answers in many for answer in answers]


def _rates(many: Sequence[Sequence[Answer]]) -> dict[str, Any]:
    """Rates and latencies over prompts."""
    flat = _flat(many)
    tokens, rates = sum(len(a.token_ids) for a in flat), [_rate(answers) for answers in many]
    return {
        "prompts": len(many),
        "tokens": tokens,
        "tokens_per_second": round(tokens / sum(a.seconds for a in flat), 4),
        "tokens_per_second_mean": round(statistics.fmean(rates), 4),
        "tokens_per_second_quartiles": quartiles(rates),
        "first_token_ms_quartiles": quartiles([_middle(a, lambda x: x.first_token_seconds) for a in many]),
        "sample_ms_quartiles": quartiles([_middle(a, lambda x: x.seconds) for a in many]),
        "token_ms_quartiles": quartiles([_middle(a, lambda x: x.token_seconds) for a in many]),
        "step_ms_quartiles": quartiles([_middle(a, lambda x: x.step_seconds) for a in many]),
    }


def _speculation(many: Sequence[Sequence[Answer]]) -> dict[str, Any]:
    """Statistics of our own steps; empty for a peer."""
    by_prompt = [[a.stats for a in answers if a.stats is not None] for answers in many]
    stats = Stats.merged(one for some in by_prompt for one in some)
    if not stats.steps:
        return {}
    per_prompt = [Stats.merged(some) for some in by_prompt]
    return {
        "steps": stats.steps,
        "mean_acceptance_length": round(stats.mean_acceptance_length, 4),
        **calls_per_token(stats),
        "acceptance_by_depth": [round(share, 4) for share in stats.acceptance_by_depth()],
        "accepted_per_step": {str(count): steps for count, steps in sorted(stats.accepted.items())},
        "acceptance_rate": round(stats.acceptance_rate, 4),
        "draft_nodes_per_step": round(stats.draft_nodes_per_step, 2),
        "sources": dict(stats.sources),
        "step_ms_by_part": {
            part: round(1e3 * statistics.median(one.parts[part] / one.steps for one in per_prompt), 4)
            for part in stats.parts
        },
        "token_ms_by_part": {part: round(1e3 * value / stats.tokens, 4) for part, value in stats.parts.items()},
    }


def _ratios(measured: ContenderAnswers, reference: ContenderAnswers, where: Sequence[int]) -> dict[str, Any]:
    """Speedups over the baseline, by prompt and in total."""
    mine, base = [measured.answers[i] for i in where], [reference.answers[i] for i in where]
    ratios = [_rate(a) / _rate(b) for a, b in zip(mine, base, strict=True)]
    whole = _rates(mine)["tokens_per_second"] / _rates(base)["tokens_per_second"]
    return {"speedup_quartiles": quartiles(ratios), "speedup_total": round(whole, 4)}


def _equality(measured: ContenderAnswers, reference: ContenderAnswers) -> dict[str, Any]:
    """How many outputs equal the baseline's, and the lengths of common prefixes, for the first repeat."""
    pairs = [(a[0].token_ids, b[0].token_ids) for a, b in zip(measured.answers, reference.answers, strict=True)]
    prefixes = [sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(a, b, strict=False))) for a, b in pairs]
    return {"equal_outputs": sum(a == b for a, b in pairs), "common_prefix_median": statistics.median(prefixes)}


def _task(measured: ContenderAnswers, reference: ContenderAnswers | None, where: Sequence[int]) -> dict[str, Any]:
    many = [measured.answers[i] for i in where]
    stats = Stats.merged(a.stats for a in _flat(many) if a.stats is not None)
    record: dict[str, Any] = {"prompts": len(where), "tokens_per_second": _rates(many)["tokens_per_second"]}
    if stats.steps:
        record["mean_acceptance_length"] = round(stats.mean_acceptance_length, 4)
        record |= calls_per_token(stats)
        record["acceptance_by_depth"] = [round(share, 4) for share in stats.acceptance_by_depth()]
        record["draft_nodes_per_step"] = round(stats.draft_nodes_per_step, 2)
    if reference is not None:
        record |= _ratios(measured, reference, where)
    return record
