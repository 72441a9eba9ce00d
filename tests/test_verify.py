"""The distribution of the emitted tokens, enumerated exactly over a 4-word vocabulary.

The enumeration runs the shipped code: ``match`` on every outcome of the target's draws, and ``trials``, which makes
every decision of ``reject``, on every outcome of the drafter's. Steps that emit fewer tokens than are compared continue
by plain decoding, so the joint distribution of several tokens is tested, not only that of the first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from anabranch.errors import CapabilityError
from anabranch.sampling import generator
from anabranch.tree import DraftTree
from anabranch.verify import Verdict, match, reject, trials

VOCABULARY = 4
LENGTH = 3  # tokens whose joint distribution is compared
ROOT = 0
Distribution = NDArray[np.float64]
Words = tuple[int, ...]
Model = Callable[[Words], Distribution]


def model(seed: int, sharpness: float = 1.5) -> Model:
    """A language model: a next-word distribution [V] for each sequence of words after the root."""

    def next_word(words: Words) -> Distribution:
        weights = np.exp(sharpness * np.random.default_rng((seed, len(words), *words)).standard_normal(VOCABULARY))
        return np.asarray(weights / weights.sum())

    return next_word


P, Q = model(1), model(2)


def joint(p: Model, emitted: dict[Words, float]) -> Distribution:
    """The distribution [V, V, V] of the first LENGTH words where plain decoding continues what was emitted."""
    result = np.zeros([VOCABULARY] * LENGTH)
    for words, weight in emitted.items():
        for rest in itertools.product(range(VOCABULARY), repeat=max(0, LENGTH - len(words))):
            odds, full = weight, words
            for word in rest:
                odds, full = odds * p(full)[word], (*full, word)
            result[full[:LENGTH]] += odds
    return result


def plain_distribution() -> Distribution:
    return joint(P, {(): 1.0})


def words_at(tree: DraftTree, node: int) -> Words:
    return tuple(int(tree.tokens[i]) for i in tree.path_to(node)[1:])


def add(emitted: dict[Words, float], words: Words, weight: float) -> None:
    emitted[words] = emitted.get(words, 0.0) + weight


def match_distribution(tree: DraftTree) -> Distribution:
    """Run ``match`` on every outcome of the target's draws at all nodes, weighted by its probability."""
    distributions = [P(words_at(tree, node)) for node in range(tree.size)]
    emitted: dict[Words, float] = {}
    for drawn in itertools.product(range(VOCABULARY), repeat=tree.size):
        verdict = match(tree, drawn)
        weight = float(np.prod([p[word] for p, word in zip(distributions, drawn, strict=True)]))
        add(emitted, (*words_at(tree, verdict.path[-1]), verdict.next_token), weight)
    return joint(P, emitted)


def drafts(parents: list[int], replacement: bool) -> Iterator[tuple[list[int], float]]:
    """Yield every outcome of sampling the children of each node from Q, with its probability."""

    def grow(tokens: list[int], weight: float) -> Iterator[tuple[list[int], float]]:
        node = len(tokens)
        if node == len(parents):
            yield tokens, weight
            return
        words: Words = ()
        walk = parents[node]
        while walk:
            words, walk = (tokens[walk], *words), parents[walk]
        q = Q(words)
        if not replacement:
            q[[tokens[i] for i in range(1, node) if parents[i] == parents[node]]] = 0.0
            q = q / q.sum()
        for word in range(VOCABULARY):
            if q[word] > 0:
                yield from grow([*tokens, word], weight * float(q[word]))

    return grow([ROOT], 1.0)


def sampled_tree(tokens: list[int], parents: list[int], replacement: bool) -> DraftTree:
    bare = DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64))
    q_NV = torch.from_numpy(np.stack([Q(words_at(bare, node)) for node in range(bare.size)]))
    return DraftTree(bare.tokens, bare.parents, draft_probs=q_NV, replacement=replacement)


def reject_outcomes(tree: DraftTree, weight: float, emitted: dict[Words, float], node: int = 0) -> None:
    """Walk through every decision that ``reject`` can make on this tree, weighted by the odds of ``trials``."""
    words, siblings = words_at(tree, node), tree.children(node)
    decisions = trials(P(words), tree.draft_probs[node].numpy(), tree.tokens[list(siblings)], tree.replacement)
    for child, (odds, rest) in zip((*siblings, None), decisions, strict=True):
        if child is None:
            for word in range(VOCABULARY):
                add(emitted, (*words, word), weight * float(rest[word]))
        elif odds > 0:
            reject_outcomes(tree, weight * odds, emitted, child)
        weight *= 1 - odds


