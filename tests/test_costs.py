"""Costs of forward passes: measured on quiet, noisy and drifting machines, kept between loads, followed by steps."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from anabranch.control import costs, profiles
from anabranch.control.costs import Costs, PassCosts, StepCosts, plain_ms
from anabranch.control.costs import measure_passes as real_measure
from anabranch.control.profiles import Situation, save_profile, settle
from anabranch.control.profiles import _keep_costs as real_keep
from anabranch.decoding.engine import Request
from anabranch.errors import InputError, PerformanceWarning
from anabranch.model.cache import Cache
from small import as_target, decode, small

TRUE = {3: 1.05, 6: 1.1, 8: 1.2, 12: 1.5, 16: 1.8, 24: 2.6}


def timed(
    seed: int, rounds: int, *, noise: float = 0.01, spikes: float = 0.0, drift: float = 0.0
) -> tuple[list[float], dict[int, list[float]], float, float]:
    """Times of a simulated machine.

    noise   standard deviation of a pass's logarithm
    spikes  share of the passes that another process delays by 0.5 to 4 times a pass
    drift   how much slower the last pass is than the first
    """
    random, one, ratios = np.random.default_rng(seed), list[float](), {width: list[float]() for width in TRUE}
    done = 0

    def once(cost: float) -> float:
        nonlocal done
        done += 1
        late = random.uniform(0.5, 4.0) if random.random() < spikes else 0.0
        slower = 1.0 + drift * done / (rounds * 2 * len(TRUE))
        return 7.0 * slower * (cost * float(np.exp(noise * random.standard_normal())) + late)

    for _ in range(rounds):
        for width, cost in TRUE.items():
            one.append(once(1.0))
            ratios[width].append(once(cost) / one[-1])
    return one, ratios, 0.0, 0.0


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({}, 0.025),
        ({"noise": 0.03}, 0.07),
        ({"drift": 1.0}, 0.04),
        ({"noise": 0.02, "drift": -0.5}, 0.055),
        ({"spikes": 0.08}, 0.03),
    ],
    ids=["quiet", "noisy", "slower", "faster", "a few spikes"],
)
def test_measured_costs_are_near_the_true_ones(how: dict[str, float], error: float) -> None:
    """Relative to a pass over one row.

    ``error`` is three standard errors of the median of five ratios, 1.25 * sqrt(2 / 5) * noise each, and what the
    drift adds between two passes.
    """
    for seed in range(10):
        one, ratios, *_ = timed(seed, 5, **how)
        assert not costs.disturbed(one)
        found = costs.tabulated(one, ratios)
        for width, true in TRUE.items():
            assert float(found(np.array(width))) / found.ms[0] == pytest.approx(true, rel=error)


@pytest.mark.parametrize("seed", range(10))
def test_a_busy_machine_is_recognised(seed: int) -> None:
    assert costs.disturbed(timed(seed, 5, spikes=0.5)[0])


def test_costs_rise_and_rare_widths_are_left_out() -> None:
    ratios = {3: [1.2, 1.2], 6: [1.1, 1.1], 8: [2.5, 1.9], 12: [], 16: [3.0]}
    assert costs.tabulated([5.0, 5.0], ratios) == StepCosts((1, 3, 6, 8, 16), (5.0, 6.0, 6.0, 11.0, 15.0))


def test_real_passes() -> None:
    found = real_measure(small())
    assert found.costs.widths[0] == 1
    assert list(found.costs.ms) == sorted(found.costs.ms)
    assert all(ms > 0 for ms in found.costs.ms)


@pytest.mark.parametrize("positions", [24, 30, 300])
def test_passes_are_timed_over_the_targets_own_words(positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One where time is up, and not beyond its positions."""
    target, capacity = small(), 2 * costs.WIDTHS[-1]
    said = decode(target, [Request([target.config.bos_token_id or 0], capacity - 1)])[0][0]
    monkeypatch.setattr(target, "config", replace(target.config, max_positions=positions))
    cache = Cache(target.config, rows=1, capacity=capacity, dtype=target.dtype, device=target.device)
    cache.add_row()
    with mock.patch.object(costs, "SECONDS", 600.0):  # however slow the machine is
        text = costs._own_text(target, cache, capacity)
    assert text[1:] == said
    with mock.patch.object(costs, "SECONDS", 0.0):
        cache.lengths[0] = 0
        assert costs._own_text(target, cache, capacity) == text[:2]
    assert real_measure(target).costs.widths[0] == 1


