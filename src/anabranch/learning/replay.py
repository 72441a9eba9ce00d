"""Predict the mean acceptance length by replaying completions with the real drafting code, without decoding.

With the rule *match*, greedy decoding follows the target's own tokens through a draft tree. If these are known
(held-out completions written by the target), this needs no forward pass of the target.

    completion  a b c d e f      step 1 emits a (there is no draft yet); the next draft starts from root a
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

# (rows, position of the last accepted token of each row) -> the trees drafted after these positions
Propose = Callable[[Sequence[int], Sequence[int]], list[DraftTree]]


@dataclass
class Replay:
    """Counts over all replayed completions; ``accepted[a]`` steps accepted a draft tokens.

    ``by_source`` has tokens and steps, without the first step of each completion.
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
        """The fraction of drafted steps that accepted at least ``depth`` draft tokens."""
        total = sum(self.accepted.values())
        return sum(n for a, n in self.accepted.items() if a >= depth) / max(1, total)


@dataclass
class Accuracy:
    """Counts of predictions that rank the text's token first, or among the ``top`` first, given the true path to it."""

    top: int
    first_S: Tensor
    among_S: Tensor
    count_S: Tensor

    @staticmethod
    def empty(top: int, predictors: int) -> Accuracy:
        """Nothing counted yet."""
        return Accuracy(top, *(torch.zeros(predictors) for _ in range(3)))

    def shares(self) -> tuple[list[float], list[float]]:
        """The accuracy of the best token and of the ``top`` best, by predictor."""
        count_S = self.count_S.clamp(min=1)
        return (self.first_S / count_S).tolist(), (self.among_S / count_S).tolist()


def matched(tree: DraftTree, wanted: Sequence[int]) -> int:
    """Count the ``wanted`` tokens that are a path of the tree, from the root on."""
    node, length = 0, 0
    while length < len(wanted):
        child = next((c for c in tree.children(node) if tree.tokens[c] == wanted[length]), None)
        if child is None:
            break
        node, length = int(child), length + 1
    return length


def walk(total: Replay, group: Sequence[Example], propose: Propose) -> None:
    """Replay several completions in parallel and add the counts to ``total``."""
    texts = [(*example.prompt_ids, *example.answer_ids) for example in group]
    at = [len(example.prompt_ids) - 1 for example in group]  # the last accepted position of each row
    total.tokens += sum(len(example.answer_ids) for example in group)
    total.steps += len(group)  # the first step of every completion has no draft
    while active := [b for b in range(len(group)) if at[b] + 2 < len(texts[b])]:
        for b, tree in zip(active, propose(active, [at[b] for b in active]), strict=True):
            wanted = texts[b][at[b] + 2 :]
            accepted = matched(tree, wanted)
            total.steps += 1
            total.accepted[accepted] = total.accepted.get(accepted, 0) + 1
            seen, steps = total.by_source.get(group[b].source, (0, 0))
            total.by_source[group[b].source] = (seen + min(accepted + 1, len(wanted)), steps + 1)
            at[b] += accepted + 1


def evaluation(totals: dict[str, Replay], accuracy: Accuracy, depth: int) -> dict[str, Any]:
    """The result of ``Objective.evaluate`` from replays by name, "tree" among them; ``depth`` is the maximum depth."""
    first, among = accuracy.shares()
    tree = totals["tree"]
    return {
        **{name: round(total.mean_acceptance_length, 4) for name, total in totals.items()},
        "top 1": [round(share, 4) for share in first],
        f"top {accuracy.top}": [round(share, 4) for share in among],
        "at least": [round(tree.at_least(d), 4) for d in range(1, depth + 1)],
        "by source": {name: round(tokens / steps, 3) for name, (tokens, steps) in sorted(tree.by_source.items())},
    }
