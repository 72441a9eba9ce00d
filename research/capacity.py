"""Plan replicas for a load: simulate them from the measured throughput of one server by its number of requests.

    python research/capacity.py benchmarks/serve-load-default-xeon-amx-2cores-2026-11-29.json

A replica with n requests in progress completes X(n) a second, shared equally among them. X is the closed loop's rate
with n clients, a line between measured points, and the last point's beyond; so it contains the width of drafts by load,
their acceptance, and the reading of prompts. Requests arrive at random (Poisson) and need a random amount of work
(exponential, ``--work`` times that of the measured requests on average). Each goes to a random replica, as consistent
hashing of new conversations does, or to the least loaded one where that has no row left.

First the model is checked: the file's own runs with random arrivals are simulated, with the same times of arrival. The
time of a request is not in the file; its median is taken to be TTFT + (tokens - 1) * TPOT, of medians.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabranch.errors import InputError

PER_MINUTE = (10, 1_000, 100_000)
ARMS = ("none", "auto")
Rate = Callable[[int], float]


@dataclass
class Replica:
    """One server. ``done`` is the work that each request in progress has received since the start."""

    rate: Rate
    time: float = 0.0
    done: float = 0.0
    jobs: list[tuple[float, int]] = field(default_factory=list)  # (work at which it ends, its number)

    def advance(self, now: float) -> None:
        """Work until ``now``; no request ends before."""
        if self.jobs:
            self.done += (now - self.time) * self.rate(len(self.jobs)) / len(self.jobs)
        self.time = now

    @property
    def next_end(self) -> float:
        """The time at which its next request ends."""
        if not self.jobs:
            return math.inf
        left = max(0.0, self.jobs[0][0] - self.done)
        return self.time + left * len(self.jobs) / self.rate(len(self.jobs))


def rate_of(points: Sequence[tuple[int, float]], work: float = 1.0) -> Rate:
    """X(n) in requests/s, from measured (requests in progress, requests/s)."""
    points = sorted(points)

    def rate(n: int) -> float:
        if n <= points[0][0]:
            return points[0][1] * n / points[0][0] / work
        for (low, slow), (high, fast) in itertools.pairwise(points):
            if n <= high:
                return (slow + (fast - slow) * (n - low) / (high - low)) / work
        return points[-1][1] / work

    return rate


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Random times at which requests arrive, ``rate`` a second on average; with serve_load.py's seed, its own."""
    draw, times = random.Random(seed), [0.0]
    while len(times) < count:
        times.append(times[-1] + draw.expovariate(rate))
    return times


