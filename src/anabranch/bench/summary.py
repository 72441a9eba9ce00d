"""Summarise rounds into records of contenders; docs/metrics.md defines all numbers.

``summarise`` compares contenders prompt by prompt, ``summarise_rows`` by the number of rows that decode together.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from types import MappingProxyType
from typing import Any

from anabranch.bench.run import Answer, Encoded, Outcome, Round
from anabranch.decoding.stats import Stats
from anabranch.support.table import decimal

__all__ = [
    "CALL_KEYS",
    "CALL_TITLES",
    "ContenderAnswers",
    "call_cells",
    "calls_per_token",
    "gather",
    "quartiles",
    "summarise",
    "summarise_rows",
]

CALL_KEYS = ("target_calls_per_token", "draft_calls_per_token", "mb_read_per_token")
CALL_TITLES = ("target calls\n/token", "draft calls\n/token", "MB read\n/token")
P95 = 0.95


@dataclass
class ContenderAnswers:
    """All answers of one contender, by prompt and repeat; with an ``error`` none of them is reported.

    every  the contender decoded the first prompt and every ``every``-th after it, to which the answers belong
    """

    name: str
    answers: list[list[Answer]] = field(default_factory=list)
    error: str | None = None
    every: int = 1

    def at(self, prompt: int) -> list[Answer]:
        """The answers to a prompt that the contender decoded."""
        return self.answers[prompt // self.every]


def gather(
    names: Sequence[str],
    done: Sequence[Round],
    errors: Mapping[str, str],
    every: Mapping[str, int] = MappingProxyType({}),
) -> list[ContenderAnswers]:
    """Group rounds of one prompt each by contender; ``errors`` are from before the first round."""
    gathered = [ContenderAnswers(name, error=errors.get(name), every=every.get(name, 1)) for name in names]
    for one in done:
        for contender in gathered:
            contender.error = contender.error or one.errors.get(contender.name)
            if contender.error is None and one.index % contender.every == 0:
                contender.answers.append([outcome.answers[0] for outcome in one.outcomes[contender.name]])
    return gathered


def quartiles(values: Sequence[float | None], digits: int = 4) -> list[float] | None:
    """[lower quartile, median, upper quartile] of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    if len(known) == 1:
        return [round(known[0], digits)] * 3
    return [round(value, digits) for value in statistics.quantiles(known, n=4, method="inclusive")]


def summarise(
    gathered: Sequence[ContenderAnswers],
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
    good = {measured.name: measured for measured in gathered if measured.error is None}
    records: list[dict[str, Any]] = []
    for measured in gathered:
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
        decoded = range(0, len(prompts), measured.every)
        record |= {"every": measured.every} if measured.every > 1 else {}
        if reference is not None:
            record |= _ratios(measured, reference, decoded)
            if comparable(measured.name):
                record |= _equality(measured, reference, decoded)
        record["by_task"] = {}
        for task in dict.fromkeys(prompts[i][0].task for i in decoded):
            where = [i for i in decoded if prompts[i][0].task == task]
            record["by_task"][task] = _task(measured, reference, where)
        record["tokens_by_prompt"] = [len(answers[0].token_ids) for answers in measured.answers]
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
        **_drafts(stats),
        "acceptance_by_depth": [round(share, 4) for share in stats.acceptance_by_depth()],
        "accepted_per_step": {str(count): steps for count, steps in sorted(stats.accepted.items())},
        "acceptance_rate": round(stats.acceptance_rate, 4),
        "sources": dict(stats.sources),
        "step_ms_by_part": {
            part: round(1e3 * statistics.median(one.parts[part] / one.steps for one in per_prompt), 4)
            for part in stats.parts
        },
        "token_ms_by_part": {part: round(1e3 * value / stats.tokens, 4) for part, value in stats.parts.items()},
    }


def _ratios(measured: ContenderAnswers, reference: ContenderAnswers, where: Sequence[int]) -> dict[str, Any]:
    """Speedups over the baseline, by prompt and in total."""
    mine, base = [measured.at(i) for i in where], [reference.at(i) for i in where]
    ratios = [_rate(a) / _rate(b) for a, b in zip(mine, base, strict=True)]
    whole = _rates(mine)["tokens_per_second"] / _rates(base)["tokens_per_second"]
    return {"speedup_quartiles": quartiles(ratios), "speedup_total": round(whole, 4)}


def _equality(measured: ContenderAnswers, reference: ContenderAnswers, where: Sequence[int]) -> dict[str, Any]:
    """Count the outputs that equal the baseline's, and measure common prefixes, for the first repeat."""
    pairs = [(measured.at(i)[0].token_ids, reference.at(i)[0].token_ids) for i in where]
    prefixes = [sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(a, b, strict=False))) for a, b in pairs]
    return {"equal_outputs": sum(a == b for a, b in pairs), "common_prefix_median": statistics.median(prefixes)}


