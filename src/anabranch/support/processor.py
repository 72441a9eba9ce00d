"""The processor: its name, its instruction sets, and the number of CPUs that this process may use."""

from __future__ import annotations

import math
import os
import platform
from functools import lru_cache
from pathlib import Path

from anabranch.errors import InputError
from anabranch.support.cgroups import control_groups, lines_of

__all__ = [
    "cgroup_quota",
    "processor_flags",
    "processor_name",
    "processor_vendor",
    "set_threads",
    "usable_cpus",
]

_CPUINFO = Path("/proc/cpuinfo")
_settled = False  # ``set_threads`` has been called


def processor_name() -> str:
    """The processor's name, with its family and model where they are known: "AMD EPYC, family 25 model 17".

    In virtual machines, processors of different generations have the same name.
    """
    first = _first_processor(_CPUINFO)
    name = first.get("model name") or platform.processor() or platform.machine()
    family, model = first.get("cpu family"), first.get("model")
    return f"{name}, family {family} model {model}" if family and model else name


def processor_vendor() -> str:
    """The vendor's name as reported by the processor, e.g. "GenuineIntel"; empty if unknown."""
    return _first_processor(_CPUINFO).get("vendor_id", "")


@lru_cache(maxsize=1)
def processor_flags() -> frozenset[str]:
    """Instruction set extensions as Linux names them ("avx2", "avx512f", ...); empty elsewhere."""
    return frozenset(_first_processor(_CPUINFO).get("flags", "").split())


@lru_cache
def _first_processor(cpuinfo: Path) -> dict[str, str]:
    """The fields of the first processor in /proc/cpuinfo, which is read once; empty without such a file."""
    if not cpuinfo.is_file():
        return {}
    first = cpuinfo.read_text(encoding="utf-8").split("\n\n", 1)[0]
    fields = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in fields}


def usable_cpus() -> int:
    """The number of CPUs that this process may use: its affinity mask, limited by the CPU quota; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota()
    return max(1, allowed if quota is None else min(allowed, math.ceil(quota)))


def cgroup_quota(root: Path = Path("/")) -> float | None:
    """The container's CPU quota in CPUs, the smallest on its cgroup path (version 2 or 1); None without a quota.

    ``root`` is the folder of ``proc`` and ``sys``.
    """
    quotas = [
        quota for version, folder in control_groups("cpu", root) if (quota := _quota(version, folder)) is not None
    ]
    return min(quotas, default=None)


def _quota(version: int, folder: Path) -> float | None:
    """The quota of one control group; None if it has none ("max" in version 2, -1 in version 1)."""
    files = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    words = " ".join(line for name in files for line in lines_of(folder / name)).split()
    if len(words) == 2 and all(word.isdecimal() and int(word) > 0 for word in words):
        return int(words[0]) / int(words[1])
    return None


def set_threads(threads: int | None) -> int:
    """Set the number of CPU threads of torch and the native kernels; returns it.

    None keeps the number of an earlier call; the first call limits torch's default to ``usable_cpus``, unless
    OMP_NUM_THREADS is set. Raises InputError for a number below 1.
    """
    import torch

    global _settled
    if threads is None:
        if not _settled and not os.environ.get("OMP_NUM_THREADS") and torch.get_num_threads() > usable_cpus():
            torch.set_num_threads(usable_cpus())
    elif isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise InputError(f"threads must be a whole number of at least 1, got {threads!r}")
    else:
        torch.set_num_threads(threads)
    _settled = True
    return torch.get_num_threads()
