"""How this process asks its system for memory while it trains."""

from __future__ import annotations

import ctypes
import platform

__all__ = ["keep_memory"]

# <malloc.h>
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3


def keep_memory() -> bool:
    """Let freed memory stay with the process; returns whether that was possible (Linux with glibc).

    glibc maps every large tensor afresh from the system and hands it back when it is freed, so each operation of a
    training step pays for zeroed pages again. Kept on the heap, the same pages serve the next operation.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # older glibc refuses more than 32 MiB
    mapped = mallopt(M_MMAP_THRESHOLD, 1 << 30) or mallopt(M_MMAP_THRESHOLD, 1 << 25)
    return bool(mapped and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
