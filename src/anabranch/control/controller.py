"""The controller: chooses how many draft nodes each step verifies, for the most expected tokens per millisecond.

Two curves decide, both measured while decoding (docs/controller.md):

    P(k)                      expected accepted tokens of the k best draft nodes of a row
    ms(nodes, rows, context)  milliseconds of a forward pass, and beside it of drafting k nodes (``control.costs``)

A step of R rows with k draft nodes each yields R (1 + P(k)) tokens in ms(R + R k) milliseconds. Before a step the
controller plans the k of the greatest ratio in every mode of drafting: nothing, free drafts alone, and the whole draft.
It uses the best mode, and tries another one from time to time. Once the drafts are made, ``choose`` ranks the nodes of
all rows together and verifies as many of the best as maximise the same ratio.

The choice changes the speed and never the text: *matching* is exact for every tree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, zip_longest
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from anabranch.control.choice import Choice
from anabranch.control.costs import CLIP, RATE, Costs
from anabranch.drafting.acceptance import best_nodes
from anabranch.drafting.drafter import Drafter, Row
from anabranch.tree import DraftTree

__all__ = ["Controller", "DraftStats", "Plan", "acceptance_by_rank", "best_count"]

BUDGETS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)  # nodes of a draft, root included
PRIOR = 0.3  # acceptance of every node before the first draft; counts as four drafts
SLOW = RATE / 5  # weight of the newest step in averages over many sequences
PERIOD = 4  # steps for which a plan is kept while the batch stays the same
NEAR = 0.85  # times the best rate that a mode has to be expected to reach to be tried again
EXPLORE = 64  # steps until an unused mode is tried; twice as many after each time that it was not the best


def best_count(probs: Sequence[float] | NDArray[np.float64], ms: Sequence[float] | NDArray[np.float64]) -> int:
    """Number of nodes of one tree to verify, root included, for the most expected tokens per millisecond.

    probs  acceptance probabilities of the draft nodes, descending
    ms     milliseconds of a step that verifies 1, 2, ... nodes, at least one more entry than ``probs``

    >>> best_count([0.9, 0.1], [10.0, 11.0, 12.0])  # 1 / 10 < 1.9 / 11 > 2.0 / 12
    2
    """
    tokens = 1.0 + np.concatenate(([0.0], np.cumsum(np.asarray(probs, np.float64))))
    return 1 + int(np.argmax(tokens / np.asarray(ms, np.float64)[: len(tokens)]))


def acceptance_by_rank(lengths: Mapping[int, float], most: int) -> tuple[float, ...]:
    """The acceptance of the best, second best, ... of ``most`` draft nodes, from mean acceptance lengths by nodes.

    Ranks between two numbers of nodes are equally likely, and those beyond the last one as likely as those before it.
    """
    nodes, tokens = (1, *sorted(lengths)), (1.0, *(lengths[n] for n in sorted(lengths)))
    steps = np.minimum.accumulate(np.diff(tokens) / np.diff(nodes)).clip(0.0, 1.0)
    ranks = np.searchsorted(nodes[1:], np.arange(2, most + 2)).clip(max=len(steps) - 1)
    return tuple(steps[ranks].tolist())


class Plan(NamedTuple):
    """Plan of a drafter for the next step.

    nodes       of a row's draft, root included; 0: nothing is drafted, 1: only the drafter's free parts draft
    tokens, ms  that the two curves predict for the step
    factor      the rate that steps of this mode had, over the predicted one
    """

    nodes: int
    tokens: float = 0.0
    ms: float = 1.0
    factor: float = 1.0

    @property
    def mode(self) -> int:
        """0: no draft, 1: free drafts alone, 2: the whole draft."""
        return min(self.nodes, 2)

    @property
    def rate(self) -> float:
        """Tokens per millisecond to expect."""
        return self.factor * self.tokens / self.ms


NOTHING = Plan(0)


@dataclass(frozen=True)
class DraftStats:
    """Statistics of a drafter in one mode, at one binary order of the batch size.

    acceptance  by rank: the probability that the best, second best, ... draft node of a row is accepted
    long_run    the same over many more steps: where a new sequence starts
    fixed_ms    of a step beside its forward pass, a row: draft, verification, commit, preparing the next draft
    node_ms     the same for each node of its draft
    drafts      seen so far, and ``steps`` timed
    tokens      emitted by these steps, recent ones counting most, and ``predicted`` for the time that they took
    """

    acceptance: tuple[float, ...]
    long_run: tuple[float, ...]
    fixed_ms: float = 0.0
    node_ms: float = 0.0
    drafts: int = 0
    steps: int = 0
    tokens: float = 1 / SLOW
    predicted: float = 1 / SLOW

    def draft_ms(self, nodes: int, rows: int) -> float:
        """Milliseconds beside the pass of a step of some rows with drafts of ``nodes`` nodes each."""
        return rows * (self.fixed_ms + self.node_ms * nodes)

    def with_draft(self, probs: Sequence[Sequence[float]], nodes: int) -> DraftStats:
        """Update the acceptance with probabilities of rows' draft nodes, at most ``nodes`` with the root."""
        size = min(nodes - 1, len(self.acceptance))
        means = [0.0] * size
        for row in probs:
            for rank, prob in enumerate(sorted(row, reverse=True)[:size]):
                means[rank] += prob / len(probs)

        def moved(before: tuple[float, ...], rate: float) -> tuple[float, ...]:
            kept = (1 - max(rate, 1 / (4 + self.drafts))) ** len(probs)
            now = [kept * old + (1 - kept) * new for old, new in zip(before, means, strict=False)]
            # nodes beyond the draft are taken to have become more or less likely with the others
            ratio = sum(now) / max(1e-9, sum(before[:size]))
            return (*now, *[min(now[-1], ratio * old) for old in before[size:]])

        acceptance, long_run = moved(self.acceptance, RATE), moved(self.long_run, SLOW)
        return replace(self, acceptance=acceptance, long_run=long_run, drafts=self.drafts + 1)

    def with_step(self, tokens: int, predicted: float, nodes: int, rows: int, ms: float) -> DraftStats:
        """Update with a timed step.

        tokens, predicted  that it emitted, and that were predicted for the time that it took
        nodes, rows, ms    of each row's draft, in the batch, and its milliseconds beside the pass
        """
        ms, known, steps, x = ms / rows, self.draft_ms(nodes, 1), self.steps + 1, nodes / 16
        if not self.steps or (steps <= PERIOD and ms < known):  # the first times include what happens only once
            fixed, per_node = ms / (1 + x / 2), ms * x / 2 / (1 + x / 2) / max(1, nodes)
        else:
            change = max(RATE, 1 / steps) * (min(ms, CLIP * known) - known) / (1 + x * x)
            fixed, per_node = self.fixed_ms + change, self.node_ms + change * x / 16
        return replace(
            self,
            fixed_ms=max(0.0, fixed),
            node_ms=max(0.0, per_node),
            steps=steps,
            tokens=(1 - SLOW) * self.tokens + tokens,
            predicted=(1 - SLOW) * self.predicted + predicted,
        )

    def with_new_row(self, rows: int) -> DraftStats:
        """One of ``rows`` sequences is new: its acceptance is that of the long run, not of the sequence before it."""
        mixed = (now + (before - now) / rows for now, before in zip(self.acceptance, self.long_run, strict=True))
        return replace(self, acceptance=tuple(mixed))


