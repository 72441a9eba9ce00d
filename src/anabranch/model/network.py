"""A target's weights, and the parts of a pass that PyTorch computes with any backend.

V vocabulary, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from anabranch.model.blocks import Norm
from anabranch.model.config import ModelConfig
from anabranch.model.encoder import Encoder
from anabranch.model.layers import Layers
from anabranch.model.rope import Rope

__all__ = ["Network"]


class Network(Layers):
    """The layers and the head. Each module may be replaced by a quantised or packed one.

    of_rows  the type of activations; None: that of the norms
    encoder  that of an encoder-decoder model; None: there is none
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.head: Any = nn.Linear(config.hidden_size, config.vocab_size, bias=config.head_bias)
        if config.tied_head:
            self.head.weight = self.embedding.weight
        self.encoder = None if config.encoder is None else Encoder(config.encoder)
        self.of_rows: torch.dtype | None = None
        self._rope: Rope | None = None

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self._norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of activations, and of weights that are not packed."""
        return self._norm.weight.dtype if self.of_rows is None else self.of_rows

    @property
    def _norm(self) -> Norm:
        """A norm, whose weight is never packed."""
        norm = self.norm if self.config.final_norm else self.blocks[0].norm_in
        assert isinstance(norm, Norm)
        return norm

    @property
    def every_block(self) -> Iterator[nn.Module]:
        """The blocks of decoder and encoder."""
        yield from self.blocks
        yield from () if self.encoder is None else self.encoder.blocks

    def rope(self) -> Rope:
        """The rotation tables, made on the weights' device on first use."""
        if self._rope is None or self._rope.device != self.device:
            c = self.config
            self._rope = Rope(c.rope, self.device, sliding=c.sliding_rope, query_scaling=c.query_scaling)
        return self._rope

    def logits(self, x: Tensor) -> Tensor:
        """Normed hidden states [..., D] -> [..., V]."""
        z: Tensor = self.head(x)
        if self.config.logit_softcap is not None:
            z = torch.tanh(z / self.config.logit_softcap) * self.config.logit_softcap
        return z
