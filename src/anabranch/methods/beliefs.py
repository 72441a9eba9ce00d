"""How many nodes of a tree are verified: at every step as many of its best ones as pay for themselves.

A step that verifies the n best nodes, the root among them, emits 1 + P_n tokens in expectation, where P_n sums the
believed probabilities that they are accepted, and it takes ms(n). Chosen is the n of the greatest

    (1 + P_n) / ms(n)

A node thus has to bring more tokens a millisecond than this very step does without it, and not than the average step
does: what is not drafted here is drafted by the next step, in a text that is as easy or as hard as here. (Against a
running average, which would be right if difficulty did not persist, replays were no faster: docs/tuning.md.)

What is believed is held against what is accepted, source by source ("stream 2", "prompt_lookup"), and corrected by the
ratio of the two. All of it is a function of a row's own drafts and text: another decoding of the same row chooses
alike, and a replay does too (``analysis.simulate``). Whatever is chosen, the rule *matching* says the same text.

B rows of the batch, N nodes of the largest tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from anabranch.costs import StepCosts
from anabranch.errors import InputError
from anabranch.tree import DraftTree

__all__ = ["Width"]

MEMORY = 0.99  # what a step counts for after the next one
PRIOR = 10.0  # accepted tokens that a belief is worth before anything was seen of it


class _Row:
    """Beliefs and acceptance of one row by source, sums in which older steps count for less."""

    def __init__(self) -> None:
        self.expected: dict[str, float] = {}
        self.accepted: dict[str, float] = {}

    def factor(self, source: str) -> float:
        """What beliefs of this source are multiplied by."""
        return (PRIOR + self.accepted.get(source, 0.0)) / (PRIOR + self.expected.get(source, 0.0))

    def beliefs(self, tree: DraftTree) -> list[float]:
        """[N] corrected probabilities that the nodes are accepted; no node's exceeds its parent's."""
        assert tree.log_probs is not None, "a drafter whose trees are cut says what it believes"
        factors = {source: self.factor(source) for source in set(tree.sources)}
        found = list(map(math.exp, tree.log_probs.tolist()))
        for node, (parent, source) in enumerate(zip(tree.parents.tolist(), tree.sources, strict=True)):
            if node:
                found[node] = min(found[parent], found[node] * factors[source])
        return found

    def learn(self, tree: DraftTree, path: Sequence[int]) -> None:
        """Take in one verified tree."""
        assert tree.log_probs is not None
        for counts in (self.expected, self.accepted):
            for source in counts:
                counts[source] *= MEMORY
        for source, belief in zip(tree.sources[1:], tree.log_probs[1:].tolist(), strict=True):
            self.expected[source] = self.expected.get(source, 0.0) + math.exp(belief)
        for node in path[1:]:
            source = tree.sources[node]
            self.accepted[source] = self.accepted.get(source, 0.0) + 1.0


class Width:
    """Cuts the trees of all rows of a step to one width, and learns what came of it.

    most   nodes at most, the root included
    costs  None: always ``most`` nodes, the most believed ones
    """

    def __init__(self, most: int, costs: StepCosts | None = None) -> None:
        if most < 2:
            raise InputError(f"nodes must be at least 2 (the root and one draft), not {most}")
        self.most, self.costs = most, costs
        self._rows: dict[int, _Row] = {}

    def __call__(self, keys: Sequence[int], trees: Sequence[DraftTree]) -> list[DraftTree]:
        """The best nodes of each tree, as many in each as pay for all of them; ``keys`` name the rows."""
        rows = [self._rows.setdefault(key, _Row()) for key in keys]
        beliefs = [row.beliefs(tree) for row, tree in zip(rows, trees, strict=True)]
        most = min(self.most, max(tree.size for tree in trees))
        width = most if self.costs is None else self._best(beliefs, most, self.costs)
        return [_cut(tree, belief, width) for tree, belief in zip(trees, beliefs, strict=True)]

    @staticmethod
    def _best(beliefs: Sequence[list[float]], most: int, costs: StepCosts) -> int:
        tokens_BN = np.zeros((len(beliefs), most))
        for b, belief in enumerate(beliefs):
            best = sorted(belief, reverse=True)[:most]
            tokens_BN[b, : len(best)] = best  # the root is certain: its 1 stands for the target's own token
        tokens_N = tokens_BN.sum(axis=0).cumsum()
        return 1 + int(np.argmax(tokens_N / costs(len(beliefs) * np.arange(1, most + 1))))

    def learn(self, key: int, tree: DraftTree, path: Sequence[int]) -> None:
        """Take in which ``path`` of the verified ``tree`` was accepted."""
        row = self._rows.get(key)
        if row is not None and tree.size > 1:
            row.learn(tree, path)

    def forget(self, key: int) -> None:
        """A row is done."""
        self._rows.pop(key, None)


def _cut(tree: DraftTree, beliefs: list[float], width: int) -> DraftTree:
    """The ``width`` most believed nodes; stable, so that of equals the earlier one, hence the parent, goes first."""
    if tree.size <= width:
        return tree
    best = sorted(range(tree.size), key=beliefs.__getitem__, reverse=True)[:width]
    return tree.select(sorted(best))
