"""Trees from stream states: against brute force over the whole tree, and the distribution that sampled trees carry."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from anabranch.drafting.head import DrawNoise, RowVocabulary
from anabranch.methods.streams.draft import StreamDraft, StreamSettings
from anabranch.methods.streams.recipes import StreamConfig
from anabranch.sampling import SamplingParams, generator, inverse_cdf, position_keys, target_probs, target_tokens
from small import RICH, VOCABULARY, paths_of, small, small_adapter

PLAIN = StreamConfig(num_streams=3, num_stream_layers=2, pruning_rank=2)
PARENT = StreamConfig(num_streams=3, num_stream_layers=2, conditioning="parent", conditioning_rank=5)
KINDS = {"none": PLAIN, "parent": PARENT, "path": RICH}
ROOT = 7


def states(rows: int = 1, seed: int = 0) -> Tensor:
    return torch.randn(rows, 3, 32, generator=torch.Generator().manual_seed(seed))


def log_probs(draft: StreamDraft, states_SD: Tensor, path: tuple[int, ...], ids: list[int]) -> dict[int, float]:
    """The distribution of the token after ``root, *path``, straight from the formulae of ``streams/scorer.py``."""
    target, conditioner = draft.target, draft.conditioner
    j = len(path)
    state, z = states_SD[j], None
    if conditioner is not None:
        for depth, token in enumerate((ROOT, *path)):
            e = target.embedding.weight[token]
            e = e / (e.pow(2).mean() + torch.finfo(e.dtype).eps).sqrt()
            inner = conditioner.token @ e
            if conditioner.kind == "path":
                assert conditioner.state is not None
                assert conditioner.carry is not None
                inner = inner + conditioner.state @ states_SD[depth]
                inner = torch.nn.functional.silu(inner if z is None else inner + conditioner.carry @ z)
            z = inner
        state = state + conditioner.to_state @ z
    scores = target.head.weight[ids] @ state
    if target.head.bias is not None:
        scores = scores + target.head.bias[ids]
    if (cap := target.config.logit_softcap) is not None:
        scores = torch.tanh(scores / cap) * cap
    return dict(zip(ids, scores.log_softmax(-1).tolist(), strict=True))


def brute_force(draft: StreamDraft, states_SD: Tensor, ids: list[int], nodes: int) -> set[tuple[int, ...]]:
    """The most probable paths of the whole tree over ``ids``, the root's empty one among them."""
    joint: dict[tuple[int, ...], float] = {(): 0.0}
    for depth in range(draft.depth):
        for path in itertools.product(ids, repeat=depth):
            for token, log_prob in log_probs(draft, states_SD, path, ids).items():
                joint[(*path, token)] = joint[path] + log_prob
    return set(sorted(joint, key=joint.__getitem__, reverse=True)[:nodes])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["llama", "gemma2", "phi"])
def test_best_first_is_brute_force_under_a_budget(kind: str, case: str) -> None:
    target, ids = small(case), [0, 3, 5, 8, 13, 17]
    adapter = small_adapter(target, KINDS[kind], torch.tensor(ids))
    options = StreamSettings(nodes=14, k=6, frontier=64)
    draft = StreamDraft(target, adapter, options)
    rows = states(2)
    for b, tree in enumerate(draft.build(rows, [ROOT, ROOT])):
        assert tree.size == 14
        assert paths_of(tree) == brute_force(draft, rows[b], ids, 14)
        assert tree.log_probs is not None
        assert tree.sources[1:] == tuple(f"stream {d}" for d in tree.depths[1:])
        for node in range(1, tree.size):
            path = tuple(int(tree.tokens[i]) for i in tree.path_to(node)[1:])
            distribution = log_probs(draft, rows[b], path[:-1], ids)
            step = tree.log_probs[node] - tree.log_probs[tree.parents[node]]
            assert step == pytest.approx(distribution[path[-1]], abs=1e-4)


def test_a_narrow_frontier_only_forgets() -> None:
    target = small()
    draft = StreamDraft(target, small_adapter(target), StreamSettings(nodes=20, k=5, frontier=2))
    (tree,) = draft.build(states(), [ROOT])
    assert tree.size == 20
    assert len(paths_of(tree)) == 20
    expanded = [len({int(tree.parents[n]) for n in range(1, tree.size) if tree.depths[n] == d}) for d in (2, 3)]
    assert max(expanded) <= 2


@pytest.mark.parametrize("kind", KINDS)
def test_product_and_chain(kind: str) -> None:
    target = small()
    adapter = small_adapter(target, KINDS[kind])
    ids = list(range(VOCABULARY))
    product = StreamDraft(target, adapter, StreamSettings(tree="product", k=2))
    (tree,) = product.build(states(), [ROOT])
    assert tree.size == 1 + 2 + 4 + 8
    for node in range(tree.size):
        if tree.depths[node] < 3:
            path = tuple(int(tree.tokens[i]) for i in tree.path_to(node)[1:])
            distribution = log_probs(product, states()[0], path, ids)
            best = sorted(distribution, key=distribution.__getitem__, reverse=True)[:2]
            assert [int(tree.tokens[child]) for child in tree.children(node)] == best
    (chain,) = StreamDraft(target, adapter, StreamSettings(tree="chain")).build(states(), [ROOT])
    assert chain.parents.tolist() == [-1, 0, 1, 2]
    assert chain.tokens[1] == tree.tokens[1]


