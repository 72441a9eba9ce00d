"""Passes of a draft model over texts and continuations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.drafting.drafter import Call, Row
from anabranch.drafting.reader import Reader
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder
from anabranch.model.encoder import Memory
from anabranch.model.inputs import Inputs
from anabranch.model.reads import weight_bytes

__all__ = ["DraftReader"]


class DraftReader(Reader):
    """A draft model and its KV cache; it answers with the logits [n, V] over its own vocabulary."""

    def __init__(self, model: Decoder) -> None:
        super().__init__(model.config.max_positions)
        self.model = model
        self._call = Call("draft", model.config.num_layers, model.config.num_layers, weight_bytes(model))

    @property
    def call(self) -> Call:
        """All layers of the draft model, and its head."""
        return self._call

    @property
    def persists(self) -> bool:
        """Graphs are captured over a cache, so it is kept where they are."""
        return self.model.backend.capture is not None

    def _new_cache(self, rows: int, capacity: int) -> Cache:
        return self.model.new_cache(rows, capacity)

    def _memory(self, row: Row) -> Memory | None:
        if self.model.encoder is None or row.source is None:
            return None
        with self.model.decoding():
            return self.model.encode(row.source)

    def known(self, tokens: Sequence[int]) -> tuple[int, int]:
        """See ``Reader``; none where keys depend on the length of the text, or on a source."""
        varies = self.model.rope().key(len(tokens)) or self.model.encoder is not None
        return (0, 0) if varies else super().known(tokens)

    def _known(self, tokens: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Token ids [n]; 0 stands for those that the draft model's vocabulary lacks."""
        ids = np.asarray(tokens, np.int64)
        return np.where(ids < self.model.config.vocab_size, ids, 0)

    def _read(self, row: Row, tokens: Sequence[int]) -> None:
        assert self.cache is not None
        slot = self._places[row].slot
        with self.model.decoding():
            inputs = Inputs.of_prompt(self._known(tokens).tolist())
            self.model(inputs, self.cache, slots=slice(slot, slot + 1), need="keys")

    def _run(self, inputs: Inputs, at: Sequence[tuple[int, int]]) -> Tensor:
        assert self.cache is not None
        inputs = Inputs(self._known(inputs.tokens_M), inputs.parents_M, inputs.counts_B)
        with self.model.decoding():
            result = self.model(inputs, self.cache, need="hidden")
            places = torch.tensor([result.starts_B[slot] + place for slot, place in at], device=self.model.device)
            logits: Tensor = self.model.logits(result.hidden_MD[places])
        return logits
