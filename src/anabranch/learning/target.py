"""The frozen target's pass over a batch: the states that drafters learn from.

B rows, T text length, K kv heads, E head width, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.learning.examples import Batch
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder
from anabranch.model.inputs import Inputs

__all__ = ["Keeping", "RunTarget", "TargetStates", "frozen_target", "run_frozen"]


@dataclass(frozen=True)
class TargetStates:
    """The states that a target computed for a batch, in its own type.

    hidden_BTD   after the last norm
    taps         main rows before the layers that were named, each [B, T, D]
    keys_values  of the layers that were named, each [B, K, T, E]
    encoded      the encoder's output for each row [S, D], beside keys and values of an encoder-decoder target
    """

    hidden_BTD: Tensor
    taps: Mapping[int, Tensor]
    keys_values: Sequence[tuple[Tensor, Tensor]]
    encoded: Sequence[Tensor] = ()


# (batch, taps=layers before which main rows are returned, keys_from=first layer whose keys and values are; None: none)
RunTarget: TypeAlias = Callable[..., TargetStates]
# (run, dtype=type of the pass, started=main rows are read from each row's last prompt token on only) -> the same, which
# keeps states
Keeping: TypeAlias = Callable[..., RunTarget]


@torch.no_grad()
def run_frozen(
    target: Decoder,
    batch: Batch,
    *,
    frozen: Decoder | None = None,
    taps: Sequence[int] = (),
    keys_from: int | None = None,
) -> TargetStates:
    """Run the target over a batch in one pass, without gradients.

    frozen     runs the pass in the target's place: a packed copy where that is faster
    taps       layers before which the main rows are returned
    keys_from  return keys and values of the layers from this one on; None: of no layer

    Padding is not computed where rows may differ in length, and its states are zero; otherwise it is. Nothing attends
    to it.
    """
    rows, width = batch.tokens_BT.shape
    runner = target if frozen is None else frozen
    cache = Cache(target.config, rows=rows, capacity=width, dtype=runner.dtype, device=target.device)
    with runner.decoding():
        encoded = _encoded(runner, batch)
        for row, (prompt, length) in enumerate(
            zip((batch.starts_B + 1).tolist(), batch.lengths_B.tolist(), strict=True)
        ):
            memory = runner.memory(encoded[row]) if encoded else None
            cache.add_row(target.rope().prompt(prompt, length), memory)  # rotated as it will be decoded
        result = runner(_inputs(batch, ragged=runner.ragged), cache, taps=taps, need="hidden")

    def by_row(x_MD: Tensor) -> Tensor:
        parts = [x_MD[result.nodes(row)] for row in range(rows)]
        whole = torch.stack([F.pad(part, (0, 0, 0, width - len(part))) for part in parts])
        return whole.to(runner.dtype).to(target.dtype)  # in the type that drafts read, and not in that of the layers

    pairs: list[tuple[Tensor, Tensor]] = []
    if keys_from is not None:  # copies, so that the cache of the lower layers is freed
        keys, values = (part[keys_from:].to(target.dtype, copy=True) for part in (cache.keys, cache.values))
        pairs = list(zip(keys, values, strict=True))
        encoded = [states.to(runner.dtype).to(target.dtype) for states in encoded]
    taps_BTD = {layer: by_row(result.taps[layer]) for layer in taps}
    return TargetStates(by_row(result.hidden_MD), taps_BTD, pairs, encoded if pairs else ())


def _encoded(runner: Decoder, batch: Batch) -> list[Tensor]:
    """The encoder's output for each row [S, D]; empty for a decoder-only target. Raises InputError for a bad source."""
    if runner.encoder is None:
        return []
    sources = []
    for source in batch.encoded:
        runner.encoder.check(source)
        assert source is not None, "checked"
        sources.append(runner.backend.encoded(runner, source))
    return sources


def _inputs(batch: Batch, *, ragged: bool) -> Inputs:
    """The rows of a batch, without their padding if they may be ``ragged``."""
    if not ragged:
        return Inputs.of_chains(batch.tokens_BT.numpy())
    lengths = batch.lengths_B.tolist()
    tokens = np.concatenate([row[:length] for row, length in zip(batch.tokens_BT.numpy(), lengths, strict=True)])
    return Inputs(tokens, np.concatenate([np.arange(-1, length - 1) for length in lengths]), lengths)


def frozen_target(target: Decoder, frozen: Decoder | None) -> RunTarget:
    """``run_frozen`` for one target."""
    return partial(run_frozen, target, frozen=frozen)
