"""Closed forms against printed numbers and against the processes they describe."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.analysis.theory import (
    T5,
    acceptance_rate,
    divergence,
    expected_operations,
    expected_tokens,
    fitted_acceptance_rate,
    least_speedup,
    optimal_gamma,
    parity,
    pays,
    speedup,
    streaming_speedup,
)
from anabranch.errors import InputError

RATES = st.floats(0.0, 0.99)
COSTS = st.floats(0.005, 2.0)


def test_printed_numbers_of_leviathan() -> None:
    assert round(expected_tokens(0.8, 5), 2) == 3.69
    assert round(speedup(0.75, 7, 0.02), 2) == 3.16
    # a bigram model that costs nothing: alpha 0.2 gives 1.2 with one token, 1.25 with many
    assert least_speedup(0.2, 0.0) == 1.2
    assert round(speedup(0.2, 40, 0.0), 2) == 1.25


def test_the_t5_table() -> None:
    assert round(T5[0].predicted, 2) == 3.16
    # docs/theory.md tells by how much the rest is off; the order of the draft models is right
    small, base, large = (row.predicted for row in T5[3:6])
    assert base > small > large
    assert all(0.6 < row.predicted / row.speedup < 1.6 for row in T5)


def test_printed_numbers_of_section_n() -> None:
    assert parity(4, 10) == pytest.approx(1.4)
    assert streaming_speedup(1.4, 4, 10) == pytest.approx(1.0)
    assert streaming_speedup(1.0, 4, 10) == pytest.approx(1.4)
    # the larger the latency ratio, the less a draft model costs
    assert streaming_speedup(1.2, 4, 5) > 1 > streaming_speedup(1.2, 4, 50)


@settings(deadline=None)
@given(alpha=RATES, gamma=st.integers(0, 40), c=COSTS)
def test_the_sum_is_the_fraction(alpha: float, gamma: int, c: float) -> None:
    assert expected_tokens(alpha, gamma) == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha))
    assert speedup(alpha, gamma, c) == pytest.approx(
        (1 - alpha ** (gamma + 1)) / ((1 - alpha) * (gamma * c + 1)), rel=1e-9
    )
    assert expected_operations(alpha, gamma, c) == pytest.approx(
        (1 - alpha) * (gamma * c + gamma + 1) / (1 - alpha ** (gamma + 1)), rel=1e-9
    )


@settings(deadline=None)
@given(alpha=RATES, c=COSTS)
def test_the_best_gamma_is_the_best_of_all(alpha: float, c: float) -> None:
    best = optimal_gamma(alpha, c)
    # beyond 1 / c (1 - alpha) drafts alone cost more than all tokens that can ever come of them
    gammas = np.arange(int(1 / (c * (1 - alpha))) + 2)
    everything = np.cumsum(alpha**gammas) / (gammas * c + 1)
    assert speedup(alpha, best, c) == pytest.approx(everything.max(), rel=1e-12)
    assert (speedup(alpha, best, c) > 1 + 1e-9) <= pays(alpha, c)
    assert speedup(alpha, best, c) >= least_speedup(alpha, c) * (1 - 1e-12)


def test_without_a_cost_there_is_no_best_gamma() -> None:
    assert optimal_gamma(1.0, 0.5, most=9) == 9
    assert optimal_gamma(0.0, 0.0) == 0
    for alpha, c in ((0.5, 0.0), (1.0, 0.5)):
        with pytest.raises(InputError, match="limit it with most"):
            optimal_gamma(alpha, c)


def test_divergence() -> None:
    p, q = [[0.5, 0.5], [1.0, 0.0]], [[0.5, 0.5], [0.0, 1.0]]
    assert divergence(p[0], q[0]) == 0
    assert divergence(p[1], q[1]) == 1
    assert divergence(p, q) == divergence(q, p) == 0.5


def test_a_fitted_rate_counts_runs() -> None:
    # 2 of 3, 3 of 3, 0 of 2: five successes, two failures
    assert fitted_acceptance_rate([2, 3, 0], [3, 3, 2]) == pytest.approx(5 / 7)


@pytest.mark.parametrize(
    "call",
    [
        lambda: expected_tokens(1.2, 3),
        lambda: speedup(0.5, -1, 0.1),
        lambda: speedup(0.5, 1, -0.1),
        lambda: parity(4, 0),
        lambda: streaming_speedup(0, 4, 10),
        lambda: acceptance_rate([0.5, 0.2], [0.5, 0.5]),
        lambda: acceptance_rate([0.5, 0.5], [0.2, 0.2, 0.6]),
        lambda: fitted_acceptance_rate([3], [2]),
        lambda: fitted_acceptance_rate([0], [0]),
    ],
)
def test_values_out_of_range_are_refused(call: object) -> None:
    assert callable(call)
    with pytest.raises(InputError):
        call()
