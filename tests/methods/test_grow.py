"""Growth of trees: drawn examples, brute force over whole trees, and the form in tensors against the one in lists.

That the C++ form draws the same trees as the tensors is a test of ``native/test_kernels.py``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from anabranch.drafting.grow import Child, Form, Growth, Node, by_depth, grow, product_size
from anabranch.drafting.grow_tensors import grow_tensors, trees_of
from anabranch.tree import DraftTree

WORDS = 6
TABLE: dict[int, list[Child]] = {
    9: [(1, math.log(0.6), None), (2, math.log(0.3), None)],
    1: [(3, math.log(0.8), None), (4, math.log(0.1), None)],
    2: [(5, math.log(0.5), None)],
    3: [(5, math.log(0.5), None)],
}


def looked_up(asked: list[list[int]], nodes: Sequence[Node]) -> list[Sequence[Child]]:
    asked.append([node.token for node in nodes])
    return [TABLE.get(node.token, []) for node in nodes]


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    return [tuple(tree.tokens[list(tree.path_to(node)[1:])].tolist()) for node in range(tree.size)]


def test_the_drawing_of_a_growth() -> None:
    asked: list[list[int]] = []
    (tree,) = grow([Growth(9, Form(4, 3))], partial(looked_up, asked), by_depth("draft"))
    assert asked == [[9], [1], [3]]
    assert tree.tokens.tolist() == [9, 1, 3, 2]
    assert tree.parents.tolist() == [-1, 0, 1, 0]
    assert tree.sources == ("target", "draft 1", "draft 2", "draft 1")
    assert tree.log_probs == pytest.approx([0.0, *map(math.log, (0.6, 0.48, 0.3))])


def test_rounds_ask_about_several_nodes_of_several_trees() -> None:
    asked: list[list[int]] = []
    forms = Form(5, 2, (2,), frontier=3, rounds=2), Form(9, 9, (1,)), Form(9, 9, floor=math.log(0.4), by_level=True)
    trees = grow([Growth(9, form) for form in forms], partial(looked_up, asked), by_depth("draft"))
    assert asked == [[9, 9, 9], [1, 2, 1, 1], [3, 3], [5]]
    assert [tree.tokens.tolist() for tree in trees] == [[9, 1, 3, 2, 5], [9, 1, 3, 5], [9, 1, 3]]


def test_a_tree_waits_for_what_is_not_answered_while_others_go_on() -> None:
    asked: list[list[int]] = []

    def expand(nodes: Sequence[Node]) -> list[Sequence[Child] | None]:
        answers = looked_up(asked, nodes)
        late = [node.growth.key == "late" for node in nodes]
        return [None if after and not all(late) else answer for after, answer in zip(late, answers, strict=True)]

    growths = [Growth(9, Form(9, 2, (1,)), key=key) for key in ("late", "early")]
    trees = grow(growths, expand, by_depth("draft"))
    assert asked == [[9, 9], [9, 1], [9], [1]]
    assert [tree.tokens.tolist() for tree in trees] == [[9, 1, 3]] * 2


def test_a_ranked_tree_has_given_places() -> None:
    asked: list[list[int]] = []
    form = Form(9, 5, {(): 2, (0,): 1, (1,): 2}, frontier=9)
    (tree,) = grow([Growth(9, form)], partial(looked_up, asked), by_depth("draft"))
    assert asked == [[9], [1, 2]]
    assert paths(tree) == [(), (1,), (1, 3), (2,), (2, 5)]


def test_of_equals_the_one_proposed_first_is_kept() -> None:
    """2 and 3 are as probable as 4 below 1: siblings in the order of the answer, and the shallower node first."""
    half: dict[int, list[Child]] = {9: [(1, math.log(0.5), None), (2, math.log(0.25), None), (3, math.log(0.25), None)]}
    half[1] = [(4, math.log(0.5), None)]
    for nodes, tokens in ((3, [9, 1, 2]), (4, [9, 1, 2, 3]), (5, [9, 1, 2, 3, 4])):
        (tree,) = grow(
            [Growth(9, Form(nodes, 3))], lambda asked: [half.get(n.token, []) for n in asked], by_depth("draft")
        )
        assert tree.tokens.tolist() == tokens


# -- sampled trees ----------------------------------------------------------------------------------------------------
def test_siblings_without_replacement_are_as_many_as_have_a_probability() -> None:
    q_V = torch.tensor([0.0, 0.5, 0.5, 0.0])
    form = Form(9, 1, (3,), noise=np.random.default_rng(0), replacement=False)
    (tree,) = grow([Growth(0, form)], lambda nodes: [q_V for _ in nodes], by_depth("draft"))
    assert sorted(tree.tokens.tolist()) == [0, 1, 2]
    assert not tree.replacement
    assert tree.draft_probs is not None
    assert tree.draft_probs.tolist() == [q_V.tolist()]


def test_a_sampled_node_below_the_floor_stays_without_children() -> None:
    form = Form(99, 3, (2, 1), math.log(0.3), noise=np.random.default_rng(1))
    q_V = torch.tensor([0.1, 0.9])
    (tree,) = grow([Growth(0, form)], lambda nodes: [q_V for _ in nodes], by_depth("draft"))
    assert tree.log_probs is not None
    for node in range(tree.size):
        children = {0: 2, 1: 1, 2: 1, 3: 0}[int(tree.depths[node])] if tree.log_probs[node] >= math.log(0.3) else 0
        assert len(tree.children(node)) == children


def test_a_node_without_a_distribution_gets_no_children() -> None:
    form = Form(9, 2, (2,), noise=np.random.default_rng(0))
    (tree,) = grow([Growth(0, form)], lambda nodes: [() for _ in nodes], by_depth("draft"))
    assert tree.size == 1


# -- against brute force, and in tensors -----------------------------------------------------------------------------
def next_log_probs(tokens: tuple[int, ...], *, ties: bool = False) -> Tensor:
    """A distribution [WORDS] that depends on all tokens up to a node."""
    noise = torch.Generator().manual_seed(hash(tokens) % 2**31)
    if ties:
        return torch.log(torch.tensor([4.0, 2.0, 2.0, 1.0, 1.0, 1.0])[torch.randperm(WORDS, generator=noise)] / 16)
    return (2 * torch.randn(WORDS, generator=noise)).log_softmax(-1)


def best_children(node: Node, k: int, ties: bool) -> list[Child]:
    found = next_log_probs((node.growth.root.token, *node.path), ties=ties)
    values, tokens = found.sort(descending=True, stable=True)
    return [(token, value, None) for token, value in zip(tokens.tolist()[:k], values.tolist(), strict=False)]


def listed(roots: Sequence[int], form: Form, k: int, *, ties: bool = False) -> list[DraftTree]:
    def expand(nodes: Iterable[Node]) -> list[list[Child]]:
        return [best_children(node, k, ties) for node in nodes]

    return grow([Growth(root, form) for root in roots], expand, by_depth("draft"))


@pytest.mark.parametrize("form", [Form(12, 3), Form(12, 3, frontier=5), Form(12, 3, frontier=40, by_level=True)])
def test_a_tree_has_the_most_probable_nodes(form: Form) -> None:
    for root, tree in enumerate(listed(range(8), form, WORDS)):
        joint = {(): 0.0}
        for path in itertools.chain(*(itertools.product(range(WORDS), repeat=depth) for depth in (1, 2, 3))):
            joint[path] = joint[path[:-1]] + float(next_log_probs((root, *path[:-1]))[path[-1]])
        best = sorted(joint, key=joint.__getitem__, reverse=True)[: form.nodes]
        assert paths(tree) == best
        assert tree.log_probs == pytest.approx([joint[path] for path in best], abs=1e-5)


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("lazy", [False, True], ids=["device", "lazy"])
@pytest.mark.parametrize(("nodes", "k", "frontier"), [(12, 6, 40), (12, 3, 2), (30, 4, 5), (3, 2, 1), (None, 2, 1)])
def test_tensors_grow_the_same_trees(nodes: int | None, k: int, frontier: int, lazy: bool, ties: bool) -> None:
    """Ties within a level may be broken otherwise in tensors, whose top-k is not stable."""
    roots, depth = [0, 3, 5], 3
    prefixes = [[(root,)] for root in roots]

    def expand(d: int, tokens_BF: Tensor, above_BF: Tensor | None) -> tuple[Tensor, Tensor]:
        if above_BF is not None:
            for b, row in enumerate(prefixes):
                row[:] = [
                    (*row[parent], token)
                    for parent, token in zip(above_BF[b].tolist(), tokens_BF[b].tolist(), strict=True)
                ]
        logs = torch.stack([torch.stack([next_log_probs(path, ties=ties) for path in row]) for row in prefixes])
        values, tokens = logs.sort(dim=-1, descending=True, stable=True)
        return tokens[..., :k], values[..., :k]

    levels = grow_tensors(torch.tensor(roots), expand, depth=depth, budget=nodes, frontier=frontier, lazy=lazy)
    floor = -3.5 if nodes == 30 else -math.inf
    size = nodes or product_size((k,), depth)
    form = Form(size, depth, (k,), floor, frontier if nodes else size, by_level=True)
    for tensors, lists in zip(
        trees_of(roots, levels, "draft", nodes, floor), listed(roots, form, k, ties=ties), strict=True
    ):
        assert tensors.log_probs == pytest.approx(lists.log_probs, abs=1e-5)
        if not ties:
            assert paths(tensors) == paths(lists)
            assert tensors.parents.tolist() == lists.parents.tolist()
            assert tensors.sources == lists.sources


def test_sizes() -> None:
    assert [product_size((2, 1), depth) for depth in range(4)] == [1, 3, 5, 7]
    assert product_size((3,), 2) == 13
