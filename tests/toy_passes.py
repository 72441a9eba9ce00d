"""A pass over three ragged trees after prompts, with streams riding in it or not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from anabranch.drafting.drafter import Observation, Row
from anabranch.methods.streams.adapter import StreamModule
from anabranch.methods.streams.draft import StreamSettings
from anabranch.methods.streams.drafter import StreamDrafter
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder
from anabranch.model.inputs import Inputs
from anabranch.model.passes import PassResult, Rider
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree
from anabranch.verify import Verdict
from small import prompt

LENGTHS = (9, 4, 12)  # committed tokens of the rows
EMITTED = 0
PATHS = ((0, 1, 3), (0,), (0, 2))


def ragged_trees() -> list[DraftTree]:
    """Trees of 6, 1 and 4 nodes."""
    parents = ([-1, 0, 0, 1, 1, 3], [-1], [-1, 0, 0, 2])
    rows = [np.array(prompt(len(p), seed=40 + len(p)), np.int64) for p in parents]
    return [DraftTree(row, np.array(p, np.int64)) for row, p in zip(rows, parents, strict=True)]


@torch.no_grad()
def run_ragged(target: Decoder, rider: Rider | None = None, taps: Sequence[int] = ()) -> tuple[PassResult, Cache]:
    """The pass over ``ragged_trees``, and the cache after it, not committed."""
    cache = Cache(target.config, rows=3, capacity=64, dtype=target.dtype, device=target.device)
    for slot, length in enumerate(LENGTHS):
        cache.add_row()
        target(Inputs.of_prompt(prompt(length, seed=slot)), cache, slots=slice(slot, slot + 1), need="hidden")
        cache.commit([range(length)])
    return target(Inputs.of_trees(ragged_trees()), cache, rider=rider, taps=taps), cache


def drafted_states(target: Decoder, module: StreamModule, placement: str) -> list[Tensor]:
    """The streams [S, D] that a drafter keeps of each row's accepted node, the last of ``PATHS``."""
    drafter = StreamDrafter(target, module, StreamSettings(placement=placement))  # type: ignore[arg-type]
    output, cache = run_ragged(target, drafter.needs.rider, drafter.needs.layers)
    cache.commit(PATHS)
    rows = [Row([EMITTED], 1, SamplingParams()) for _ in PATHS]
    for row in rows:
        drafter.join(row)
    verdicts = [Verdict(path, 0) for path in PATHS]
    seen = Observation(output, cache, range(3), ragged_trees(), verdicts, [True] * 3, drafter.max_nodes)
    drafter.observe(rows, seen)
    return [state for row in rows if (state := drafter._state(row).states_SD) is not None]
