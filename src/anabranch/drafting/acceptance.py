"""Acceptance probabilities of a row's drafts, corrected by what was accepted.

A drafter estimates for each node the probability that it is accepted (``DraftTree.log_probs``). For each source of
nodes, the estimates are multiplied by the ratio of accepted to expected tokens. The corrected probabilities depend only
on the row's own drafts and text, so decoding a row again gives the same ones.

N nodes of a tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np

from anabranch.tree import DraftTree

__all__ = ["Acceptance", "best_nodes", "exclusive", "joint_log_probs", "merge"]

MEMORY = 0.99  # weight of a step relative to the one after it
PRIOR = 10.0  # weight of the drafter's own estimate, in accepted tokens


@dataclass
class Acceptance:
    """Expected and accepted draft tokens of one row by source, exponentially weighted towards recent steps."""

    expected: dict[str, float] = field(default_factory=dict)
    accepted: dict[str, float] = field(default_factory=dict)

    def factor(self, source: str, prior: float = PRIOR) -> float:
        """The correction for a source: accepted divided by expected tokens, each with the prior added."""
        return (prior + self.accepted.get(source, 0.0)) / (prior + self.expected.get(source, 0.0))

    def __call__(self, tree: DraftTree) -> list[float]:
        """[N] corrected acceptance probabilities; the root's is 1, and no node's exceeds its parent's."""
        assert tree.log_probs is not None, "trees to be ranked have log_probs"
        factors = {source: self.factor(source) for source in set(tree.sources)}
        probs = list(map(math.exp, tree.log_probs.tolist()))
        for node, (parent, source) in enumerate(zip(tree.parents.tolist(), tree.sources, strict=True)):
            if node:
                probs[node] = min(probs[parent], probs[node] * factors[source])
        return probs

    def learn(self, tree: DraftTree, path: Sequence[int]) -> None:
        """Update with a verified tree, of which the target accepted ``path``."""
        assert tree.log_probs is not None
        for counts in (self.expected, self.accepted):
            for source in counts:
                counts[source] *= MEMORY
        for source, stated in zip(tree.sources[1:], tree.log_probs[1:].tolist(), strict=True):
            self.expected[source] = self.expected.get(source, 0.0) + math.exp(stated)
        for node in path[1:]:
            source = tree.sources[node]
            self.accepted[source] = self.accepted.get(source, 0.0) + 1.0


def merge(trees: Sequence[DraftTree]) -> DraftTree:
    """The union of trees that share a root; siblings share what their parent has (``exclusive``)."""
    tree = DraftTree.merge(trees)
    assert tree.log_probs is not None, "merged trees have log_probs"
    shared = exclusive(tree.parents.tolist(), list(map(math.exp, tree.log_probs.tolist())))
    logs = [math.log(prob) if prob else -math.inf for prob in shared]
    return replace(tree, log_probs=np.array(logs, np.float32))


def exclusive(parents: Sequence[int], probs: Sequence[float]) -> list[float]:
    """Lower the probabilities of siblings that sum to more than their parent's: only one of them can be accepted.

    Drafters whose trees are merged do not know of each other. The more probable sibling keeps its probability, and what
    it leaves is the most that the others can have; their descendants fall with them.

    >>> exclusive([-1, 0, 0, 2], [1.0, 0.75, 0.5, 0.25])
    [1.0, 0.75, 0.25, 0.125]
    """
    left = list(probs)
    for node in range(1, len(probs)):
        left[parents[node]] -= probs[node]
    if min(left) >= 0.0:
        return list(probs)
    shares = [1.0] + [probs[node] / probs[parents[node]] if probs[node] else 0.0 for node in range(1, len(probs))]
    left, kept = [1.0] * len(probs), [1.0] * len(probs)
    for node in sorted(range(1, len(probs)), key=shares.__getitem__, reverse=True):
        kept[node] = max(0.0, min(shares[node], left[parents[node]]))
        left[parents[node]] -= kept[node]
    for node in range(1, len(probs)):
        kept[node] *= kept[parents[node]]
    return kept


def best_nodes(tree: DraftTree, probs: Sequence[float], count: int) -> DraftTree:
    """The ``count`` most probable nodes of a tree; among equals the earlier one, and so the parent, comes first."""
    if tree.size <= count:
        return tree
    best = sorted(range(tree.size), key=probs.__getitem__, reverse=True)[:count]
    return tree.select(sorted(best))


def joint_log_probs(paths: Sequence[tuple[Sequence[int], Sequence[float]]]) -> list[list[float]]:
    """The joint log probabilities along some continuations of a root, for ``DraftTree.from_paths``.

    paths  continuations, the best first, each with the probability of its tokens, those before given. One that leaves
           an earlier one is right only where that one is wrong: its token has its probability times what is left over

    >>> for path in joint_log_probs([([1, 2], [0.5, 0.5]), ([1, 3], [0.4, 0.4])]):
    ...     [round(math.exp(joint), 2) for joint in path]
    [0.5, 0.25]
    [0.5, 0.1]
    """
    if len(paths) == 1:  # by far the most frequent case
        return [list(accumulate(map(math.log, paths[0][1][: len(paths[0][0])])))]
    joints: dict[tuple[int, ...], float] = {}
    left: dict[tuple[int, ...], float] = {}  # of each node, what its children so far leave over
    whole = []
    for path, shares in paths:
        above, joint_path = 0.0, []
        for depth, (_, share) in enumerate(zip(path, shares, strict=False)):
            parent, node = tuple(path[:depth]), tuple(path[: depth + 1])
            if node not in joints:
                over = left.get(parent, 1.0)
                joints[node] = above + math.log(over * share)
                left[parent] = over * (1.0 - share)
            above = joints[node]
            joint_path.append(above)
        whole.append(joint_path)
    return whole