def simulate(rate: Rate, replicas: int, came: Sequence[float], *, rows: int, seed: int) -> tuple[list[float], float]:
    """The seconds from arrival to end of each request, and the end of the last one.

    came  when requests arrive, in order
    rows  requests in progress above which a replica passes on new ones
    """
    draw = random.Random(seed)
    servers = [Replica(rate) for _ in range(replicas)]
    ends: list[tuple[float, int]] = []  # (when, replica), of which some are out of date
    taken, now, first, left = [0.0] * len(came), 0.0, 0, len(came)
    while left:
        while ends and ends[0][0] != servers[ends[0][1]].next_end:
            heapq.heappop(ends)
        if first < len(came) and (not ends or came[first] <= ends[0][0]):
            now, place = came[first], draw.randrange(replicas)
            if len(servers[place].jobs) >= rows:
                place = min(range(replicas), key=lambda each: len(servers[each].jobs))
            servers[place].advance(now)
            heapq.heappush(servers[place].jobs, (servers[place].done + draw.expovariate(1.0), first))
            first += 1
        else:
            now, place = heapq.heappop(ends)
            servers[place].advance(now)
            _, number = heapq.heappop(servers[place].jobs)
            taken[number] = now - came[number]
            left -= 1
        heapq.heappush(ends, (servers[place].next_end, place))
    return taken, now


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that a share of the values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def latency(rate: Rate, replicas: int, per_second: float, *, rows: int, share: float = 0.95) -> float:
    """Seconds within which a share of requests is answered, but for the first fifth, which finds empty replicas."""
    came = arrivals(per_second, max(4_000, 60 * replicas), 0)
    seconds, _ = simulate(rate, replicas, came, rows=rows, seed=0)
    return quantile(seconds[len(came) // 5 :], share)


def plan(rate: Rate, per_second: float, target: float, *, rows: int) -> int:
    """The fewest replicas with which 95% of requests end within ``target`` seconds. Raises InputError if none do."""
    if latency(rate, 1, 1e-3, rows=rows) > target:
        raise InputError(f"a replica without other load takes longer than {target:g} seconds; give a longer --target")
    low, high = 0, max(1, math.ceil(per_second / rate(rows)))
    while latency(rate, high, per_second, rows=rows) > target:
        low, high = high, math.ceil(high * 1.25)
    while high - low > max(1, high // 100):  # to 1%
        middle = (low + high) // 2
        low, high = (middle, high) if latency(rate, middle, per_second, rows=rows) > target else (low, middle)
    return high


def points_of(loads: Sequence[dict[str, Any]], arm: str) -> list[tuple[int, float]]:
    """(clients, requests/s) of an arm, the mean of its rounds. Raises InputError if there are none."""
    counts = sorted({load["clients"] for load in loads if load["arm"] == arm and load.get("clients")})
    if not counts:
        raise InputError(f"the file has no closed loop of the arm {arm!r}; give a result of serve_load.py")
    found = [(n, [load for load in loads if load["arm"] == arm and load.get("clients") == n]) for n in counts]
    return [(n, statistics.mean(load["requests_per_second"] for load in each)) for n, each in found]


@dataclass(frozen=True)
class Checked:
    """A measured value in seconds, and the simulation's 5%, 50% and 95% quantile of it.

    share  of the capacity at which requests came
    """

    arm: str
    share: float
    what: str
    measured: float
    low: float
    median: float
    high: float


def check(loads: Sequence[dict[str, Any]], arm: str, rows: int) -> list[Checked]:
    """The time of each run with random arrivals, and the median time of its requests."""
    rate, most = rate_of(points_of(loads, arm)), max(load.get("clients") or 0 for load in loads)
    found = []
    for load in (load for load in loads if load["arm"] == arm and load.get("share_of_capacity")):
        loop = next(x for x in loads if (x["arm"], x["round"], x.get("clients")) == (arm, load["round"], most))
        count = load["requests"]
        came = arrivals(load["share_of_capacity"] * loop["requests_per_second"], count, count)
        runs = [simulate(rate, 1, came, rows=rows, seed=seed) for seed in range(400)]
        decoding = (load["tokens"] / count - 1) * load["tpot_ms"]["p50"]
        for what, measured, simulated in (
            ("all requests", load["seconds"], [end for _, end in runs]),
            ("a request", (load["ttft_ms"]["p50"] + decoding) / 1e3, [quantile(taken, 0.5) for taken, _ in runs]),
        ):
            quantiles = (quantile(simulated, part) for part in (0.05, 0.5, 0.95))
            found.append(Checked(arm, load["share_of_capacity"], what, measured, *quantiles))
    return found


def main() -> None:
    """Print the check and the plan as tables of Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path, help="of serve_load.py")
    parser.add_argument("--target", type=float, default=4.0, help="seconds within which 95%% of requests end")
    parser.add_argument("--work", type=float, default=1.0, help="work of a request, relative to the measured ones")
    parser.add_argument("--rows", type=int, default=32, help="requests that a replica decodes at a time")
    parser.add_argument("--per-minute", type=int, nargs="+", default=PER_MINUTE)
    given = parser.parse_args()
    loads = json.loads(given.result.read_text(encoding="utf-8"))["loads"]
    print("| arm | share | time of | measured | simulated, median | 5% to 95% |\n|---|---:|---|---:|---:|---:|")
    for each in (each for arm in ARMS for each in check(loads, arm, given.rows)):
        simulated = f"{each.median:.1f} s | {each.low:.1f}-{each.high:.1f} s"
        print(f"| `{each.arm}` | {each.share:g} | {each.what} | {each.measured:.1f} s | {simulated} |")
    print("\n| requests a minute | `none` | `auto` |\n|---:|---:|---:|")
    for asked in given.per_minute:
        cells = []
        for arm in ARMS:
            rate = rate_of(points_of(loads, arm), given.work)
            count = plan(rate, asked / 60, given.target, rows=given.rows)
            cells.append(f"{count:,} ({latency(rate, count, asked / 60, rows=given.rows, share=0.5):.1f} s)")
        print(f"| {asked:,} | {cells[0]} | {cells[1]} |")


if __name__ == "__main__":
    main()
