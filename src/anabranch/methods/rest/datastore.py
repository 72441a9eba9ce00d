"""Lookups in a suffix array of token ids: where the longest suffix of a context occurs, and what follows it there."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.drafting.tables import OpenTables
from anabranch.errors import FileError
from anabranch.methods.rest.suffixes import WIDTH, text_type

__all__ = ["Datastore"]

USUAL = 4  # tokens of a match


class Datastore:
    """The memory-mapped arrays of ``suffixes.build``; whatever they hold, lookups return tokens of the vocabulary."""

    def __init__(self, tables: OpenTables) -> None:
        arrays, self.vocab_size = tables.arrays, tables.vocab_size
        wanted = {"text": text_type(self.vocab_size), "places": "<u4", "starts": "<i8"}
        if {name: array.dtype.str for name, array in arrays.items()} != wanted:
            raise FileError("the tables lack an array of a datastore, or have one of another type; build them again")
        self._text, self._places, self._starts = (arrays[name] for name in wanted)
        if len(self._starts) != self.vocab_size + 1 or not len(self._text) > len(self._places) > 0:
            raise FileError("the arrays of the datastore do not fit together; build the tables again")
        # views whose items are Python integers: a binary search reads them one by one
        self._token, self._place = self._text.data, self._places.data

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The range of the suffixes that begin with 1 to ``WIDTH`` tokens; empty where there are none."""
        low, high = (min(max(int(self._starts[tokens[0] + i]), 0), len(self._places)) for i in (0, 1))
        for depth, token in enumerate(tokens[1:WIDTH], 1):
            if low >= high:
                return 0, 0
            low, high = self._narrowed(low, high, depth, token)
        return (low, high) if low < high else (0, 0)

    def _narrowed(self, low: int, high: int, depth: int, token: int) -> tuple[int, int]:
        """The part of a range whose suffixes have ``token`` at ``depth``."""
        text, places, size, separator = self._token, self._place, len(self._text), self.vocab_size

        def key(index: int) -> int:
            place = places[index] + depth
            return text[place] if place < size else separator

        low = bisect_left(range(high), token, low, high, key=key)
        return low, bisect_left(range(high), token + 1, low, high, key=key)

    def longest(self, context: Sequence[int], most: int) -> tuple[int, int, int]:
        """The longest suffix of a context, of at most ``most`` tokens, that occurs: its length and range; (0, 0, 0).

        If a sequence occurs, so do its suffixes: a binary search over lengths, beginning with a typical one.
        """
        low, high = 0, min(most, len(context), WIDTH)
        span = (0, 0)
        length = min(USUAL, high)
        while low < high:
            here = self.find(context[len(context) - length :])
            if here[0] < here[1]:
                low, span = length, here
            else:
                high = length - 1
            length = (low + high + 1) // 2
        return (low, *span) if low else (0, 0, 0)

    def following(self, low: int, high: int, skip: int, depth: int, most: int) -> list[list[int]]:
        """Continuations of up to ``depth`` tokens after the first ``skip`` tokens of the suffixes of a range.

        At most ``most`` of them, evenly spread over the range. They end with their document.
        """
        chosen = np.arange(low, high) if high - low <= most else np.linspace(low, high - 1, most).astype(np.int64)
        at = np.asarray(self._places[chosen], np.int64)[:, None] + np.arange(skip, skip + depth)
        outside = at >= len(self._text)
        tokens: NDArray[Any] = self._text[np.where(outside, 0, at)].astype(np.int64)
        tokens[outside | (tokens >= self.vocab_size)] = -1
        return [row[: row.index(-1)] if -1 in row else row for row in tokens.tolist()]
