"""Passes of EAGLE's head over each token of a text but the first, with the feature of the token before it.

    text      a b c d      d is the root; the target has computed the features of a, b and c
    position  (b, fa) (c, fb) (d, fc)      its last output predicts fd, whose scores are those of d's children

Only positions with the target's features are committed. Nodes of a draft are read with the head's own features of their
parents, and again with the target's once they are part of the text.

M nodes of a pass, n nodes, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from anabranch.drafting.drafter import Call, Row
from anabranch.drafting.kept import Family
from anabranch.drafting.reader import CHUNK, Place, Reader
from anabranch.methods.eagle.layer import EagleLayer
from anabranch.model.cache import Cache
from anabranch.model.inputs import Inputs

__all__ = ["FeatureReader"]


@dataclass(eq=False)
class _Fed(Place):
    """A row's place, and its features.

    waiting  of the target's features, those at positions that are not in the cache yet [.., D], ``count`` in total
    last     the newest one in the cache [1, D]
    own      the head's own after nodes of the draft [D]
    """

    waiting: list[Tensor] = field(default_factory=list)
    last: Tensor | None = None
    own: dict[int, Tensor] = field(default_factory=dict)
    count: int = 0

    def take(self, count: int) -> None:
        """The first ``count`` positions are in the cache now."""
        whole = torch.cat(self.waiting)
        self.waiting = [whole[count:]] if count < len(whole) else []
        self.count -= count
        self.last = whole[count - 1 : count]


class FeatureReader(Reader):
    """A head and its KV cache; it answers with the features [n, D] that the head predicts after nodes."""

    place = _Fed
    skipped = 1

    def __init__(self, layer: EagleLayer) -> None:
        super().__init__(layer.target.config.max_positions)
        self.layer = layer

    @property
    def call(self) -> Call:
        """One layer, and the target's head over the draft vocabulary."""
        return self.layer.call

    def _new_cache(self, rows: int, capacity: int) -> Cache:
        return self.layer.new_cache(rows, capacity)

    def _family(self, tokens: Sequence[int], family: Family) -> Family:
        # the first position also depends on the first token, which has none
        return family._replace(drafts=f"{self.layer.fingerprint} {tokens[0]}")

    # -- features ---------------------------------------------------------------------------------------
    def seat(self, row: Row) -> None:
        """Begin a row with what the cache holds of its prompt."""
        self.settle()
        self._seat(row)

    def resume(self, row: Row, start: int) -> None:
        """The features that follow begin with that of token ``start``."""
        self.settle()
        place: _Fed = self._seat(row)
        assert self.cache is not None
        self.cache.rewind(place.slot, min(self.cache.lengths[place.slot], start))

    def feed(self, *rows: tuple[Row, Tensor]) -> None:
        """The target's features [n, D] of rows' next tokens, in order; the tokens that follow them are known."""
        self.settle()
        for row, features_nD in rows:
            place: _Fed = self._seat(row)
            place.waiting.append(features_nD)
            place.count += len(features_nD)
            if place.count > CHUNK:
                self.catch_up(row)

    def catch_up(self, row: Row) -> None:
        """Read all positions of a row whose features are known."""
        place: _Fed = self._seat(row)
        assert self.cache is not None
        self.read(row, self.cache.lengths[place.slot] + place.count + self.skipped)

    def knows(self, row: Row) -> bool:
        """Return whether the features of all tokens before the root were fed, and there is one."""
        place: _Fed | None = self._places.get(row)
        if place is None or self.cache is None or len(row.tokens) <= self.skipped:
            return False
        return self.cache.lengths[place.slot] + place.count == len(row.tokens) - self.skipped

    def forget(self, row: Row) -> None:
        """Drop what is kept for a row that no draft is made for any more."""
        super().forget(row)
        place: _Fed | None = self._places.get(row)
        if place is not None:
            place.waiting.clear()
            place.count = 0

    # -- passes -----------------------------------------------------------------------------------------
    def _read(self, row: Row, tokens: Sequence[int]) -> None:
        assert self.cache is not None
        place: _Fed = self._places[row]
        where, features_nD = slice(place.slot, place.slot + 1), torch.cat(place.waiting)[: len(tokens)]
        self.layer.run(Inputs.of_prompt(tokens), features_nD, self.cache, where)
        place.take(len(tokens))

    def _feed(self, row: Row, place: Any, wanted: Sequence[int], tokens: list[int], parents: list[int]) -> None:
        super()._feed(row, place, wanted, tokens, parents)
        if place.base > place.count:  # the root is read again
            assert place.last is not None
            place.waiting.insert(0, place.last)
            place.count += 1

    def ask(self, wanted: Mapping[Row, Sequence[int]]) -> Tensor:
        """The features [n, D] after some nodes of each row's continuations, row by row, in one pass."""
        features_nD = super().ask(wanted)
        features = iter(features_nD)
        for row, nodes in wanted.items():
            self._places[row].own.update((node, next(features)) for node in nodes)
        return features_nD

    def _run(self, inputs: Inputs, at: Sequence[tuple[int, int]]) -> Tensor:
        assert self.cache is not None
        parts: list[Tensor] = []
        for row, count in zip(self._rows, inputs.counts_B, strict=True):
            place: _Fed = self._places[row]
            if count and place.base:
                parts += place.waiting
            if count and place.read:
                assert place.continuations is not None
                parts.append(torch.stack([place.own[place.continuations.parents[node]] for node in place.read]))
        slots = slice(0, len(self._rows))
        found_MD = self.layer.run(inputs, torch.cat(parts), self.cache, slots)
        return found_MD[torch.tensor([inputs.starts_B[slot] + place for slot, place in at], device=found_MD.device)]

    def settle(self) -> None:
        """Commit the text's positions and forget all nodes, whose features are not the target's."""
        super().settle()
        for place in self._places.values():
            place.own.clear()

    def _accepted(self, row: Row) -> list[int]:
        return []

    def _commit(self, kept: Sequence[Sequence[int]]) -> None:
        for place in self._places.values():
            if place.base:
                place.take(place.base)
        super()._commit(kept)