def test_depth_and_condition_are_options() -> None:
    target = small()
    adapter = small_adapter(target)
    shallow = StreamDraft(target, adapter, StreamSettings(depth=1))
    assert shallow.build(states(), [ROOT])[0].max_depth == 1
    assert [StreamSettings(nodes=n).streams(5) for n in (2, 3, 4, 6, 7, 32)] == [1, 2, 3, 4, 5, 5]
    assert StreamSettings(nodes=4, depth=5).streams(5) == StreamSettings(tree="chain").streams(5) == 5
    blind = StreamDraft(target, adapter, StreamSettings(condition=False, nodes=12))
    # what a blind stream says does not depend on the root
    assert np.array_equal(blind.build(states(), [3])[0].tokens[1:], blind.build(states(), [4])[0].tokens[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_knows_the_noise_draws_as_the_target_does(kind: str) -> None:
    """Were the streams' scores the target's own, the chain would be the very text that is drawn."""
    target = small()
    draft = StreamDraft(target, small_adapter(target, KINDS[kind]), StreamSettings(tree="chain"))
    ids = list(range(VOCABULARY))
    for seed in range(8):
        noise = DrawNoise(0.7, position_keys(seed, np.arange(4)))
        rows = states(2)
        for b, chain in enumerate(draft.build(rows, [ROOT, ROOT], noise=[noise, None])):
            path: tuple[int, ...] = ()
            for depth, token in enumerate(chain.tokens[1:].tolist()):
                distribution = log_probs(draft, rows[b], path, ids)
                logits = torch.tensor([[distribution[i] for i in ids]])
                params = SamplingParams(temperature=0.7 if b == 0 else 0.0)
                assert token == int(target_tokens(logits, params, noise.keys_D[depth : depth + 1]))
                path = (*path, token)


@pytest.mark.parametrize("case", ["llama", "gemma2", "phi"])
def test_a_rows_own_tokens_join_its_vocabulary(case: str) -> None:
    target, ids = small(case), [0, 3, 5, 8]
    draft = StreamDraft(
        target, small_adapter(target, RICH, torch.tensor(ids)), StreamSettings(nodes=14, k=6, frontier=64)
    )
    rows = [
        RowVocabulary(draft.head).extend([5, 11, 11, 14]),
        RowVocabulary(draft.head).extend([5, 9]),
        RowVocabulary(draft.head),
    ]
    texts = [[*ids, 11, 14], [*ids, 9], ids]
    trees = draft.build(states(3), [ROOT] * 3, rows)
    for b, tree in enumerate(trees):
        # the padding of the shorter rows is never drafted, under a soft cap neither
        assert paths_of(tree) == brute_force(draft, states(3)[b], texts[b], 14)
    later = rows[1].extend([5, 9, 17])
    assert later.ids.tolist() == [9, 17]


# -- sampled trees ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tree", ["chain", "product"])
def test_sampled_trees_carry_the_distribution_they_were_drawn_from(kind: str, tree: str) -> None:
    target, ids = small(), [0, 3, 5, 8, 13, 17]
    adapter = small_adapter(target, KINDS[kind], torch.tensor(ids))
    draft = StreamDraft(target, adapter, StreamSettings(tree=tree, k=2))  # type: ignore[arg-type]
    params = SamplingParams(temperature=0.7, top_k=4, seed=3)
    found = draft.sample(states()[0], ROOT, params, generator(3, 9, lane=2), depth=3)
    assert found.draft_probs is not None
    assert found.replacement
    assert found.size == (4 if tree == "chain" else 15)
    noise = generator(3, 9, lane=2)
    for depth in range(3):
        level = [node for node in range(found.size) if found.depths[node] == depth]
        drawn = noise.random((1 if tree == "chain" else 2, len(level)))
        for column, node in enumerate(level):
            path = tuple(int(found.tokens[i]) for i in found.path_to(node)[1:])
            scores = torch.full((1, VOCABULARY), float("-inf"))
            distribution = log_probs(draft, states()[0], path, ids)
            scores[0, list(distribution)] = torch.tensor(list(distribution.values()))
            wanted = target_probs(scores, params)
            assert torch.allclose(found.draft_probs[node], wanted[0], atol=1e-5)
            children = [int(found.tokens[child]) for child in found.children(node)]
            row = found.draft_probs[node : node + 1]
            assert children == [int(inverse_cdf(row, [u])) for u in drawn[:, column]]


def test_a_sampled_tree_stops_where_there_is_no_room() -> None:
    draft = StreamDraft(small(), small_adapter(small()), StreamSettings(tree="product", k=2))
    params = SamplingParams(temperature=1.0)
    assert draft.sample(states()[0], ROOT, params, generator(0, 1), depth=1).size == 3
    assert draft.sample(states()[0], ROOT, params, generator(0, 1), depth=0).size == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_threshold_leaves_out_what_is_unlikely(kind: str) -> None:
    target = small()
    adapter = small_adapter(target, KINDS[kind])
    (whole,) = StreamDraft(target, adapter, StreamSettings(nodes=40, k=5)).build(states(), [ROOT])
    (likely,) = StreamDraft(target, adapter, StreamSettings(nodes=40, k=5, threshold=0.05)).build(states(), [ROOT])
    assert whole.log_probs is not None
    kept = [node for node in range(whole.size) if whole.log_probs[node] >= np.log(0.05)]
    assert 1 < len(kept) < whole.size
    assert paths_of(likely) == paths_of(whole.select(kept))
