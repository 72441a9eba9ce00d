"""Numbers in the tensor names of published draft heads."""

from __future__ import annotations

import re
from collections.abc import Iterable

from anabranch.drafting.published import Published
from anabranch.errors import AdapterError

__all__ = ["numbers"]


def numbers(file: Published, names: Iterable[str], pattern: str) -> list[int]:
    """The numbers in the names that match ``pattern``, whose first group they are: 0, 1, 2, ... without a gap.

    Raises AdapterError where some are missing.
    """
    matches = (re.fullmatch(pattern, name) for name in names)
    ascending = sorted({int(match[1]) for match in matches if match is not None})
    if ascending != list(range(len(ascending))):
        raise AdapterError(f"{file.source} has the heads or blocks {ascending} and lacks some; its copy is incomplete")
    return ascending
