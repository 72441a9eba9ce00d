"""How much is speculated: at every step, as many draft nodes as give the most expected tokens per millisecond.

A step that verifies k draft nodes besides the R rows' roots emits R + P_k tokens in expectation, where P_k sums the k
largest acceptance probabilities (``drafting.beliefs``), and takes ms(R + k). Chosen is the k of the greatest

    (R + P_k) / ms(R + k)

so a node has to add more tokens per millisecond than the step has without it. Before that, the same is asked of the
draft: how many nodes are worth drafting, given the cost of drafting and of preparing a draft, and what the nodes were
worth recently. None is one of the answers; the step is then plain decoding, and drafts are back one step after the load
has fallen.

Whatever is chosen, *matching* emits the same text. (Against a running average of tokens a millisecond, which would be
right if the difficulty of a text did not persist, replays were no faster: docs/tuning.md.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from anabranch.control.arms import Arms
from anabranch.control.costs import Costs
from anabranch.drafting.beliefs import Calibration, best_nodes
from anabranch.drafting.drafter import Drafter, Row
from anabranch.tree import DraftTree
from anabranch.verify import Verdict

__all__ = ["Speculation", "best_count"]

BUDGETS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)  # nodes of a draft, root included
RATE = 0.05  # weight of a row's newest draft in what nodes are expected to be worth
USUAL_RATE = 0.01  # the same in what they are expected to be worth in the next text
KEPT_SHARES = 1 - np.array([[RATE], [USUAL_RATE]])  # what is left of earlier estimates after a draft
PREDICTED = 15  # draft nodes of the trees whose mean acceptance length an adapter's card predicts
NEARLY = 0.985  # times the best rate at which the widest draft is preferred: what is not worth it need not be verified
# what the best, second best, ... draft node of a row is taken to be worth before any was seen
PRIOR = tuple(0.55 * 0.82**k for k in range(BUDGETS[-1]))
GUESSED = 0.6  # times the rate without a draft that one whose costs are guessed has to promise to be tried
EXPLORE = 200  # steps with drafts, or without, after which the opposite is tried
SOONER = 0.2  # times as many where both are expected to be equally fast
TRIAL = 4  # steps long
FIRST_TRIAL = 8  # steps of a text that is alone in which drafts are tried, if they are expected to reach
FROM = 0.7  # times the rate
TOGETHER = 16  # drafts whose worth is taken in together at most
KEPT = 8  # steps for which a plan is kept while the rows stay the same: making one takes a tenth of a small pass
LONGEST_KEPT = 32  # steps for which one is kept that came out the same again and again
WORTH = 0.85  # if it is expected to reach that much of the rate; what is farther behind is tried less often
FADING = 0.98  # weight of a step relative to the next one in what is learned of planned milliseconds
INTERRUPTED = 2.0  # times the planned milliseconds that a step counts for at most: one that was interrupted says little
STATED = 10.0  # steps that a plan's milliseconds are worth before any was checked
STATED_TOKENS = 200.0  # tokens that a plan's tokens are worth before any was checked: acceptance varies much more
FORGOTTEN = 1000.0  # tokens after which what was learned of them counts a third
SELDOM = 16  # steps after which free drafts are asked for again where they did not pay lately
FREE_GAIN = 2.0  # times the milliseconds that free drafts take which they have to be expected to save
MARGIN = 1.04  # times the rate without a draft that one has to promise: estimates that look best are often too high
SUFFICIENT = 1.1  # times the planned rate that free drafts have to promise for the next step to need no others
FREE_MARGIN = 1.03  # and that free drafts have to promise for a step: with many rows a node adds little either way


def best_count(beliefs: Sequence[float] | NDArray[np.float64], ms: Sequence[float] | NDArray[np.float64]) -> int:
    """How many nodes of one tree to verify, root included, for the most expected tokens a millisecond.

    beliefs  acceptance probabilities of the draft nodes, descending
    ms       of a step that verifies 1, 2, ... nodes, at least one more entry than ``beliefs``

    >>> best_count([0.9, 0.1], [10.0, 11.0, 12.0])  # 1 / 10 < 1.9 / 11 > 2.0 / 12
    2
    """
    tokens = 1.0 + np.concatenate(([0.0], np.cumsum(np.asarray(beliefs, np.float64))))
    return 1 + int(np.argmax(tokens / np.asarray(ms, np.float64)[: len(tokens)]))


@dataclass(frozen=True)
class _Plan:
    """What a step was expected to yield when its draft was planned.

    budget     1 where nothing is drafted
    plain      milliseconds of a plain step, if it is one of several arms that is judged
    guessed    whether its milliseconds are not from measurements yet, and say nothing about later plans
    sufficing  whether a draft was planned, but what was free to draft sufficed
    """

    rows: int
    budget: int
    tokens: float
    ms: float
    plain: float
    spec: str
    name: str
    guessed: bool = False
    sufficing: bool = False

    @property
    def drafting(self) -> bool:
        """Whether anything is drafted."""
        return self.budget > 1


@dataclass(frozen=True)
class _Outlook:
    """What steps are expected to yield: tokens, milliseconds and their ratio as trusted, by the nodes of a row's draft.

    The first entry is that of steps without a draft but what is free.
    """

    nodes: NDArray[np.int64]
    tokens: NDArray[np.float64]
    ms: NDArray[np.float64]
    rates: NDArray[np.float64]


@dataclass
class _Lately:
    """What one drafter's nodes were worth lately.

    depths         of drafts of each size in ``BUDGETS``
    estimates      worth of the best, second best, ... node of a row: of the last ones, and of those of more texts
    drafts         what is not in them yet: the probabilities of some rows' draft nodes, and the nodes they had at most
    free_nodes     nodes a row that were verified in steps for which only its free parts drafted
    free_tokens    tokens that those were expected to add
    free_gain      milliseconds that they were expected to save in such a step
    free_idle      steps since its free parts drafted
    free_load      binary order of the rows for which that gain was seen: what many rows made of free drafts says
                   little of what one will
    timed          drafts that were timed before the text that is decoded alone; 0 with several
    since          steps since the opposite of what pays was tried, and ``trial`` how many of that are to come
    plan           the latest one with its budget, for how many rows it was made, for how many steps it was kept, and
                   for how many it may be
    """

    depths: NDArray[np.int64]
    estimates: NDArray[np.float64] = field(default_factory=lambda: np.array([PRIOR, PRIOR]))
    drafts: list[tuple[Sequence[Sequence[float]], int]] = field(default_factory=list)
    free_nodes: float = 0.0
    free_tokens: float = 0.0
    free_gain: float = 1.0
    free_idle: int = 0
    free_load: int = 0
    since: int = 0
    trial: int = 0
    pays: bool = False
    timed: int = 0
    plan: _Plan | None = None
    planned_for: tuple[int, int, int] = (0, 0, 0)
    kept: int = 0
    keep: int = KEPT

    @property
    def worth(self) -> NDArray[np.float64]:
        """Of the best, second best, ... node of a row, lately."""
        self._settle()
        lately: NDArray[np.float64] = self.estimates[0]
        return lately

    @property
    def usual(self) -> NDArray[np.float64]:
        """The same over more texts."""
        self._settle()
        usual: NDArray[np.float64] = self.estimates[1]
        return usual

    def learn(self, beliefs: Sequence[Sequence[float]], budget: int) -> None:
        """Take in the draft nodes' probabilities of some rows, from drafts of at most ``budget`` nodes.

        Several drafts are taken in together: alone, each would take as long as a hundredth of a small pass.
        """
        self.drafts.append((beliefs, budget))
        if len(self.drafts) >= TOGETHER:
            self._settle()

    def _settle(self) -> None:
        for beliefs, budget in self.drafts:
            self._take_in(beliefs, budget)
        self.drafts.clear()

    def _take_in(self, beliefs: Sequence[Sequence[float]], budget: int) -> None:
        size = min(budget - 1, self.estimates.shape[1])
        mean = np.zeros(size)
        for row in beliefs:
            best = sorted(row, reverse=True)[:size]
            mean[: len(best)] += best
        had, others = self.estimates[:, :size], self.estimates[:, size:]
        before = had.sum(axis=1)
        had += (1 - KEPT_SHARES ** len(beliefs)) * (mean / len(beliefs) - had)
        # nodes that such drafts do not have are taken to have become better or worse with the others
        np.minimum(others * (had.sum(axis=1) / before)[:, None], had[:, -1:], out=others)

    def learn_free(self, beliefs: Sequence[Sequence[float]], gain: float) -> None:
        """Take in the probabilities of the draft nodes of some rows that cost nothing to draft and were verified."""
        self.free_gain += RATE * (gain - self.free_gain)
        rate = 1 - (1 - RATE) ** len(beliefs)
        self.free_nodes += rate * (sum(map(len, beliefs)) / len(beliefs) - self.free_nodes)
        self.free_tokens += rate * (sum(map(sum, beliefs)) / len(beliefs) - self.free_tokens)

    def miss_free(self, rows: int) -> None:
        """Take in a step of some rows for which nothing was drafted, not even what is free."""
        left = (1 - RATE) ** rows
        self.free_nodes, self.free_tokens = left * self.free_nodes, left * self.free_tokens

    def begin(self, rows: int, timed: int = 0) -> None:
        """A new text is one of ``rows``: it is taken to be like the usual one, not like the last, and not to repeat
        itself yet. Drafts were timed ``timed`` times so far.
        """
        self.estimates[0] += (self.usual - self.worth) / rows
        self.free_nodes -= self.free_nodes / rows
        self.free_tokens -= self.free_tokens / rows
        self.planned_for = (0, 0, 0)
        self.timed = timed if rows == 1 else 0
        if rows == 1:
            self.pays, self.since, self.trial = False, 0, FIRST_TRIAL


@dataclass
class _Trust:
    """How the tokens and milliseconds of steps compared with their plans: weighted sums of what came and was expected.

    The parts of a prediction are learned one by one; this catches what they miss together.
    """

    tokens: tuple[float, float] = (STATED_TOKENS, STATED_TOKENS)
    ms: tuple[float, float] = (STATED, STATED)

    @property
    def factor(self) -> float:
        """By which rates of tokens a millisecond turned out higher than planned."""
        return self.tokens[0] / self.tokens[1] * self.ms[1] / self.ms[0]

    def learn(self, expected: float, tokens: float, planned: float, ms: float) -> None:
        """Compare a step with what was expected of it: its tokens by the nodes that were verified, its milliseconds."""
        took = min(INTERRUPTED, ms / planned)
        fading = math.exp(-expected / FORGOTTEN)
        self.tokens = (fading * self.tokens[0] + tokens, fading * self.tokens[1] + expected)
        self.ms = (FADING * self.ms[0] + took, FADING * self.ms[1] + 1)


class Speculation:
    """The controller of one target: plans drafts and chooses what is verified. It learns costs and worth as it goes.

    ragged  whether a pass takes rows of different numbers of nodes; otherwise they are padded to the widest
    arms    what is known of the drafters that new rows choose from; None: nothing yet
    """

    def __init__(self, costs: Costs, *, ragged: bool, arms: Arms | None = None) -> None:
        self.costs, self.ragged, self.arms = costs, ragged, arms
        self._lately: dict[str, _Lately] = {}
        self._calibration = Calibration()
        # of each drafter, with drafts or without, by the binary order of the rows
        self._trust: dict[tuple[str, bool, int], _Trust] = {}
        self._plan: _Plan | None = None  # of the next step, where one drafter's budget was planned
        self._promised = 1.0  # tokens that this step's nodes, as chosen, are expected to yield

    def lately(self, drafter: Drafter, rows: int = 1) -> _Lately:
        """What a drafter's nodes have been worth with so many rows; drafters of one account share it."""
        account = drafter.account(rows)
        if account not in self._lately:
            depths = np.array([drafter.depth_of(min(n, drafter.max_nodes)) for n in BUDGETS], np.int64)
            made = self._lately[account] = _Lately(depths)
            stated = 0.0 if self.arms is None else self.arms.lengths.get(drafter.spec, 0.0)
            if length := max(stated, drafter.usual_length(rows)):
                made.estimates *= (length - 1) / made.worth[:PREDICTED].sum()
        return self._lately[account]

    def joined(self, drafter: Drafter, rows: int) -> None:
        """A new text is one of a drafter's ``rows``. The last one may have been so hard to draft that nothing was."""
        if drafter.adaptive:
            self.lately(drafter, rows).begin(rows, self.costs.times_measured(drafter.account(rows)))

    def arm(self, arms: Sequence[Drafter], rows: int, context: float, *, using: Drafter | None) -> Drafter:
        """The one of several drafters for a new row, beside which ``rows`` - 1 others will decode.

        context  mean tokens in the rows' caches
        using    the one that a row in use has, if any
        """
        if self.arms is None:
            self.arms = Arms()
        expected = {arm.spec: self._expected(arm, rows, context) for arm in arms}
        chosen = self.arms.choose(expected, rows, using=None if using is None else using.spec)
        return next(arm for arm in arms if arm.spec == chosen)

    def _expected(self, drafter: Drafter, rows: int, context: float) -> float:
        """How many times as fast as plain decoding a drafter is expected to be if all rows use it."""
        outlook = self._outlook(drafter, rows, rows, 0, context)
        return max(1e-3, float(outlook.rates.max()) * self._plain_ms(rows, context) / rows)

    def _plain_ms(self, rows: int, context: float) -> float:
        """Milliseconds of a step that verifies no draft."""
        return self.costs.passes_ms(rows, 1, rows, context)[0] + self.costs.rest_ms(rows)

    def plan(self, groups: Mapping[Drafter, int], context: float) -> dict[Drafter, int]:
        """The budget of each drafter's next draft; ``groups`` says how many rows each has.

        1 means none but what is free, and 0 not even that. The first steps are plain and timed: otherwise wide passes
        that are slower than expected would make plain ones seem as slow.

        context  mean tokens in the rows' caches
        """
        budgets = {drafter: drafter.max_nodes for drafter in groups}
        rows = sum(groups.values())
        self._plan, self._promised = None, float(rows)
        for drafter, count in groups.items():
            if drafter.adaptive and not self.costs.timed:
                budgets[drafter] = 0
            elif drafter.adaptive and drafter.free:
                budgets[drafter] = drafter.max_nodes if self._ask(drafter, count, rows) else 0
            elif drafter.adaptive:
                others = sum(
                    n * (budgets[d] + d.probes) for d, n in groups.items() if d is not drafter and not d.adaptive
                )
                others += sum(n for d, n in groups.items() if d is not drafter and d.adaptive)
                budgets[drafter] = self._budget(drafter, count, rows, others, context)
        if len(groups) > 1:
            self._plan = None
        return budgets

    def _budget(self, drafter: Drafter, count: int, rows: int, others: int, context: float) -> int:
        lately, planned_for = self.lately(drafter, count), (count, rows, others)
        lately.since += 1
        lately.kept += 1
        before = lately.plan if lately.planned_for == planned_for else None
        if before is None or lately.kept >= lately.keep:
            lately.plan = self._planned(drafter, count, rows, others, context)
            same = before is not None and before.budget == lately.plan.budget
            lately.keep = min(2 * lately.keep, LONGEST_KEPT) if same else KEPT
            again = lately.plan.guessed or lately.plan.drafting != lately.pays
            lately.planned_for, lately.kept = planned_for, lately.keep if again else 0
        assert lately.plan is not None
        self._plan = lately.plan
        if self._plan.drafting:
            return self._plan.budget
        if self._ask(drafter, count, rows):
            return 1
        lately.miss_free(count)
        return 0

    def _planned(self, drafter: Drafter, count: int, rows: int, others: int, context: float) -> _Plan:
        """The best budget for the next steps of ``count`` of the ``rows``, beside ``others`` nodes."""
        lately, outlook = self.lately(drafter, count), self._outlook(drafter, count, rows, others, context)
        rates = outlook.rates
        wide = 1 + int(np.flatnonzero(rates[1:] >= NEARLY * rates[1:].max())[-1])
        account = drafter.account(count)
        guessed = not self.costs.measured(account)
        ratio = float(rates[wide] / rates[0])
        drafting = self._tried(lately, ratio > (GUESSED if guessed else 1.0), ratio)
        if guessed and lately.timed:  # too slow, unless it was interrupted: each text tries one until the cost is known
            drafting |= self.costs.times_measured(account) == lately.timed
        place = wide if drafting else 0
        plain = 0.0 if self.arms is None else self._plain_ms(rows, context)
        tokens, ms = float(outlook.tokens[place]), float(outlook.ms[place])
        nodes = int(outlook.nodes[place])
        return _Plan(rows, nodes, tokens, ms, plain, drafter.spec, account, guessed=guessed and drafting)

    def _outlook(self, drafter: Drafter, count: int, rows: int, others: int, context: float) -> _Outlook:
        """What steps are expected to yield with drafts of each size for ``count`` of the ``rows``."""
        lately, costs, account = self.lately(drafter, count), self.costs, drafter.account(count)
        least = drafter.least(count)
        smaller = sum(n < least for n in BUDGETS)
        tried = np.array([n for n in BUDGETS if least <= n < drafter.max_nodes] + [min(drafter.max_nodes, BUDGETS[-1])])
        gains = np.concatenate(([0.0], np.cumsum(lately.worth)))
        nodes = np.concatenate(([1], tried))
        tokens = rows + count * gains[nodes - 1]
        tokens[0] += count * lately.free_tokens
        verified = others + count * nodes
        verified[1:] += count * drafter.probes
        verified[0] += round(count * lately.free_nodes)
        ms = costs.pass_ms(verified, rows, context) + costs.rest_ms(rows)
        ms[0] += costs.free_ms(account, count)
        ms[1:] += costs.draft_ms(account, tried, count)
        ms[1:] += costs.prepare_ms(account, lately.depths[smaller : smaller + len(tried)] * count)
        rates = tokens / ms
        rates[0] *= MARGIN * self._trusted(account, False, rows).factor
        rates[1:] *= self._trusted(account, True, rows).factor
        return _Outlook(nodes, tokens, ms, rates)

    def _trusted(self, drafter: str, drafting: bool, rows: int) -> _Trust:
        return self._trust.setdefault((drafter, drafting, rows.bit_length()), _Trust())

    @staticmethod
    def _tried(lately: _Lately, pays: bool, ratio: float) -> bool:
        """Whether to draft: as it ``pays``, but for a short trial of the opposite from time to time.

        ratio  of the rate expected with drafts to the one without
        """
        if pays != lately.pays:
            lately.pays, lately.since, lately.trial = pays, 0, 0
        behind = 1 - (1 / ratio if pays else ratio)  # of the opposite, as a share of the rate
        loss = max(SOONER, behind / (1 - WORTH))
        if lately.since >= EXPLORE * max(loss, loss**2):
            lately.since, lately.trial = 0, TRIAL
        if lately.trial:
            lately.trial -= 1
            return not pays and ratio > FROM
        return pays

    def _ask(self, drafter: Drafter, count: int, rows: int) -> bool:
        """Whether to ask for free drafts: where they lately paid for the milliseconds they take, else now and then."""
        lately = self.lately(drafter, count)
        if lately.free_load != rows.bit_length():
            lately.free_load, lately.free_gain = rows.bit_length(), _Lately.free_gain
        lately.free_idle += 1
        if (
            lately.free_gain > FREE_GAIN * self.costs.free_ms(drafter.account(count), rows)
            or lately.free_idle >= SELDOM
        ):
            lately.free_idle = 0
            return True
        return False

    @property
    def guessing(self) -> bool:
        """Whether the next step was planned without knowing what its draft costs."""
        return self._plan is not None and self._plan.guessed

    def suffices(self, rows: Sequence[Row], sketch: Sequence[DraftTree]) -> bool:
        """Whether free drafts promise so much for the next step that the planned draft need not be prepared.

        Call it after ``plan``, with all rows. If it returns True, it has replaced the plan of the step.
        """
        plan = self._plan
        if plan is None or all(tree.size == 1 for tree in sketch):
            return False
        beliefs = {b: self._calibration(tree, rows[b].beliefs(tree)) for b, tree in enumerate(sketch)}
        planned = plan.tokens / plan.ms * self._trusted(plan.name, True, plan.rows).factor
        rest = self.costs.rest_ms(len(rows)) + self.costs.free_ms(plan.name, len(rows))
        least = self.costs.passes_ms(len(rows), 1, len(rows), _context(rows))[0] + rest
        if sum(map(sum, beliefs.values())) < SUFFICIENT * planned * least:
            return False
        sizes, _ = self._sizes(rows, sketch, beliefs, [0], rest, 1.0)
        tokens = sum(sum(sorted(known, reverse=True)[: sizes[b]]) for b, known in beliefs.items())
        nodes = sum(sizes.values()) if self.ragged else len(rows) * max(sizes.values())
        ms = self.costs.passes_ms(nodes, 1, len(rows), _context(rows))[0] + rest
        if tokens < SUFFICIENT * planned * ms:
            return False
        self._plan = replace(plan, budget=1, tokens=tokens, ms=ms, guessed=False, sufficing=True)
        return True

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
        beliefs = {
            b: self._calibration(trees[b], rows[b].beliefs(trees[b])) if trees[b].size > 1 else [1.0]
            for b, drafter in enumerate(drafters)
            if drafter.adaptive
        }
        self._promised = float(len(rows))
        if not beliefs:
            return list(trees)
        if all(len(known) == 1 for known in beliefs.values()):
            for drafter, count in _counts([drafters[b] for b in beliefs]).items():
                if self._usual(drafter, budgets):
                    self.lately(drafter, count).learn_free([()] * count, 0.0)
            return list(trees)
        rest = self.costs.rest_ms(len(rows))
        beside = [drafter.probes if budgets[drafter] > 1 else 0 for drafter in drafters]
        free = True
        counts = _counts(drafters)
        for drafter, count in counts.items():
            if drafter.adaptive and not drafter.free and budgets[drafter] > 1:
                free = False
                account = drafter.account(count)
                rest += float(self.costs.draft_ms(account, budgets[drafter], count))
                rest += float(self.costs.prepare_ms(account, drafter.depth_of(budgets[drafter]) * count))
        sizes, gain = self._sizes(rows, trees, beliefs, beside, rest, FREE_MARGIN if free else 1.0)
        for b in beliefs:
            if budgets[drafters[b]] > 1 and not drafters[b].free:
                sizes[b] = max(sizes[b], min(drafters[b].least(counts[drafters[b]]), trees[b].size))
        found = [best_nodes(tree, beliefs[b], sizes[b]) if b in beliefs else tree for b, tree in enumerate(trees)]
        verified = {b: sorted(known[1:], reverse=True)[: sizes[b] - 1] for b, known in beliefs.items()}
        self._promised += sum(map(sum, verified.values()))
        for drafter in {drafters[b] for b in beliefs}:
            members = [b for b in beliefs if drafters[b] is drafter]
            if self._usual(drafter, budgets):
                self.lately(drafter, counts[drafter]).learn_free([verified[b] for b in members], gain)
            elif budgets[drafter] > 1 and any(trees[b].size > 1 for b in members):
                self.lately(drafter, counts[drafter]).learn([beliefs[b][1:] for b in members], budgets[drafter])
        return found

    def _usual(self, drafter: Drafter, budgets: Mapping[Drafter, int]) -> bool:
        """Whether only free drafts were to be asked for, or there are no others; not that these sufficed for once."""
        return drafter.free or (budgets[drafter] < 2 and not (self._plan is not None and self._plan.sufficing))

    def _sizes(
        self,
        rows: Sequence[Row],
        trees: Sequence[DraftTree],
        beliefs: Mapping[int, Sequence[float]],
        beside: Sequence[int],
        rest: float,
        margin: float,
    ) -> tuple[dict[int, int], float]:
        """How many nodes of each tree in ``beliefs`` to verify, for the most expected tokens a millisecond.

        beside  nodes of each row's probe
        rest    milliseconds of the step beside its pass
        margin  times the rate without a draft that one has to promise

        Returned with them are the milliseconds that this saves over verifying no draft.
        """
        context = _context(rows)
        others = [tree.size for b, tree in enumerate(trees) if b not in beliefs]
        if not self.ragged:
            falling = np.zeros((len(beliefs), max(map(len, beliefs.values()))))
            for i, known in enumerate(beliefs.values()):
                falling[i, : len(known)] = sorted(known, reverse=True)
            widths = np.arange(1, falling.shape[1] + 1)
            nodes = len(rows) * (np.maximum(widths, max(others, default=1)) + max(beside))
            tokens = falling.sum(axis=0).cumsum() + len(others)
            ms = self.costs.pass_ms(nodes, len(rows), context) + rest
            rates = tokens / ms
            rates[0] *= margin
            best = int(np.argmax(rates))
            saved = float(tokens[best] * ms[0] / tokens[0] - ms[best])
            return {b: min(1 + best, trees[b].size) for b in beliefs}, saved
        drafted = [(belief, b) for b, known in beliefs.items() for belief in known[1:]]
        ranked = sorted(drafted, key=itemgetter(0), reverse=True)
        fixed = sum(others) + sum(beside) + len(beliefs)
        costs = self.costs.passes_ms(fixed, len(ranked) + 1, len(rows), context)
        best, tokens, sizes = 0, float(len(rows)), dict.fromkeys(beliefs, 1)
        most = tokens, (costs[0] + rest) / margin
        for k, (belief, _) in enumerate(ranked, 1):
            tokens += belief
            if tokens * most[1] > most[0] * (costs[k] + rest):
                best, most = k, (tokens, costs[k] + rest)
        if not best:
            return sizes, 0.0
        for _, b in ranked[:best]:
            sizes[b] += 1
        return sizes, most[0] * (costs[0] + rest) / len(rows) - most[1]

    def learn(self, row: Row, tree: DraftTree, verdict: Verdict) -> None:
        """Take in what was accepted of a tree, before ``row.beliefs`` does."""
        self._calibration.learn(tree, row.beliefs(tree), verdict.path)

    def saw_step(self, rows: int, tokens: int, ms: float) -> None:
        """Compare a step with its plan: the tokens of all its rows, and its milliseconds with preparing its draft."""
        plan = self._plan
        if plan is not None and plan.rows == rows:
            if not plan.guessed:
                self._trusted(plan.name, plan.drafting, rows).learn(self._promised, tokens, plan.ms, ms)
            if self.arms is not None and plan.plain:
                self.arms.saw(plan.spec, rows, tokens / rows, min(ms, INTERRUPTED * plan.ms) / plan.plain)


def _context(rows: Sequence[Row]) -> float:
    return sum(len(row.tokens) for row in rows) / len(rows)


def _counts(drafters: Sequence[Drafter]) -> dict[Drafter, int]:
    counts: dict[Drafter, int] = {}
    for drafter in drafters:
        counts[drafter] = counts.get(drafter, 0) + 1
    return counts
