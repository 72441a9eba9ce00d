"""Suggest the known value that resembles a mistyped one, for messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["hint"]

CUTOFF = 0.7  # similarity, of 1; at difflib's 0.6 "width" suggests "depth"


def hint(value: object, known: Iterable[str]) -> str:
    """`` (did you mean 'suffix'?)``, to put after a value that is not among ``known``; empty if none resembles it."""
    near = difflib.get_close_matches(str(value).strip().lower(), list(known), n=1, cutoff=CUTOFF)
    return f" (did you mean {near[0]!r}?)" if near else ""
