"""The drawings of tree.py with the same numbers, and what holds for every tree."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from anabranch.tree import UNKNOWN_LOG_PROB, DraftTree

# Another job on the machine must not fail a test of what holds.
patient = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
THE, CAT, DOG, SAT, RAN = range(10, 15)


def ints(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


@pytest.fixture
def cat_tree() -> DraftTree:
    """The drawing at the top of tree.py."""
    return DraftTree(ints(THE, CAT, DOG, SAT, RAN), ints(-1, 0, 0, 1, 1))


@st.composite
def trees(draw: st.DrawFn, max_size: int = 24, vocabulary: int = 3, root: int | None = None) -> DraftTree:
    size = draw(st.integers(1, max_size))
    parents = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]
    tokens = draw(st.lists(st.integers(0, vocabulary - 1), min_size=size, max_size=size))
    if root is not None:
        tokens[0] = root
    joint = [0.0] * size
    for node in range(1, size):
        joint[node] = joint[parents[node]] + draw(st.floats(-3, 0, width=32))
    log_probs = np.array(joint, np.float32) if draw(st.booleans()) else None
    sources = ("target", *(draw(st.sampled_from("ab")) for _ in range(1, size)))
    return DraftTree(ints(*tokens), ints(*parents), log_probs=log_probs, sources=sources)


def path_tokens(tree: DraftTree, node: int) -> tuple[int, ...]:
    return tuple(int(tree.tokens[i]) for i in tree.path_to(node))


def test_module_drawing(cat_tree: DraftTree) -> None:
    assert cat_tree.size == 5
    assert cat_tree.depths.tolist() == [0, 1, 1, 2, 2]
    assert cat_tree.max_depth == 2
    assert cat_tree.children(0) == (1, 2)
    assert cat_tree.children(1) == (3, 4)
    assert cat_tree.children(4) == ()
    assert cat_tree.path_to(4) == (0, 1, 4)
    assert cat_tree.path_to(0) == (0,)
    assert cat_tree.leaves == (2, 3, 4)
    assert cat_tree.mask.dtype == np.bool_
    assert cat_tree.mask.astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 0, 1],
    ]


def test_select_drawing(cat_tree: DraftTree) -> None:
    small = cat_tree.select([0, 1, 4])
    assert small.tokens.tolist() == [THE, CAT, RAN]
    assert small.parents.tolist() == [-1, 0, 1]


def test_root() -> None:
    tree = DraftTree.root(7)
    assert (tree.size, tree.max_depth, tree.leaves, tree.sources) == (1, 0, (0,), ("target",))
    assert tree.mask.tolist() == [[True]]
    assert tree.draft_probs is None


def test_chain() -> None:
    probs = torch.full((2, 4), 0.25)
    tree = DraftTree.chain(9, [1, 2], source="prompt_lookup", draft_probs=probs, log_probs=[-0.5, -1.5])
    assert tree.tokens.tolist() == [9, 1, 2]
    assert tree.parents.tolist() == [-1, 0, 1]
    assert tree.sources == ("target", "prompt_lookup", "prompt_lookup")
    assert tree.log_probs.tolist() == [0.0, -0.5, -1.5]
    assert tree.draft_probs is probs
    assert tree.mask.tolist() == np.tri(3, dtype=bool).tolist()
    assert DraftTree.chain(9, []).size == 1


def test_from_paths_drawing() -> None:
    tree = DraftTree.from_paths(9, [[1, 2], [1, 3], [2]])
    assert tree.tokens.tolist() == [9, 1, 2, 3, 2]
    assert tree.parents.tolist() == [-1, 0, 1, 1, 0]
    assert tree.log_probs is None


def test_from_paths_keeps_the_highest_probability_of_a_shared_node() -> None:
    tree = DraftTree.from_paths(9, [[1, 2], [1, 3]], source=["a", "b"], log_probs=[[-1, -2], [-0.5, -3]])
    assert tree.sources == ("target", "b", "a", "b")
    assert tree.log_probs.tolist() == [0, -0.5, -2, -3]


def merge_inputs() -> list[DraftTree]:
    first = DraftTree.chain(9, [1, 2], source="a", log_probs=[-0.1, -0.3])
    second = DraftTree(
        ints(9, 1, 5, 4),
        ints(-1, 0, 1, 0),
        log_probs=np.array([0, -0.2, -0.4, -2], np.float32),
        sources=("target", *"bbb"),
    )
    return [first, second]


def test_merge_drawing() -> None:
    full = DraftTree.merge(merge_inputs(), 5)
    assert full.tokens.tolist() == [9, 1, 2, 5, 4]
    assert full.parents.tolist() == [-1, 0, 1, 1, 0]
    assert full.sources == ("target", "a", "a", "b", "b")
    agreed = math.log(1 - (1 - math.exp(-0.1)) * (1 - math.exp(-0.2)))
    np.testing.assert_allclose(full.log_probs, [0, agreed, -0.3, -0.4, -2.0], rtol=1e-5)
    assert DraftTree.merge(merge_inputs()).tokens.tolist() == full.tokens.tolist()
    assert DraftTree.merge(merge_inputs(), 4).tokens.tolist() == [9, 1, 2, 5]
    assert DraftTree.merge(merge_inputs(), 1).tokens.tolist() == [9]


def test_trees_without_probabilities_are_merged_at_one_half() -> None:
    sure = DraftTree.chain(9, [1, 2], log_probs=[-0.1, -0.2])
    merged = DraftTree.merge([DraftTree.chain(9, [3, 4, 5]), sure], 4)
    assert merged.tokens.tolist() == [9, 3, 1, 2]
    assert merged.log_probs[1] == np.float32(UNKNOWN_LOG_PROB)


def test_truncate_keeps_parents_of_overrated_children() -> None:
    rising = DraftTree.chain(9, [1, 2, 3], log_probs=[-5, -1, -0.5])  # rounding can do this; a distribution cannot
    assert rising.truncate(2).tokens.tolist() == [9, 1]
    assert DraftTree.from_paths(9, [[1, 2], [3]]).truncate(3).tokens.tolist() == [9, 1, 3]


def test_what_a_threshold_leaves_was_sampled_from_the_rest() -> None:
    """Tokens that may not follow a node have no probability among its children."""
    probs = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]])
    tree = DraftTree(ints(9, 0, 1, 2), ints(-1, 0, 0, 1), draft_probs=probs)
    left = tree.select([0, 2], torch.tensor([[False, True, True], [True, True, True]]))
    assert left.tokens.tolist() == [9, 1]
    assert left.draft_probs is not None
    assert torch.allclose(left.draft_probs, torch.tensor([[0.0, 0.3, 0.2]]))
    assert replace(tree, replacement=False).select([0, 2], torch.ones(2, 3, dtype=torch.bool)).draft_probs is None


def test_whatever_may_drop_nodes_drops_draft_probs() -> None:
    tree = DraftTree.chain(9, [1, 2], draft_probs=torch.full((2, 3), 1 / 3))
    results = [tree.select([0, 1, 2]), tree.select([0]), tree.truncate(9), DraftTree.merge([tree], 9)]
    assert [result.draft_probs for result in results] == [None] * 4


@patient
@given(trees())
def test_mask_depths_and_children_follow_from_parents(tree: DraftTree) -> None:
    for node in range(tree.size):
        ancestors = {node}
        walk = node
        while walk:
            walk = int(tree.parents[walk])
            ancestors.add(walk)
        assert set(np.flatnonzero(tree.mask[node]).tolist()) == ancestors
        assert tree.depths[node] == len(ancestors) - 1
        assert set(tree.path_to(node)) == ancestors
        assert tree.children(node) == tuple(np.flatnonzero(tree.parents == node).tolist())
    assert tree.max_depth == tree.mask.sum(axis=1).max() - 1
    assert tree.leaves == tuple(i for i in range(tree.size) if i not in tree.parents)


@pytest.mark.parametrize("size", [7, 8, 9, 64, 255, 256])
def test_mask_of_a_long_chain(size: int) -> None:
    assert (DraftTree.chain(0, list(range(size - 1))).mask == np.tri(size, dtype=bool)).all()


@patient
@given(trees(), st.data())
def test_select_keeps_paths(tree: DraftTree, data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.integers(0, tree.size - 1)))
    kept = np.flatnonzero(tree.mask[[0, *chosen]].any(axis=0))
    small = tree.select(kept)
    replace(small)  # checks it: ``select`` does not
    assert small.draft_probs is None
    assert small.sources == tuple(tree.sources[i] for i in kept)
    for new, old in enumerate(kept.tolist()):
        assert path_tokens(small, new) == path_tokens(tree, old)
    assert (small.mask == tree.mask[np.ix_(kept, kept)]).all()
    if tree.log_probs is not None:
        assert (small.log_probs == tree.log_probs[kept]).all()


@patient
@given(trees(), st.integers(1, 30))
def test_truncate_keeps_the_best(tree: DraftTree, budget: int) -> None:
    small = tree.truncate(budget)
    assert small.size == min(budget, tree.size)
    everything = tree.log_probs if tree.log_probs is not None else -tree.depths
    kept = small.log_probs if small.log_probs is not None else -small.depths
    np.testing.assert_array_equal(np.sort(kept), np.sort(everything)[::-1][: small.size][::-1])


@patient
@given(st.lists(trees(max_size=10, root=0), min_size=1, max_size=3), st.integers(1, 30))
def test_merge_is_the_union_of_paths(some: list[DraftTree], budget: int) -> None:
    union = {path_tokens(tree, node) for tree in some for node in range(tree.size)}
    full = DraftTree.merge(some, 1000)
    paths = [path_tokens(full, node) for node in range(full.size)]
    assert len(paths) == len(set(paths))
    assert set(paths) == union
    cut = DraftTree.merge(some, budget)
    assert cut.draft_probs is None
    assert cut.size == min(budget, len(union))
    assert {path_tokens(cut, node) for node in range(cut.size)} <= union


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [([1, 2], [-1]), ([], []), ([1, 2], [-1, 1]), ([1, 2], [-1, -1]), ([1, 2], [0, 0]), ([1, 2, 3], [-1, 2, 0])],
)
def test_malformed_trees_are_refused(tokens: list[int], parents: list[int]) -> None:
    with pytest.raises(AssertionError):
        DraftTree(ints(*tokens), ints(*parents))


def test_malformed_companions_are_refused() -> None:
    tokens, parents = ints(1, 2), ints(-1, 0)
    with pytest.raises(AssertionError, match="int64"):
        DraftTree(tokens.astype(np.int32), parents)
    with pytest.raises(AssertionError, match="one source"):
        DraftTree(tokens, parents, sources=("target",))
    with pytest.raises(AssertionError, match="numbers"):
        DraftTree(tokens, parents, log_probs=np.array([0, np.nan], np.float32))
    with pytest.raises(AssertionError, match="one log probability"):
        DraftTree(tokens, parents, log_probs=np.zeros(3, np.float32))
    with pytest.raises(AssertionError, match="one row of draft_probs"):
        DraftTree(tokens, parents, draft_probs=torch.ones(3, 4))


@pytest.mark.parametrize("kept", [[], [1], [0, 3], [0, 2, 1], [0, 0], [0, 9]])
def test_select_refuses_what_is_not_a_tree(cat_tree: DraftTree, kept: list[int]) -> None:
    with pytest.raises(AssertionError):
        cat_tree.select(kept)


def test_merge_refuses_other_roots() -> None:
    with pytest.raises(AssertionError, match="share their root"):
        DraftTree.merge([DraftTree.root(1), DraftTree.root(2)], 4)
