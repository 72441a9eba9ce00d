"""The frozen target's pass over a batch: the states that drafters learn from.

B rows, T text length, D model width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.learning.examples import Batch
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder
from anabranch.model.inputs import Inputs

__all__ = ["TargetStates", "run_frozen"]


@dataclass(frozen=True)
class TargetStates:
    """What the frozen target computed for a batch, in its own type.

    hidden_BTD  states after the last norm
    taps        main rows before the layers that were asked for, each [B, T, D]
    cache       keys and values of all layers [layers, B, K, T, E]
    """

    hidden_BTD: Tensor
    taps: Mapping[int, Tensor]
    cache: Cache


@torch.no_grad()
def run_frozen(
    target: Decoder, batch: Batch, *, frozen: Decoder | None = None, taps: Sequence[int] = ()
) -> TargetStates:
    """Run the target over a batch in one pass, without gradients.

    frozen  runs the pass in the target's place: a packed copy where that is faster
    taps    layers before which the main rows are returned

    The states of padding are computed too; nothing attends to it.
    """
    rows, width = batch.tokens_BT.shape
    runner = target if frozen is None else frozen
    cache = Cache(target.config, rows=rows, capacity=width, dtype=runner.dtype, device=target.device)
    for prompt, length in zip((batch.starts_B + 1).tolist(), batch.lengths_B.tolist(), strict=True):
        cache.add_row(target.rope().prompt(prompt, length))  # rotated as it will be decoded
    with runner.decoding():
        found = runner(Inputs.of_chains(batch.tokens_BT.numpy()), cache, taps=taps, need="hidden")

    def by_row(x_MD: Tensor) -> Tensor:
        return torch.stack([x_MD[found.nodes(row)] for row in range(rows)]).to(target.dtype)

    return TargetStates(by_row(found.hidden_MD), {layer: by_row(found.taps[layer]) for layer in taps}, cache)
