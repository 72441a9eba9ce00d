"""Forked child processes: the threads of the parent do not exist there, and its locks stay as they were.

Before a process forks, the forking thread ends its pool of OpenMP threads, which both processes start again when they
need it: in a child with a pool whose threads do not exist, PyTorch's first parallel operation would wait forever.
"""

from __future__ import annotations

import ctypes
import os
from typing import Protocol, TypeVar
from weakref import WeakSet

__all__ = ["renewed_after_fork"]

SOFT = 1  # omp_pause_soft: settings of OpenMP are kept


class Renewed(Protocol):
    """An object with threads or locks."""

    def after_fork(self) -> None:
        """Replace threads and locks, in the child."""


R = TypeVar("R", bound=Renewed)
_renewed: WeakSet[Renewed] = WeakSet()


def renewed_after_fork(each: R) -> R:
    """Call the object's ``after_fork`` in forked child processes; returns the object."""
    _renewed.add(each)
    return each


def _before() -> None:
    # the OpenMP that torch loaded, if it is one with this function (version 5): GNU's since GCC 9, LLVM's since 9
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:
        pause(SOFT)


def _in_child() -> None:
    for each in list(_renewed):
        each.after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_before, after_in_child=_in_child)
