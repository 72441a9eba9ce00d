"""Rows that ride in a pass of the native kernels: streams of each node from one layer on, and early-exit pruning.

M nodes of all rows, S streams, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from anabranch.model.inputs import starts_of
from anabranch.model.native_terms import PackedTerms, Term
from anabranch.native import structs
from anabranch.native.arguments import BLOCK, address

__all__ = ["NativeRider", "Ridden", "RiderCall", "Side"]


@dataclass(frozen=True)
class Side:
    """The weights of one layer for streams only; None: the layer's own.

    qkv, out, up, down  added to the layer's products
    mlp                 silu(h down') up', added to the MLP or, with ``replaces``, instead of it
    gated               the layer's MLP is gated, so that its kernels alternate blocks of gate and up
    """

    qkv: Term | None = None
    out: Term | None = None
    up: Term | None = None
    down: Term | None = None
    mlp: Term | None = None
    replaces: bool = False
    gated: bool = False


class Ridden(NamedTuple):
    """The rider's part in the result of a pass.

    kept        the nodes of each row that were not pruned, ascending; None: nothing was pruned
    allowed_B   as in ``PassResult``
    riding_MSD  states of the streams after the last norm; None: there are none
    """

    kept: list[NDArray[np.int64]] | None
    riding_MSD: Tensor | None
    allowed_B: list[Tensor] | None = None


class NativeRider:
    """A rider for the native kernels (``rider.h``): its weights, packed in the type of a target's rows.

    kind        of the target's weights, one of ``KINDS``
    start       the first layer with streams, or where pruning is
    streams     S; 0: pruning only
    own         nodes attend to their own streams, which are then part of the model
    from_main   streams start from their node's row, otherwise from nothing
    positioned  the model's embeddings of positions, if it has any, are added to streams
    embeddings  added to the initial streams [S, D]
    init        a term of the node's row, added to all of its streams
    root        (inputs [inner, D], hidden [S, inner], up [D, inner]): adds up silu(inputs m' + hidden) for a node's row
                m, scaled to unit RMS (m')
    angles      by which the values of streams are rotated [S], radians
    sides       of the layers from ``start`` on
    exit        the term o of early exit: scores are head(norm(m + o(m)))
    softcap     of the scores

    Nothing is pruned (``limited``).
    """

    def __init__(
        self,
        kind: str,
        *,
        start: int,
        streams: int = 0,
        own: bool = False,
        from_main: bool = True,
        positioned: bool = False,
        embeddings: Tensor | None = None,
        init: Term | None = None,
        root: tuple[Tensor, Tensor, Tensor] | None = None,
        angles: Tensor | None = None,
        sides: Sequence[Side] = (),
        exit: Term | None = None,  # the papers' word
        softcap: float | None = None,
    ) -> None:
        self._packed = packed = PackedTerms(kind)
        turns = None if angles is None else torch.stack((angles.cos(), angles.sin()), dim=1)
        inputs, up, hidden = structs.Packed(), structs.Packed(), None
        if root is not None:
            more = -len(root[0]) % BLOCK
            inputs, up = packed.pack(F.pad(root[0], (0, 0, 0, more))), packed.pack(F.pad(root[2], (0, more)))
            hidden = packed.pointer(F.pad(root[1], (0, more)))
        self._native = structs.Rider(
            start=start,
            least=-math.inf,
            softcap=softcap or 0.0,
            from_main=from_main,
            positioned=positioned,
            streams=structs.Streams(count=streams, own=own, turns=packed.pointer(turns)),
            embeddings=packed.pointer(embeddings),
            init=packed.term(init),
            inputs=inputs,
            up=up,
            hidden=hidden,
            sides=self._layers(sides),
            terms=self._terms(sides),
            exit=packed.term(exit),
        )

    def limited(self, *, ride: bool, keep: int, least: float) -> NativeRider:
        """The same rider over the same weights, without its streams unless they ``ride``, and with pruning.

        keep   number of nodes that stay of each row; 0: all
        least  minimum log probability of a node that stays, given its parent; -inf: none
        """
        made = copy(self)
        made._native = structs.Rider.from_buffer_copy(self._native)
        made._native.keep, made._native.least = keep, least
        if not ride:
            made._native.streams.count, made._native.sides, made._native.terms = 0, None, None
        return made

    def _layers(self, sides: Sequence[Side]) -> int | None:
        if all(side.mlp is None for side in sides):
            return None
        made = [structs.StreamLayer(self._packed.term(side.mlp), side.replaces) for side in sides]
        return self._packed.addresses(made)

    def _terms(self, sides: Sequence[Side]) -> int | None:
        if not any(any((side.qkv, side.out, side.up, side.down)) for side in sides):
            return None
        made = [self._packed.layer(side.qkv, side.out, side.up, side.down, gated=side.gated) for side in sides]
        return self._packed.addresses(made)

    def call(self, counts: Sequence[int], width: int, dtype: torch.dtype, words: int = 0) -> RiderCall:
        """The rider's part in a pass over rows of ``counts`` nodes of ``width`` channels.

        words  the size of the vocabulary, if the result shall have ``allowed_B``; else 0
        """
        return RiderCall(self._native, counts, width, dtype, words)


class RiderCall:
    """A rider in one pass: the struct for the kernels, and the memory that they write."""

    def __init__(self, rider: structs.Rider, counts: Sequence[int], width: int, dtype: torch.dtype, words: int) -> None:
        self.native = structs.Rider.from_buffer_copy(rider)
        self._starts = starts_of(counts)
        nodes, streams, prunes = sum(counts), rider.streams.count, rider.least > -math.inf
        if 0 < rider.keep < max(counts):
            prunes = True
        else:
            self.native.keep = 0  # nothing to drop: the early exit would be computed for nothing
        self._states = torch.empty((nodes, streams, width), dtype=dtype) if streams else None
        self._kept = np.empty(nodes, np.int64) if prunes else None
        self._counts = np.asarray(counts, np.int64) if self._kept is None else np.empty(len(counts), np.int64)
        if self._states is not None:
            self.native.states = self._states.data_ptr()
        if self._kept is not None:
            self.native.kept, self.native.counts = address(self._kept), address(self._counts)
        self._scores, self._sums = (torch.empty(0), torch.empty(0))
        if words and rider.least > -math.inf:
            # nodes without children are not scored: any token may stay below them
            self._scores, self._sums = torch.zeros(nodes, words), torch.full((nodes,), -math.inf)
            self.native.scores, self.native.sums = self._scores.data_ptr(), self._sums.data_ptr()

    @property
    def counts(self) -> list[int]:
        """The nodes of each row after the pass."""
        return [int(count) for count in self._counts]

    def result(self) -> Ridden:
        """The results, once the pass has run."""
        states, counts = self._states, self._counts
        whole = None if states is None else states[: int(counts.sum())]
        if self._kept is None:
            return Ridden(None, whole)
        ends = np.cumsum(counts)
        kept = [self._kept[end - count : end] for end, count in zip(ends, counts, strict=True)]
        return Ridden(kept, whole, self._allowed(kept) if len(self._scores) else None)

    def _allowed(self, kept: Sequence[NDArray[np.int64]]) -> list[Tensor]:
        """The tokens below each kept node whose log probability, as the kernels round it, reaches the threshold."""
        at = [torch.from_numpy(nodes) + start for nodes, start in zip(kept, self._starts, strict=True)]
        return [self._scores[rows] - self._sums[rows, None] >= self.native.least for rows in at]
