"""Our decoder against transformers', family by family: whole forwards, cache reuse, batches, trees, pruning."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from toys import Oracle, ToyMaker, tokens

from anabranch.errors import InputError
from anabranch.model.blocks import Block
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder
from anabranch.model.inputs import Inputs
from anabranch.model.load import Target, load_target
from anabranch.model.passes import Entry, Pass
from anabranch.tree import DraftTree
from small import logits_after, logits_of, new_cache

#   0 - 1 - 3
#   |   +-- 4 - 6
#   +-- 2 - 5
PARENTS = [-1, 0, 0, 1, 1, 2, 4]
PATHS = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5], [0, 1, 4, 6]]


def run(decoder: Decoder, feed: Inputs, cache: Cache, **options: object) -> Tensor:
    return logits_of(decoder(feed, cache, **options))


def advance(decoder: Decoder, ids: list[int], cache: Cache, slot: int = 0, **options: object) -> Tensor:
    """Run a chain in one row and commit all of it."""
    logits = run(decoder, Inputs.of_prompt(ids), cache, slots=slice(slot, slot + 1), **options)
    cache.commit([list(range(len(ids)))])
    return logits[0]


def chains(rows: list[list[int]]) -> Inputs:
    return Inputs.of_trees([DraftTree.chain(ids[0], ids[1:]) for ids in rows])


def tree(seed: int) -> DraftTree:
    return DraftTree(np.array(tokens(len(PARENTS), seed=seed), np.int64), np.array(PARENTS, np.int64))


def along(tree: DraftTree, path: list[int]) -> list[int]:
    return [int(tree.tokens[node]) for node in path]


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


class Pruner:
    """A rider that only prunes: before layer ``start`` it keeps the nodes ``kept``, before ``then[0]`` ``then[1]``."""

    def __init__(self, start: int, kept_Bn: list[list[int]], then: tuple[int, list[list[int]]] | None = None) -> None:
        self.start, self.kept_Bn, self.then = start, torch.tensor(kept_Bn), then
        self.rides, self.fixed = True, False  # layer by layer: it prunes on the way

    def enter(self, x_BND: Tensor, run: Pass) -> tuple[Tensor, Entry]:
        last = self.kept_Bn if self.then is None else self.kept_Bn.gather(1, torch.tensor(self.then[1]))
        return self._prune(self.start, self.kept_Bn, x_BND, run), Entry(list(last.numpy()))

    def in_kernels(self, kind: str) -> None:
        """PyTorch runs it."""

    def positions(self, nodes: int) -> int:
        return nodes

    def _prune(self, layer: int, kept_Bn: Tensor, x_BND: Tensor, run: Pass) -> Tensor:
        run.select(layer, kept_Bn)
        return x_BND.gather(1, kept_Bn[:, :, None].expand(-1, -1, x_BND.shape[2]))

    def layer(self, index: int, block: Block, x_BRD: Tensor, run: Pass, entry: Entry) -> Tensor:
        if self.then is not None and self.then[0] == index:
            x_BRD = self._prune(index, torch.tensor(self.then[1]), x_BRD, run)
        return block(x_BRD, run.cos, run.sin, lambda *parts: run.attend(index, *parts))

    def leave(self, x_BRD: Tensor, run: Pass) -> tuple[Tensor, Tensor]:
        return x_BRD, x_BRD.flatten(0, 1)[:, None]


def test_one_forward(toy: tuple[Target, Oracle]) -> None:
    target, oracle = toy
    ids = tokens(23)
    theirs = oracle.logits(ids)
    assert theirs.std() > 0.3, "a toy that says nothing tests nothing"
    close(logits_after(target.decoder, ids), theirs)


def test_cache_reuse_in_uneven_pieces(toy: tuple[Target, Oracle]) -> None:
    target, oracle = toy
    ids, cache = tokens(23), new_cache(target.decoder)
    pieces, start = [], 0
    for width in (1, 7, 3, 1, 1, 10):
        pieces.append(advance(target.decoder, ids[start : start + width], cache))
        start += width
    assert cache.lengths == [start] == [len(ids)]
    close(torch.cat(pieces), oracle.logits(ids))


def test_rows_of_different_lengths(toy: tuple[Target, Oracle]) -> None:
    target, oracle = toy
    rows = [tokens(length, seed=length) for length in (3, 12, 7)]
    cache = new_cache(target.decoder, rows=3)
    for slot, ids in enumerate(rows):
        close(advance(target.decoder, ids, cache, slot), oracle.logits(ids))
    for width in (1, 4, 1):
        more = [tokens(width, seed=100 * width + slot) for slot in range(3)]
        logits = run(target.decoder, chains(more), cache)
        cache.commit([list(range(width))] * 3)
        rows = [ids + new for ids, new in zip(rows, more, strict=True)]
        for slot, ids in enumerate(rows):
            close(logits[slot], oracle.logits(ids)[-width:])


def test_each_node_of_a_tree_is_its_path_alone(toy: tuple[Target, Oracle]) -> None:
    target, oracle = toy
    prompt, cache, drawn = tokens(9), new_cache(target.decoder), tree(5)
    advance(target.decoder, prompt, cache)
    logits = run(target.decoder, Inputs.of_trees([drawn]), cache)[0]
    for node, path in enumerate(PATHS):
        close(logits[node], oracle.logits(prompt + along(drawn, path))[-1])


@pytest.mark.parametrize("path", [[0], [0, 2, 5], [0, 1, 4, 6]])
def test_commit_of_a_path_equals_a_fresh_prefill(toy: tuple[Target, Oracle], path: list[int]) -> None:
    target, oracle = toy
    prompt, cache, drawn, more = tokens(9), new_cache(target.decoder), tree(5), tokens(4, seed=7)
    advance(target.decoder, prompt, cache)
    run(target.decoder, Inputs.of_trees([drawn]), cache)
    cache.commit([path])
    ids = prompt + along(drawn, path)
    assert cache.lengths == [len(ids)]
    fresh = new_cache(target.decoder)
    advance(target.decoder, ids, fresh)
    n = len(ids)
    torch.testing.assert_close(cache.keys[:, :, :, :n], fresh.keys[:, :, :, :n], rtol=0, atol=1e-4)
    torch.testing.assert_close(cache.values[:, :, :, :n], fresh.values[:, :, :, :n], rtol=0, atol=1e-4)
    close(advance(target.decoder, more, cache), oracle.logits(ids + more)[-4:])


def test_pruned_trees_of_two_rows(toy: tuple[Target, Oracle]) -> None:
    """Rows keep different nodes; kept nodes are untouched, and decoding goes on as if nothing had been drafted."""
    target, oracle = toy
    if target.config.recurrent is not None:
        return  # whatever prunes needs dense layers (``ModelConfig.dense``)
    prompts, trees = [tokens(4), tokens(9, seed=2)], [tree(5), tree(6)]
    kept = [[0, 1, 4, 6], [0, 1, 2, 5]]
    paths = [[0, 1, 2, 3], [0, 2, 3]]  # of kept nodes: 0 1 4 6 and 0 2 5
    cache = new_cache(target.decoder, rows=2)
    for slot, prompt in enumerate(prompts):
        advance(target.decoder, prompt, cache, slot)
    logits = run(target.decoder, Inputs.of_trees(trees), cache, rider=Pruner(2, kept))
    assert logits.shape[1] == 4
    for slot in range(2):
        for place, node in enumerate(kept[slot]):
            close(logits[slot, place], oracle.logits(prompts[slot] + along(trees[slot], PATHS[node]))[-1])
    cache.commit(paths)
    rows = [
        prompts[slot] + along(trees[slot], [kept[slot][place] for place in path]) for slot, path in enumerate(paths)
    ]
    assert cache.lengths == [len(ids) for ids in rows]
    more = [tokens(3, seed=8), tokens(3, seed=9)]
    logits = run(target.decoder, chains(more), cache)
    for slot in range(2):
        close(logits[slot], oracle.logits(rows[slot] + more[slot])[-3:])


def test_pruning_twice(make_toy: ToyMaker) -> None:
    target, oracle = make_toy("llama")
    prompt, cache, drawn, more = tokens(6), new_cache(target.decoder), tree(5), tokens(3, seed=7)
    advance(target.decoder, prompt, cache)
    # 0 1 2 4 6 are left in layer 1, 0 1 4 6 of them in layer 2
    pruner = Pruner(1, [[0, 1, 2, 4, 6]], then=(2, [[0, 1, 3, 4]]))
    logits = run(target.decoder, Inputs.of_trees([drawn]), cache, rider=pruner)[0]
    for place, node in enumerate((0, 1, 4, 6)):
        close(logits[place], oracle.logits(prompt + along(drawn, PATHS[node]))[-1])
    cache.commit([[0, 1, 2]])
    ids = prompt + along(drawn, PATHS[4])
    close(advance(target.decoder, more, cache), oracle.logits(ids + more)[-3:])


def test_trees_of_different_sizes_and_a_row_that_leaves(make_toy: ToyMaker) -> None:
    target, oracle = make_toy("mistral-sliding")
    prompts = [tokens(8), tokens(3, seed=2), tokens(5, seed=3)]
    cache = new_cache(target.decoder, rows=3)
    for slot, prompt in enumerate(prompts):
        advance(target.decoder, prompt, cache, slot)
    drawn = [tree(5), DraftTree.root(40), DraftTree.chain(41, [42, 43])]
    logits = run(target.decoder, Inputs.of_trees(drawn).widened(8), cache)
    assert logits.isfinite().all(), "padding sees itself, so that no row of the softmax is empty"
    close(logits[0, 6], oracle.logits(prompts[0] + along(drawn[0], PATHS[6]))[-1])
    close(logits[1, 0], oracle.logits([*prompts[1], 40])[-1])
    close(logits[2, 2], oracle.logits([*prompts[2], 41, 42, 43])[-1])
    cache.commit([[0], [0], [0, 1, 2]])
    assert cache.remove_row(0) == 2
    rows = [[*prompts[2], 41, 42, 43], [*prompts[1], 40]]
    assert cache.lengths == [len(ids) for ids in rows]
    logits = run(target.decoder, chains([[50], [51]]), cache)
    close(logits[0, 0], oracle.logits([*rows[0], 50])[-1])
    close(logits[1, 0], oracle.logits([*rows[1], 51])[-1])


def test_a_window_narrower_than_the_tree_is_deep(make_toy: ToyMaker) -> None:
    """The window counts positions, not places in the cache: siblings stand between a node and its ancestors there."""
    target, oracle = make_toy("mistral-sliding")
    prompt, cache = tokens(4), new_cache(target.decoder)
    advance(target.decoder, prompt, cache)
    drawn = DraftTree(np.array(tokens(10, seed=5), np.int64), np.array([-1, 0, 0, 0, 3, 4, 5, 6, 7, 8], np.int64))
    logits = run(target.decoder, Inputs.of_trees([drawn]), cache)[0]
    path = [0, 3, 4, 5, 6, 7, 8, 9]
    for depth, node in enumerate(path):
        close(logits[node], oracle.logits(prompt + along(drawn, path[: depth + 1]))[-1])


def test_rewound_tokens_are_forgotten(make_toy: ToyMaker) -> None:
    target, oracle = make_toy("gemma2")
    ids, cache = tokens(12), new_cache(target.decoder)
    advance(target.decoder, ids, cache)
    cache.rewind(0, 5)
    more = tokens(3, seed=4)
    close(advance(target.decoder, more, cache), oracle.logits(ids[:5] + more)[-3:])


def test_learned_positions_end(make_toy: ToyMaker) -> None:
    target, _ = make_toy("gpt2")
    with pytest.raises(InputError, match="needs 129 positions, but the target has 128"):
        target.decoder(Inputs.of_prompt(tokens(129)), new_cache(target.decoder, capacity=256))


def test_bfloat16_is_near(make_toy: ToyMaker) -> None:
    """The half-width types run through every wire too; their numerics are a matter of rounding."""
    target, oracle = make_toy("llama")
    half, ids = load_target(str(target.path), dtype="bfloat16", device="cpu"), tokens(10)
    logits = logits_after(half.decoder, ids)
    assert logits.dtype == torch.bfloat16
    theirs = oracle.logits(ids)
    assert (logits.float() - theirs).abs().mean() < 0.1 * theirs.std()
