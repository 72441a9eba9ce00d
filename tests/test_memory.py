"""Memory that does not suffice: the cache grows with the texts, rows wait for each other, nothing that runs is lost."""

from __future__ import annotations

import mmap
import re
import subprocess
import sys
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch.decoding import scheduler as module
from anabranch.decoding import ticks
from anabranch.decoding.batch import Member
from anabranch.decoding.engine import Engine, Request, Step
from anabranch.decoding.scheduler import Scheduler
from anabranch.drafting.kept import Family
from anabranch.errors import OutOfMemoryError
from anabranch.methods import make_drafter
from anabranch.methods.none import NoDrafter
from anabranch.model import cache as caches
from anabranch.model.cache import Cache, bytes_per_token, room_for
from anabranch.model.config import ModelConfig
from anabranch.model.decoder import Decoder
from anabranch.native.library import library
from anabranch.support import memory
from anabranch.support.memory import choose_pages, free_memory, untouched_is_free, zeroed
from small import decode, prompt, request, small, small_adapter

PLAIN = NoDrafter()


def machine(root: Path, *, groups: str, mounts: str, files: dict[str, str]) -> Path:
    """A machine with 1 GiB available and 1 MiB of swap, and the files of control groups."""
    files = {
        "proc/meminfo": "MemTotal:  4194304 kB\nMemAvailable:  1048576 kB\nSwapFree:  1024 kB\n",
        "proc/self/cgroup": groups,
        "proc/self/mountinfo": mounts,
        **files,
    }
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


V2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "35 31 0:32 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "36 31 0:33 {} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


def v2(folder: str, **numbers: object) -> dict[str, str]:
    return {f"sys/fs/cgroup/{folder}memory.{name}": f"{number}\n" for name, number in numbers.items()}


def v1(folder: str, limit: int, usage: int, inactive: int) -> dict[str, str]:
    where = f"sys/fs/cgroup/memory/{folder}memory."
    stat = f"cache 7\ninactive_file 1\ntotal_inactive_file {inactive}\n"
    return {f"{where}limit_in_bytes": str(limit), f"{where}usage_in_bytes": str(usage), f"{where}stat": stat}


WHOLE = 2**30 + 2**20
MACHINES: dict[str, tuple[str, str, dict[str, str], int]] = {
    "no group": ("", "", {}, WHOLE),
    "a group without a limit": ("0::/a\n", V2, v2("a/", max="max", high="max", current=5), WHOLE),
    "v2": ("0::/a\n", V2, v2("a/", max=9000, current=2000, stat="anon 5\ninactive_file 500"), 7500),
    "the least of all groups above it": (
        "0::/a/b/c\n",
        V2,
        {**v2("a/b/c/", max="max", current=1), **v2("a/b/", max=6000, current=100), **v2("a/", max=9000, current=7000)},
        2000,
    ),
    "beyond memory.high a process is slowed down": ("0::/a\n", V2, v2("a/", max=9000, high=5000, current=100), 4900),
    "a group's name space": ("0::/\n", V2, v2("", max=9000, current=100), 8900),
    "a path of the host": ("0::/kubepods/pod1/x\n", V2, v2("", max=9000, current=100), 8900),
    "a group that is full": ("0::/a\n", V2, v2("a/", max=9000, current=9500), 0),
    "v1": ("4:cpu:/a\n3:memory:/a/b\n", V1.format("/"), v1("a/b/", 9000, 2000, 500), 7500),
    "v1, above it": (
        "3:cpuacct,memory:/a/b\n",
        V1.format("/"),
        {**v1("a/b/", 2**63 - 4096, 2000, 500), **v1("a/", 4000, 3000, 0)},
        1000,
    ),
    "v1 in a container": ("3:memory:/docker/x\n", V1.format("/docker/x"), v1("", 9000, 2000, 0), 7000),
    "v1 beside v2": ("3:memory:/a\n0::/a\n", V1.format("/") + V2, {**v1("a/", 9000, 2000, 0), **v2("a/")}, 7000),
}


@pytest.mark.parametrize("name", MACHINES)
def test_limits_of_control_groups_count(name: str, tmp_path: Path) -> None:
    groups, mounts, files, free = MACHINES[name]
    assert free_memory(root=machine(tmp_path, groups=groups, mounts=mounts, files=files)) == free


def test_a_system_that_does_not_say(tmp_path: Path) -> None:
    assert free_memory(root=tmp_path) is None


def test_untouched_memory_where_the_system_promises_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tmp_path / "proc/sys/vm/overcommit_memory"
    policy.parent.mkdir(parents=True)
    for number in range(3):
        policy.write_text(f"{number}\n")
        assert untouched_is_free(root=tmp_path) == (number < 2)
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/status").write_text("VmSize:\t100 kB\n")
    policy.write_text("0\n")
    monkeypatch.setattr(memory.resource, "getrlimit", lambda limit: (2**30, 2**30))
    assert not untouched_is_free(root=tmp_path)


