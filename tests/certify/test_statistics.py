"""Chi-square tests: tables of the distribution, pooling, and how often they reject simulated samples."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.certify.statistics import (
    EXPECTED,
    Cell,
    chi_square_above,
    chi_square_quantile,
    holm,
    homogeneity,
    noise_of,
    pooled,
    power_of,
    samples_needed,
    total_variation,
)
from toy_distribution import goodness_of_fit

# upper quantiles from printed tables: degrees, probability above, value
TABLE = [(1, 0.05, 3.841), (4, 0.01, 13.277), (10, 0.05, 18.307), (15, 0.001, 37.697), (100, 0.05, 124.342)]
# noncentralities that give a power of 0.8 at alpha 0.05 (Cohen 1988): degrees, noncentrality
NONCENTRAL = [(1, 7.849), (2, 9.635), (3, 10.903), (5, 12.828), (10, 16.241)]


@pytest.mark.parametrize(("degrees", "alpha", "value"), TABLE)
def test_quantiles_are_those_of_the_tables(degrees: int, alpha: float, value: float) -> None:
    assert chi_square_above(value, degrees) == pytest.approx(alpha, rel=2e-3)
    assert chi_square_quantile(alpha, degrees) == pytest.approx(value, abs=6e-4)


def test_two_degrees_of_freedom_have_a_closed_form() -> None:
    for value in (0.1, 1.0, 30.0, 300.0, 1200.0):
        assert chi_square_above(value, 2) == pytest.approx(math.exp(-value / 2), rel=1e-9)


@pytest.mark.parametrize(("degrees", "noncentrality"), NONCENTRAL)
def test_power_is_that_of_the_tables(degrees: int, noncentrality: float) -> None:
    assert power_of(noncentrality, degrees, 0.05) == pytest.approx(0.8, abs=1e-4)
    assert power_of(0.0, degrees, 0.05) == pytest.approx(0.05, abs=1e-9)
    assert samples_needed(0.3, degrees=degrees, alpha=0.05, power=0.8) == pytest.approx(
        2 * noncentrality / 0.09, abs=1.01
    )


def samples(probabilities: list[float], size: int, runs: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).multinomial(size, probabilities, size=runs)


def cells(first: np.ndarray, second: np.ndarray) -> list[Cell]:
    return [Cell((i,), int(a), int(b)) for i, (a, b) in enumerate(zip(first, second, strict=True))]


def test_the_stated_power_is_reached_and_false_alarms_are_as_rare_as_stated() -> None:
    p, q = [0.4, 0.3, 0.2, 0.1], [0.46, 0.32, 0.15, 0.07]
    effect = math.sqrt(sum(2 * (a - b) ** 2 / (a + b) for a, b in zip(p, q, strict=True)))
    size, runs = samples_needed(effect, degrees=3, alpha=0.05, power=0.9), 2000
    one, same, other = (samples(law, size, runs, seed) for seed, law in enumerate((p, p, q)))
    alarms = np.mean([homogeneity(cells(a, b)).p_value < 0.05 for a, b in zip(one, same, strict=True)])
    share = np.mean([homogeneity(cells(a, b)).p_value < 0.05 for a, b in zip(one, other, strict=True)])
    assert 0.035 < alarms < 0.065
    assert 0.87 < share < 0.93


def test_every_difference_of_half_the_effect_in_total_variation_is_large_enough() -> None:
    """w >= 2 TV, for whatever pair of distributions."""
    for p, q in np.random.default_rng(0).dirichlet(np.ones(6), size=(200, 2)):
        assert math.sqrt((2 * (p - q) ** 2 / (p + q)).sum()) >= np.abs(p - q).sum()


def test_noise_is_the_mean_total_variation_of_equal_distributions() -> None:
    p = [0.5, 0.25, 0.15, 0.1]
    one, two = samples(p, 800, 1000, 3), samples(p, 800, 1000, 4)
    both = [cells(a, b) for a, b in zip(one, two, strict=True)]
    assert np.mean([total_variation(each) for each in both]) == pytest.approx(np.mean([*map(noise_of, both)]), rel=0.03)


def test_the_drawing_of_pooling() -> None:
    first = Counter({(1, 5): 30, (1, 6): 7, (1, 7): 6, (2, 5): 1, (3, 3): 4, (4, 4): 2})
    second = Counter({(1, 5): 28, (1, 6): 2, (1, 8): 5, (2, 6): 3, (3, 3): 3, (4, 4): 9})
    counts = {cell.start: (cell.first, cell.second) for cell in pooled(first, second, 9)}
    # (1, 6) to (1, 8) share their first token; (2, 5), (2, 6) and (3, 3) are too rare even so
    assert counts == {(1, 5): (30, 28), (1,): (13, 7), (4, 4): (2, 9), (): (5, 6)}
    assert {cell.start for cell in pooled(first, second, 2)} == {(1, 5), ()}
    assert pooled(Counter({(1,): 3}), Counter({(2,): 3}), 4) == [Cell((), 3, 3)]
    rest = pooled(Counter({(1,): 9, (2,): 1}), Counter({(1,): 8, (3,): 2}), 4)
    assert rest == [Cell((1,), 10, 10)], "what is too rare joins the smallest cell"
    first, second = Counter({(2, 0): 9, (1, 0): 5}), Counter({(1, 0): 8, (2, 0): 4, (3, 0): 2})
    for pool in (pooled(first, second, 4), pooled(second, first, 4)):
        assert {cell.start: cell.first + cell.second for cell in pool} == {(1, 0): 15, (2, 0): 13}, (
            "or, of equals, the first"
        )


OUTCOMES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=300)


@given(OUTCOMES, st.integers(0, 2**32), st.integers(2, 12))
@settings(max_examples=100, deadline=None)
def test_cells_are_a_partition_into_frequent_parts(outcomes: list[tuple[int, int]], seed: int, most: int) -> None:
    other = [outcomes[i] for i in np.random.default_rng(seed).integers(len(outcomes), size=len(outcomes))]
    pool = pooled(Counter(outcomes), Counter(other), most)
    assert len(pool) <= most
    assert sum(cell.first for cell in pool) == sum(cell.second for cell in pool) == len(outcomes)
    assert len(pool) == 1 or all(cell.first + cell.second >= 2 * EXPECTED for cell in pool)
    swapped = pooled(Counter(other), Counter(outcomes), most)
    assert sorted((c.start, c.second, c.first) for c in swapped) == sorted((c.start, c.first, c.second) for c in pool)


def test_goodness_of_fit() -> None:
    right = goodness_of_fit([48, 32, 20], [0.5, 0.3, 0.2])
    assert right.statistic == pytest.approx(4 / 50 + 4 / 30)
    assert (right.degrees, goodness_of_fit([100, 0, 0], [0.5, 0.3, 0.2]).p_value < 1e-9) == (2, True)
    # expected 1 and 2 are pooled with each other, and as 3 is rare too, with the smallest cell
    assert goodness_of_fit([57, 40, 1, 2], [0.57, 0.4, 0.01, 0.02]).degrees == 1
    assert goodness_of_fit([99, 1], [1.0, 0.0]).p_value == 0.0, "what is impossible occurred"
    assert goodness_of_fit([100, 0], [1.0, 0.0]).p_value == 1.0


def test_holm() -> None:
    assert holm([0.04, 0.001, 0.02], 0.05) == [True, True, True]
    assert holm([0.04, 0.001, 0.03], 0.05) == [False, True, False]
    assert holm([], 0.05) == []
    alarms = np.random.default_rng(1).random((4000, 20))
    assert np.mean([any(holm(p.tolist(), 0.05)) for p in alarms]) == pytest.approx(0.05, abs=0.012)
