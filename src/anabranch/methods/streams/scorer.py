"""Scores of draft tokens from stream states.

A stream at position t sees neither the token t + 1 that the main stream emits nor the draft tokens above it in the
tree. Its score of a child c can be conditioned on them afterwards, with a small product:

    parent:  score(c | parent) = head[c] . (s_j + W U E[parent])            a low-rank bilinear term
    path:    z_j = silu(A z_{j-1} + U E[parent_j] + C s_j),  score(c | path) = head[c] . (s_j + W z_j)

s_j is the stream's state after the target's last norm, E the target's embeddings at unit RMS, z_0 = 0.

F frontier nodes, S streams, V draft vocabulary, D model width, Z conditioning width.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.model.pack import Packable

__all__ = ["Conditioner"]


class Conditioner(Packable):
    """The trained conditioning term, shared by all streams. W is initialised to zero: no conditioning."""

    def __init__(self, width: int, kind: Literal["parent", "path"], rank: int) -> None:
        super().__init__()
        self.kind, self.rank = kind, rank
        self.token = nn.Parameter(torch.empty(rank, width))
        self.to_state = nn.Parameter(torch.zeros(width, rank))
        self.state = nn.Parameter(torch.empty(rank, width)) if kind == "path" else None
        self.carry = nn.Parameter(torch.empty(rank, rank)) if kind == "path" else None
        if not self.token.is_meta:
            for weight in (self.token, self.state, self.carry):
                if weight is not None:
                    nn.init.normal_(weight, std=1.0 / math.sqrt(weight.shape[1]))

    def forward(self, states: Tensor, parents: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor]:
        """Conditioned states, and the z to pass to the children.

        ``states`` [..., D] are streams after the last norm, ``parents`` [..., D] the parent tokens' embeddings,
        ``carried`` [..., Z] the parent's z (None for the root's children). Returns ([..., D], [..., Z]). Leading axes
        broadcast.
        """
        parents = F.rms_norm(parents.to(states.dtype), (parents.shape[-1],))
        z = self.linear(parents, "token")
        if self.kind == "path":
            z = z + self.linear(states, "state")
            if carried is not None:
                z = z + self.linear(carried, "carry")
            z = F.silu(z)
        return states + self.linear(z, "to_state"), z
