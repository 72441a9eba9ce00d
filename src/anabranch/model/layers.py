"""Embedding, positions, blocks and last norm: the parts that an encoder and a decoder have in common.

D model width.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from anabranch.model.blocks import Block, Norm
from anabranch.model.config import ModelConfig
from anabranch.model.rope import Rope

__all__ = ["Layers", "rounded", "table"]


class Layers(nn.Module):
    """A stack of blocks with what comes before and after it.

    embedded  it has an embedding of its own
    of_rows   the type of activations; None: that of the norms
    """

    def __init__(self, config: ModelConfig, *, embedded: bool = True) -> None:
        super().__init__()
        self.config = config
        self.embedding: Any = table(config.vocab_size, config.hidden_size) if embedded else None
        self.positions = (
            table(config.max_positions + config.learned_offset, config.hidden_size)
            if config.position == "learned"
            else None
        )
        self.relative = None if config.relative is None else table(config.relative.buckets, config.num_heads)
        self.norm_embedding = Norm(config) if config.embedding_norm else None
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm: Any = Norm(config, scale=config.output_scale) if config.final_norm else nn.Identity()
        self.of_rows: torch.dtype | None = None
        self._rope: Rope | None = None

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self._some_norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of activations, and of weights that are not packed."""
        return self._some_norm.weight.dtype if self.of_rows is None else self.of_rows

    @property
    def _some_norm(self) -> Norm:
        """A norm, whose weight is never packed."""
        norm = self.norm if self.config.final_norm else self.blocks[0].norm_in
        assert isinstance(norm, Norm)
        return norm

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
        return self.placed(x, positions)

    def placed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Add to rows [..., D] what tells their positions [...], and apply the norm of the embedding."""
        if (places := self.places(positions, x.dtype)) is not None:
            x = x + places
        return x if self.norm_embedding is None else self.norm_embedding(x)

    def places(self, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The embeddings of positions [...]: [..., D]; None: there are none."""
        if self.config.position == "sinusoidal":
            return sinusoids(positions, self.config.hidden_size).to(dtype)
        if self.positions is None:
            return None
        places: Tensor = self.positions(positions + self.config.learned_offset)
        return places


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Sines, then cosines of positions [...] at ``width`` / 2 frequencies [..., width] (Vaswani et al. 2017)."""
    steps = torch.arange(0, width, 2, device=positions.device, dtype=torch.float64)
    angles = positions[..., None] / 10_000.0 ** (steps / width)
    return torch.cat((angles.sin(), angles.cos()), -1).float()


def table(rows: int, width: int) -> nn.Embedding:
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
