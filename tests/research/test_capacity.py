"""The simulation of replicas: its law where that is known, the plan, and the numbers on its page."""

from __future__ import annotations

import importlib
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from anabranch.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "serve-load-default-xeon-amx-2cores-2026-11-29.json"


@pytest.fixture
def capacity(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "research"))
    return importlib.import_module("capacity")


@pytest.mark.parametrize("replicas", [1, 3])
def test_processor_sharing_has_its_mean(capacity: Any, replicas: int) -> None:
    """One that shares a constant rate m among requests at a rate a has the mean time 1 / (m - a)."""
    came = capacity.arrivals(6.0 * replicas, 40_000, 1)
    seconds, end = capacity.simulate(lambda n: 10.0, replicas, came, rows=10_000, seed=2)
    assert statistics.mean(seconds) == pytest.approx(1 / (10 - 6), rel=0.06)
    assert end >= came[-1]
    assert min(seconds) > 0


def test_rates_are_between_the_measured_ones(capacity: Any) -> None:
    rate = capacity.rate_of([(8, 6.0), (2, 3.0)])
    assert [rate(n) for n in (1, 2, 5, 8, 99)] == [1.5, 3.0, 4.5, 6.0, 6.0]
    assert capacity.rate_of([(1, 3.0)], work=2.0)(1) == 1.5


def test_plans(capacity: Any) -> None:
    rate = capacity.rate_of([(1, 2.0), (4, 5.0)])
    counts = [capacity.plan(rate, per_second, 3.0, rows=8) for per_second in (0.1, 10.0, 100.0)]
    assert counts[0] == 1
    assert 2 < counts[1] < counts[2]
    assert counts[2] > 100 / rate(8)
    assert capacity.latency(rate, counts[1], 10.0, rows=8) <= 3.0
    with pytest.raises(InputError, match=r"a replica without other load takes longer than 0\.1 seconds"):
        capacity.plan(rate, 1.0, 0.1, rows=8)
    with pytest.raises(InputError, match="no closed loop of the arm 'auto'"):
        capacity.points_of([], "auto")


@pytest.mark.thorough
def test_the_page_has_the_numbers_of_the_script(
    capacity: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["capacity.py", str(RESULT), "--target", "8", "--per-minute", "10", "1000"])
    capacity.main()
    page = (ROOT / "docs" / "capacity.md").read_text(encoding="utf-8").splitlines()
    printed = [line for line in capsys.readouterr().out.splitlines() if line]
    assert len(printed) == 14 + 4
    assert [line for line in printed if line not in page] == []
