"""A target's weights, and the parts of a pass that PyTorch computes with any backend.

V vocabulary, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from anabranch.model.config import ModelConfig
from anabranch.model.encoder import Encoder
from anabranch.model.layers import Layers

__all__ = ["Network"]


class Network(Layers):
    """The layers and the head. Each module may be replaced by a quantised or packed one.

    encoder  that of an encoder-decoder model; None: there is none
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.head: Any = nn.Linear(config.hidden_size, config.vocab_size, bias=config.head_bias)
        if config.tied_head:
            self.head.weight = self.embedding.weight
        self.encoder = None if config.encoder is None else Encoder(config.encoder)

    @property
    def every_block(self) -> Iterator[nn.Module]:
        """The blocks of decoder and encoder."""
        yield from self.blocks
        yield from () if self.encoder is None else self.encoder.blocks

    def logits(self, x: Tensor) -> Tensor:
        """Normed hidden states [..., D] -> [..., V]."""
        z: Tensor = self.head(x)
        if self.config.logit_softcap is not None:
            z = torch.tanh(z / self.config.logit_softcap) * self.config.logit_softcap
        return z
