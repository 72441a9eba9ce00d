"""Acceptance probabilities of a row's drafts, corrected by what was accepted.

A drafter estimates for each node the probability that it is accepted (``DraftTree.log_probs``). For each source of
nodes, the estimates are multiplied by the ratio of accepted to expected tokens. The corrected probabilities depend only
on the row's own drafts and text, so decoding a row again gives the same ones.

N nodes of a tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from anabranch.tree import DraftTree

__all__ = ["Beliefs", "best_nodes"]

MEMORY = 0.99  # weight of a step relative to the one after it
PRIOR = 10.0  # weight of the drafter's own estimate, in accepted tokens


@dataclass
class Beliefs:
    """Expected and accepted draft tokens of one row by source, exponentially weighted towards recent steps."""

    expected: dict[str, float] = field(default_factory=dict)
    accepted: dict[str, float] = field(default_factory=dict)

    def factor(self, source: str) -> float:
        """The correction for a source: accepted divided by expected tokens, each with the prior added."""
        return (PRIOR + self.accepted.get(source, 0.0)) / (PRIOR + self.expected.get(source, 0.0))

    def __call__(self, tree: DraftTree) -> list[float]:
        """[N] corrected acceptance probabilities; the root's is 1, and no node's exceeds its parent's."""
        assert tree.log_probs is not None, "trees to be ranked have log_probs"
        factors = {source: self.factor(source) for source in set(tree.sources)}
        found = list(map(math.exp, tree.log_probs.tolist()))
        for node, (parent, source) in enumerate(zip(tree.parents.tolist(), tree.sources, strict=True)):
            if node:
                found[node] = min(found[parent], found[node] * factors[source])
        return found

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


def best_nodes(tree: DraftTree, beliefs: Sequence[float], count: int) -> DraftTree:
    """The ``count`` most probable nodes of a tree; among equals the earlier one, and so the parent, comes first."""
    if tree.size <= count:
        return tree
    best = sorted(range(tree.size), key=beliefs.__getitem__, reverse=True)[:count]
    return tree.select(sorted(best))
