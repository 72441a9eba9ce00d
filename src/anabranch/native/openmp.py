"""The number of threads of torch's OpenMP."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache

import torch

__all__ = ["set_openmp_threads"]


@lru_cache(maxsize=1)
def set_openmp_threads() -> Callable[[int], None] | None:
    """``omp_set_num_threads`` of torch's OpenMP, which affects the calling thread alone; None where torch has none.

    ``torch.set_num_threads`` would also set the count of threads that start later.
    """
    try:
        set_threads = ctypes.CDLL(None).omp_set_num_threads
    except AttributeError:
        return None
    set_threads.argtypes, set_threads.restype = (ctypes.c_int,), None
    before = torch.get_num_threads()
    set_threads(before + 1)
    works = torch.get_num_threads() == before + 1  # a library other than torch's would change nothing
    set_threads(before)
    return set_threads if works else None
