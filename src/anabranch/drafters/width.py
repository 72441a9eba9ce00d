"""How many nodes of a tree are verified: at every step as many of its best ones as pay for themselves.

A step that verifies the n best nodes, the root among them, emits 1 + P_n tokens in expectation, where P_n sums the
believed probabilities that they are accepted, and it takes ms(n). Chosen is the n of the greatest

    (1 + P_n) / ms(n)

A node thus has to bring more tokens a millisecond than this very step does without it, and not than the average step
does: what is not drafted here is drafted by the next step, in a text that is as easy or as hard as here. (Against a
running average, which would be right if difficulty did not persist, replays were no faster: docs/tuning.md.)

What is believed is held against what is accepted, source by source ("stream 2", "prompt_lookup"), and corrected by the
ratio of the two. All of it is a function of a row's own drafts and text: another decoding of the same row chooses
alike, and a replay does too (``analysis.simulate``). Whatever is chosen, the rule *follow* says the same text.

B rows of the batch, N nodes of the largest tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anabranch.errors import InputError
from anabranch.model.decoder import Decoder
from anabranch.tree import DraftTree

__all__ = ["StepCosts", "Width", "usual_costs"]

MEMORY = 0.99  # what a step counts for after the next one
PRIOR = 10.0  # accepted tokens that a belief is worth before anything was seen of it


@dataclass(frozen=True)
class StepCosts:
    """What a whole step costs by the width of its tree, in milliseconds or any other unit; widths ascend.

    Between two widths it is linear, beyond the last as steep as from the first to the last: it may be a staircase.
    """

    widths: tuple[int, ...]
    ms: tuple[float, ...]

    @staticmethod
    def parse(text: str) -> StepCosts:
        """From ``"1:8.7/8:9.4/16:11.2"``, nodes and milliseconds. Raises InputError."""
        try:
            pairs = [item.split(":") for item in text.split("/")]
            table = sorted((int(width), float(ms)) for width, ms in pairs)
        except ValueError as error:
            raise InputError(f"step costs are given as NODES:MS/NODES:MS, as in 1:8.7/16:11.2, not {text!r}") from error
        widths, costs = zip(*table, strict=True)
        if widths[0] < 1 or len(set(widths)) < len(widths) or not all(0 < ms < math.inf for ms in costs):
            raise InputError(f"step costs have positive milliseconds for different numbers of nodes, unlike {text!r}")
        return StepCosts(widths, costs)

    def __str__(self) -> str:
        """What ``parse`` reads."""
        return "/".join(f"{width}:{ms:.4g}" for width, ms in zip(self.widths, self.ms, strict=True))

    def __call__(self, widths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Costs of these widths, of the same shape."""
        inside = np.interp(widths, self.widths, self.ms)
        if len(self.widths) == 1:
            return inside
        steep = max(0.0, (self.ms[-1] - self.ms[0]) / (self.widths[-1] - self.widths[0]))
        beyond: NDArray[np.float64] = inside + steep * np.maximum(0, widths - self.widths[-1])
        return beyond


def usual_costs(target: Decoder) -> StepCosts:
    """What steps are taken to cost, in relation to each other, before ``anabranch tune`` measured them here.

    The native kernels: a step costs a quarter more than with one row with as many rows as hide their arithmetic behind
    reading the weights, and twice as much with twice as many. PyTorch: a row costs 1/128 of a step.
    """
    if target.stack is None:
        return StepCosts((1, 129), (1.0, 2.0))
    rows = target.stack.shared
    return StepCosts((1, rows, 2 * rows), (1.0, 1.25, 2.0))


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
