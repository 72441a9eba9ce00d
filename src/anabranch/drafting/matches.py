"""a(n): the share of matches of n tokens whose next token was right, for drafters that copy what followed a match."""

from __future__ import annotations

__all__ = ["LONGEST", "MatchRates"]

# a(n) on prompts of many kinds, for matches of 1, 2, ... tokens (the last: that many or more), before a text has shown
# its own
PRIOR = (0.2, 0.45, 0.6, 0.7, 0.75, 0.8, 0.8, 0.9)
LONGEST = len(PRIOR)  # longer matches count as this long


class MatchRates:
    """a(n) of one text, which starts from ``PRIOR``; that is worth ``weight`` matches of each length."""

    def __init__(self, weight: float) -> None:
        self._right = [weight * share for share in PRIOR]
        self._all = [weight] * LONGEST

    def saw(self, length: int, *, right: bool) -> None:
        """Count a match."""
        place = min(length, LONGEST) - 1
        self._right[place] += right
        self._all[place] += 1

    def __call__(self, length: int) -> float:
        """a(length)."""
        place = min(length, LONGEST) - 1
        return self._right[place] / self._all[place]
