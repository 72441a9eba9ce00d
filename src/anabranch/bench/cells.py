"""Cells of the tables of results, and the cost of a token in forward passes.

A mean acceptance length counts the target's passes only. The calls of drafters and the bytes of weights that all passes
read say what else was run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anabranch.decoding.stats import Stats

__all__ = [
    "CALL_KEYS",
    "CALL_TITLES",
    "call_cells",
    "calls_per_token",
    "decimal",
    "percent",
    "quartiles_cell",
    "signed_percent",
]

CALL_KEYS = ("target_calls_per_token", "draft_calls_per_token", "mb_read_per_token")
CALL_TITLES = ("target calls\n/token", "draft calls\n/token", "MB read\n/token")


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


def decimal(value: float | None, digits: int = 2) -> str:
    """A number; "-" if there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def quartiles_cell(values: Sequence[float] | None, digits: int = 2) -> str:
    """The median, followed by the quartiles; "-" if there are none."""
    if values is None:
        return "-"
    low, middle, high = (f"{value:.{digits}f}" for value in values)
    return f"{middle} ({low}-{high})"


def percent(part: Mapping[str, Any]) -> str:
    """A mean with its interval, in %; "-" if nothing was scored."""
    if part["mean"] is None:
        return "-"
    mean, low, high = (f"{100 * part[name]:.1f}" for name in ("mean", "low", "high"))
    return f"{mean} ({low}-{high})"


def signed_percent(part: Mapping[str, Any]) -> str:
    """A mean difference with its interval, in percentage points; "-" if nothing was scored."""
    if part["mean"] is None:
        return "-"
    mean, low, high = (f"{100 * part[name]:+.1f}" for name in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"
