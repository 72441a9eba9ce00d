"""How a training takes memory from its system."""

from __future__ import annotations

import ctypes
import mmap
import platform

import torch
from torch import Tensor

__all__ = ["keep_memory", "off_heap"]

# <malloc.h>
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3


def off_heap(x: Tensor) -> Tensor:
    """A copy in memory of its own: what stays for a whole training must not lie scattered among what comes and goes."""
    if x.device.type != "cpu" or x.numel() == 0:
        return x
    copy = torch.frombuffer(mmap.mmap(-1, x.numel() * x.itemsize), dtype=x.dtype).view(x.shape)
    return copy.copy_(x)


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
