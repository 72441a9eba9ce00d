"""A 4-bit copy of the target and streams together: the copy drafts the first tokens, and the streams trail these.

Streams that trail the newest committed token guess the token after the next from the states of the top layers. The copy
nearly always agrees with the target, so it is worth passes of its own. Each verifies a small tree of streams (``TREE``
nodes), since a few nodes hardly cost more than one, and the streams then trail the last token that it drafted: staged
speculative decoding (Spector and Ré 2023) with the streams as its last stage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from anabranch.drafting.drafter import Observation, Row
from anabranch.drafting.head import DrawNoise
from anabranch.errors import CapabilityError
from anabranch.methods.quantized_draft.copy import COPY, Copied, QuantizedCopy
from anabranch.methods.streams.adapter import StreamModule
from anabranch.methods.streams.draft import StreamDraft, StreamSettings
from anabranch.methods.streams.drafter import StreamDrafter, StreamState
from anabranch.methods.streams.native import NativeTrail, trailing
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder
from anabranch.tree import DraftTree
from anabranch.verify import Rule

__all__ = ["LEAD_ROWS", "LeadCopy", "LeadStreamDrafter", "tree_behind"]

TREE = 4  # nodes that a pass of the copy verifies
# Tokens that the copy drafts where their number is not given, and the most rows that it then drafts for: a pass of the
# copy over many rows is bound by arithmetic like the target's own (docs/log.md).
AUTO_LEAD, LEAD_ROWS = 1, 1
REFUSAL = (
    "quantized_draft needs bf16 weights that the native kernels run, and streams that trail on them without pruning, "
    "with tree=best or tree=chain; leave it out"
)


class LeadCopy(QuantizedCopy):
    """A copy whose passes verify trees of streams; a pass may draft several tokens.

    trail  runs the streams
    below  builds the trees that the copy verifies
    """

    def __init__(self, target: Decoder, adapter: StreamModule, trail: NativeTrail, *, copy: bool) -> None:
        below = StreamDraft(target, adapter, StreamSettings(nodes=TREE, copy=copy))
        parts = self.parts(target, below.head)
        if parts is None:
            raise CapabilityError(REFUSAL)
        super().__init__(*parts, below.head, tapped=adapter.start)
        self._trail, self._below = trail, below
        self.beyond = below.depth

    def _trees(self, rows: Sequence[Copied], cache: Cache, most: int) -> list[DraftTree]:
        """Trees of streams; only the latest token where one more token is wanted."""
        if most - max(len(row.tokens) for row in rows) < 2:
            return super()._trees(rows, cache, most)
        states = trailing(self._trail, rows, cache, self._below.depth)
        noise = [row.noise_ahead(self._below.depth) for row in rows]
        ahead = [row.tokens for row in rows]
        return self._below.build(states, [row.latest for row in rows], [row.words for row in rows], noise, ahead)


@dataclass
class _LeadState(StreamState):
    """The state of a row, with the tokens that the copy drafted after the root, and their joint log probabilities."""

    lead: Sequence[int] = ()
    log_probs: Sequence[float] = ()


class LeadStreamDrafter(StreamDrafter):
    """Streams that trail what a 4-bit copy of the target drafts first.

    tokens  that the copy drafts, or a few more, since one of its passes may bring several; None: ``AUTO_LEAD`` where at
            most ``LEAD_ROWS`` rows are decoded, else none
    """

    rules: tuple[Rule, ...] = ("match",)
    name = "streams+quantized_draft"

    def __init__(
        self,
        target: Decoder,
        adapter: StreamModule,
        settings: StreamSettings | None = None,
        *,
        tokens: int | None = None,
    ) -> None:
        super().__init__(target, adapter, settings)
        self.name = type(self).name
        if self.native is None or self.prune or not adapter.reads_main or self.tree.settings.kind == "product":
            raise CapabilityError(REFUSAL)
        self.copy = LeadCopy(target, adapter, self.native, copy=self.tree.settings.copy)
        self.most_rows = LEAD_ROWS if tokens is None else math.inf
        self.tokens = AUTO_LEAD if tokens is None else tokens
        self._longest = self.tokens + self.copy.beyond
        self.needs = replace(self.needs, positions=adapter.shape.num_streams + self._longest)
        if self.tree.settings.kind != "best":
            self.max_nodes += self._longest

    def depth_of(self, budget: int) -> int:
        """The maximum depth of a tree of ``budget`` nodes: what the copy drafts, and the streams of the rest."""
        streams = self._streams_of(min(budget, self.max_nodes) - self.tokens)
        return min(budget - 1, self._longest + streams)

    def join(self, row: Row) -> None:
        """A new row has no stream states before its first step."""
        row.state[self] = _LeadState(self.tree.row())

    def _lead(self, row: Row) -> _LeadState:
        state: _LeadState = row.state[self]
        return state

    def _known(self, row: Row) -> bool:
        return super()._known(row) or bool(self._lead(row).lead)

    def _forget(self, row: Row) -> None:
        row.state[self] = _LeadState(self._lead(row).words)

    def _matching(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        """Trees of the copy's chain followed by the streams' tree, which gets the remaining nodes."""
        left = [min(budget, self.max_nodes) - len(self._lead(row).lead) for row in rows]
        all_trees = [DraftTree.root(row.root) for row in rows]
        for nodes in sorted(set(left)):
            places = [b for b, most in enumerate(left) if most == nodes]
            trees = self._below([rows[b] for b in places], nodes, [self._lead(rows[b]).lead for b in places])
            for b, tree in zip(places, trees, strict=True):
                state = self._lead(rows[b])
                all_trees[b] = tree_behind(rows[b].root, state.lead, state.log_probs, tree)
        return all_trees

    def _prepare(
        self,
        native: NativeTrail,
        rows: Sequence[Row],
        slots: Sequence[int],
        nodes: Sequence[int],
        main_MD: Tensor,
        seen: Observation,
    ) -> None:
        """Let the copy draft, and the streams trail it; ``nodes`` are the rows of ``main_MD`` of the newest tokens."""
        budget, count = min(seen.budget, self.max_nodes), self.tokens if len(rows) <= self.most_rows else 0
        most = min(budget - 1, self._longest) if count else 0
        copied = [
            Copied(
                *(row, slot, row.root, main_MD, node),
                words=self._words(row),
                noise=DrawNoise.of(row, 2 * self._longest) if most else None,
            )
            for row, slot, node in zip(rows, slots, nodes, strict=True)
        ]
        if most:
            self.copy.run(copied, seen.cache, min(count, most), most)
        for row, lead in zip(rows, copied, strict=True):
            state = self._lead(row)
            state.lead, state.log_probs = lead.tokens, lead.log_probs
        for left in sorted({budget - len(lead.tokens) for lead in copied}):
            if left >= 2:
                same = [i for i, lead in enumerate(copied) if budget - len(lead.tokens) == left]
                states = trailing(native, [copied[i] for i in same], seen.cache, self._streams_of(left))
                for i, states_SD in zip(same, states, strict=True):
                    self._lead(rows[i]).states_SD = states_SD


def tree_behind(root: int, lead: Sequence[int], log_probs: Sequence[float], tree: DraftTree) -> DraftTree:
    """The tree of a row from the one below what the copy drafted.

    lead 7 8, tree 8 +-- 1 -- 2         root 5 -- 7 -- 8 +-- 1 -- 2
                     +-- 4                               +-- 4
    """
    count = len(lead)
    if not count:
        return tree
    assert tree.log_probs is not None
    sources = [f"{COPY} {depth}" for depth in range(1, count + 1)]
    return DraftTree(
        np.concatenate(([root], lead, tree.tokens[1:])).astype(np.int64),
        np.concatenate((np.arange(-1, count), tree.parents[1:] + count)).astype(np.int64),
        sources=("target", *sources, *tree.sources[1:]),
        log_probs=np.concatenate(([0.0], log_probs, tree.log_probs[1:] + log_probs[-1])).astype(np.float32),
    )
