"""The processor's name, CPU quotas of containers in trees like those that Linux mounts, and the threads that follow."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from anabranch.errors import InputError
from anabranch.support import processor
from anabranch.support.processor import cgroup_quota, processor_name, set_threads, usable_cpus

# what /proc/self/cgroup says, the files below /sys/fs/cgroup, and the quota
TREES = {
    "version 2, in a container": ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
    "version 2, a service": (
        "0::/a.slice/b\n",
        {"a.slice/b/cpu.max": "max 100000", "a.slice/cpu.max": "200000 100000"},
        2,
    ),
    "version 2, the smallest counts": ("0::/a/b", {"a/b/cpu.max": "50000 100000", "a/cpu.max": "400000 100000"}, 0.5),
    "version 2, without a limit": ("0::/a", {"a/cpu.max": "max 100000", "cpu.max": "max 100000"}, None),
    "version 2, of a parent's name": ("0::/../../other", {"cpu.max": "300000 100000"}, 3),
    "version 1, in a container": (
        "5:cpuacct,cpu:/docker/0123\n1:name=systemd:/docker/0123\n",
        {"cpu/cpu.cfs_quota_us": "250000\n", "cpu/cpu.cfs_period_us": "100000\n"},
        2.5,
    ),
    "version 1, mounted by both names": (
        "5:cpu,cpuacct:/a\n0::/\n",
        {"cpu,cpuacct/a/cpu.cfs_quota_us": "100000", "cpu,cpuacct/a/cpu.cfs_period_us": "50000"},
        2,
    ),
    "version 1, without a limit": (
        "5:cpu:/\n",
        {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
        None,
    ),
    "version 1, cpuset alone": ("5:cpuset:/\n", {"cpu.max": "100000 100000"}, None),
    "beside version 1": ("0::/a\n5:memory:/\n", {"unified/a/cpu.max": "100000 100000"}, 1),
    "files that make no sense": ("0::/\n\n5\nx:y\n", {"cpu.max": "1 0\n"}, None),
    "no words": ("0::/\n", {"cpu.max": ""}, None),
    "no cgroups": ("", {}, None),
}


def mounts(files: Iterable[str]) -> str:
    """The entries of /proc/self/mountinfo for the folders below /sys/fs/cgroup that a tree has."""
    tops = {path.partition("/")[0] if path.startswith(("cpu/", "cpu,", "unified/")) else "" for path in files}
    kinds = {top: "cgroup cgroup rw,cpu,cpuacct" if top.startswith("cpu") else "cgroup2 cgroup2 rw" for top in tops}
    return "".join(f"35 31 0:32 / /sys/fs/cgroup/{top} rw,nosuid shared:4 - {kind}\n" for top, kind in kinds.items())


@pytest.mark.parametrize("name", TREES)
def test_quotas(name: str, tmp_path: Path) -> None:
    own, files, quota = TREES[name]
    for path, text in {
        "proc/self/cgroup": own,
        "proc/self/mountinfo": mounts(files),
        **{f"sys/fs/cgroup/{key}": text for key, text in files.items()},
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert cgroup_quota(tmp_path) == quota


def test_unreadable_files_set_no_quota(tmp_path: Path) -> None:
    assert cgroup_quota(tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_bytes(b"0::/\xff")
    assert cgroup_quota(tmp_path) is None
    (tmp_path / "proc/self/cgroup").write_text("0::/")
    (tmp_path / "proc/self/mountinfo").write_text(mounts(["cpu.max"]))
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_bytes(b"\xff\xff")
    assert cgroup_quota(tmp_path) is None


@pytest.mark.parametrize(("quota", "cpus"), [(0.1, 1), (1.0, 1), (1.5, 2), (1000.0, None), (None, None)])
def test_usable_cpus(quota: float | None, cpus: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "cgroup_quota", lambda: quota)
    monkeypatch.setattr(processor.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert usable_cpus() == (cpus or 8)


def test_threads(monkeypatch: pytest.MonkeyPatch, restored_threads: int) -> None:
    """Torch's number is lowered to the quota once; a requested number stays."""
    monkeypatch.setattr(processor, "usable_cpus", lambda: 2)
    monkeypatch.setattr(processor, "_settled", False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(5)
    assert set_threads(None) == 2
    assert set_threads(3) == 3
    assert set_threads(None) == 3
    for wrong in (0, -1, 1.5, "2", True):
        with pytest.raises(InputError, match="threads must be a whole number of at least 1, got"):
            set_threads(wrong)
    monkeypatch.setattr(processor, "_settled", False)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    torch.set_num_threads(5)
    assert set_threads(None) == 5


@pytest.mark.parametrize(
    ("says", "name"),
    [
        ("cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n", "AMD EPYC, family 25 model 17"),
        ("model name\t: ARMv8\nmodel\t: 1\n", "ARMv8"),
    ],
)
def test_processor_names_include_the_generation(
    says: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(says, encoding="utf-8")
    monkeypatch.setattr(processor, "_CPUINFO", tmp_path / "cpuinfo")
    assert processor_name() == name
