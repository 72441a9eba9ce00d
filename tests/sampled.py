"""Which cases of a parametrised test a run of all tests takes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["SHARE", "left_out"]

SHARE = 6  # one case of so many is taken
T = TypeVar("T")


def left_out(cases: Sequence[T], name: Callable[[T], str]) -> list[T]:
    """The cases of one test that are left to the thorough tests.

    Checksums of their names give an order, and those with a part of the name that none before them has come first, so
    what remains varies in every parameter.
    """
    seen: set[tuple[int, str]] = set()
    new, more = list[T](), list[T]()
    for case in sorted(cases, key=lambda case: zlib.crc32(name(case).encode())):
        parts = set(enumerate(name(case).removesuffix("]").split("[", 1)[-1].split("-")))
        (more if parts <= seen else new).append(case)
        seen |= parts
    return [*new, *more][-(-len(cases) // SHARE) :]