def test_typical_costs_serve_where_the_machine_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "_time_passes", lambda _: timed(0, 5, spikes=0.5))
    found = real_measure(small())
    assert found == PassCosts(StepCosts.parse(costs.TYPICAL["float32"]), busy=True)
    once = iter((timed(0, 5, spikes=0.5), timed(0, 5)))  # disturbed for a moment
    monkeypatch.setattr(costs, "_time_passes", lambda _: next(once))
    assert not real_measure(small()).busy
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
        first = settle(target)
    assert (first.origin, first.when, first.busy) == ("measured when loaded", date.today().isoformat(), False)
    forget()
    with measured("1:1/2:9") as again:
        found = settle(target)
    assert not again.called
    assert (found.origin, found.when) == ("remembered", first.when)
    assert first.when in found.sentence


@pytest.mark.parametrize(
    ("ms", "origin"), [(0.7, "measured when loaded"), (1.2, "remembered"), (2.0, "measured when loaded")]
)
def test_costs_of_another_clock_are_measured_again(home: Path, ms: float, origin: str) -> None:
    target = as_target(small())
    with measured("1:1/24:1.5"):
        settle(target)
    forget()
    with measured("1:1/24:3"), mock.patch.object(profiles, "plain_ms", return_value=ms):
        assert settle(target).origin == origin
    assert costs._known[target.decoder].costs.ms[-1] == (1.5 if origin == "remembered" else 3.0)
    forget()
    with measured("1:1/24:9", busy=True), mock.patch.object(profiles, "plain_ms", return_value=5.0):
        assert settle(target).origin == "remembered", "costs of another clock are better than typical ones"


def test_a_pass_over_one_row_is_timed() -> None:
    clock = mock.Mock(side_effect=[0.0, 9.0, 10.0, 10.5, 11.0, 11.25])  # the first pass reads the weights from the disk
    with mock.patch.object(costs, "time", mock.Mock(perf_counter=clock)):
        assert plain_ms(small()) == 250


def test_old_or_damaged_costs_are_measured_again(home: Path) -> None:
    target = as_target(small())
    path = Situation.of(target).path("costs")
    with measured("1:1/24:1.5"):
        settle(target)
    old = (date.today() - timedelta(days=profiles.DAYS + 1)).isoformat()
    aged = json.dumps({"costs": "1:1/24:1", "row_ms": 0.0, "node_ms": 0.0, "date": old})
    for text in (aged, "{", "[]", '{"costs": 3, "date": "today"}', "null"):
        path.write_text(text, encoding="utf-8")
        forget()
        with measured("1:1/24:1.5") as again:
            assert settle(target).origin == "measured when loaded"
        assert again.called
    # an old measurement is better than none
    path.write_text(aged, encoding="utf-8")
    forget()
    with measured("1:1/24:1.5", busy=True), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert settle(target).origin == "remembered"


def test_a_busy_machine_is_said_and_not_remembered(home: Path) -> None:
    target = as_target(small())
    with measured("1:1/24:1.5", busy=True), pytest.warns(PerformanceWarning, match="too busy.*anabranch tune"):
        found = settle(target)
    assert (found.origin, found.busy) == ("typical", True)
    assert not list(home.rglob("*.json"))
    forget()
    with measured("1:1/24:1.5"):
        assert settle(target).origin == "measured when loaded"


def test_a_cache_folder_that_cannot_be_written_is_no_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("ANABRANCH_HOME", str(home / "file"))
    with measured("1:1/24:1.5"):
        assert settle(as_target(small())).origin == "measured when loaded"


