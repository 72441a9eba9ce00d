"""Memory management: file-backed tensors, glibc's thresholds, and returning freed memory to the system."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from anabranch.errors import FileError

__all__ = ["free_memory", "give_back", "keep_memory", "off_heap"]

# <malloc.h>
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3


def off_heap(x: Tensor, folder: Path) -> Tensor:
    """Copy a CPU tensor into an unnamed memory-mapped file in ``folder``.

    Long-lived tensors of a training then do not fragment the heap, and the system can page them out if memory is short.
    Raises FileError if the disk is full.
    """
    if x.device.type != "cpu" or x.numel() == 0:
        return x
    size = x.numel() * x.itemsize
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise FileError(
                f"{folder} has too little space for the target's states ({error.strerror}); use --no-keep-states"
            ) from error
        copy = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=x.dtype).view(x.shape)
    return copy.copy_(x)


def keep_memory() -> bool:
    """Keep freed memory in the process; returns whether that is supported (Linux with glibc).

    By default glibc maps each large tensor from the system and unmaps it when it is freed, so every operation of a
    training step waits for zeroed pages. On the heap, the next operation reuses the same pages.
    """
    if not _glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # older glibc refuses more than 32 MiB
    mapped = mallopt(M_MMAP_THRESHOLD, 1 << 30) or mallopt(M_MMAP_THRESHOLD, 1 << 25)
    return bool(mapped and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


def free_memory() -> int | None:
    """Available memory in bytes, including swap; None except on Linux."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    return sizes["MemAvailable"] + sizes["SwapFree"] if "MemAvailable" in sizes else None


def give_back() -> None:
    """Return freed memory to the system (Linux with glibc): loading and packing leave holes of the size of weights."""
    if _glibc():
        ctypes.CDLL(None).malloc_trim(0)


def _glibc() -> bool:
    return platform.system() == "Linux" and platform.libc_ver()[0] == "glibc"
