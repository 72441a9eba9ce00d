"""The feed-forward part of a layer.

B rows of the batch, R rows of one pass, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.model.config import ModelConfig

__all__ = ["ACTIVATIONS", "MLP"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class MLP(nn.Module):
    """The feed-forward part; a gated MLP keeps gate and up in one matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inner = config.intermediate_size
        self.gated = config.gated_mlp
        self.up = nn.Linear(config.hidden_size, inner * (2 if self.gated else 1), bias=config.mlp_bias)
        self.down = nn.Linear(inner, config.hidden_size, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        """[B, R, D] -> [B, R, D]."""
        return self.through(x, self.up, self.down)

    def through(self, x: Tensor, up: Callable[[Tensor], Tensor], down: Callable[[Tensor], Tensor]) -> Tensor:
        """The feed-forward part with other products in place of ``up`` and ``down``."""
        y = up(x)
        if not self.gated:
            return down(self.activation(y))
        if y.requires_grad and self.activation is F.silu:  # in training
            return down(_SiluGate.apply(y))  # type: ignore[no-untyped-call]
        gate, y = y.chunk(2, dim=-1)
        return down(self.activation(gate) * y)


class _SiluGate(torch.autograd.Function):
    """[gate, up] -> silu(gate) * up, with half of autograd's memory: silu(gate) is recomputed for the gradient.

    The two halves of the gradient are written in place instead of being concatenated, a few rows at a time.
    """

    ROWS = 512

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        """[..., 2 D] -> [..., D]."""
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        """The gradient of both halves."""
        (both,) = ctx.saved_tensors
        inner = both.shape[-1] // 2
        change = torch.empty_like(both)
        rows = (x.flatten(0, -2).split(_SiluGate.ROWS) for x in (both, change, upstream[0]))
        for part, to, slope in zip(*rows, strict=True):
            gate, up = part[:, :inner], part[:, inner:]
            torch.ops.aten.silu_backward.grad_input(slope * up, gate, grad_input=to[:, :inner])
            torch.mul(slope, F.silu(gate), out=to[:, inner:])
        return change
