"""Mixtures of experts: a router chooses for each row the few experts, of many, that it passes through.

The rows of a pass are grouped by expert, so that the weights of each chosen expert are read once and those of other
experts not at all. Nodes of a tree share the experts that they agree on. Among experts with equal scores the one with
the lowest index is chosen, and a row's experts are added in the order of their indices: the result of a row does not
depend on the other rows if that of a product does not, as with the native kernels.

B rows of the batch, R rows of one pass, M rows of all, E experts, k experts that a row passes through, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from anabranch.model.config import ExpertsConfig, ModelConfig
from anabranch.model.mlp import MLP

__all__ = ["Experts"]


class ClampedMLP(MLP):
    """The MLP of gpt-oss: clamp gate and up, then compute gate sigmoid(alpha gate) (up + 1)."""

    def __init__(self, config: ModelConfig, alpha: float, limit: float) -> None:
        super().__init__(config)
        self.alpha, self.limit = alpha, limit

    def through(self, x: Tensor, up: Callable[[Tensor], Tensor], down: Callable[[Tensor], Tensor]) -> Tensor:
        """The feed-forward part with other products in place of ``up`` and ``down``."""
        gate, y = up(x).chunk(2, dim=-1)
        gate, y = gate.clamp(max=self.limit), y.clamp(-self.limit, self.limit)
        return down((y + 1) * (gate * torch.sigmoid(gate * self.alpha)))


class Experts(nn.Module):
    """The feed-forward part of a layer with experts; ``router`` scores them (Shazeer et al. 2017).

    The linear layers of the experts may be replaced by quantised or packed modules.
    """

    def __init__(self, config: ModelConfig, experts: ExpertsConfig) -> None:
        super().__init__()
        self.config = experts
        inside = replace(config, intermediate_size=experts.width, mlp_bias=experts.bias)
        self.router: nn.Module = nn.Linear(config.hidden_size, experts.count, bias=experts.bias)
        self.experts = nn.ModuleList(
            MLP(inside) if experts.clamp is None else ClampedMLP(inside, *experts.clamp) for _ in range(experts.count)
        )

    def choose(self, rows_MD: Tensor) -> tuple[Tensor, Tensor]:
        """The chosen experts of each row [M, k] and their weights [M, k], by descending score."""
        scores: Tensor = self.router(rows_MD).float()
        # not topk, whose choice among equal scores is undefined
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        chosen = order[:, : self.config.chosen]
        if self.config.normalized:
            return chosen, ordered[:, : self.config.chosen].softmax(-1)
        return chosen, scores.softmax(-1).gather(1, chosen)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]; sums in float32."""
        rows = x.reshape(-1, x.shape[-1])
        chosen, weights = self.choose(rows)
        by_expert = chosen.flatten().argsort(stable=True)
        of_row, weights = by_expert // self.config.chosen, weights.flatten()[by_expert, None]
        counts = torch.bincount(chosen.flatten(), minlength=self.config.count).tolist()
        y = torch.zeros(rows.shape, dtype=torch.float32, device=x.device)
        parts = zip(self.experts, torch.split(of_row, counts), torch.split(weights, counts), strict=True)
        for expert, at, weight in parts:
            if len(at):
                y.index_add_(0, at, expert(rows[at]).float() * weight)
        return y.to(x.dtype).view(x.shape)
