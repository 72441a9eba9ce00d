"""Predicted mean acceptance length: recorded completions replayed through the real drafting, without decoding.

Greedy decoding with the rule *match* walks a draft tree along the target's own tokens. Where these are known (held-out
completions written by the target), the walk needs no forward pass of the target.

    completion  a b c d e f      step 1 emits a (nothing was drafted yet); the draft starts from root a
                                 step 2 accepts b c, emits d;  step 3 accepts nothing, emits e;  step 4 emits f
    6 tokens in 4 steps: 1.5

S predictors of a position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from anabranch.learning.examples import Example
from anabranch.tree import DraftTree

__all__ = ["Accuracy", "Replay", "evaluation", "walk"]

# (rows, position of the last accepted token of each of these rows) -> the tree drafted after that position
Propose = Callable[[Sequence[int], Sequence[int]], list[DraftTree]]


@dataclass
class Replay:
    """Counts over all replayed completions; ``accepted[a]`` steps accepted a draft tokens.

    ``by_source`` holds tokens and steps, the first step of each completion left out.
    """

    tokens: int = 0
    steps: int = 0
    accepted: dict[int, int] = field(default_factory=dict)
    by_source: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per step, the target's own next token included."""
        return self.tokens / max(1, self.steps)

    def at_least(self, depth: int) -> float:
        """Share of drafted steps that accepted at least ``depth`` draft tokens."""
        total = sum(self.accepted.values())
        return sum(n for a, n in self.accepted.items() if a >= depth) / max(1, total)


@dataclass
class Accuracy:
    """How often a predictor's best token, and one of its ``top`` best, is the text's, given the true path to it."""

    top: int
    first_S: Tensor
    among_S: Tensor
    count_S: Tensor

    @staticmethod
    def empty(top: int, predictors: int) -> Accuracy:
        """Nothing counted yet."""
        return Accuracy(top, *(torch.zeros(predictors) for _ in range(3)))

    def shares(self) -> tuple[list[float], list[float]]:
        """Of the best token and of the ``top`` best, by predictor."""
        count_S = self.count_S.clamp(min=1)
        return (self.first_S / count_S).tolist(), (self.among_S / count_S).tolist()


def matched(tree: DraftTree, wanted: Sequence[int]) -> int:
    """How many of the ``wanted`` tokens the tree holds as a path from the root."""
    node, found = 0, 0
    while found < len(wanted):
        child = next((c for c in tree.children(node) if tree.tokens[c] == wanted[found]), None)
        if child is None:
            break
        node, found = int(child), found + 1
    return found


def walk(total: Replay, group: Sequence[Example], propose: Propose) -> None:
    """Replay some completions side by side and add the counts to ``total``."""
    texts = [(*example.prompt_ids, *example.answer_ids) for example in group]
    at = [len(example.prompt_ids) - 1 for example in group]  # the last accepted position of each row
    total.tokens += sum(len(example.answer_ids) for example in group)
    total.steps += len(group)  # the first step of every completion has no draft
    while active := [b for b in range(len(group)) if at[b] + 2 < len(texts[b])]:
        for b, tree in zip(active, propose(active, [at[b] for b in active]), strict=True):
            wanted = texts[b][at[b] + 2 :]
            found = matched(tree, wanted)
            total.steps += 1
            total.accepted[found] = total.accepted.get(found, 0) + 1
            seen, steps = total.by_source.get(group[b].source, (0, 0))
            total.by_source[group[b].source] = (seen + min(found + 1, len(wanted)), steps + 1)
            at[b] += found + 1


def evaluation(totals: dict[str, Replay], accuracy: Accuracy, depth: int) -> dict[str, Any]:
    """What ``Objective.evaluate`` returns, from replays by name ("tree" among them); ``depth`` is the deepest draft."""
    first, among = accuracy.shares()
    tree = totals["tree"]
    return {
        **{name: round(total.mean_acceptance_length, 4) for name, total in totals.items()},
        "top 1": [round(share, 4) for share in first],
        f"top {accuracy.top}": [round(share, 4) for share in among],
        "at least": [round(tree.at_least(d), 4) for d in range(1, depth + 1)],
        "by source": {name: round(tokens / steps, 3) for name, (tokens, steps) in sorted(tree.by_source.items())},
    }
