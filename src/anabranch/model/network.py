"""A target's weights, and the parts of a pass that PyTorch computes with any backend.

V vocabulary, D model width.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from anabranch.model.blocks import Block, Norm
from anabranch.model.config import ModelConfig
from anabranch.model.rope import Rope

__all__ = ["Network", "rounded"]


class Network(nn.Module):
    """Embedding, blocks, last norm and head. Each may be replaced by a quantised or packed module.

    of_rows  the type of activations; None: that of the norms
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding: Any = _table(config.vocab_size, config.hidden_size)
        self.positions = (
            _table(config.max_positions + config.learned_offset, config.hidden_size)
            if config.position == "learned"
            else None
        )
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = Norm(config, scale=config.output_scale)
        self.head: Any = nn.Linear(config.hidden_size, config.vocab_size, bias=config.head_bias)
        if config.tied_head:
            self.head.weight = self.embedding.weight
        self.of_rows: torch.dtype | None = None
        self._rope: Rope | None = None

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of activations, and of weights that are not packed."""
        return self.norm.weight.dtype if self.of_rows is None else self.of_rows

    def rope(self) -> Rope:
        """The rotation tables, made on the weights' device on first use."""
        if self._rope is None or self._rope.device != self.device:
            c = self.config
            self._rope = Rope(c.rope, self.device, sliding=c.sliding_rope, query_scaling=c.query_scaling)
        return self._rope

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Token ids and positions [...] -> [..., D]."""
        x: Tensor = self.embedding(tokens)
        if self.config.embedding_scale != 1.0:
            x = x * rounded(self.config.embedding_scale, x.dtype)
        if self.positions is not None:
            x = x + self.positions(positions + self.config.learned_offset)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Normed hidden states [..., D] -> [..., V]."""
        z: Tensor = self.head(x)
        if self.config.logit_softcap is not None:
            z = torch.tanh(z / self.config.logit_softcap) * self.config.logit_softcap
        return z


def _table(rows: int, width: int) -> nn.Embedding:
    """``nn.Embedding``, but without random numbers on the meta device, where they would import 70 MB of PyTorch."""
    weight = torch.empty(rows, width)
    if not weight.is_meta:
        nn.init.normal_(weight)
    made: nn.Embedding = nn.Embedding.from_pretrained(weight, freeze=False)  # type: ignore[no-untyped-call]
    return made


@cache
def rounded(value: float, dtype: torch.dtype) -> float:
    """A scale as PyTorch multiplies values of this type by it."""
    return float(torch.tensor(value, dtype=dtype))