def rejection_distribution(parents: list[int], replacement: bool) -> Distribution:
    emitted: dict[Words, float] = {}
    for tokens, weight in drafts(parents, replacement):
        reject_outcomes(sampled_tree(tokens, parents, replacement), weight, emitted)
    return joint(P, emitted)


def distance(a: Distribution, b: Distribution) -> float:
    """Total variation distance."""
    return float(np.abs(a - b).sum() / 2)


def top(words: Words, k: int) -> list[int]:
    return [int(word) for word in np.argsort(-Q(words))[:k]]


def trees_of_all_kinds() -> dict[str, DraftTree]:
    top_k = DraftTree.from_paths(ROOT, [[word, next_word] for word in top((), 2) for next_word in top((word,), 2)])
    paths = [[word, below] for word in top((), 2) for below in top((0,), 2)]
    product = DraftTree.from_paths(ROOT, paths, log_probs=[[x, x + y] for x in (-1, -2) for y in (-1, -1.5)])
    chain = DraftTree.chain(ROOT, [3, 1, 2, 0], log_probs=[-0.5, -1.2, -1.3, -9])
    return {
        "root": DraftTree.root(ROOT),
        "chain": chain,
        "top-k": top_k,
        "product": product,
        "pruned": product.select([0, 4, 5, 6]),
        "truncated": product.truncate(5),
        "merged": DraftTree.merge([chain, product, top_k], 7),
        "repeated siblings": DraftTree(np.array([0, 1, 1, 2, 3]), np.array([-1, 0, 0, 1, 2])),
        "sampled": sampled_tree([ROOT, 2, 2, 1, 0], [-1, 0, 0, 1, 2], True),
    }


@pytest.mark.parametrize("kind", trees_of_all_kinds())
def test_matching_is_exact_for_any_tree(kind: str) -> None:
    np.testing.assert_allclose(match_distribution(trees_of_all_kinds()[kind]), plain_distribution(), rtol=0, atol=1e-12)


def test_matching_drawing() -> None:
    tree = DraftTree(np.array([9, 3, 2, 5]), np.array([-1, 0, 0, 1]))
    assert match(tree, [2, 3, 7, 5]) == Verdict((0, 2), 7)
    assert match(tree, np.array([3, 5, 7, 1])) == Verdict((0, 1, 3), 1)
    assert match(tree, [9, 3, 7, 5]) == Verdict((0,), 9)
    assert Verdict((0, 1, 3), 1).accepted == 2


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize(
    "parents",
    [[-1], [-1, 0], [-1, 0, 1, 2], [-1, 0, 0], [-1, 0, 0, 0, 0], [-1, 0, 0, 1, 2, 2], [-1, 0, 1, 1, 0]],
    ids=["root", "one", "chain", "two", "four", "tree", "interleaved"],
)
def test_rejection_is_exact_for_sampled_trees(parents: list[int], replacement: bool) -> None:
    np.testing.assert_allclose(rejection_distribution(parents, replacement), plain_distribution(), rtol=0, atol=1e-12)


def test_rejection_drawing() -> None:
    p, q = np.array([0.2, 0.6, 0.2, 0.0]), np.array([0.1, 0.8, 0.1, 0.0])
    steps = list(trials(p, q, [1, 0], True))
    np.testing.assert_allclose([odds for odds, _ in steps], [0.75, 1.0, 1.0])
    np.testing.assert_allclose(steps[1][1], [0.5, 0, 0.5, 0])
    np.testing.assert_allclose(steps[2][1], [0.5, 0, 0.5, 0])  # .4 0 .4 0, normalised


def test_without_replacement_removes_the_tried_word() -> None:
    p, q = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.4, 0.3, 0.2, 0.1])
    steps = list(trials(p, q, [0, 1], False))
    np.testing.assert_allclose(steps[1][1], [0, 0, 0.25, 0.75])
    np.testing.assert_allclose(steps[2][1], [0, 0, 0, 1])  # minus 0 1/2 1/3 1/6
    assert [odds for odds, _ in steps] == pytest.approx([0.25, 0.0, 1.0])


