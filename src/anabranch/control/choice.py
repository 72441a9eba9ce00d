"""Choice of a drafter for a new row, where adapters of several methods are loaded: the fastest, others now and then.

The measure is the speedup over plain decoding at the same load: tokens per row and step, times the milliseconds of a
plain step, divided by those of the step. A clock that changes, a long context or more rows thus affect all drafters
alike. It is measured in steps in which all rows use one drafter, and kept for each binary order of the batch size. The
chosen drafter has the greatest

    log(speedup) + OPTIMISM * sqrt(log(1 + N) / (1 + n))

where n counts the samples of the drafter, 64 tokens of a row each, and N those of all (UCB, Auer et al. 2002). A
drafter begins with one sample at the speedup that the controller predicts. Older samples fade, so the choice follows
the text and the machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Choice", "DraftYield"]

SAMPLE = 64.0  # tokens of a row that count as one sample; a new row keeps to the drafter in use for four
OPTIMISM = 0.2  # weight of uncertainty: a drafter 15 % slower than the best gets one token in 25
FADING = 256.0  # samples after which an observation counts a third


@dataclass
class DraftYield:
    """The yield of a drafter at one load: tokens of a row, and the time they took in plain steps."""

    tokens: float = 0.0
    steps: float = 0.0

    @property
    def speedup(self) -> float:
        """Speedup over plain decoding; 0 if nothing was seen."""
        return self.tokens / self.steps if self.steps else 0.0


@dataclass
class Choice:
    """Yields of drafters by their specifications."""

    _yields: dict[int, dict[str, DraftYield]] = field(default_factory=dict)  # by the binary order of the batch size
    _chosen: str = ""
    _tokens: float = 0.0  # of a row since the choice changed
    changed: bool = False  # since ``to_dict`` was last called

    def choose(self, expected: Mapping[str, float], rows: int, *, using: str | None = None) -> str:
        """The drafter of a new row.

        expected  the predicted speedup of each drafter that is possible now
        rows      rows that are about to be in use
        using     the drafter of a row in use, if any: new rows keep to it for four samples, since a mixed batch pays
                  for the drafts of both
        """
        if using is not None and self._tokens < 4 * SAMPLE:
            self._chosen = using
            return using
        seen = self._yields.get(rows.bit_length(), {})
        known = {drafter: seen.get(drafter, DraftYield()) for drafter in expected}
        total = math.log1p(sum(each.tokens for each in known.values()) / SAMPLE)

        def bound(drafter: str) -> float:
            each = known[drafter]
            speedup = (each.tokens + SAMPLE) / (each.steps + SAMPLE / expected[drafter])
            return math.log(speedup) + OPTIMISM * math.sqrt(total / (1 + each.tokens / SAMPLE))

        best = max(expected, key=bound)
        if best != self._chosen:
            self._chosen, self._tokens = best, 0.0
        return best

    def saw(self, drafter: str, rows: int, tokens: float, steps: float) -> None:
        """Update with a step of ``rows`` rows that all use ``drafter``: its tokens a row, its length in plain steps."""
        seen = self._yields.setdefault(rows.bit_length(), {})
        left = math.exp(-tokens / (FADING * SAMPLE))
        for each in seen.values():
            each.tokens *= left
            each.steps *= left
        each = seen.setdefault(drafter, DraftYield())
        each.tokens += tokens
        each.steps += steps
        self._tokens += tokens
        self.changed = True

    def measured(self, speedups: Mapping[str, float]) -> None:
        """Replace the yields of one row by speedups measured on the same prompts, worth 16 samples each."""
        self._yields[1] = {drafter: DraftYield(16 * SAMPLE, 16 * SAMPLE / each) for drafter, each in speedups.items()}
        self.changed = True

    def yields(self) -> dict[int, dict[str, DraftYield]]:
        """The yields by the fewest rows of each order."""
        return {1 << (order - 1): dict(seen) for order, seen in sorted(self._yields.items())}

    def to_dict(self) -> dict[str, Any]:
        """JSON values: tokens and steps by rows and drafter, without drafters that have faded."""
        self.changed = False
        return {
            str(rows): {
                drafter: [round(each.tokens, 3), round(each.steps, 3)]
                for drafter, each in seen.items()
                if each.tokens >= 1 and each.steps >= 0.01
            }
            for rows, seen in self.yields().items()
        }

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> Choice:
        """The inverse of ``to_dict``. Raises ValueError, TypeError or AttributeError for anything else."""
        made = Choice()
        for rows, seen in record.items():
            known = {str(name): DraftYield(float(tokens), float(steps)) for name, (tokens, steps) in seen.items()}
            if int(rows) < 1 or not all(0 < each.tokens < 1e9 and 0 < each.steps < 1e9 for each in known.values()):
                raise ValueError(f"not yields of drafters: {rows}, {seen}")
            made._yields[int(rows).bit_length()] = known
        return made
