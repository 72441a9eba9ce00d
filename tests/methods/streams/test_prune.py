"""Early-exit pruning: the drawn example, and a naive walk over random trees."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from anabranch.methods.streams import prune
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.prune import early_exit_logits, prune_nodes
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder
from anabranch.model.inputs import Inputs
from anabranch.model.passes import Nodes, Pass
from anabranch.tree import DraftTree
from small import prompt, small, small_adapter


def a_pass(target: Decoder, trees: list[DraftTree]) -> Pass:
    cache = Cache(target.config, rows=len(trees), capacity=64, dtype=target.dtype, device=target.device)
    for _ in trees:
        cache.add_row()
    feed = Inputs.of_trees(trees)
    cache.begin(feed.tokens_BN.shape[1], slice(0, len(trees)))
    return Pass(target.config, Nodes.of(feed, cache.lengths), cache, slice(0, len(trees)), target.rope())


def random_tree(size: int, seed: int) -> DraftTree:
    rng = np.random.default_rng(seed)
    parents = [-1, *(int(rng.integers(0, node)) for node in range(1, size))]
    return DraftTree(np.array(prompt(size, seed), np.int64), np.array(parents, np.int64))


def test_the_drawn_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """root -> a (0.6) -> c (0.4); root -> b (0.3) -> d (0.1): keep 3 is root, a, b."""
    target = small()
    a, b, c, d = 3, 4, 5, 6
    tree = DraftTree(np.array([9, a, b, c, d], np.int64), np.array([-1, 0, 0, 1, 2], np.int64))

    def distributions(target: Decoder, adapter: StreamAdapter, main_BND: Tensor) -> Tensor:
        distribution = torch.full((1, 5, 19), 1e-6)
        distribution[0, 0, a], distribution[0, 0, b], distribution[0, 1, c], distribution[0, 2, d] = 0.6, 0.3, 0.4, 0.1
        distribution[0, :, 18] = 1 - distribution[0, :, :18].sum(-1)
        return distribution.log()

    monkeypatch.setattr(prune, "early_exit_logits", distributions)
    for keep, kept in ((2, [0, 1]), (3, [0, 1, 2]), (4, [0, 1, 2, 3]), (5, [0, 1, 2, 3, 4])):
        nodes = prune_nodes(target, small_adapter(target), torch.zeros(1, 5, 32), a_pass(target, [tree]), keep)
        assert (nodes.nodes_Bn.tolist(), nodes.counts_B) == ([kept], [keep])
    for threshold, kept, allowed in ((0.35, [0, 1, 3], [a]), (0.2, [0, 1, 2, 3], [a, b]), (0.7, [0], [])):
        nodes = prune_nodes(target, small_adapter(target), torch.zeros(1, 5, 32), a_pass(target, [tree]), 0, threshold)
        assert nodes.nodes_Bn.tolist() == [kept]
        assert nodes.allowed_BnV is not None
        assert nodes.allowed_BnV[0, 0, :18].nonzero().flatten().tolist() == allowed


@pytest.mark.parametrize("case", ["llama", "gemma2"])
def test_random_trees_against_a_walk(case: str) -> None:
    target = small(case)
    adapter = small_adapter(target)
    trees = [random_tree(size, size) for size in (12, 7, 1)]
    main = torch.randn(3, 12, 32, generator=torch.Generator().manual_seed(5))
    distributions = early_exit_logits(target, adapter, main).float().log_softmax(-1)
    for keep, threshold in ((2, 0.0), (5, 0.0), (9, 0.0), (0, 0.05), (4, 0.03), (0, 0.5)):
        found = prune_nodes(target, adapter, main, a_pass(target, trees), keep, threshold)
        kept = found.nodes_Bn
        for b, tree in enumerate(trees):
            worth = [0.0] * tree.size
            for node in range(1, tree.size):
                parent = int(tree.parents[node])
                step = float(distributions[b, parent, int(tree.tokens[node])])
                worth[node] = worth[parent] + (step if step >= math.log(threshold or 1e-30) else -math.inf)
            best = sorted((n for n in range(tree.size) if worth[n] > -math.inf), key=lambda node: (-worth[node], node))
            mine = kept[b, : found.counts_B[b]].tolist()
            assert mine == sorted(best[: keep or None])
            assert len(set(kept[b].tolist())) == kept.shape[1]  # what fills a row up is another node
            assert tree.select(mine).size == len(mine)  # refuses what is no tree
            assert all(not math.isnan(w) for w in worth)
