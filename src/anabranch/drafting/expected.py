"""Drafts from a text that is expected: the new text follows it, leaves it where it differs, and joins it again.

    expected   def area ( w , h ) : return w * h
    new text   def area ( w , height ) : re...      leaves at "h", joins at ")" and goes on from there

After a token that differs, the place is sought that the longest end of the new text leads to, at least two tokens or a
few tokens ahead; among equals the nearest one ahead. Where there is none, the token is taken for a replacement of the
one that was expected.
"""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.drafting.matches import LONGEST, MatchRates

__all__ = ["PREDICTION", "Expected"]

PREDICTION = "prediction"  # the source of these drafts
SKIPPED = 8  # tokens of the expected text that may be left out before a single token is taken for the next one
WEIGHT = 4.0  # of the prior of ``MatchRates``, as in prompt lookup


class Expected:
    """Alignment of a new text with an expected one, token by token."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self._places: dict[int, list[int]] = {}  # of each token
        for place, token in enumerate(self.tokens):
            self._places.setdefault(token, []).append(place)
        self._at = 0  # the token that comes next
        self._length = LONGEST  # of the match before it
        self._rates = MatchRates(WEIGHT)
        self._read = 0  # tokens of the new text

    def draft(self, text: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        """At most ``count`` tokens that continue the new text, which only grows, each with its probability given
        those before it."""
        for place in range(self._read, len(text)):
            self._follow(text[: place + 1])
        self._read = len(text)
        following = self.tokens[self._at : self._at + count]
        return following, [self._rates(self._length + ahead) for ahead in range(len(following))]

    def _follow(self, text: Sequence[int]) -> None:
        """Go on by the last token of the new text."""
        expected = self.tokens[self._at] if self._at < len(self.tokens) else None
        if expected is not None:
            self._rates.saw(self._length, right=expected == text[-1])
        if expected == text[-1]:
            self._at, self._length = self._at + 1, min(self._length + 1, LONGEST)
            return
        places = [
            (self._shared(text, place), place >= self._at, -abs(place - self._at), place)
            for place in self._places.get(text[-1], ())
        ]
        near = [each for each in places if each[0] > 1 or 0 <= each[3] - self._at <= SKIPPED]
        self._length, _, _, place = max(near, default=(1, True, 0, self._at))
        self._at = place + 1

    def _shared(self, text: Sequence[int], place: int) -> int:
        """The length of the common end of the new text and of the expected one up to a place, capped."""
        most, length = min(LONGEST, place + 1, len(text)), 1
        while length < most and self.tokens[place - length] == text[-1 - length]:
            length += 1
        return length