def _task(measured: ContenderAnswers, reference: ContenderAnswers | None, where: Sequence[int]) -> dict[str, Any]:
    many = [measured.at(i) for i in where]
    stats = Stats.merged(a.stats for a in _flat(many) if a.stats is not None)
    record: dict[str, Any] = {"prompts": len(where), "tokens_per_second": _rates(many)["tokens_per_second"]}
    if stats.steps:
        record |= _drafts(stats)
        record["acceptance_by_depth"] = [round(share, 4) for share in stats.acceptance_by_depth()]
    if reference is not None:
        record |= _ratios(measured, reference, where)
    return record


# -- several rows at a time ----------------------------------------------------------------------------------------
def summarise_rows(
    done: Sequence[Round],
    baselines: Mapping[str, str | None],
    *,
    errors: Mapping[str, str] | None = None,
    comparable: Callable[[str], bool] = lambda name: True,
) -> list[dict[str, Any]]:
    """One record per contender and number of rows.

    baselines   the plain decoding that each contender is compared with, by name
    errors      contenders that failed before the first round, and why
    comparable  contenders whose tokens should equal plain decoding's

    Texts are compared with plain decoding at the same number of rows; those of plain decoding, with the first number of
    rows. Ratios are within a round; they and rates are [lowest, median, highest] over rounds. Latencies are medians and
    95th percentiles over all prompts and tokens.
    """
    errors = {**(errors or {}), **{name: why for one in done for name, why in one.errors.items()}}
    numbers = list(dict.fromkeys(one.rows for one in done))
    records: list[dict[str, Any]] = []
    for name, baseline in baselines.items():
        if name in errors:
            records.append({"name": name, "error": errors[name]})
            continue
        for number in numbers:
            at = [one.outcomes for one in done if one.rows == number]
            mine = [outcome for outcomes in at for outcome in outcomes[name]]
            record = {"name": name, "rows": number} | _latencies(mine)
            if baseline is not None and baseline in at[0]:
                pairs = [pair for each in at for pair in zip(each[name], each.get(baseline, ()), strict=False)]
                record["ratio"] = _range(one.tokens_per_second / plain.tokens_per_second for one, plain in pairs)
                if comparable(name):
                    first = next(one for one in done if one.rows == (numbers[0] if name == baseline else number))
                    record["equal_outputs"] = _equal(mine, first.outcomes[baseline][0])
            records.append(record)
    return records


def _latencies(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Rates and latencies at one number of rows, and the statistics of the first round."""
    answers = [answer for outcome in outcomes for answer in outcome.answers]
    record: dict[str, Any] = {
        "prompts": len(outcomes[0].answers),
        "tokens": sum(map(len, outcomes[0].texts)),
        "tokens_per_second": _range(outcome.tokens_per_second for outcome in outcomes),
        "first_token_ms": _percentiles([1e3 * at for one in answers if (at := one.first_token_seconds) is not None]),
        "token_ms": _percentiles([1e3 * seconds for answer in answers for seconds in answer.latencies]),
    }
    stats = Stats.merged(answer.stats for answer in outcomes[0].answers if answer.stats is not None)
    return record | (_drafts(stats) if stats.steps else {})


def _equal(outcomes: Sequence[Outcome], plain: Outcome) -> int:
    """The number of prompts whose tokens equal plain decoding's in every round."""
    return sum(
        all(text == expected for text in texts)
        for expected, *texts in zip(plain.texts, *(outcome.texts for outcome in outcomes), strict=True)
    )


def _range(values: Iterable[float]) -> list[float]:
    """[lowest, median, highest]."""
    known = list(values)
    return [round(value, 4) for value in (min(known), statistics.median(known), max(known))]


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Median and 95th percentile (nearest rank); None without values."""
    if not values:
        return None
    ranked = sorted(values)
    return {
        "median": round(statistics.median(ranked), 4),
        "p95": round(ranked[math.ceil(P95 * len(ranked)) - 1], 4),
    }


def _drafts(stats: Stats) -> dict[str, Any]:
    """The statistics of drafts that every record has."""
    return {
        "mean_acceptance_length": round(stats.mean_acceptance_length, 4),
        **calls_per_token(stats),
        "draft_nodes_per_step": round(stats.draft_nodes_per_step, 2),
    }


def calls_per_token(stats: Stats) -> dict[str, Any]:
    """Passes and 10^6 bytes of weights per emitted token, and the passes by kind; empty if they were not counted."""
    if not stats.calls or not stats.tokens:
        return {}
    counted = stats.to_dict()
    return {
        "target_calls_per_token": round(stats.steps / stats.tokens, 4),
        "draft_calls_per_token": round(stats.draft_calls / stats.tokens, 4),
        "mb_read_per_token": round(stats.bytes_read / stats.tokens / 1e6, 3),
        "calls": counted["calls"],
    }


def call_cells(record: Mapping[str, Any]) -> list[str]:
    """The cells of ``CALL_TITLES``: "-" for a peer, and for drafters' passes in results that did not count them."""
    length = record.get("mean_acceptance_length")
    target = record.get("target_calls_per_token", 1 / length if length else None)
    draft, read = record.get("draft_calls_per_token"), record.get("mb_read_per_token")
    return [decimal(target), decimal(draft), decimal(read, 1)]