def test_pages_are_zero_and_aligned() -> None:
    for size in (100, 3 * memory.PAGE):
        pages = zeroed(size)
        assert pages.shape == (size,)
        assert not pages.any()
        assert size < memory.PAGE or pages.data_ptr() % memory.PAGE == 0


def flags_of(address: int) -> list[str]:
    """The kernel's flags of the memory at an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


@pytest.mark.skipif(not hasattr(mmap, "MADV_NOHUGEPAGE"), reason="the system has pages of one size")
def test_parts_of_memory_in_small_pages() -> None:
    whole = zeroed(6 * memory.PAGE)
    if "hg" not in flags_of(whole.data_ptr()):
        pytest.skip("the kernel has no large pages, or does not tell")
    parts = whole.view(3, -1)
    choose_pages(parts[1], large=False)
    assert ["nh" in flags_of(part.data_ptr()) for part in parts] == [False, True, False]
    choose_pages(parts[1], large=True)
    assert all("hg" in flags_of(part.data_ptr()) for part in parts)
    choose_pages(whole[: memory.PAGE // 2], large=False)  # less than a large page
    assert all("hg" in flags_of(part.data_ptr()) for part in parts)


def test_room_grows_by_a_quarter() -> None:
    sizes = sorted({room_for(n) for n in range(1, 40_000)})
    assert sizes[:6] == [512, 640, 768, 896, 1024, 1280]
    assert all(b / a <= 1.25 for a, b in pairwise(sizes))
    assert all(n <= room_for(n) for n in range(1, 5000))


class Machine:
    """Memory for so many tokens of a toy's caches; ``made``: the sizes of all of them, ``most``: the most in use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, target: Decoder, tokens: int) -> None:
        self.tokens, self.made, self.most = tokens, list[tuple[int, int]](), 0
        self.each = bytes_per_token(target.config, target.dtype)
        self._caches: weakref.WeakSet[Cache] = weakref.WeakSet()
        before = Cache.__init__

        def watched(cache: Cache, config: ModelConfig, **options: Any) -> None:
            before(cache, config, **options)
            self._caches.add(cache)
            self.made.append((cache.rows, cache.capacity))
            self.most = max(self.most, self.used)

        monkeypatch.setattr(Cache, "__init__", watched)
        monkeypatch.setattr(caches, "MIN_CAPACITY", 8)
        monkeypatch.setattr(ticks, "AHEAD", 2)
        for place in (caches, module):
            monkeypatch.setattr(place, "free_memory", lambda device=None: (self.tokens - self.used) * self.each)
            monkeypatch.setattr(place, "HEADROOM", 0)
            monkeypatch.setattr(place, "SMALL", 0)

    @property
    def used(self) -> int:
        return sum(cache.rows * cache.capacity for cache in self._caches)


def alone(target: Decoder, asked: Request) -> list[int]:
    (tokens,), _ = decode(target, [asked])
    return tokens


def finish(scheduler: Scheduler) -> int:
    """Runs until nothing is left; returns the most rows that were in use."""
    most = 0
    while scheduler.busy:
        scheduler.tick()
        most = max(most, 0 if scheduler.engine is None else scheduler.engine.active)
    return most


def test_a_cache_holds_used_tokens_and_not_requested_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    target = small()
    wanted = alone(target, request(2, 0, 90))
    stop = frozenset({wanted[5]})
    found = Machine(monkeypatch, target, 10**6)
    scheduler = Scheduler(target)
    tickets = [scheduler.submit(request(2, 0, 90, stop_ids=stop), PLAIN) for _ in range(16)]
    finish(scheduler)
    assert [ticket.emitted for ticket in tickets] == [wanted[:6]] * 16
    assert found.made == [(16, 8)], "and never for 92 tokens"


