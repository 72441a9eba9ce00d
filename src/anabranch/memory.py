"""How memory is taken from the system and given back."""

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
    """A copy in a nameless file in ``folder``: what stays for a whole training must not lie scattered among what comes
    and goes, and where memory is short the system may write it out.
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
                f"{folder} has no room for the target's states ({error.strerror}); use --no-keep-states"
            ) from error
        copy = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=x.dtype).view(x.shape)
    return copy.copy_(x)


def keep_memory() -> bool:
    """Let freed memory stay with the process; returns whether that was possible (Linux with glibc).

    glibc maps every large tensor afresh from the system and hands it back when it is freed, so each operation of a
    training step pays for zeroed pages again. Kept on the heap, the same pages serve the next operation.
    """
    if not _glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # older glibc refuses more than 32 MiB
    mapped = mallopt(M_MMAP_THRESHOLD, 1 << 30) or mallopt(M_MMAP_THRESHOLD, 1 << 25)
    return bool(mapped and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


def free_memory() -> int | None:
    """Bytes that a process may still take, swap included; None where the system does not tell (Linux does)."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    return sizes["MemAvailable"] + sizes["SwapFree"] if "MemAvailable" in sizes else None


def give_back() -> None:
    """Hand what was freed back to the system (Linux with glibc): a load or a packing leaves holes of whole weights."""
    if _glibc():
        ctypes.CDLL(None).malloc_trim(0)


def _glibc() -> bool:
    return platform.system() == "Linux" and platform.libc_ver()[0] == "glibc"
