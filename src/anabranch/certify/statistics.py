"""Chi-square tests of samples of discrete distributions: pooling of cells, p-values, power, several tests at once.

The chi-square distribution with k degrees of freedom is a regularised incomplete gamma function, which torch has; the
noncentral one is a mixture of central ones with Poisson weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "Cell",
    "ChiSquare",
    "chi_square_above",
    "chi_square_quantile",
    "holm",
    "homogeneity",
    "noise_of",
    "pooled",
    "power_of",
    "samples_needed",
    "total_variation",
]

EXPECTED = 5.0  # least expected count of a cell at which the chi-square approximation holds (Cochran)
Outcome = tuple[int, ...]


@dataclass(frozen=True)
class ChiSquare:
    """A chi-square statistic, its degrees of freedom, and the probability of a larger one if nothing differs."""

    statistic: float
    degrees: int
    p_value: float

    @staticmethod
    def of(statistic: float, degrees: int) -> ChiSquare:
        """With its p-value. No degrees of freedom: there is one cell only, and nothing can differ."""
        return ChiSquare(statistic, degrees, chi_square_above(statistic, degrees) if degrees else 1.0)


@dataclass(frozen=True)
class Cell:
    """Outcomes that are counted together: all that begin with ``start`` and are in no other cell.

    first, second  how often they occurred in each of two samples
    """

    start: Outcome
    first: int
    second: int


# -- the chi-square distribution -----------------------------------------------------------------------------------
def chi_square_above(value: float, degrees: int) -> float:
    """The probability that a chi-square variable exceeds ``value``.

    >>> round(chi_square_above(3.841, 1), 4)
    0.05
    """
    return float(_above(value, torch.tensor([degrees], dtype=torch.float64))[0])


def _above(value: float, degrees_J: Tensor) -> Tensor:
    above_J: Tensor = torch.special.gammaincc(degrees_J / 2, torch.full_like(degrees_J, value / 2))
    return above_J


def chi_square_quantile(alpha: float, degrees: int) -> float:
    """The value that a chi-square variable exceeds with probability ``alpha``.

    >>> round(chi_square_quantile(0.001, 15), 1)
    37.7
    """
    return _solve(lambda value: chi_square_above(value, degrees) > alpha)


def power_of(noncentrality: float, degrees: int, alpha: float) -> float:
    """The probability that a test at level ``alpha`` rejects where the statistic is noncentral chi-square."""
    half = noncentrality / 2
    reach = 12 * math.sqrt(half) + 40
    j = torch.arange(max(0, math.floor(half - reach)), math.ceil(half + reach) + 1, dtype=torch.float64)
    weights = (torch.xlogy(j, torch.tensor(half, dtype=torch.float64)) - half - torch.lgamma(j + 1)).exp()
    return float((weights * _above(chi_square_quantile(alpha, degrees), degrees + 2 * j)).sum().clamp(0, 1))


def samples_needed(effect: float, *, degrees: int, alpha: float, power: float) -> int:
    """The size of each of two samples with which ``homogeneity`` finds a difference of ``effect`` or more.

    effect   Cohen's w: sqrt(sum (p - q)^2 / m), where m is the mean of p and q. It is at least twice their total
             variation, so every difference of a total variation of ``effect / 2`` is found
    degrees  cells minus 1, at most; with fewer cells the power is higher
    power    the probability of finding it at level ``alpha``
    """
    needed = _solve(lambda noncentrality: power_of(noncentrality, degrees, alpha) < power)
    return math.ceil(2 * needed / effect**2)


def _solve(below: Callable[[float], bool]) -> float:
    """The least positive value at which ``below`` stops being true, by bisection."""
    low, high = 0.0, 1.0
    while below(high):
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return high


# -- two samples ---------------------------------------------------------------------------------------------------
def pooled(first: Counter[Outcome], second: Counter[Outcome], most: int) -> list[Cell]:
    """At most ``most`` cells of two samples of equal size, each with an expected count of at least 5 in either.

    The most frequent outcomes have a cell of their own. The others are pooled with those that share all but their last
    token, then all but their last two, and so on. What is pooled depends only on the counts of both samples together,
    which say nothing about whether they differ.
    """
    whole = first + second
    cells: dict[Outcome, list[int]] = {}
    rest: Mapping[Outcome, Outcome] = {outcome: outcome for outcome in whole}
    longest = max(map(len, whole), default=0)
    for length in range(longest, -1, -1):
        rest = {outcome: outcome[:length] for outcome in rest}
        totals: Counter[Outcome] = Counter()
        for outcome, start in rest.items():
            totals[start] += whole[outcome]
        ranked = sorted(totals, key=lambda start: (-totals[start], start))
        room = most - len(cells) - (length > 0)  # one is kept for what is left in the end
        kept = {start for start in ranked[:room] if totals[start] >= 2 * EXPECTED}
        for outcome in [outcome for outcome, start in rest.items() if start in kept]:
            cell = cells.setdefault(rest[outcome], [0, 0])
            cell[0] += first[outcome]
            cell[1] += second[outcome]
        rest = {outcome: start for outcome, start in rest.items() if start not in kept}
    _absorb(cells, rest, first, second)
    return [Cell(start, *counts) for start, counts in cells.items()]


def _absorb(
    cells: dict[Outcome, list[int]], rest: Mapping[Outcome, Outcome], first: Counter[Outcome], second: Counter[Outcome]
) -> None:
    """Add what is too rare for a cell to the smallest one; of equals, to the first by its tokens."""
    if not rest:
        return
    smallest = min(cells, key=lambda start: (sum(cells[start]), start)) if cells else ()
    cell = cells.setdefault(smallest, [0, 0])
    cell[0] += sum(first[outcome] for outcome in rest)
    cell[1] += sum(second[outcome] for outcome in rest)


def homogeneity(cells: Sequence[Cell]) -> ChiSquare:
    """Test whether two samples of equal size are from one distribution: sum (a - b)^2 / (a + b) over the cells."""
    statistic = sum((cell.first - cell.second) ** 2 / (cell.first + cell.second) for cell in cells)
    return ChiSquare.of(float(statistic), len(cells) - 1)


def total_variation(cells: Sequence[Cell]) -> float:
    """Half the sum of the absolute differences of the two samples' frequencies."""
    size = sum(cell.first for cell in cells)
    return sum(abs(cell.first - cell.second) for cell in cells) / (2 * size)


def noise_of(cells: Sequence[Cell]) -> float:
    """The ``total_variation`` that two samples of one distribution are expected to have."""
    size = sum(cell.first for cell in cells)
    shares = [(cell.first + cell.second) / (2 * size) for cell in cells]
    return sum(math.sqrt(share * (1 - share) / (math.pi * size)) for share in shares)


# -- several tests ------------------------------------------------------------------------------------------------
def holm(p_values: Sequence[float], alpha: float) -> list[bool]:
    """Tell which of several tests reject, so that none rejects wrongly with a probability of at least 1 - ``alpha``.

    Holm (1979): the smallest p-value is compared with alpha / n, the next with alpha / (n - 1), until one is larger.

    >>> holm([0.04, 0.001, 0.02], 0.05)
    [True, True, True]
    >>> holm([0.04, 0.001, 0.03], 0.05)
    [False, True, False]
    """
    rejected = [False] * len(p_values)
    for place, test in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[test] > alpha / (len(p_values) - place):
            break
        rejected[test] = True
    return rejected