@dataclass
class _Schedule:
    """The plan in use for a drafter at one order of the batch size, and when other modes are tried.

    used, wait  by mode: the step when it was last used, and the steps from then until it is tried
    """

    plan: Plan = NOTHING
    batch: tuple[int, ...] = ()  # for which the plan was made
    age: int = 0
    step: int = 0
    used: dict[int, int] = field(default_factory=dict)
    wait: dict[int, int] = field(default_factory=dict)


class Controller:
    """Plans drafts and chooses what is verified; learns acceptance and costs meanwhile.

    ragged  whether a pass takes rows of different numbers of nodes; otherwise they are padded to the widest
    choice  yields of the drafters that new rows choose from; None: none yet
    cards   mean acceptance lengths by nodes, measured in training, by method
    """

    def __init__(
        self,
        costs: Costs,
        *,
        ragged: bool,
        choice: Choice | None = None,
        cards: Mapping[str, Mapping[int, float]] | None = None,
    ) -> None:
        self.costs, self.ragged, self.choice, self.cards = costs, ragged, choice, cards or {}
        self._stats: dict[tuple[str, int, int], DraftStats] = {}  # by drafter, mode and order of the batch size
        self._schedules: dict[tuple[str, int], _Schedule] = {}
        self._plans: dict[Drafter, tuple[Plan, int]] = {}  # of the next step, with the drafters' rows

    def stats(self, drafter: Drafter, mode: int, rows: int) -> DraftStats:
        """Statistics of a drafter in a mode at a batch size; before any were taken, those of the nearest size.

        The first step of the new size replaces the cost. Acceptance does not depend on the load.
        """
        key = drafter.name, mode, rows.bit_length()
        known = self._stats.get(key)
        if known is None:
            seen = [order for name, kind, order in self._stats if (name, kind) == key[:2]]
            if seen:
                nearest = min(seen, key=lambda order: abs(order - key[2]))
                known = replace(self._stats[drafter.name, mode, nearest], steps=0)
            else:
                most = max(1, min(drafter.max_nodes, BUDGETS[-1]) - 1)
                card = next((self.cards[name] for name in drafter.name.split("+") if self.cards.get(name)), None)
                if mode < 2 or card is None:
                    acceptance = (PRIOR,) * most
                    known = DraftStats(acceptance, acceptance)
                else:  # as good as a long run
                    acceptance = acceptance_by_rank(card, most)
                    known = DraftStats(acceptance, acceptance, drafts=round(1 / RATE))
                if mode > 1:
                    known = replace(known, fixed_ms=self.costs.draft_ms(drafter.name))
            self._stats[key] = known
        return known

    def joined(self, drafter: Drafter, rows: int) -> None:
        """A sequence joined the ``rows`` of a drafter; for one that is alone, planning starts anew."""
        if rows == 1 and (schedule := self._schedules.get((drafter.name, 1))) is not None:
            schedule.wait.clear()
            schedule.batch = ()
        for mode in (1, 2):
            key = drafter.name, mode, rows.bit_length()
            if key in self._stats:
                self._stats[key] = self._stats[key].with_new_row(rows)

    # -- how the next step drafts ------------------------------------------------------------------------
    def plan(self, groups: Mapping[Drafter, int], context: float) -> dict[Drafter, Plan]:
        """Plan the next step of each drafter; ``groups`` has the number of rows of each.

        Steps are plain until a pass was timed: typical costs have no unit.

        context  mean tokens in the rows' caches
        """
        rows = sum(groups.values())
        plans = {drafter: Plan(drafter.max_nodes) for drafter in groups}
        for drafter, count in groups.items():
            if drafter.adaptive:
                others = sum(
                    n * (1 if other.adaptive else other.max_nodes + other.needs.probes)
                    for other, n in groups.items()
                    if other is not drafter
                )
                plans[drafter] = self._planned(drafter, count, rows, others, context) if self.costs.timed else Plan(0)
        self._plans = {drafter: (plan, groups[drafter]) for drafter, plan in plans.items()}
        return plans

    def _planned(self, drafter: Drafter, count: int, rows: int, others: int, context: float) -> Plan:
        """The plan in use, or a new one every ``PERIOD`` steps and for another batch."""
        schedule = self._schedules.setdefault((drafter.name, rows.bit_length()), _Schedule())
        schedule.age += 1
        schedule.step += 1
        kept = schedule.batch == (count, rows, others) and schedule.age < PERIOD
        if kept and self.stats(drafter, schedule.plan.mode, rows).steps >= PERIOD:
            return schedule.plan
        plans = self._modes(drafter, count, rows, others, context)
        if kept:  # a mode that was hardly used yet: the best size so far
            schedule.plan = next(plan for plan in plans if plan.mode == schedule.plan.mode)
            return schedule.plan
        best = max(plans, key=lambda plan: plan.rate)
        schedule.wait[best.mode] = EXPLORE
        waited = {plan: schedule.step - schedule.used.setdefault(plan.mode, 0) for plan in plans}
        due = [plan for plan in plans if waited[plan] >= schedule.wait.setdefault(plan.mode, EXPLORE)]
        if tried := [plan for plan in due if plan is not best and plan.rate > NEAR * best.rate]:
            best = tried[0]
            schedule.wait[best.mode] *= 2
        schedule.used[best.mode] = schedule.step
        schedule.plan, schedule.batch, schedule.age = best, (count, rows, others), 0
        return best

    def _modes(self, drafter: Drafter, count: int, rows: int, others: int, context: float) -> list[Plan]:
        """The best plan of each mode, for ``count`` of the ``rows``, beside ``others`` nodes."""
        most = drafter.max_nodes
        sizes = [n for n in BUDGETS if n < most] + [min(most, BUDGETS[-1])]
        modes = [
            [0],
            *([[1]] if drafter.traits.free == "some" else []),
            [most] if drafter.traits.free == "all" else sizes,
        ]
        return [self._best(drafter, mode, count, rows, others, context) for mode in modes]

    def _best(self, drafter: Drafter, sizes: Sequence[int], count: int, rows: int, others: int, context: float) -> Plan:
        """The plan of the highest rate among sizes of a draft in one mode."""
        mode = Plan(sizes[0]).mode
        stats = self.stats(drafter, mode, rows)
        gains = (0.0, *accumulate(stats.acceptance))
        free = mode == 1 or (mode == 2 and drafter.traits.free == "all")
        factor, best = stats.tokens / stats.predicted, Plan(sizes[0])
        for nodes in sizes:
            probes = drafter.needs.probes if nodes > 1 else 0
            draft_ms = stats.draft_ms(nodes, rows)
            # free drafts are as large as they can be, and seldom all of it is verified
            for verified in (n for n in (1, *BUDGETS) if n <= len(gains)) if free else (max(1, nodes),):
                ms = self.costs.pass_ms(others + count * (verified + probes), rows, context) + draft_ms
                tokens = rows + count * gains[min(verified, len(gains)) - 1]
                if tokens * best.ms > best.tokens * ms:
                    best = Plan(nodes, tokens, ms, factor)
        return best

    # -- what the step verifies --------------------------------------------------------------------------
    def choose(
        self,
        rows: Sequence[Row],
        drafters: Sequence[Drafter],
        trees: Sequence[DraftTree],
        plans: Mapping[Drafter, Plan],
    ) -> list[DraftTree]:
        """The trees to verify: the best nodes of adaptive drafters' trees, and all of others.

        Updates the acceptance of the adaptive drafters.
        """
        probs = {
            b: rows[b].acceptance(trees[b]) if trees[b].size > 1 else [1.0]
            for b, drafter in enumerate(drafters)
            if drafter.adaptive and (plans[drafter].nodes or trees[b].size > 1)
        }
        for drafter in {drafters[b] for b in probs}:
            plan = plans[drafter]
            free = plan.nodes < 2 or drafter.traits.free == "all"
            each = [probs[b][1:] for b in probs if drafters[b] is drafter]
            if free or any(each):  # rows that have just joined have no draft yet
                stats = self.stats(drafter, plan.mode, len(rows))
                nodes = drafter.max_nodes if free else plan.nodes
                self._stats[drafter.name, plan.mode, len(rows).bit_length()] = stats.with_draft(each, nodes)
        if all(len(each) == 1 for each in probs.values()):
            return list(trees)
        counts = self._counts(rows, drafters, trees, plans, probs)
        return [best_nodes(tree, probs[b], counts[b]) if b in probs else tree for b, tree in enumerate(trees)]

    def _counts(
        self,
        rows: Sequence[Row],
        drafters: Sequence[Drafter],
        trees: Sequence[DraftTree],
        plans: Mapping[Drafter, Plan],
        probs: Mapping[int, Sequence[float]],
    ) -> dict[int, int]:
        """Numbers of nodes to verify of the trees in ``probs``: the most probable of all rows, for the highest rate."""
        count, context = len(rows), sum(len(row.tokens) for row in rows) / len(rows)
        draft_ms = sum(
            self.stats(drafter, plan.mode, count).draft_ms(plan.nodes, drafters.count(drafter))
            for drafter, plan in plans.items()
            if drafter.adaptive
        )
        probes = [drafter.needs.probes if plans[drafter].nodes > 1 else 0 for drafter in drafters]
        fixed = [1 if b in probs else tree.size for b, tree in enumerate(trees)]
        if self.ragged:
            drafted = ((prob, b) for b, each in probs.items() for prob in each[1:])
            ranked = sorted(drafted, key=itemgetter(0), reverse=True)
            gains = [prob for prob, _ in ranked]
            widths = [sum(fixed) + sum(probes) + k for k in range(len(gains) + 1)]
        else:
            columns = zip_longest(*(sorted(each[1:], reverse=True) for each in probs.values()), fillvalue=0.0)
            gains = list(map(sum, columns))
            widths = [count * (max(1 + k, *fixed) + max(probes)) for k in range(len(gains) + 1)]
        best, tokens, highest = 0, float(count), 0.0
        for k, (gain, width) in enumerate(zip((0.0, *gains), widths, strict=True)):
            tokens += gain
            rate = tokens / (self.costs.pass_ms(width, count, context) + draft_ms)
            if rate > highest:
                best, highest = k, rate
        if not self.ragged:
            return {b: min(1 + best, trees[b].size) for b in probs}
        chosen = Counter(b for _, b in ranked[:best])
        return {b: 1 + chosen[b] for b in probs}

    def saw_step(self, nodes: int, rows: int, context: float, *, tokens: int, pass_ms: float, other_ms: float) -> None:
        """Update with a step: its pass over ``nodes`` nodes, the tokens of all rows, and its milliseconds.

        other_ms  milliseconds of everything beside the pass, its draft's preparation in the step before included
        """
        self.costs.saw_pass(pass_ms, nodes, rows, context)
        if len(self._plans) != 1:
            return  # which drafter took how long is unknown
        ((drafter, (plan, count)),) = self._plans.items()
        if count != rows or not drafter.adaptive:
            return
        stats = self.stats(drafter, plan.mode, rows)
        expected = self.costs.pass_ms(nodes, rows, context) + stats.draft_ms(plan.nodes, rows)
        ms = min(pass_ms + other_ms, CLIP * expected)  # no more where the step was interrupted
        predicted = plan.tokens * ms / plan.ms
        made = stats.with_step(tokens if predicted else 0, predicted, plan.nodes, rows, other_ms)
        self._stats[drafter.name, plan.mode, rows.bit_length()] = made
        if self.choice is not None and drafter.spec:
            self.choice.saw(drafter.spec, rows, tokens / rows, ms / self._plain_ms(drafter, rows, context))

    # -- which drafter a new row has ---------------------------------------------------------------------
    def choose_drafter(
        self, drafters: Sequence[Drafter], rows: int, context: float, *, using: Drafter | None
    ) -> Drafter:
        """The drafter of a new row, beside which ``rows`` - 1 others will decode.

        context  mean tokens in the rows' caches
        using    the drafter of a row in use, if any
        """
        if self.choice is None:
            self.choice = Choice()
        expected = {}
        for drafter in drafters:
            plans = self._modes(drafter, rows, rows, 0, context)
            rate = max(plan.rate for plan in plans if plan.mode != 1)
            expected[drafter.spec] = max(1e-3, rate * self._plain_ms(drafter, rows, context) / rows)
        chosen = self.choice.choose(expected, rows, using=None if using is None else using.spec)
        return next(drafter for drafter in drafters if drafter.spec == chosen)

    def _plain_ms(self, drafter: Drafter, rows: int, context: float) -> float:
        """Milliseconds of a step without a draft."""
        return self.costs.pass_ms(rows, rows, context) + self.stats(drafter, 0, rows).draft_ms(0, rows)