def test_a_drafter_that_agrees_is_always_accepted() -> None:
    p_V = torch.rand(7, generator=torch.Generator().manual_seed(0)).softmax(0)  # float32: sums to 1 only nearly
    tree = DraftTree.chain(0, [3], draft_probs=p_V[None])
    for step in range(50):
        assert reject(tree, torch.stack([p_V, p_V]), generator(0, step)).path == (0, 1)


def test_rejection_at_temperature_zero_is_the_target_argmax() -> None:
    one_hot = torch.eye(4)[[2, 1, 3]]
    hit = DraftTree(np.array([0, 1, 2]), np.array([-1, 0, 0]), draft_probs=torch.full((1, 4), 0.25))
    assert reject(hit, one_hot, generator(0, 0)) == Verdict((0, 2), 3)
    miss = DraftTree.chain(0, [1, 3], draft_probs=torch.full((2, 4), 0.25))
    assert reject(miss, one_hot, generator(0, 0)) == Verdict((0,), 2)


def shaped(draw: st.DrawFn, most: int) -> list[int]:
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, draw(st.integers(1, most))))]


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_matching_is_exact_for_random_trees(data: st.DataObject) -> None:
    parents = data.draw(st.composite(shaped)(5))
    words = data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=len(parents), max_size=len(parents)))
    tree = DraftTree(np.array([ROOT, *words[1:]]), np.array(parents))
    np.testing.assert_allclose(match_distribution(tree), plain_distribution(), rtol=0, atol=1e-12)


@given(st.composite(shaped)(5), st.booleans())
@settings(max_examples=15, deadline=None)
def test_rejection_is_exact_for_random_trees(parents: list[int], replacement: bool) -> None:
    np.testing.assert_allclose(rejection_distribution(parents, replacement), plain_distribution(), rtol=0, atol=1e-12)


def test_top_k_children_judged_by_the_ratio_err() -> None:
    best = top((), 2)
    tree = sampled_tree([ROOT, *best], [-1, 0, 0], True)
    emitted: dict[Words, float] = {}
    reject_outcomes(tree, 1.0, emitted)
    assert distance(joint(P, emitted), plain_distribution()) > 0.05


def test_sampled_children_pruned_by_token_err() -> None:
    emitted: dict[Words, float] = {}
    for tokens, weight in drafts([-1, 0, 0], True):
        kept = max(tokens[1:], key=Q(()).__getitem__)
        reject_outcomes(sampled_tree([ROOT, kept], [-1, 0], True), weight, emitted)
    assert distance(joint(P, emitted), plain_distribution()) > 0.05


def test_the_wrong_replacement_errs() -> None:
    emitted: dict[Words, float] = {}
    for tokens, weight in drafts([-1, 0, 0, 0], False):
        reject_outcomes(sampled_tree(tokens, [-1, 0, 0, 0], True), weight, emitted)
    assert distance(joint(P, emitted), plain_distribution()) > 0.01


def test_rejection_refuses_trees_without_draft_probs() -> None:
    probs = torch.full((3, 4), 0.25)
    sampled = DraftTree.chain(0, [1, 2], draft_probs=probs[:2])
    for tree in (DraftTree.chain(0, [1, 2]), sampled.select([0, 1, 2]), DraftTree.from_paths(0, [[1], [2]])):
        with pytest.raises(CapabilityError, match="use the rule 'match'"):
            reject(tree, probs, generator(0, 0))


def test_rejection_takes_a_step_without_drafts() -> None:
    assert reject(DraftTree.root(0), torch.eye(4)[[2]], generator(0, 0)) == Verdict((0,), 2)


def test_impossible_drafts_are_noticed() -> None:
    impossible = DraftTree.chain(0, [1], draft_probs=torch.tensor([[1.0, 0.0]]))
    with pytest.raises(AssertionError, match="sampled from draft_probs"):
        reject(impossible, torch.full((2, 2), 0.5), generator(0, 0))


def test_matching_wants_a_token_for_each_node() -> None:
    with pytest.raises(AssertionError, match="each node"):
        match(DraftTree.chain(0, [1, 2]), [1, 2])
