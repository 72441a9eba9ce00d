"""Which of several drafters ("arms") a new row uses: the one that lately yielded the most, each tried now and then.

What counts is the speedup over plain decoding at the same load: tokens per row and step, times the milliseconds of a
plain step, over those of the step. So a clock that changes, a long context or more rows affect all arms alike. It is
measured in steps in which all rows use the same arm, and kept for each binary order of the rows in use. Chosen is the
arm of the greatest

    log(speedup) + OPTIMISM * sqrt(log(1 + N) / n)

where n is how much was seen of the arm, in samples of 64 tokens a row, and N of all of them (UCB, Auer et al. 2002).
An arm begins with a prediction, from costs and from the acceptance that its adapter's card states, that counts as half
a sample. Older samples fade, so the choice follows the text and the machine.

Prompts differ more than good arms do, so one prompt does not rule out an arm unless it is far behind: in the long run
an arm that is 15 % slower than the best gets about one token in 25, and one that is half as fast hardly any.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ArmYield", "Arms"]

SAMPLE = 64.0  # tokens of a row
PRIOR = 0.5  # samples that a prediction is worth
OPTIMISM = 0.2
MEMORY = 16384.0  # tokens of a row after which what was seen counts a third
MEASURED = 1024.0  # tokens of a row that a measurement of all arms on the same prompts is worth
TENURE = 256.0  # tokens of a row for which arms stay as they are while rows are in use: a change takes as long as a row


@dataclass
class ArmYield:
    """What an arm yielded at one load, older steps counting less.

    tokens  of a row
    steps   that took as long, in plain steps
    """

    tokens: float = 0.0
    steps: float = 0.0

    @property
    def speedup(self) -> float:
        """Over plain decoding; 0 where nothing was seen."""
        return self.tokens / self.steps if self.steps else 0.0


@dataclass
class Arms:
    """What is known of the arms, by their specifications.

    lengths  the mean acceptance lengths that adapters' cards predict
    """

    lengths: Mapping[str, float] = field(default_factory=dict)
    _yields: dict[int, dict[str, ArmYield]] = field(default_factory=dict)  # by the binary order of the rows in use
    _chosen: str = ""
    _tenure: float = 0.0
    _news: bool = False

    def choose(self, expected: Mapping[str, float], rows: int, *, using: str | None = None) -> str:
        """The arm of a new row.

        expected  the predicted speedup of each arm that is possible now
        rows      rows that are about to be in use
        using     the arm of a row in use, if any
        """
        if using is not None and self._tenure < TENURE:
            self._chosen = using
            return using
        seen = self._yields.get(rows.bit_length(), {})
        known = {arm: seen.get(arm, ArmYield()) for arm in expected}
        total = math.log1p(sum(found.tokens for found in known.values()) / SAMPLE)

        def promise(arm: str) -> float:
            found, ahead = known[arm], PRIOR * SAMPLE
            speedup = (found.tokens + ahead) / (found.steps + ahead / expected[arm])
            return math.log(speedup) + OPTIMISM * math.sqrt(total / (found.tokens / SAMPLE + PRIOR))

        best = max(expected, key=promise)
        if best != self._chosen:
            self._chosen, self._tenure = best, 0.0
        return best

    def saw(self, arm: str, rows: int, tokens: float, steps: float) -> None:
        """Take in a step of ``rows`` rows that all used ``arm``: its tokens a row, and its length in plain steps."""
        seen = self._yields.setdefault(rows.bit_length(), {})
        fading = math.exp(-tokens / MEMORY)
        for found in seen.values():
            found.tokens *= fading
            found.steps *= fading
        found = seen.setdefault(arm, ArmYield())
        found.tokens += tokens
        found.steps += steps
        self._tenure += tokens
        self._news = True

    def measured(self, speedups: Mapping[str, float]) -> None:
        """Take in the speedups of all arms, measured on the same prompts, one at a time."""
        self._yields[1] = {arm: ArmYield(MEASURED, MEASURED / speedup) for arm, speedup in speedups.items()}
        self._news = True

    def yields(self) -> dict[int, dict[str, ArmYield]]:
        """What was seen, by the least rows of each order."""
        return {1 << (order - 1): dict(seen) for order, seen in sorted(self._yields.items())}

    # -- what is kept -----------------------------------------------------------------------------------
    @property
    def news(self) -> bool:
        """Whether anything was seen since ``to_dict`` was last called."""
        return self._news

    def to_dict(self) -> dict[str, Any]:
        """As JSON values: by rows and arm, tokens and steps, without arms of which less than a token is remembered."""
        self._news = False
        return {
            str(rows): {
                arm: [round(found.tokens, 3), round(found.steps, 3)]
                for arm, found in seen.items()
                if found.tokens >= 1 and found.steps >= 0.01
            }
            for rows, seen in self.yields().items()
        }

    @staticmethod
    def from_dict(record: Mapping[str, Any], lengths: Mapping[str, float]) -> Arms:
        """The inverse of ``to_dict``. Raises ValueError, TypeError or AttributeError for anything else."""
        made = Arms(lengths)
        for rows, seen in record.items():
            found = {str(arm): ArmYield(float(tokens), float(steps)) for arm, (tokens, steps) in seen.items()}
            if int(rows) < 1 or not all(0 < each.tokens < 1e9 and 0 < each.steps < 1e9 for each in found.values()):
                raise ValueError(f"no yields of arms: {rows}, {seen}")
            made._yields[int(rows).bit_length()] = found
        return made
