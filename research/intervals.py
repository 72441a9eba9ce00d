"""Intervals of a speedup by bootstrap over prompts, from the records of ``anabranch bench``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["cell", "speedup_interval", "task_cell"]

DRAWS, SHARE = 2000, 0.95


def speedup_interval(
    record: Mapping[str, Any], plain: Mapping[str, Any], where: Sequence[int]
) -> tuple[float, float, float] | None:
    """Tokens/s over plain decoding's on some prompts, and the middle 95 % of it over resampled prompts.

    where  places of the prompts

    None for records without rates by prompt.
    """
    if not where or any("tokens_per_second_by_prompt" not in each for each in (record, plain)):
        return None
    counts = [np.asarray(each["tokens_by_prompt"], np.float64)[list(where)] for each in (record, plain)]
    rates = [np.asarray(each["tokens_per_second_by_prompt"], np.float64)[list(where)] for each in (record, plain)]
    seconds = [count / rate for count, rate in zip(counts, rates, strict=True)]

    def ratio(places: Any) -> Any:
        tokens, times = ([each[places].sum(-1) for each in kind] for kind in (counts, seconds))
        return tokens[0] / times[0] / (tokens[1] / times[1])

    drawn = ratio(np.random.default_rng(0).integers(0, len(where), (DRAWS, len(where))))
    low, high = np.quantile(drawn, ((1 - SHARE) / 2, (1 + SHARE) / 2))
    return float(ratio(np.arange(len(where)))), float(low), float(high)


def cell(speedup: tuple[float, float, float] | None) -> str:
    """A ratio, followed by its interval in brackets; "-" without one."""
    return "-" if speedup is None else f"{speedup[0]:.2f} ({speedup[1]:.2f}-{speedup[2]:.2f})"


def task_cell(
    record: Mapping[str, Any], plain: Mapping[str, Any], tasks: Sequence[str], task: str | None = None
) -> str:
    """The same for the prompts of one task, or of all of them. ``tasks`` are those of the prompts."""
    return cell(speedup_interval(record, plain, [i for i, each in enumerate(tasks) if task in (None, each)]))
