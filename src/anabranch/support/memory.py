"""Memory: free bytes, peaks, zeroed pages, glibc's thresholds."""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from anabranch.errors import OutOfMemoryError
from anabranch.support.cgroups import control_groups, lines_of

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

__all__ = ["forget_peak", "free_memory", "give_back", "keep_memory", "peak_memory_mb", "untouched_is_free", "zeroed"]

CPU = torch.device("cpu")
PAGE = 2**21  # bytes of a large page

# files of a control group, by version: limits, usage, and the part of the usage that is dropped when memory runs short
LIMITS = {
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    2: (("memory.max", "memory.high"), "memory.current", "inactive_file"),
}

# <malloc.h>
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3


def forget_peak(device: torch.device) -> None:
    """Reset ``peak_memory_mb`` if the system supports it, to exclude loading and warm-up."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_mb(device: torch.device) -> dict[str, float]:
    """Peak memory of this process in 10^6 bytes, by kind of memory, omitting unknown kinds."""
    peaks: dict[str, float] = {}
    if resource is not None:
        unit = 1 if sys.platform == "darwin" else 1024
        peaks["resident"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6, 1)
    if device.type == "cuda":
        peaks["device"] = round(torch.cuda.max_memory_allocated(device) / 1e6, 1)
    return peaks


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


def free_memory(device: torch.device = CPU, *, root: Path = Path("/")) -> int | None:
    """Bytes that this process may still use on ``device``; None if the system does not say.

    On a CPU this is the minimum of the machine's available memory, swap included, and of the bytes that remain under
    the limits of the process's control groups and of the process. ``root`` is the folder of proc and sys.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    limits = [*_of_machine(root), *_of_groups(root), *_of_process(root)]
    return max(0, min(limits)) if limits else None


def _of_machine(root: Path) -> Iterator[int]:
    sizes = {name: 1024 * size for name, size in _counts(root / "proc/meminfo").items()}
    if "MemAvailable:" in sizes:
        yield sizes["MemAvailable:"] + sizes.get("SwapFree:", 0)


def _of_process(root: Path) -> Iterator[int]:
    """Remaining bytes under the limits on address space (``ulimit -v``) and on data (``ulimit -d``)."""
    sizes = {} if resource is None else _counts(root / "proc/self/status")
    for limit, name in (("RLIMIT_AS", "VmSize:"), ("RLIMIT_DATA", "VmData:")):
        if name in sizes:
            most, _ = resource.getrlimit(getattr(resource, limit))
            if most != resource.RLIM_INFINITY:
                yield most - 1024 * sizes[name]


def _of_groups(root: Path) -> Iterator[int]:
    """Remaining bytes under the limits of the process's control groups (v1 or v2) and their parents.

    Inactive pages of files are dropped when memory runs short, so they count as free.
    """
    for version, folder in control_groups("memory", root):
        limits, usage, inactive = LIMITS[version]
        used, stat = _number(folder / usage), _counts(folder / "memory.stat")
        for limit in limits:
            most = _number(folder / limit)
            if most is not None and used is not None:
                yield most - used + stat.get(inactive, 0)


def _counts(path: Path) -> dict[str, int]:
    """The numbers of a file by name, from its lines that are a name and a number."""
    fields = (line.split() for line in lines_of(path))
    return {line[0]: int(line[1]) for line in fields if len(line) > 1 and line[1].isdecimal()}


def _number(path: Path) -> int | None:
    """The number in a file; None if there is none, or "max"."""
    lines = lines_of(path)
    return int(lines[0]) if lines and lines[0].strip().isdecimal() else None


def zeroed(size: int) -> Tensor:
    """``size`` zero bytes on the CPU, allocated on first use and in large pages if possible.

    Raises OutOfMemoryError.
    """
    with torch.inference_mode(False):  # they are written outside of it, too
        if size < PAGE or not hasattr(mmap, "MAP_ANONYMOUS"):
            return torch.zeros(size, dtype=torch.uint8, device="cpu")
        try:
            pages = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise OutOfMemoryError(f"{size:,} bytes of memory cannot be allocated") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without large pages
                pages.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(pages, dtype=torch.uint8)
        start = -whole.data_ptr() % PAGE
        return whole[start : start + size]


def choose_pages(memory: Tensor, *, large: bool) -> None:
    """Let contiguous memory on the CPU, as far as nobody has written to it, be in large or in small pages.

    Nothing happens to less than a large page, nor where the system does not offer the choice.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE" if large else "MADV_NOHUGEPAGE", None)
    if advice is None or memory.nbytes < PAGE or not _glibc():
        return
    first = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (memory.data_ptr() + memory.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), ctypes.c_int(advice))


def untouched_is_free(*, root: Path = Path("/")) -> bool:
    """Return whether memory that is allocated and not written to leaves as much for other allocations.

    False where the process's addresses are limited (``ulimit -v``, ``ulimit -d``), and where the system promises no
    more memory than it has (``vm.overcommit_memory`` 2). ``root`` is the folder of proc.
    """
    return not [*_of_process(root)] and _number(root / "proc/sys/vm/overcommit_memory") != 2


def give_back() -> None:
    """Return freed memory to the system (Linux with glibc): loading and packing leave holes of the size of weights."""
    if _glibc():
        ctypes.CDLL(None).malloc_trim(0)


def _glibc() -> bool:
    return platform.system() == "Linux" and platform.libc_ver()[0] == "glibc"
