"""What forward passes cost: from recorded times to a choice, quiet, noisy and drifting; kept between loads."""

from __future__ import annotations

import json
import warnings
from datetime import date, timedelta
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from anabranch import costs, profiles
from anabranch.costs import PassCosts, PassTimes, StepCosts
from anabranch.costs import measure_passes as real_measure
from anabranch.errors import PerformanceWarning
from anabranch.profiles import Situation, explain, save_profile
from anabranch.profiles import _keep_costs as real_keep
from small import as_target, small

TRUE = {3: 1.05, 6: 1.1, 8: 1.2, 12: 1.5, 16: 1.8, 24: 2.6}


def timed(seed: int, rounds: int, *, noise: float = 0.01, spikes: float = 0.0, drift: float = 0.0) -> PassTimes:
    """Times of a simulated machine.

    noise   standard deviation of a pass's logarithm
    spikes  share of the passes that another process delays by 0.5 to 4 times a pass
    drift   how much slower the last pass is than the first
    """
    random, times, done = np.random.default_rng(seed), PassTimes(), 0

    def once(cost: float) -> float:
        nonlocal done
        done += 1
        late = random.uniform(0.5, 4.0) if random.random() < spikes else 0.0
        slower = 1.0 + drift * done / (rounds * 2 * len(TRUE))
        return 7.0 * slower * (cost * float(np.exp(noise * random.standard_normal())) + late)

    for _ in range(rounds):
        times.rounds += 1
        for rows, cost in TRUE.items():
            times.one.append(once(1.0))
            if times.add(rows, once(cost)) > costs.ENOUGH:
                break
    return times


def chosen(times: PassTimes, monkeypatch: pytest.MonkeyPatch) -> str:
    target = small()
    monkeypatch.setitem(costs._known, target, PassCosts(times.costs()))
    monkeypatch.setattr(costs, "UNPACKED", 0.3)
    return profiles.usual(target, streams=True)


@pytest.mark.parametrize(
    "how",
    [{}, {"noise": 0.03}, {"drift": 1.0}, {"noise": 0.02, "drift": -0.5}, {"spikes": 0.08}],
    ids=["quiet", "noisy", "slower", "faster", "a few spikes"],
)
def test_what_is_chosen_settles(how: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten loads choose trees whose true rate is within 4 % of the best."""
    true = PassTimes(one=[7.0] * 6, ratios={rows: [cost] for rows, cost in TRUE.items()}, rounds=1).costs()

    def rate(spec: str) -> float:
        rows, tokens = profiles.USUAL[spec]
        return tokens / (float(true(np.array(rows))) + 0.3 * true.ms[0] * ("streams" in spec))

    best = max(map(rate, profiles.USUAL))
    for seed in range(10):
        times = timed(seed, 5, **how)
        assert not times.busy
        assert rate(chosen(times, monkeypatch)) > 0.96 * best


@pytest.mark.parametrize("seed", range(10))
def test_a_busy_machine_is_recognised(seed: int) -> None:
    assert timed(seed, 5, spikes=0.5).busy


def test_interruptions_count_even_where_times_are_even() -> None:
    times = timed(0, 5)
    assert not times.busy
    times.interruptions = 1200.0
    assert times.busy


def test_rounds_go_on_until_costs_are_precise() -> None:
    assert not timed(0, 2).settled
    assert timed(0, 3).settled
    assert not timed(0, 3, noise=0.15).settled


def test_costs_rise_and_end_where_a_pass_takes_twice_as_long() -> None:
    times = PassTimes(one=[5.0, 5.0], ratios={3: [1.2, 1.2], 6: [1.1, 1.1], 8: [2.5, 1.9], 12: [3.0]}, rounds=2)
    assert times.costs() == StepCosts((1, 3, 6, 8), (5.0, 6.0, 6.0, 11.0))


def test_real_passes() -> None:
    found = real_measure(small())
    assert found.costs.widths[0] == 1
    assert list(found.costs.ms) == sorted(found.costs.ms)
    assert all(ms > 0 for ms in found.costs.ms)


def test_typical_costs_serve_where_the_machine_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "_time_passes", lambda _: timed(0, 5, spikes=0.5))
    found = real_measure(small())
    assert found == PassCosts(StepCosts.parse(costs.TYPICAL["torch", "float32"]), busy=True)
    for table in costs.TYPICAL.values():
        StepCosts.parse(table)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ANABRANCH_HOME", str(tmp_path))
    monkeypatch.setattr(profiles, "_keep_costs", real_keep)
    monkeypatch.setattr(costs, "_known", {})
    return tmp_path


def measured(table: str, *, busy: bool = False) -> mock._patch[mock.Mock]:
    return mock.patch.object(costs, "measure_passes", return_value=PassCosts(StepCosts.parse(table), busy))


def forget() -> None:
    """As in another process."""
    costs._known.clear()


def test_a_later_load_remembers(home: Path) -> None:
    target = as_target(small())
    with measured("1:1/24:1.5"):
        first = explain("auto", target, None)
    assert (first.origin, first.when, first.busy) == ("measured when loaded", date.today().isoformat(), False)
    forget()
    with measured("1:1/2:9") as again:
        found = explain("auto", target, None)
    assert not again.called
    assert (found.drafter, found.origin, found.when) == (first.drafter, "remembered", first.when)
    assert first.when in found.sentence


def test_old_or_damaged_costs_are_measured_again(home: Path) -> None:
    target = as_target(small())
    path = Situation.of(target, None).costs_path()
    with measured("1:1/24:1.5"):
        explain("auto", target, None)
    old = (date.today() - timedelta(days=profiles.DAYS + 1)).isoformat()
    for text in (json.dumps({"costs": "1:1/24:1", "date": old}), "{", "[]", '{"costs": 3, "date": "today"}', "null"):
        path.write_text(text, encoding="utf-8")
        forget()
        with measured("1:1/24:1.5") as again:
            assert explain("auto", target, None).origin == "measured when loaded"
        assert again.called
    # an old measurement is better than none
    path.write_text(json.dumps({"costs": "1:1/24:1", "date": old}), encoding="utf-8")
    forget()
    with measured("1:1/24:1.5", busy=True), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert explain("auto", target, None).origin == "remembered"


def test_a_busy_machine_is_said_and_not_remembered(home: Path) -> None:
    target = as_target(small())
    with measured("1:1/24:1.5", busy=True), pytest.warns(PerformanceWarning, match="too busy.*anabranch tune"):
        found = explain("auto", target, None)
    assert (found.origin, found.busy) == ("typical", True)
    assert not list(home.rglob("*.json"))
    forget()
    with measured("1:1/24:1.5"):
        assert explain("auto", target, None).origin == "measured when loaded"


def test_a_cache_folder_that_cannot_be_written_is_no_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("ANABRANCH_HOME", str(home / "file"))
    with measured("1:1/24:1.5"):
        assert explain("auto", as_target(small()), None).origin == "measured when loaded"


def test_what_tune_found_comes_first(home: Path) -> None:
    target = as_target(small())
    with measured("1:1/24:1.5"):
        explain("auto", target, None)
    save_profile(Situation.of(target, None), "prompt_lookup:tokens=6", {"date": "2026-11-01"})
    found = explain("auto", target, None)
    assert (found.drafter, found.origin, found.when) == ("prompt_lookup:tokens=6", "tuned", "2026-11-01")
    assert explain("none", target, None).origin == "given"
