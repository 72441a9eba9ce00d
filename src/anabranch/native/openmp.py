"""The number of threads of torch's OpenMP."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache

import torch

__all__ = ["set_openmp_threads"]


@lru_cache(maxsize=1)
def set_openmp_threads() -> Callable[[int], None] | None:
    """``omp_set_num_threads`` of torch's OpenMP, which affects only the calling thread; None if torch has no OpenMP.

    ``torch.set_num_threads`` would also affect threads that start later.
    """
    try:
        set_threads = ctypes.CDLL(None).omp_set_num_threads
    except AttributeError:
        return None
    set_threads.argtypes, set_threads.restype = (ctypes.c_int,), None
    before = torch.get_num_threads()
    set_threads(before + 1)
    works = torch.get_num_threads() == before + 1  # no effect if the library is not the one that torch uses
    set_threads(before)
    return set_threads if works else None
