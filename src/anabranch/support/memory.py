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

__all__ = ["OffHeap", "free_memory", "give_back", "keep_memory"]

SMALLEST, LARGEST = 1 << 20, 1 << 28  # bytes of a file that tensors share: each has twice those of the one before it
ALIGNED = 64

# <malloc.h>
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3


class OffHeap:
    """CPU tensors in unnamed memory-mapped files in ``folder``, for as long as any of them lives.

    Long-lived tensors of a training then do not fragment the heap, and the system can page them out if memory is short.
    A mapping holds a file descriptor, of which a process often has 1,024, so many tensors share one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mapped: mmap.mmap | None = None
        self._used = 0

    def keep(self, x: Tensor) -> Tensor:
        """A copy of the tensor; the tensor itself if it is empty or not on a CPU.

        Raises FileError if the disk is full.
        """
        if x.device.type != "cpu" or x.numel() == 0:
            return x
        size, start = x.numel() * x.itemsize, -(-self._used // ALIGNED) * ALIGNED
        if self._mapped is None or start + size > len(self._mapped):
            before = SMALLEST if self._mapped is None else len(self._mapped)
            self._mapped, start = self._file(max(size, min(2 * before, LARGEST))), 0
        self._used = start + size
        copy = torch.frombuffer(self._mapped, dtype=x.dtype, count=x.numel(), offset=start).view(x.shape)
        return copy.copy_(x)

    def _file(self, size: int) -> mmap.mmap:
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.folder) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                raise FileError(
                    f"{self.folder} has too little space for the target's states ({error.strerror}); use "
                    "--no-keep-states"
                ) from error
            return mmap.mmap(file.fileno(), size)


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
