"""Biases of attention by the distance of positions (Raffel et al. 2020, T5).

B rows of the batch, N queries, L keys, H query heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from anabranch.model.config import RelativeConfig

__all__ = ["biases_of", "buckets_of", "relative_bias"]


def buckets_of(distances: Tensor, config: RelativeConfig) -> Tensor:
    """The bucket of each distance, key position minus query position [...].

    With 8 buckets, both ways, up to a distance of 8:

        distance  -9 -8 -4 -3 -2 -1  0  1  2  3  4  8
        bucket     3  3  3  2  2  1  0  5  6  6  7  7
    """
    count = config.buckets
    if config.both_ways:
        count //= 2
        first, far = torch.where(distances > 0, count, 0), distances.abs()
    else:
        first, far = torch.zeros_like(distances), (-distances).clamp(min=0)
    exact = count // 2
    # in float32, as T5 was trained: the bounds between buckets depend on it
    share = torch.log(far.clamp(min=1).float() / exact) / math.log(config.distance / exact)
    large = (exact + (share * (count - exact)).long()).clamp(max=count - 1)
    return first + torch.where(far < exact, far, large)


def biases_of(table: nn.Module, config: RelativeConfig) -> tuple[Tensor, int]:
    """The bias of each head by the distance from query to key [H, 2 far + 1], from -far on, and far.

    Beyond these distances the biases do not change.
    """
    far = config.distance
    biases: Tensor = table(buckets_of(torch.arange(-far, far + 1), config))
    return biases.T, far


def relative_bias(table: nn.Module, config: RelativeConfig, queries_BN: Tensor, keys_BL: Tensor) -> Tensor:
    """The bias of each head between positions of queries and of keys [B, H, N, L]."""
    bias: Tensor = table(buckets_of(keys_BL[:, None, :] - queries_BN[:, :, None], config))
    return bias.permute(0, 3, 1, 2)
