"""Streams riding in the target's pass: the main rows do not notice, and trailing gives the same streams."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from anabranch.drafting.drafter import Observation, Row
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.draft import StreamSettings
from anabranch.methods.streams.drafter import StreamDrafter
from anabranch.methods.streams.recipes import StreamConfig
from anabranch.methods.streams.rider import StreamRider
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder
from anabranch.model.inputs import Inputs
from anabranch.model.passes import PassResult, Rider
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree
from anabranch.verify import Verdict
from small import CASES, RICH, logits_of, prompt, small, small_adapter

PAPER = StreamConfig(num_streams=4, num_stream_layers=2, adapter_rank=3, pruning_rank=2)
CONFIGS = {
    "paper": PAPER,
    "rich": RICH,
    "rotation": replace(PAPER, position="rotation", rotation_step=0.1, init_rank=2),
}
LENGTHS = (9, 4, 12)  # committed tokens of the rows
EMITTED = 0
PATHS = ((0, 1, 3), (0,), (0, 2))


def trees() -> list[DraftTree]:
    """Ragged: 6, 1 and 4 nodes."""
    parents = ([-1, 0, 0, 1, 1, 3], [-1], [-1, 0, 0, 2])
    rows = [np.array(prompt(len(p), seed=40 + len(p)), np.int64) for p in parents]
    return [DraftTree(row, np.array(p, np.int64)) for row, p in zip(rows, parents, strict=True)]


def filled(target: Decoder) -> Cache:
    """A cache with the rows' committed tokens."""
    cache = Cache(target.config, rows=3, capacity=40, dtype=target.dtype, device=target.device)
    for slot, length in enumerate(LENGTHS):
        cache.add_row()
        target(Inputs.of_prompt(prompt(length, seed=slot)), cache, slots=slice(slot, slot + 1), need="hidden")
        cache.commit([range(length)])
    return cache


@torch.no_grad()
def run(target: Decoder, rider: Rider | None, taps: Sequence[int] = ()) -> tuple[PassResult, Cache]:
    cache = filled(target)
    return target(Inputs.of_trees(trees()), cache, rider=rider, taps=taps), cache


@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("name", CONFIGS)
def test_main_rows_do_not_notice(case: str, name: str) -> None:
    target = small(case)
    plain, bare = run(target, None)
    output, cache = run(target, StreamRider(target, small_adapter(target, CONFIGS[name]), ride=True))
    for b, tree in enumerate(trees()):
        n = tree.size
        assert torch.allclose(logits_of(output)[b, :n], logits_of(plain)[b, :n], atol=1e-5)
    for mine, other in ((cache.keys, bare.keys), (cache.values, bare.values)):
        for b, length in enumerate(LENGTHS):
            assert torch.allclose(mine[:, b, :, :length], other[:, b, :, :length], atol=1e-5)


def states(target: Decoder, adapter: StreamAdapter, placement: str) -> list[torch.Tensor]:
    """The streams [S, D] that a drafter keeps of each row's accepted node."""
    drafter = StreamDrafter(target, adapter, StreamSettings(placement=placement))  # type: ignore[arg-type]
    output, cache = run(target, drafter.needs.rider, drafter.needs.layers)
    cache.commit(PATHS)
    rows = [Row([EMITTED], 1, SamplingParams()) for _ in PATHS]
    for row in rows:
        drafter.join(row)
    verdicts = [Verdict(path, 0) for path in PATHS]
    seen = Observation(output, cache, range(3), trees(), verdicts, [True] * 3, drafter.max_nodes)
    drafter.observe(rows, seen)
    found = [drafter._state(row).states_SD for row in rows]
    return [states_SD for states_SD in found if states_SD is not None]


@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("name", CONFIGS)
def test_riding_is_trailing(case: str, name: str) -> None:
    target = copy.deepcopy(small(case))
    target.embedding.weight.data[EMITTED] = 0  # told of the token that was emitted, they would know more than riders
    adapter = small_adapter(target, CONFIGS[name])
    ridden, trailed = states(target, adapter, "ride"), states(target, adapter, "trail")
    for b in range(3):
        assert ridden[b].shape == (CONFIGS[name].num_streams, 32)
        assert torch.allclose(ridden[b], trailed[b], atol=2e-5)


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_trailing_streams_are_told_the_root(case: str) -> None:
    target = small(case)
    adapter = small_adapter(target, RICH)
    ridden, trailed, auto = (states(target, adapter, placement) for placement in ("ride", "trail", "auto"))
    for b in range(3):
        assert not torch.allclose(ridden[b], trailed[b], atol=1e-2)
        assert torch.equal(trailed[b], auto[b])
    assert adapter.root is not None
    adapter.root.token.data.zero_()
    for mine, other in zip(states(target, adapter, "trail"), states(target, adapter, "ride"), strict=True):
        assert torch.allclose(mine, other, atol=2e-5)


def test_top_context_rides_and_changes_the_streams() -> None:
    target = small()
    adapter = small_adapter(target, replace(PAPER, context_top=3))
    near, full = states(target, adapter, "auto"), states(target, small_adapter(target, PAPER), "ride")
    assert not torch.allclose(near[0], full[0], atol=1e-3)
    wide = states(target, small_adapter(target, replace(PAPER, context_top=40)), "ride")
    for b in range(3):
        assert torch.allclose(wide[b], full[b], atol=1e-5)


@pytest.mark.parametrize("case", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("ride", [True, False])
def test_pruning_changes_nothing_for_the_nodes_that_stay(case: str, ride: bool) -> None:
    target, keep = small(case), 3
    adapter = small_adapter(target)
    whole, pruned = StreamRider(target, adapter, ride=ride), StreamRider(target, adapter, ride=ride, prune=keep)
    full, _ = run(target, whole)
    part, cache = run(target, pruned)
    assert part.kept is not None
    assert [len(kept) for kept in part.kept] == [min(keep, tree.size) for tree in trees()]
    for b, kept_n in enumerate(part.kept):
        for place, node in enumerate(kept_n.tolist()):
            assert torch.allclose(logits_of(part)[b, place], logits_of(full)[b, node], atol=1e-5)
            if ride:
                assert part.riding_MSD is not None
                assert full.riding_MSD is not None
                mine, whole_S = part.riding_MSD[part.nodes(b)][place], full.riding_MSD[full.nodes(b)][node]
                assert torch.allclose(mine, whole_S, atol=2e-5)
    # committing the kept tree's path leaves the cache of a plain prefill of the same tokens
    kept = [tree.select(kept_n) for tree, kept_n in zip(trees(), part.kept, strict=True)]
    paths = [tree.path_to(tree.size - 1) for tree in kept]
    cache.commit(paths)
    for b, (tree, path) in enumerate(zip(kept, paths, strict=True)):
        text = [*prompt(LENGTHS[b], seed=b), *(int(tree.tokens[node]) for node in path)]
        fresh = Cache(target.config, rows=1, capacity=40, dtype=target.dtype, device=target.device)
        fresh.add_row()
        with torch.no_grad():
            target(Inputs.of_prompt(text), fresh)
        fresh.commit([range(len(text))])
        assert cache.lengths[b] == len(text)
        assert torch.allclose(cache.keys[:, b, :, : len(text)], fresh.keys[:, 0, :, : len(text)], atol=1e-5)
        assert torch.allclose(cache.values[:, b, :, : len(text)], fresh.values[:, 0, :, : len(text)], atol=1e-5)