@pytest.mark.parametrize("spec", ["none", "prompt_lookup", "streams:tree=6", "streams:tree=6,placement=ride"])
def test_a_cache_grows_as_texts_do(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = small()
    asked = [request(n, n, 60) for n in (2, 9, 20)]
    wanted = [alone(target, each) for each in asked]
    found = Machine(monkeypatch, target, 10**6)
    scheduler = Scheduler(target)
    drafter = make_drafter(spec, target, small_adapter(target))
    tickets = [scheduler.submit(each, drafter) for each in asked]
    finish(scheduler)
    assert [ticket.emitted for ticket in tickets] == wanted
    assert len(found.made) > 4
    copied = sum(rows * capacity for rows, capacity in found.made)
    assert copied < 6 * found.made[-1][0] * found.made[-1][1], "in all a few times what the last one holds"


@pytest.mark.parametrize("native", [False, True])
def test_a_cache_that_grew_in_inference_mode_is_written_outside_of_it(native: bool) -> None:
    config, kernels = small().config, library() if native else None
    with torch.inference_mode():
        cache = Cache(config, rows=1, capacity=8, dtype=torch.float32, device=torch.device("cpu"), kernels=kernels)
        cache = cache.resized(2, 16)
    cache.add_row()
    ones = torch.ones(config.num_layers, config.num_kv_heads, 3, config.head_dim)
    cache.put(0, 0, ones, ones)
    assert cache.keys.sum() == ones.numel()


@pytest.mark.thorough
@pytest.mark.parametrize("spec", ["none", "streams:tree=6"])
@pytest.mark.parametrize("memory", [110, 300, 900])
def test_rows_wait_where_memory_does_not_suffice(spec: str, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, and with the same text; the first one is not slowed down by the others."""
    target = small()
    asked = [request(n, n, new) for n, new in ((2, 80), (9, 40), (20, 60), (3, 10), (5, 70), (30, 30), (8, 50))]
    wanted = [alone(target, each) for each in asked]
    found = Machine(monkeypatch, target, memory)
    scheduler = Scheduler(target, prefix_bytes=0)
    drafter = make_drafter(spec, target, small_adapter(target))
    tickets = [scheduler.submit(each, drafter) for each in asked]
    most = finish(scheduler)
    assert [ticket.error for ticket in tickets] == [None] * 7
    assert [ticket.emitted for ticket in tickets] == wanted
    assert found.most <= memory
    assert most < 7 or memory > 500
    assert most > 1 or memory < 300


def test_kept_texts_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    target = small()
    Machine(monkeypatch, target, 120)
    scheduler = Scheduler(target, prefix_bytes=2**20)
    scheduler.submit(request(30, 1, 10), PLAIN)
    finish(scheduler)
    assert scheduler.prefixes.nbytes
    ticket = scheduler.submit(request(3, 2, 85), PLAIN)
    finish(scheduler)
    assert ticket.error is None
    family = Family(None, target.rope().key(3))
    assert [scheduler.prefixes.find(family, prompt(30, 1)), scheduler.prefixes.find(family, prompt(3, 2))] == [0, 3]


def test_a_text_that_cannot_fit_is_refused_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    target = small()
    Machine(monkeypatch, target, 60)
    scheduler = Scheduler(target)
    first = scheduler.submit(request(5, 1, 20), PLAIN)
    scheduler.tick()
    with pytest.raises(OutOfMemoryError, match=r"a text of 85 tokens .* are free, enough for 60 tokens; lower max_new"):
        scheduler.submit(request(5, 1, 80), PLAIN)
    finish(scheduler)
    assert first.error is None
    assert len(first.emitted) == 20


def test_a_pass_that_runs_out_of_memory_is_run_again_with_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    target = small()
    asked = [request(n, n, 12) for n in range(3, 9)]
    wanted = [alone(target, each) for each in asked]
    scheduler = Scheduler(target)
    step, sizes = Engine._step, list[int]()

    def full(engine: Engine, members: list[Member]) -> list[Step]:
        sizes.append(len(members))
        if len(members) > 2:
            raise torch.OutOfMemoryError
        return step(engine, members)

    monkeypatch.setattr(Engine, "_step", full)
    tickets = [scheduler.submit(each, PLAIN) for each in asked]
    finish(scheduler)
    assert [ticket.emitted for ticket in tickets] == wanted
    most = sizes.index(max(sizes))
    assert sizes[most] > 2
    assert max(sizes[most + 1 :]) == 2
    monkeypatch.setattr(Engine, "_step", step)
    again = [scheduler.submit(each, PLAIN) for each in asked]
    assert finish(scheduler) > 2, "memory may suffice next time"
    assert [ticket.emitted for ticket in again] == wanted


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="limits of a process's memory")
def test_a_process_with_little_memory() -> None:
    """64 prompts of two tokens that may become long texts, in a process that may grow by 600 MB."""
    code = """
import resource, torch
from anabranch.decoding.engine import Request
from anabranch.decoding.scheduler import Scheduler
from anabranch.errors import OutOfMemoryError
from anabranch.methods.none import NoDrafter
from anabranch.model.config import ModelConfig, RopeConfig
from anabranch.model.weights import build_decoder
torch.set_num_threads(1)
config = ModelConfig("llama", 97, 64, 8, 4, 4, 64, 64, 10**6, rope=RopeConfig(dim=64, max_positions=10**6))
scheduler = Scheduler(build_decoder(config, device="cpu"))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 600 * 10**6, used + 600 * 10**6))
asked = [Request([5, 6], n, stop_ids=frozenset(range(97))) for n in [20_000] * 64 + [60_000]]
tickets = [scheduler.submit(each, NoDrafter()) for each in asked[:-1]]
while scheduler.busy:
    scheduler.tick()
print([ticket.error for ticket in tickets if ticket.error], sum(len(ticket.emitted) for ticket in tickets))
try:
    scheduler.submit(asked[-1], NoDrafter())
except OutOfMemoryError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    served, refused = done.stdout.splitlines() or [done.stderr, ""]
    assert served == "[] 64"
    assert refused.startswith("a text of 60,002 tokens (prompt and max_new_tokens) needs a cache of 1.00 GiB on cpu")
