"""Which cases of a parametrised test a run of all tests takes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["SHARE", "left_out"]

SHARE = 4  # one case of so many is taken
T = TypeVar("T")


def left_out(cases: Sequence[T], name: Callable[[T], str]) -> list[T]:
    """The cases of one test that are left to the thorough tests.

    Checksums of their names choose, so what remains varies in every parameter.
    """
    ordered = sorted(cases, key=lambda case: zlib.crc32(name(case).encode()))
    return ordered[-(-len(ordered) // SHARE) :]