def test_what_tune_found_comes_first(home: Path) -> None:
    target = as_target(small())
    with measured("1:1/24:1.5"):
        settle(target)
    tables = {"pass": "1:5/8:10", "draft": "4:1/12:2", "prepare": "4:3"}
    save_profile(Situation.of(target), costs=tables, drafter="prompt_lookup:tokens=6", record={"date": "2026-11-01"})
    found = settle(target)
    assert (found.origin, found.when) == ("tuned", "2026-11-01")
    assert [found.costs.pass_ms(nodes, 1, 0.0) for nodes in (1, 8)] == pytest.approx([5.0, 10.0])
    assert found.costs.draft_ms("any") == pytest.approx(5.0)


# -- costs that follow the passes -------------------------------------------------------------------------------
def begun() -> Costs:
    return Costs(PassCosts(StepCosts((1, 24), (2.0, 4.0)), row_ms=1.0, node_ms=0.5))


def saw(made: Costs, times: int, *passes: tuple[float, int]) -> Costs:
    for _ in range(times):
        for ms, nodes in passes:
            made.saw_pass(ms, nodes, 1, 0.0)
    return made


def test_costs_follow_the_passes() -> None:
    assert saw(begun(), 400, (9.0, 8)).pass_ms(8, 1, 0.0) == pytest.approx(9.0, rel=0.01)


def test_typical_costs_get_their_unit_from_the_first_passes() -> None:
    made = Costs(PassCosts(StepCosts.parse("1:1/8:1.1/16:2")))
    saw(made, 1, (10.0, 1), (11.0, 8), (10.0, 1), (300.0, 8))
    assert made.pass_ms(1, 1, 0.0) == pytest.approx(10.0, rel=0.15)
    assert made.pass_ms(16, 1, 0.0) == pytest.approx(20.0, rel=0.2)


def test_one_disturbed_pass_changes_little() -> None:
    made, before = saw(begun(), 40, (2.0, 1), (2.6, 8)), begun().pass_ms(8, 1, 0.0)
    saw(made, 1, (100 * before, 8))
    assert saw(made, 3, (2.0, 1)).pass_ms(8, 1, 0.0) < 1.05 * before


def test_all_widths_share_what_slows_the_machine_down_and_each_has_its_own_correction() -> None:
    made, before = begun(), [0.0, *(begun().pass_ms(nodes, 1, 0.0) for nodes in range(1, 25))]
    saw(made, 200, (1.3 * before[1], 1), (1.3 * before[2], 2))
    assert made.pass_ms(16, 1, 0.0) > 1.2 * before[16]
    made = saw(begun(), 200, (before[1], 1), (2 * before[16], 16))
    assert made.pass_ms(16, 1, 0.0) == pytest.approx(2 * before[16], rel=0.05)
    assert made.pass_ms(1, 1, 0.0) == pytest.approx(before[1], rel=0.05)


def test_wider_passes_never_cost_less_than_narrow_ones() -> None:
    made = begun()
    for ms, nodes in ((6.0, 1), (3.0, 24), (20.0, 8), (1.0, 2)):
        saw(made, 52, (ms, nodes))
        assert (np.diff([made.pass_ms(n, 1, 0.0) for n in range(1, 700)]) >= 0).all()


def test_context_costs_by_row_and_by_node() -> None:
    made = begun()
    assert made.pass_ms(8, 4, 2000.0) - made.pass_ms(8, 4, 0.0) == pytest.approx(2.0 * (4 * 1.0 + 8 * 0.5))
    for _ in range(20):
        made.saw_pass(begun().pass_ms(8, 4, 2000.0), 8, 4, 2000.0)
    assert made.pass_ms(8, 1, 0.0) == pytest.approx(begun().pass_ms(8, 1, 0.0)), "the context's share is taken off"


@pytest.mark.parametrize("text", ["", "1", "1:0", "0:3", "1:2/1:3", "1:inf", "1:nan", "a:b"])
def test_tables_that_cannot_be_read(text: str) -> None:
    with pytest.raises(InputError, match="costs"):
        StepCosts.parse(text)


def test_tables_are_printed_as_they_are_read() -> None:
    assert str(StepCosts.parse("8:9.4/1:8.7")) == "1:8.7/8:9.4"
