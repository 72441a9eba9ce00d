"""Cost of a token in forward passes: calls of the target, calls of drafters, and bytes of weights read by both.

A mean acceptance length counts the target's passes only. These three beside it say what else was run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anabranch.decoding.stats import Stats

__all__ = ["CALL_KEYS", "CALL_TITLES", "call_cells", "calls_per_token"]

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
    values = (target, record.get("draft_calls_per_token"), record.get("mb_read_per_token"))
    return ["-" if value is None else f"{value:.{digits}f}" for value, digits in zip(values, (2, 2, 1), strict=True)]
