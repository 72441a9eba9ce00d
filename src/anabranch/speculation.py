"""How much is speculated: at every step, as many draft nodes as give the most expected tokens per millisecond.

A step that verifies k draft nodes besides the R rows' roots emits R + P_k tokens in expectation, where P_k sums the k
largest acceptance probabilities (``methods.beliefs``), and takes ms(R + k). Chosen is the k of the greatest

    (R + P_k) / ms(R + k)

so a node has to add more tokens per millisecond than the step has without it. Before that, the same is asked of the
draft: how many nodes are worth drafting, given the cost of drafting and of preparing a draft, and what the nodes were
worth recently. None is one of the answers; the step is then plain decoding, and drafts are back one step after the load
has fallen.

Whatever is chosen, *matching* emits the same text. (Against a running average of tokens a millisecond, which would be
right if the difficulty of a text did not persist, replays were no faster: docs/tuning.md.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from anabranch.costs import Costs
from anabranch.methods.base import Drafter, Row
from anabranch.methods.beliefs import best_nodes
from anabranch.tree import DraftTree

__all__ = ["Speculation", "best_count"]

BUDGETS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)  # nodes of a draft, root included
RATE = 0.08  # weight of a row's newest draft in what nodes are expected to be worth
# what the best, second best, ... draft node of a row is taken to be worth before any was seen
PRIOR = tuple(0.55 * 0.82**k for k in range(BUDGETS[-1]))
EXPLORE = 100  # steps without a draft after which one is tried, if it does not cost too much
WORTH = 0.6  # of the rate without it


def best_count(beliefs: Sequence[float] | NDArray[np.float64], ms: Sequence[float] | NDArray[np.float64]) -> int:
    """How many nodes of one tree to verify, root included, for the most expected tokens a millisecond.

    beliefs  acceptance probabilities of the draft nodes, descending
    ms       of a step that verifies 1, 2, ... nodes, at least one more entry than ``beliefs``

    >>> best_count([0.9, 0.1], [10.0, 11.0, 12.0])  # 1 / 10 < 1.9 / 11 > 2.0 / 12
    2
    """
    tokens = 1.0 + np.concatenate(([0.0], np.cumsum(np.asarray(beliefs, np.float64))))
    return 1 + int(np.argmax(tokens / np.asarray(ms, np.float64)[: len(tokens)]))


@dataclass
class _Lately:
    """What one drafter's nodes were worth: ``worth[k]`` of the (k + 1)-th best node of a row, and steps without any."""

    worth: NDArray[np.float64] = field(default_factory=lambda: np.array(PRIOR))
    idle: int = 0

    def learn(self, beliefs: Sequence[Sequence[float]], budget: int) -> None:
        """Take in the draft nodes' probabilities of some rows, from drafts of at most ``budget`` nodes."""
        size = min(budget - 1, len(self.worth))
        mean = np.zeros(size)
        for row in beliefs:
            best = sorted(row, reverse=True)[:size]
            mean[: len(best)] += best
        rate = 1 - (1 - RATE) ** len(beliefs)
        self.worth[:size] += rate * (mean / len(beliefs) - self.worth[:size])
        self.worth[size:] = np.minimum(self.worth[size:], self.worth[size - 1])


