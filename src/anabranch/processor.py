"""The processor as this process may use it: its name, its instruction sets, and how many threads it has room for."""

from __future__ import annotations

import math
import os
import platform
from functools import lru_cache
from pathlib import Path

import torch

from anabranch.errors import InputError

__all__ = ["cgroup_quota", "processor_flags", "processor_name", "set_threads", "usable_cpus"]

_CPUINFO = Path("/proc/cpuinfo")
_CGROUPS = Path("/sys/fs/cgroup")


def processor_name() -> str:
    """The processor's model name, e.g. "AMD EPYC"."""
    if _CPUINFO.is_file():
        for line in _CPUINFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@lru_cache(maxsize=1)
def processor_flags() -> frozenset[str]:
    """Instruction set extensions as Linux names them ("avx2", "avx512f", ...); empty elsewhere."""
    if _CPUINFO.is_file():
        for line in _CPUINFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("flags"):
                return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def usable_cpus() -> int:
    """CPUs that this process may use: its affinity mask, limited by the container's CPU quota; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota()
    return max(1, allowed if quota is None else min(allowed, math.ceil(quota)))


def cgroup_quota() -> float | None:
    """The container's CPU quota in CPUs, the least along its cgroup path (version 2 or 1); None without one."""
    quotas = []
    for folder in _cgroup_folders():
        try:
            limit, period = (folder / "cpu.max").read_text(encoding="ascii").split()[:2]
        except (OSError, ValueError):
            try:
                limit = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
                period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
            except OSError:
                continue
        if limit.isdigit() and period.isdigit() and int(period) > 0:
            quotas.append(int(limit) / int(period))
    return min(quotas, default=None)


def _cgroup_folders() -> list[Path]:
    """The cgroup folders of this process and of its ancestors, where the kernel shows them."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = _CGROUPS / "cpu" if controllers else _CGROUPS
        inner = top / path.lstrip("/")
        folders += [folder for folder in (inner, *inner.parents) if folder.is_relative_to(top)]
    return folders


def set_threads(threads: int | None) -> int:
    """Let torch and the native kernels use ``threads`` CPU threads; returns how many.

    None keeps torch's own choice, lowered to ``usable_cpus``, unless OMP_NUM_THREADS says otherwise. Raises InputError
    for a number below 1.
    """
    if threads is None:
        if not os.environ.get("OMP_NUM_THREADS") and torch.get_num_threads() > usable_cpus():
            torch.set_num_threads(usable_cpus())
    elif isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise InputError(f"threads must be a whole number of at least 1, got {threads!r}")
    else:
        torch.set_num_threads(threads)
    return torch.get_num_threads()
