"""What forward passes cost: measured on quiet, noisy and drifting machines, kept between loads, followed by steps."""

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
from anabranch.control.costs import TOGETHER, Costs, PassCosts, PassTimes, StepCosts
from anabranch.control.costs import measure_passes as real_measure
from anabranch.control.profiles import Situation, save_profile, settle
from anabranch.control.profiles import _keep_costs as real_keep
from anabranch.decoding.engine import Request
from anabranch.errors import InputError, PerformanceWarning
from anabranch.model.cache import Cache
from small import as_target, decode, small

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
    """Relative to a pass over one row, as choices depend on no other unit.

    ``error`` is three standard errors of the median of five ratios, 1.25 * sqrt(2 / 5) * noise each, and what the
    drift adds between two passes.
    """
    for seed in range(10):
        times = timed(seed, 5, **how)
        assert not times.busy
        found = times.costs()
        for rows, true in TRUE.items():
            if rows <= found.widths[-1]:
                cost = float(found(np.array(rows)))
                assert cost / found.ms[0] == pytest.approx(true, rel=error)
        assert found.widths[-1] >= 8


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


@pytest.mark.parametrize("positions", [24, 30, 300])
def test_passes_are_timed_over_the_targets_own_words(positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One where time is up, and not beyond its positions."""
    target, capacity = small(), 2 * costs.ROWS[-1]
    said = decode(target, [Request([target.config.bos_token_id or 0], capacity - 1)])[0][0]
    monkeypatch.setattr(target, "config", replace(target.config, max_positions=positions))
    cache = Cache(target.config, rows=1, capacity=capacity, dtype=target.dtype, device=target.device)
    cache.add_row()
    text = costs._own_text(target, cache, capacity)
    assert text[1:] == said
    with mock.patch.object(costs, "WRITING", 0.0):
        cache.lengths[0] = 0
        assert costs._own_text(target, cache, capacity) == text[:2]
    assert real_measure(target).costs.widths[0] == 1


def test_typical_costs_serve_where_the_machine_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "_time_passes", lambda _: timed(0, 5, spikes=0.5))
    found = real_measure(small())
    assert found == PassCosts(StepCosts.parse(costs.TYPICAL["torch", "float32"]), busy=True)
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


def test_old_or_damaged_costs_are_measured_again(home: Path) -> None:
    target = as_target(small())
    path = Situation.of(target).costs_path()
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
    assert found.costs.pass_ms(np.array([1, 8]), 1, 0.0).tolist() == [5.0, 10.0]
    assert found.costs.draft_ms("any", 12, 1) == pytest.approx(2.0)
    assert found.costs.prepare_ms("any", 4) == pytest.approx(3.0)


# -- costs that follow the steps --------------------------------------------------------------------------------
def begun() -> Costs:
    return Costs(PassCosts(StepCosts((1, 24), (2.0, 4.0)), row_ms=1.0, node_ms=0.5), 0.4)


def pass_ms(made: Costs, nodes: int, rows: int = 1, context: float = 0.0) -> float:
    return float(made.pass_ms(np.array([nodes]), rows, context)[0])


def test_costs_follow_what_steps_take() -> None:
    made = begun()
    for _ in range(400):
        made.saw_pass(9.0, 8, 1, 0.0)
        made.saw_draft("any", 1.5, 12, 3)
        made.saw_prepare("any", 2.5, 8)
        made.saw_rest(0.8, 4)
    assert pass_ms(made, 8) == pytest.approx(9.0, rel=0.01)
    assert made.draft_ms("any", 12, 3) == pytest.approx(1.5, rel=0.01)
    assert made.prepare_ms("any", 8) == pytest.approx(2.5, rel=0.01)
    assert made.rest_ms(4) == pytest.approx(0.8, rel=0.01)
    assert made.prepare_ms("any", 0) == 0.0


def test_the_first_measurement_replaces_a_guess_and_nothing_that_was_tuned() -> None:
    guessed = begun()
    tuned = Costs.tuned(StepCosts((1, 24), (2.0, 4.0)), StepCosts((12,), (0.2,)), StepCosts((4,), (0.2,)))
    for made in (guessed, tuned):
        made.saw_prepare("any", 6.0, 4)
        made.saw_draft("any", 6.0, 12, 1)
    assert guessed.prepare_ms("any", 4) == pytest.approx(6.0)
    assert guessed.draft_ms("any", 12, 1) == pytest.approx(6.0)
    assert tuned.prepare_ms("any", 4) < 0.3
    assert tuned.draft_ms("any", 12, 1) < 0.3


def test_what_many_rows_take_does_not_change_what_is_known_of_one() -> None:
    made = begun()
    for rows, ms in ((1, 0.3), (32, 1.6)):
        for _ in range(100):
            made.saw_rest(ms, rows)
            made.saw_free("any", 0.1 * ms, rows)
    assert made.rest_ms(1) == pytest.approx(0.3, rel=0.01)
    assert made.rest_ms(32) == pytest.approx(1.6, rel=0.01)
    assert made.rest_ms(20) == pytest.approx(1.0, rel=0.01)  # never seen: by rows, as at the nearest load
    assert made.free_ms("any", 1) == pytest.approx(0.03, rel=0.01)
    assert made.free_ms("other", 1) == 0.0


def test_typical_costs_get_their_unit_from_the_first_passes() -> None:
    made = Costs(PassCosts(StepCosts.parse("1:1/8:1.1/16:2")), 0.3)
    for nodes, ms in ((1, 10.0), (8, 11.0), (1, 10.0), (8, 300.0)):
        made.saw_pass(ms, nodes, 1, 0.0)
    assert pass_ms(made, 1) == pytest.approx(10.0, rel=0.15)
    assert pass_ms(made, 16) == pytest.approx(20.0, rel=0.2)


def test_one_disturbed_step_changes_little() -> None:
    made = begun()
    before = pass_ms(made, 8)
    for step in range(4 * TOGETHER):
        made.saw_pass(before if step != TOGETHER else 100 * before, 8, 1, 0.0)
    assert before < pass_ms(made, 8) < 1.03 * before


def test_a_machine_that_slows_down_slows_down_widths_that_were_not_seen_too() -> None:
    made, before = begun(), begun()
    for _ in range(100):
        for nodes in (1, 2):
            made.saw_pass(1.3 * pass_ms(before, nodes), nodes, 1, 0.0)
    assert pass_ms(made, 16) == pytest.approx(1.3 * pass_ms(before, 16), rel=0.05)


def test_what_one_width_cost_in_the_past_is_forgotten() -> None:
    made, before = begun(), begun()
    for _ in range(100):
        made.saw_pass(pass_ms(before, 1), 1, 1, 0.0)
        made.saw_pass(2 * pass_ms(before, 16), 16, 1, 0.0)
    assert pass_ms(made, 16) == pytest.approx(2 * pass_ms(before, 16), rel=0.1)
    assert pass_ms(made, 1) == pytest.approx(pass_ms(before, 1), rel=0.1)
    for _ in range(400):
        made.saw_pass(pass_ms(before, 1), 1, 1, 0.0)
    assert pass_ms(made, 16) == pytest.approx(pass_ms(before, 16), rel=0.05)


def test_passes_by_nodes_are_the_same_one_by_one_and_in_a_row() -> None:
    made = begun()
    for first, count in ((1, 20), (500, 8), (508, 40)):
        wanted = made.pass_ms(np.arange(first, first + count), 3, 500.0)
        np.testing.assert_allclose(made.passes_ms(first, count, 3, 500.0), wanted)


def test_wider_passes_never_cost_less_than_narrow_ones() -> None:
    made = begun()
    for nodes, ms in ((1, 6.0), (24, 3.0), (8, 20.0), (2, 1.0)):
        for _ in range(50):
            made.saw_pass(ms, nodes, 1, 0.0)
        assert (np.diff(made.pass_ms(np.arange(1, 700), 1, 0.0)) >= 0).all()


def test_context_costs_by_row_and_by_node() -> None:
    made = begun()
    assert pass_ms(made, 8, 4, 2000.0) - pass_ms(made, 8, 4) == pytest.approx(2.0 * (4 * 1.0 + 8 * 0.5))
    for _ in range(TOGETHER):
        made.saw_pass(pass_ms(made, 8, 4, 2000.0), 8, 4, 2000.0)
    assert pass_ms(made, 8) == pytest.approx(pass_ms(begun(), 8)), "what the context took is not put down to the nodes"


@pytest.mark.parametrize("text", ["", "1", "1:0", "0:3", "1:2/1:3", "1:inf", "1:nan", "a:b"])
def test_tables_that_cannot_be_read(text: str) -> None:
    with pytest.raises(InputError, match="costs"):
        StepCosts.parse(text)


def test_tables_are_printed_as_they_are_read() -> None:
    assert str(StepCosts.parse("8:9.4/1:8.7")) == "1:8.7/8:9.4"
