"""A pass over rows with any mask, with gradients, in plain PyTorch.

R rows, T text length, C rows of earlier passes, L = C + R, D model width, K kv heads, E head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anabranch.model.blocks import RowSide, attention
from anabranch.model.decoder import Decoder

__all__ = ["Earlier", "Rows", "causal", "rows_pass"]


@dataclass(frozen=True)
class Rows:
    """The results of a pass.

    entries      states before each layer, and after the last layer, [1, R, D] each
    hidden_1RD   states after the last norm
    keys_values  of each layer [1, K, C + R, E]
    """

    entries: list[Tensor]
    hidden_1RD: Tensor
    keys_values: list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Earlier:
    """Rows of earlier passes: their positions, and the keys and values of each layer, [1, K, C, E]."""

    positions_C: Tensor
    keys_values: list[tuple[Tensor, Tensor]]


def causal(length: int) -> Tensor:
    """The mask [T, T] of plain decoding: row t sees rows up to t."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def rows_pass(
    target: Decoder,
    tokens_R: Tensor,
    positions_R: Tensor,
    visible_RL: Tensor,
    sides: Sequence[RowSide | None] | None = None,
    earlier: Earlier | None = None,
) -> Rows:
    """Run rows through all layers; row i attends to the rows j of ``visible_RL[i, j]``: the earlier ones, then its own.

    ``sides`` are low-rank terms by layer. Sliding windows apply on top of the mask.
    """
    config, dtype = target.config, target.dtype
    longest = int(positions_R.max()) + 1
    # copies: tables that a pass made in inference mode take no part in gradients
    cos, sin = (turn.clone().to(dtype) for turn in target.rope()(positions_R[None], longest))
    groups = config.num_heads // config.num_kv_heads
    places_L = positions_R if earlier is None else torch.cat((earlier.positions_C, positions_R))

    def bias(window: int | None) -> Tensor:
        seen = visible_RL
        if window is not None:
            seen = seen & ((positions_R[:, None] - places_L) < window)
        return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, float("-inf")).repeat(groups, 1)[None, None]

    biases: dict[bool, Tensor] = {}
    entries: list[Tensor] = []
    kept: list[tuple[Tensor, Tensor]] = []
    x = target.embed(tokens_R[None], positions_R[None])
    for index, block in enumerate(target.blocks):
        sliding = config.is_sliding(index)
        if sliding not in biases:
            biases[sliding] = bias(config.sliding_window if sliding else None)
        entries.append(x)

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor = biases[sliding]) -> Tensor:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
            if earlier is not None:
                k, v = (torch.cat(both, 2) for both in zip(earlier.keys_values[len(kept)], (k, v), strict=True))
            kept.append((k, v))
            return attention(config, q, *kept[-1], mask)

        side: Any = None if sides is None else sides[index]
        x = block(x, cos, sin, attend, side)
    return Rows([*entries, x], target.norm(x), kept)
