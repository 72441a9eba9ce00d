"""Acceptance probabilities of drafts against observed acceptance."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.drafting.acceptance import MEMORY, PRIOR, Acceptance, best_nodes, exclusive, merge
from anabranch.tree import DraftTree

#  9 (0) +-- 1 (1: .6) +-- 3 (3: .5) -- 4 (4: .1)
#        +-- 2 (2: .3)
TREE = DraftTree(
    np.array([9, 1, 2, 3, 4]),
    np.array([-1, 0, 0, 1, 3]),
    sources=("target", "a", "b", "a", "b"),
    log_probs=np.log(np.array([1, 0.6, 0.3, 0.5, 0.1])).astype(np.float32),
)


def best(acceptance: Acceptance, count: int) -> list[int]:
    return best_nodes(TREE, acceptance(TREE), count).tokens.tolist()


def test_the_most_probable_nodes_are_kept_in_order() -> None:
    assert [best(Acceptance(), count) for count in range(1, 6)] == [
        [9],
        [9, 1],
        [9, 1, 3],
        [9, 1, 2, 3],
        [9, 1, 2, 3, 4],
    ]
    assert best_nodes(TREE, Acceptance()(TREE), 9) is TREE


def test_of_equals_the_earlier_node_is_kept_so_a_parent_comes_before_its_child() -> None:
    chain = DraftTree.chain(9, [1, 2, 3], log_probs=[-1.0, -1.0, -1.0])
    for count in (1, 2, 3):
        assert best_nodes(chain, Acceptance()(chain), count).tokens.tolist() == [9, 1, 2, 3][:count]


def test_what_is_accepted_corrects_what_is_believed() -> None:
    acceptance = Acceptance()
    assert best(acceptance, 3) == [9, 1, 3]
    # source a errs all the time, b is right more often than it says
    for _ in range(40):
        acceptance.learn(TREE, (0, 2))
    weight = (1 - MEMORY**40) / (1 - MEMORY)
    assert acceptance.factor("a") == pytest.approx(PRIOR / (PRIOR + 1.1 * weight), rel=1e-5)
    assert acceptance.factor("b") == pytest.approx((PRIOR + weight) / (PRIOR + 0.4 * weight), rel=1e-5)
    assert acceptance.factor("c") == acceptance.factor("target") == 1.0
    assert best(acceptance, 3) == [9, 1, 2]
    found = np.array(acceptance(TREE))
    assert found[0] == 1.0
    assert (found[1:] <= found[TREE.parents[1:]]).all()


def test_acceptance_depends_on_the_verdicts_alone() -> None:
    one, two = Acceptance(), Acceptance()
    for path in ((0, 1), (0,), (0, 1, 3)):
        one.learn(TREE, path)
        two.learn(TREE, path)
    assert one == two
    assert one(TREE) == two(TREE)


def test_what_leaves_a_sure_path_is_unlikely() -> None:
    #  9 +-- 1 (.95) -- 2 (.9)      drafted by one
    #    +-- 3 (.5) -- 4 (.4)       by another, which does not know of it
    found = exclusive([-1, 0, 1, 0, 3], [1.0, 0.95, 0.9, 0.5, 0.4])
    assert found == pytest.approx([1.0, 0.95, 0.9, 0.05, 0.04])


def test_merged_trees_share_what_a_parent_has() -> None:
    sure = DraftTree.chain(9, [1, 2], source="a", log_probs=np.log([0.6, 0.5]))
    other = DraftTree(
        np.array([9, 1, 5, 4]),
        np.array([-1, 0, 1, 0]),
        sources=("target", *"bbb"),
        log_probs=np.log([1.0, 0.5, 0.4, 0.4]).astype(np.float32),
    )
    tree = merge([sure, other])
    assert tree.tokens.tolist() == [9, 1, 2, 5, 4]
    assert tree.log_probs is not None
    np.testing.assert_allclose(np.exp(tree.log_probs), [1.0, 0.8, 0.5, 0.3, 0.2], rtol=1e-5)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 30)), min_size=1, max_size=12))
def test_siblings_share_what_their_parent_has(nodes: list[tuple[float, int]]) -> None:
    parents, found = [-1], [1.0]
    for share, above in nodes:
        parent = above % len(parents)
        found.append(share * found[parent])
        parents.append(parent)
    shared = exclusive(parents, found)
    for parent in range(len(parents)):
        children = [node for node in range(1, len(parents)) if parents[node] == parent]
        assert sum(shared[node] for node in children) <= shared[parent] + 1e-9
        if children and parent == 0:
            assert max(shared[node] for node in children) == pytest.approx(max(found[node] for node in children))
