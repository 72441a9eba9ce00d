"""Low-rank terms beside a linear layer (LoRA, Hu et al. 2022)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["LowRank"]


class LowRank(nn.Module):
    """x -> up(down(x)), initialised to zero like LoRA (Hu et al. 2022). 2 * rank parameters per channel."""

    def __init__(self, width_in: int, width_out: int, rank: int, *, activation: bool = False) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(rank, width_in))
        self.up = nn.Parameter(torch.zeros(width_out, rank))
        self.activation = activation
        if not self.down.is_meta:
            nn.init.normal_(self.down, std=1.0 / math.sqrt(width_in))

    def forward(self, x: Tensor, *, fixed: bool = False) -> Tensor:
        """[..., width_in] -> [..., width_out]; ``fixed``: with gradients for ``x`` only."""
        down, up = (self.down.detach(), self.up.detach()) if fixed else (self.down, self.up)
        y = F.linear(x, down)
        return F.linear(F.silu(y) if self.activation else y, up)
