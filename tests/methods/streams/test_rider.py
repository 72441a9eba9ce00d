"""Streams riding in the target's pass: the main rows do not notice, and trailing gives the same streams."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from anabranch.methods.streams.recipes import StreamConfig
from anabranch.methods.streams.rider import StreamRider
from anabranch.model.cache import Cache
from anabranch.model.inputs import Inputs
from small import CASES, RICH, logits_of, prompt, small, small_adapter
from toy_passes import EMITTED, LENGTHS, drafted_states, ragged_trees, run_ragged

PAPER = StreamConfig(num_streams=4, num_stream_layers=2, adapter_rank=3, pruning_rank=2)
CONFIGS = {
    "paper": PAPER,
    "rich": RICH,
    "rotation": replace(PAPER, position="rotation", rotation_step=0.1, init_rank=2),
}


@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("name", CONFIGS)
def test_main_rows_do_not_notice(case: str, name: str) -> None:
    target = small(case)
    plain, bare = run_ragged(target)
    output, cache = run_ragged(target, StreamRider(target, small_adapter(target, CONFIGS[name]), ride=True))
    for b, tree in enumerate(ragged_trees()):
        n = tree.size
        assert torch.allclose(logits_of(output)[b, :n], logits_of(plain)[b, :n], atol=1e-5)
    for mine, other in ((cache.keys, bare.keys), (cache.values, bare.values)):
        for b, length in enumerate(LENGTHS):
            assert torch.allclose(mine[:, b, :, :length], other[:, b, :, :length], atol=1e-5)


@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("name", CONFIGS)
def test_riding_is_trailing(case: str, name: str) -> None:
    target = copy.deepcopy(small(case))
    target.embedding.weight.data[EMITTED] = 0  # told of the token that was emitted, they would know more than riders
    adapter = small_adapter(target, CONFIGS[name])
    ridden, trailed = drafted_states(target, adapter, "ride"), drafted_states(target, adapter, "trail")
    for b in range(3):
        assert ridden[b].shape == (CONFIGS[name].num_streams, 32)
        assert torch.allclose(ridden[b], trailed[b], atol=2e-5)


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_trailing_streams_are_told_the_root(case: str) -> None:
    target = small(case)
    adapter = small_adapter(target, RICH)
    ridden, trailed, auto = (drafted_states(target, adapter, placement) for placement in ("ride", "trail", "auto"))
    for b in range(3):
        assert not torch.allclose(ridden[b], trailed[b], atol=1e-2)
        assert torch.equal(trailed[b], auto[b])
    assert adapter.root is not None
    adapter.root.token.data.zero_()
    trailed, ridden = (drafted_states(target, adapter, placement) for placement in ("trail", "ride"))
    for mine, other in zip(trailed, ridden, strict=True):
        assert torch.allclose(mine, other, atol=2e-5)


def test_top_context_rides_and_changes_the_streams() -> None:
    target = small()
    adapter = small_adapter(target, replace(PAPER, context_top=3))
    near, full = drafted_states(target, adapter, "auto"), drafted_states(target, small_adapter(target, PAPER), "ride")
    assert not torch.allclose(near[0], full[0], atol=1e-3)
    wide = drafted_states(target, small_adapter(target, replace(PAPER, context_top=40)), "ride")
    for b in range(3):
        assert torch.allclose(wide[b], full[b], atol=1e-5)


@pytest.mark.parametrize("case", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("ride", [True, False])
def test_pruning_changes_nothing_for_the_nodes_that_stay(case: str, ride: bool) -> None:
    target, keep = small(case), 3
    adapter = small_adapter(target)
    whole, pruned = StreamRider(target, adapter, ride=ride), StreamRider(target, adapter, ride=ride, prune=keep)
    full, _ = run_ragged(target, whole)
    part, cache = run_ragged(target, pruned)
    assert part.kept is not None
    assert [len(kept) for kept in part.kept] == [min(keep, tree.size) for tree in ragged_trees()]
    for b, kept_n in enumerate(part.kept):
        for place, node in enumerate(kept_n.tolist()):
            assert torch.allclose(logits_of(part)[b, place], logits_of(full)[b, node], atol=1e-5)
            if ride:
                assert part.riding_MSD is not None
                assert full.riding_MSD is not None
                mine, whole_S = part.riding_MSD[part.nodes(b)][place], full.riding_MSD[full.nodes(b)][node]
                assert torch.allclose(mine, whole_S, atol=2e-5)
    # committing the kept tree's path leaves the cache of a plain prefill of the same tokens
    kept = [tree.select(kept_n) for tree, kept_n in zip(ragged_trees(), part.kept, strict=True)]
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
