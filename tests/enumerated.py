"""Every outcome of code that draws at random, with its probability: runs are repeated until all choices were made.

``Draws`` stands in for the generator that drafters and ``reject`` read from, and for ``inverse_cdf``, so the code that
runs is the shipped one. Sums over the outcomes are exact.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from anabranch import sampling

T = TypeVar("T")


class Draws:
    """The choices of one run: first the given ones, then always the first option. ``weight``: their probability."""

    def __init__(self, given: Sequence[int]) -> None:
        self.given, self.made, self.weight = given, list[tuple[int, int]](), 1.0

    def choose(self, weights: Sequence[float]) -> int:
        """An index of positive weight."""
        options = [index for index, weight in enumerate(weights) if weight > 0]
        chosen = self.given[len(self.made)] if len(self.made) < len(self.given) else 0
        self.made.append((chosen, len(options)))
        self.weight *= weights[options[chosen]] / sum(weights)
        return options[chosen]

    def inverse_cdf(self, probs_NV: Tensor, uniforms: object) -> Tensor:
        """A token for each row, whatever the uniforms."""
        return torch.tensor([self.choose(row) for row in probs_NV.double().tolist()])

    def random(self, size: Any = None) -> Any:
        """A uniform that has no value until it is compared; several, for ``inverse_cdf`` alone, have none at all."""
        return _Uniform(self) if size is None else torch.zeros(size).numpy()


class _Uniform:
    def __init__(self, draws: Draws) -> None:
        self.draws = draws

    def __lt__(self, probability: float) -> bool:
        return self.draws.choose([probability, 1.0 - probability]) == 0


def outcomes(run: Callable[[Draws], T]) -> Iterator[tuple[T, float]]:
    """Yield the result and the probability of every outcome of ``run``."""
    given: list[int] = []
    while True:
        draws = Draws(given)
        yield run(draws), draws.weight
        made = draws.made
        while made and made[-1][0] + 1 == made[-1][1]:
            made.pop()
        if not made:
            return
        given = [chosen for chosen, _ in made[:-1]] + [made[-1][0] + 1]


def drawing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Draws], None]:
    """Let everything in the package that samples drafts, and *rejection*, draw from the last ``Draws`` given."""
    given: list[Draws] = []
    stand_ins = {
        sampling.inverse_cdf: lambda probs_NV, uniforms: given[-1].inverse_cdf(probs_NV, uniforms),
        sampling.generator: lambda *_, **__: given[-1],
    }
    for name, module in list(sys.modules.items()):
        if name.startswith("anabranch."):
            for real, stand_in in stand_ins.items():
                if vars(module).get(real.__name__) is real:
                    monkeypatch.setattr(module, real.__name__, stand_in)
    return given.append