class Speculation:
    """The controller of one target: plans drafts and chooses what is verified. It learns costs and worth as it goes.

    ragged  whether a pass takes rows of different numbers of nodes; otherwise they are padded to the widest
    """

    def __init__(self, costs: Costs, *, ragged: bool) -> None:
        self.costs, self.ragged = costs, ragged
        self._lately: dict[str, _Lately] = {}

    def lately(self, drafter: Drafter) -> _Lately:
        """What a drafter's nodes have been worth; drafters of one name share it."""
        return self._lately.setdefault(drafter.name, _Lately())

    def plan(self, groups: Mapping[Drafter, int], context: float) -> dict[Drafter, int]:
        """The budget of each drafter's next draft, 1 for none; ``groups`` says how many rows each has.

        context  mean tokens in the rows' caches
        """
        budgets = {drafter: drafter.max_nodes for drafter in groups}
        rows = sum(groups.values())
        for drafter, count in groups.items():
            if drafter.adaptive:
                others = sum(
                    n * (budgets[d] + d.probes) for d, n in groups.items() if d is not drafter and not d.adaptive
                )
                others += sum(n for d, n in groups.items() if d is not drafter and d.adaptive)
                budgets[drafter] = self._budget(drafter, count, rows, others, context)
        return budgets

    def _budget(self, drafter: Drafter, count: int, rows: int, others: int, context: float) -> int:
        lately, costs = self.lately(drafter), self.costs
        tried = [n for n in BUDGETS if n < drafter.max_nodes]
        tried.append(min(drafter.max_nodes, BUDGETS[-1]))
        gains = np.concatenate(([0.0], np.cumsum(lately.worth)))
        nodes = np.array([1, *tried])
        beside = np.where(nodes > 1, drafter.probes, 0)
        ms = costs.pass_ms(others + count * (nodes + beside), rows, context) + costs.rest_ms(rows)
        ms[1:] += [costs.draft_ms(n, count) + costs.prepare_ms(drafter.depth_of(n) * count) for n in tried]
        rates = (rows + count * gains[nodes - 1]) / ms
        best = int(np.argmax(rates))
        if best:
            lately.idle = 0
            return int(nodes[best])
        lately.idle += 1
        other = 1 + int(np.argmax(rates[1:]))
        if lately.idle >= EXPLORE and rates[other] > WORTH * rates[0]:
            lately.idle = 0
            return int(nodes[other])
        return 1

    def choose(
        self,
        rows: Sequence[Row],
        drafters: Sequence[Drafter],
        trees: Sequence[DraftTree],
        budgets: Mapping[Drafter, int],
    ) -> list[DraftTree]:
        """The trees that are verified: of adaptive drafters' trees the nodes that pay, of others all.

        The drafters' worth is learned from what they drafted.
        """
        found = list(trees)
        open_rows = [b for b, drafter in enumerate(drafters) if drafter.adaptive]
        if not open_rows:
            return found
        beliefs = {b: rows[b].beliefs(trees[b]) if trees[b].size > 1 else [1.0] for b in open_rows}
        for drafter in {drafters[b] for b in open_rows if budgets[drafters[b]] > 1}:
            drafted = [beliefs[b][1:] for b in open_rows if drafters[b] is drafter]
            if any(drafted):
                self.lately(drafter).learn(drafted, budgets[drafter])
        every = sorted(-p for b in open_rows for p in beliefs[b][1:])
        if not every:
            return found
        context = sum(len(row.tokens) for row in rows) / len(rows)
        fixed = [tree.size for b, tree in enumerate(trees) if b not in beliefs]
        beside = [drafter.probes if budgets[drafter] > 1 else 0 for drafter in drafters]
        rest = self.costs.rest_ms(len(rows)) + sum(
            self.costs.draft_ms(budgets[d], n) + self.costs.prepare_ms(d.depth_of(budgets[d]) * n)
            for d, n in _counts(drafters).items()
            if d.adaptive and budgets[d] > 1
        )
        if self.ragged:
            tokens = len(rows) + np.concatenate(([0.0], -np.cumsum(every)))
            nodes = sum(fixed) + sum(beside) + len(open_rows) + np.arange(len(tokens))
            best = int(np.argmax(tokens / (self.costs.pass_ms(nodes, len(rows), context) + rest)))
            least = -every[best - 1] if best else 2.0
            room = best - sum(p > least for b in open_rows for p in beliefs[b][1:])  # ties at the threshold
            for b in open_rows:
                above = sum(p > least for p in beliefs[b][1:])
                ties = min(room, sum(p == least for p in beliefs[b][1:]))
                room -= ties
                found[b] = best_nodes(trees[b], beliefs[b], 1 + above + ties)
            return found
        widest = max(len(beliefs[b]) for b in open_rows)
        falling = np.zeros((len(open_rows), widest))
        for i, b in enumerate(open_rows):
            falling[i, : len(beliefs[b])] = sorted(beliefs[b], reverse=True)
        widths = np.arange(1, widest + 1)
        nodes = len(rows) * (np.maximum(widths, max(fixed, default=1)) + max(beside))
        tokens = falling.sum(axis=0).cumsum() + len(fixed)
        width = 1 + int(np.argmax(tokens / (self.costs.pass_ms(nodes, len(rows), context) + rest)))
        for b in open_rows:
            found[b] = best_nodes(trees[b], beliefs[b], width)
        return found


def _counts(drafters: Sequence[Drafter]) -> dict[Drafter, int]:
    counts: dict[Drafter, int] = {}
    for drafter in drafters:
        counts[drafter] = counts.get(drafter, 0) + 1
    return counts
