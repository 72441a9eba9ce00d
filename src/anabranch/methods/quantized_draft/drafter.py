"""A 4-bit copy of the target drafts chains by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch

from anabranch.drafting.drafter import Drafter, Observation, Row
from anabranch.drafting.head import DraftHead, DrawNoise, RowVocabulary
from anabranch.errors import CapabilityError
from anabranch.methods.quantized_draft.copy import COPY, Copied, QuantizedCopy
from anabranch.model.decoder import Decoder
from anabranch.tree import DraftTree

__all__ = ["QuantizedDrafter"]

_heads: WeakKeyDictionary[Decoder, DraftHead] = WeakKeyDictionary()


@dataclass
class _State:
    """The state of a row: its part of the draft vocabulary, and what was drafted, with joint log probabilities."""

    words: RowVocabulary
    tokens: Sequence[int] = ()
    log_probs: Sequence[float] = ()


class QuantizedDrafter(Drafter):
    """Drafts chains of ``tokens`` tokens with a 4-bit copy of the target, one pass of it a token.

    adaptive  whether the number of tokens follows the load, up to ``tokens``
    """

    name = "quantized_draft"

    def __init__(self, target: Decoder, tokens: int, *, adaptive: bool = False) -> None:
        parts = None
        if QuantizedCopy.fits(target):
            if target not in _heads:
                _heads[target] = DraftHead(target, torch.arange(target.config.vocab_size))
            parts = QuantizedCopy.parts(target, _heads[target])
        if parts is None:
            raise CapabilityError(
                "quantized_draft drafts with a 4-bit copy of bf16 weights that the native kernels run, which this "
                "target is not; use drafter='prompt_lookup'"
            )
        self.copy = QuantizedCopy(*parts, _heads[target])
        self.tokens, self.adaptive, self.max_nodes = tokens, adaptive, tokens + 1

    def join(self, row: Row) -> None:
        """A new row has no draft before its first step."""
        row.state[self] = _State(RowVocabulary(self.copy.head))

    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        """The chains that were prepared."""
        return [self._chain(row, min(budget - 1, row.max_depth)) for row in rows]

    def _chain(self, row: Row, depth: int) -> DraftTree:
        state: _State = row.state[self]
        count = min(len(state.tokens), depth)
        if count < 1:
            return DraftTree.root(row.root)
        return DraftTree(
            np.array([row.root, *state.tokens[:count]], np.int64),
            np.arange(-1, count, dtype=np.int64),
            sources=("target", *(f"{COPY} {depth}" for depth in range(1, count + 1))),
            log_probs=np.array([0.0, *state.log_probs[:count]], np.float32),
        )

    def observe(self, rows: Sequence[Row], seen: Observation) -> None:
        """Draft after each row's newest token."""
        for row in rows:
            state: _State = row.state[self]
            state.tokens, state.log_probs = (), ()
        count = min(seen.budget - 1, self.tokens)
        going = sorted((seen.slots[i], row) for i, row in enumerate(rows) if seen.live[i])
        if count < 1 or not going:
            return
        copied = [
            Copied(
                *(row, slot, row.root, seen.result.hidden_MD, 0),
                words=row.state[self].words.extend(row.tokens),
                noise=DrawNoise.of(row, count),
            )
            for slot, row in going
        ]
        self.copy.run(copied, seen.cache, count, count)
        for each in copied:
            state = each.row.state[self]
            state.tokens, state.log_probs = each.tokens, each.log_probs
