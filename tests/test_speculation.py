"""How much is speculated: hand-made beliefs and costs, loads that come and go, and the same text throughout."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest

from anabranch.control.controller import (
    EXPLORE,
    FIRST_TRIAL,
    GUESSED,
    KEPT,
    SOONER,
    TOGETHER,
    TRIAL,
    Speculation,
    best_count,
)
from anabranch.control.costs import FIRST, Costs, PassCosts, StepCosts
from anabranch.decoding.engine import Engine, Request
from anabranch.decoding.scheduler import Scheduler
from anabranch.drafting.beliefs import Beliefs, Calibration
from anabranch.drafting.drafter import Row
from anabranch.methods import Drafter, make_drafter
from anabranch.methods.none import NoDrafter
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree
from small import Timeless, decode, prompt, request, small, small_adapter

FREE = "1:10/512:10"
LINEAR = "1:10/512:5120"  # every node costs as much as the first row
CLIFF = "1:10/8:10/9:60/512:3000"  # eight nodes fit a pass


class Adaptive(NoDrafter):
    name, max_nodes, adaptive = "adaptive", 16, True


def controller(table: str, *, ragged: bool = True, draft: float = 0.0) -> Speculation:
    """A controller that has seen a plain pass."""
    made = Speculation(Costs(PassCosts(StepCosts.parse(table)), draft), ragged=ragged)
    made.costs.saw_pass(StepCosts.parse(table).ms[0], 1, 1, 0.0)
    return made


def settled(made: Speculation, drafter: Drafter, rows: int = 1) -> int:
    """The budget once no earlier plan is kept."""
    for _ in range(KEPT):
        budget = made.plan({drafter: rows}, 0.0)[drafter]
    return budget


def step(made: Speculation, drafter: Drafter, tree: DraftTree, budget: int, *, tokens: int, ms: float) -> None:
    """A step of one row as the engine reports it, once it was planned."""
    made.choose([Row([9], 1, SamplingParams())], [drafter], [tree], {drafter: budget})
    made.saw_step(1, tokens, ms)


def star(*beliefs: float) -> DraftTree:
    """Children of the root 9, with these probabilities; their tokens are 0, 1, ..."""
    logs = np.log(np.array([1.0, *beliefs])).astype(np.float32)
    parents = np.array([-1, *[0] * len(beliefs)])
    return DraftTree(np.array([9, *range(len(beliefs))]), parents, log_probs=logs)


def chosen(made: Speculation, trees: Sequence[DraftTree], drafters: Sequence[Drafter] | None = None) -> list[list[int]]:
    drafter = Adaptive()
    drafters = drafters or [drafter] * len(trees)
    rows = [Row([9], 1, SamplingParams()) for _ in trees]
    found = made.choose(rows, drafters, trees, {each: each.max_nodes for each in drafters})
    return [tree.tokens[1:].tolist() for tree in found]


def test_the_worth_of_drafts_is_the_same_whenever_it_is_asked_for() -> None:
    early, late = controller(FREE).lately(Adaptive()), controller(FREE).lately(Adaptive())
    for turn in range(3 * TOGETHER + 1):
        for lately in (early, late):
            lately.learn([[0.5, 0.9 - turn / 100], [0.25]], 3 + turn % 6)
        assert early.worth[0] > 0
        assert len(late.drafts) < TOGETHER
    assert (early.worth == late.worth).all()
    assert (early.usual == late.usual).all()


# -- one tree ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("beliefs", "ms", "count"),
    [
        ([0.9, 0.1], [10.0, 11.0, 12.0], 2),
        ([], [10.0], 1),
        ([0.5, 0.4], [10.0, 10.0, 10.0], 3),
        ([0.5, 0.4], [10.0, 20.0, 30.0], 1),
        ([0.5, 0.5], [10.0, 15.0, 16.0], 3),  # the first node pays only with the second
        ([0.5], [10.0, 15.0], 1),  # no gain, no node
    ],
)
def test_best_count(beliefs: list[float], ms: list[float], count: int) -> None:
    assert best_count(beliefs, ms) == count


# -- what is verified -------------------------------------------------------------------------------------------------
def test_the_best_nodes_of_all_rows_share_a_ragged_pass() -> None:
    # two roots and two nodes are free, a third node costs three times the pass
    made = controller("1:10/4:10/5:30/512:3000")
    assert chosen(made, [star(0.9, 0.8, 0.2), star(0.3)]) == [[0, 1], []]
    assert chosen(made, [star(0.9, 0.2), star(0.5, 0.4)]) == [[0], [0]]


def test_a_padded_pass_has_one_width() -> None:
    made = controller("1:10/4:10/5:30/512:3000", ragged=False)
    assert chosen(made, [star(0.9, 0.8, 0.2), star(0.3)]) == [[0], [0]]
    assert chosen(made, [star(0.9, 0.8, 0.2)]) == [[0, 1, 2]]


@pytest.mark.parametrize("ragged", [True, False])
def test_flat_costs_take_all_and_steep_costs_none(ragged: bool) -> None:
    trees = [star(0.9, 0.1), star(0.05)]
    assert chosen(controller(FREE, ragged=ragged), trees) == [[0, 1], [0]]
    assert chosen(controller(LINEAR, ragged=ragged), trees) == [[], []]
    assert chosen(controller(FREE, ragged=ragged), [star(), star()]) == [[], []]


def test_ties_go_to_the_earlier_row_and_only_as_many_as_pay() -> None:
    made = controller("1:10/5:10/6:60/512:3000")
    assert chosen(made, [star(0.5, 0.5), star(0.5, 0.5)]) == [[0, 1], [0]]


@pytest.mark.parametrize("ragged", [True, False])
def test_trees_of_other_drafters_stay_whole_and_are_paid_for(ragged: bool) -> None:
    fixed = NoDrafter()
    trees = [star(0.9, 0.8), star(0.1, 0.1, 0.1)]
    assert chosen(controller(CLIFF, ragged=ragged), trees, [Adaptive(), fixed]) == [[0, 1], [0, 1, 2]]
    # beside seven nodes only one more fits
    many = [star(0.9, 0.8), star(*[0.1] * 5)]
    assert chosen(controller(CLIFF), many, [Adaptive(), fixed]) == [[0], [0, 1, 2, 3, 4]]


def test_a_parent_is_never_cut_before_its_child() -> None:
    chain = DraftTree.chain(9, [1, 2, 3], log_probs=np.log([0.9, 0.9, 0.2]).tolist())
    assert chosen(controller("1:10/3:10/4:30/512:3000"), [chain]) == [[1, 2]]


# -- what is drafted --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rows", [1, 2, 8, 32])
def test_where_every_node_costs_a_row_nothing_is_drafted(rows: int) -> None:
    drafter = Adaptive()
    assert controller(LINEAR).plan({drafter: rows}, 100.0) == {drafter: 1}


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_where_nodes_cost_nothing_the_widest_draft_is_made(rows: int) -> None:
    drafter = Adaptive()
    assert controller(FREE).plan({drafter: rows}, 100.0) == {drafter: 16}


def test_a_draft_that_costs_more_than_it_brings_is_not_made() -> None:
    drafter = Adaptive()
    assert controller(FREE, draft=100.0).plan({drafter: 1}, 0.0) == {drafter: 1}


def test_drafts_end_under_load_and_are_back_one_step_after_it() -> None:
    made, drafter = controller(CLIFF), Adaptive()
    budgets = [made.plan({drafter: rows}, 100.0)[drafter] for rows in (1, 2, 8, 8, 8, 2, 1)]
    assert budgets[0] == budgets[6] == 8
    assert budgets[1] == budgets[5] == 4
    assert budgets[2:5] == [1, 1, 1]


def test_rows_of_other_drafters_are_load_too() -> None:
    made, drafter, plain = controller(CLIFF), Adaptive(), NoDrafter()
    assert made.plan({drafter: 1, plain: 7}, 100.0) == {drafter: 1, plain: 1}
    assert made.plan({drafter: 1, plain: 4}, 100.0) == {drafter: 4, plain: 1}


def trials(made: Speculation, steps: int, *, drafts: bool) -> list[int]:
    """Steps whose plan is to draft, or not to."""
    drafter = Adaptive()
    budgets = [made.plan({drafter: 1}, 0.0)[drafter] for _ in range(steps)]
    return [step for step, budget in enumerate(budgets) if (budget > 1) == drafts]


def test_the_opposite_of_what_pays_is_tried_now_and_then() -> None:
    # with a draft 0.89 and 1.13 times the rate without one
    for table, drafts in (("1:10/2:16.8/512:5120", True), ("1:10/2:13.2/3:50/512:5120", False)):
        tried = trials(controller(table), 4 * EXPLORE, drafts=drafts)
        starts = [step for step in tried if step - 1 not in tried]
        assert len(tried) == TRIAL * len(starts)
        assert all(SOONER * EXPLORE <= later - start < EXPLORE for start, later in pairwise(starts))
        assert len(starts) >= 4
    # where the opposite is equally fast it is tried more often, and never where it is far behind
    often = trials(controller("1:10/2:14.95/512:5120"), 4 * EXPLORE, drafts=True)
    assert len(often) > len(trials(controller("1:10/2:16.8/512:5120"), 4 * EXPLORE, drafts=True))
    assert trials(controller("1:10/2:100/512:9000"), 3 * EXPLORE, drafts=True) == []
    assert trials(controller(FREE), 3 * EXPLORE, drafts=False) == []


def test_what_small_drafts_do_not_show_follows_what_they_do() -> None:
    made, drafter = controller(FREE), Adaptive()
    tail = made.lately(drafter).worth[1:4].copy()
    for _ in range(40):
        made.choose([Row([9], 1, SamplingParams())], [drafter], [star(0.1)], {drafter: 2})
    low = made.lately(drafter).worth[1:4].copy()
    for _ in range(200):
        made.choose([Row([9], 1, SamplingParams())], [drafter], [star(0.7)], {drafter: 2})
    assert (low < 0.5 * tail).all()
    assert (made.lately(drafter).worth[1:4] > 2 * low).all()


def test_a_plan_that_fails_is_not_repeated() -> None:
    made, drafter = controller("1:10/2:12/3:50/512:5120"), Adaptive()  # 1.55 / 12 > 1 / 10
    assert made.plan({drafter: 1}, 0.0) == {drafter: 2}
    for _ in range(400):
        budget = made.plan({drafter: 1}, 0.0)[drafter]
        step(made, drafter, star(0.55) if budget > 1 else star(), budget, tokens=1, ms=12.0 if budget > 1 else 10.0)
    drafts = [made.plan({drafter: 1}, 0.0)[drafter] > 1 for _ in range(EXPLORE)]
    assert sum(drafts) <= EXPLORE * TRIAL / (SOONER * EXPLORE)  # only trials


def test_what_nodes_are_worth_is_not_held_against_drafts_twice() -> None:
    """Nodes of this text are worth less than those of most, as they say themselves, but still pay."""
    made, drafter = controller("1:10/2:10.2/3:50/512:5120"), Adaptive()  # 1.1 / 10.2 > 1.04 / 10
    for accepted in [True, *[False] * 9] * 30:
        budget = made.plan({drafter: 1}, 0.0)[drafter]
        tree, ms = (star(0.1), 10.2) if budget > 1 else (star(), 10.0)
        step(made, drafter, tree, budget, tokens=1 + (accepted and budget > 1), ms=ms)
    assert made.lately(drafter).worth[0] == pytest.approx(0.1, abs=0.01)
    assert made._trusted(drafter.account(1), True, 1).factor == pytest.approx(1.0, abs=0.02)
    assert settled(made, drafter) == 2


def test_free_drafts_that_promise_more_than_the_plan_suffice() -> None:
    made, drafter = controller("1:10/8:11/16:12/512:900", draft=8.0), Adaptive()
    row = Row([9], 1, SamplingParams())
    assert made.plan({drafter: 1}, 0.0)[drafter] > 1
    for tree in (star(), star(0.3)):
        assert not made.suffices([row], [tree])
    assert made.plan({drafter: 1}, 0.0)[drafter] > 1
    chain = DraftTree.chain(9, [1, 2, 3, 4, 5], log_probs=np.log([0.98**k for k in range(1, 6)]).tolist())
    assert made.suffices([row], [chain])
    before = made.lately(drafter).free_tokens, made.lately(drafter).worth.copy()
    (verified,) = made.choose([row], [drafter], [chain], {drafter: 1})
    assert verified.size == 6
    assert made.lately(drafter).free_tokens == before[0], "a step that was chosen for its text says nothing of others"
    assert (made.lately(drafter).worth == before[1]).all()
    assert made.plan({drafter: 1}, 0.0)[drafter] > 1, "for one step only"
    made.plan({}, 0.0)
    assert not made.suffices([row], [chain]), "nothing was planned"


def test_drafts_whose_cost_is_a_guess_are_tried_and_not_distrusted_for_it() -> None:
    made, drafter = controller("1:10/8:11/16:12/512:900", draft=34.0), Adaptive()
    outlook = made._outlook(drafter, 1, 1, 0, 0.0)
    assert GUESSED < outlook.rates[1:].max() / outlook.rates[0] < 1
    for step in range(FIRST):
        assert made.plan({drafter: 1}, 0.0)[drafter] > 1
        assert made.guessing
        made.saw_step(1, 1, 40.0)
        made.costs.saw_prepare(drafter.account(1), 30.0 if step == 0 else 1e-3, 1)
        made.costs.saw_draft(drafter.account(1), 1e-3, 2, 1)
    assert settled(made, drafter) > 1
    assert not made.guessing


# -- a cold start -----------------------------------------------------------------------------------------------------
TRUE = StepCosts.parse("1:14/8:16/16:20/32:27")  # of a target that PyTorch computes
TYPICAL = PassCosts(StepCosts.parse("1:1/8:1.1/16:1.2/32:1.4"), busy=True)
MEASURED = PassCosts(TRUE)


def decoded(passes: PassCosts, slower: float, drafts: Sequence[float], texts: int) -> list[float]:
    """Tokens/s of texts of 64 tokens that are decoded one after the other, from the first step on.

    slower  how many times as long passes over several nodes take as they should
    drafts  milliseconds of preparing the first, second, ... draft; the last are those of all others
    """
    made, drafter, prepared, rates = (
        Speculation(Costs(passes, 0.6 * passes.costs.ms[0]), ragged=True),
        Adaptive(),
        0,
        [],
    )
    account, row = drafter.account(1), Row([9], 1, SamplingParams())
    for _ in range(texts):
        made.joined(drafter, 1)
        tokens, ms, budget = 0.0, 0.0, min(1, made.plan({drafter: 1}, 0.0)[drafter])
        while tokens < 64:
            tree = star(*(0.62 * 0.86**k for k in range(budget - 1)))
            (tree,) = made.choose([row], [drafter], [tree], {drafter: budget})
            took = float(TRUE(np.array(tree.size))) * (slower if tree.size > 1 else 1.0)
            tokens += made._promised
            made.saw_step(1, round(made._promised), took)
            budget = made.plan({drafter: 1}, 0.0)[drafter]
            made.costs.saw_pass(took, tree.size, 1, 0.0)
            if budget > 1:
                made.costs.saw_prepare(account, drafts[min(prepared, len(drafts) - 1)], drafter.depth_of(budget))
                made.costs.saw_draft(account, 3.0, budget, 1)
                took += 3.0 + drafts[min(prepared, len(drafts) - 1)]
                prepared += 1
            ms += took
        rates.append(1e3 * tokens / ms)
    return rates


PLAIN = 1e3 / TRUE.ms[0]


@pytest.mark.parametrize("passes", [MEASURED, TYPICAL])
def test_a_cold_start_finds_what_drafts_are_worth(passes: PassCosts) -> None:
    """Costs that were not measured have no unit, which the first steps, plain ones, give them."""
    assert min(decoded(passes, 1.0, [7.0], 6)) > 1.5 * PLAIN


@pytest.mark.parametrize("passes", [MEASURED, TYPICAL])
@pytest.mark.parametrize("slower", [4.0, 8.0])
def test_wide_passes_that_are_slower_than_stated_are_not_put_down_to_plain_ones(
    passes: PassCosts, slower: float
) -> None:
    rates = decoded(passes, slower, [7.0], 6)
    assert rates[1:3] == pytest.approx([PLAIN] * 2, rel=0.02)
    assert min(rates[3:]) > 0.7 * PLAIN  # one of them tries drafts again


@pytest.mark.parametrize("interrupted", [1, 2])
def test_first_drafts_that_were_interrupted_do_not_end_drafting(interrupted: int) -> None:
    rates = decoded(MEASURED, 1.0, [*[150.0] * interrupted, 7.0], 6)
    assert min(rates[:interrupted]) > 0.85 * PLAIN
    assert min(rates[interrupted:]) > 1.5 * PLAIN


def test_drafts_that_take_longer_than_they_save_are_tried_a_few_times_only() -> None:
    rates = decoded(MEASURED, 1.0, [100.0], 6)
    assert min(rates) > 0.85 * PLAIN
    assert rates[-2:] == pytest.approx([PLAIN] * 2, rel=0.02)


def test_nodes_that_are_rarely_accepted_are_believed_less() -> None:
    known, tree = Calibration(), star(0.85, 0.35)
    beliefs = Beliefs()(tree)
    for step in range(200):
        known.learn(tree, beliefs, [0, 1] if step % 2 else [0])
    _, first, second = known(tree, beliefs)
    assert first == pytest.approx(0.5, abs=0.03)
    assert second < 0.05
    assert known(star(0.15), [1.0, 0.15]) == [1.0, 0.15]  # nothing is known of other probabilities
    parent_and_child = DraftTree.chain(9, [1, 2], log_probs=np.log([0.85, 0.95]).tolist())
    assert known(parent_and_child, [1.0, 0.85, 0.8])[2] <= known(parent_and_child, [1.0, 0.85, 0.8])[1]


# -- learning ---------------------------------------------------------------------------------------------------------
def test_what_drafts_were_worth_decides_about_the_next_ones() -> None:
    made, drafter = controller("1:10/2:12/16:30/512:900"), Adaptive()
    row = Row([9], 1, SamplingParams())

    def see(tree: DraftTree, times: int) -> None:
        for _ in range(times):
            made.choose([row], [drafter], [tree], {drafter: 16})

    assert made.plan({drafter: 1}, 0.0)[drafter] > 1
    before = made.lately(drafter).worth.copy()
    see(star(0.01, 0.01), 100)
    assert (made.lately(drafter).worth <= before).all()
    assert made.lately(drafter).worth[0] < 0.02
    assert settled(made, drafter) == 1
    see(star(*[0.95] * 15), 100)
    assert made.lately(drafter).worth[14] == pytest.approx(0.95, rel=0.01)
    assert settled(made, drafter) == 16
    other = Adaptive()
    assert made.lately(other) is made.lately(drafter), "drafters of one name share what they were worth"


def test_a_new_text_is_like_the_usual_one_not_like_the_last() -> None:
    made, drafter = controller("1:10/2:12/16:30/512:900"), Adaptive()
    row = Row([9], 1, SamplingParams())

    def see(tree: DraftTree, budget: int, times: int) -> None:
        for _ in range(times):
            made.choose([row], [drafter], [tree], {drafter: budget})

    see(star(*[0.9] * 15), 16, 300)
    see(star(0.01, 0.01), 16, 40)  # a hard text ends drafts of its own, not of those after it
    hard = made.lately(drafter).worth.sum()
    assert settled(made, drafter) == 1
    made.joined(drafter, 2)  # the other row is still hard to draft
    half = made.lately(drafter).worth.sum()
    made.joined(drafter, 1)
    assert hard < half < made.lately(drafter).worth.sum()
    assert made.plan({drafter: 1}, 0.0)[drafter] > 1
    see(star(0.9, 0.8), 1, 40)  # what was free in a text that repeats itself
    assert made.lately(drafter).free_tokens > 0.5
    made.joined(drafter, 1)
    assert made.lately(drafter).free_tokens == 0.0


def test_what_is_free_is_worth_nothing_where_it_is_not_asked_for() -> None:
    made, drafter = controller("1:10/2:30/512:9000"), Adaptive()
    assert settled(made, drafter) == 1
    lately = made.lately(drafter)
    lately.free_tokens, lately.free_gain = 0.5, -1.0
    budgets = [made.plan({drafter: 1}, 0.0)[drafter] for _ in range(200)]
    assert budgets.count(0) > 150
    assert lately.free_tokens < 0.01


@pytest.mark.parametrize(("table", "times"), [("1:10/2:16.8/512:5120", FIRST_TRIAL), ("1:10/2:30/512:9000", 0)])
def test_a_text_that_is_alone_begins_with_drafts_unless_they_are_far_behind(table: str, times: int) -> None:
    made, drafter = controller(table), Adaptive()
    assert settled(made, drafter) == 1
    made.joined(drafter, 2)
    assert made.plan({drafter: 2}, 0.0)[drafter] <= 1
    made.joined(drafter, 1)
    budgets = [made.plan({drafter: 1}, 0.0)[drafter] for _ in range(30)]
    assert [budget > 1 for budget in budgets] == [True] * times + [False] * (30 - times)


def test_the_engine_says_when_a_text_begins() -> None:
    target, drafter = small(), make_drafter("prompt_lookup:tokens=auto", small())
    engine = Engine(target, drafter, rows=2, capacity=64, speculation=Timeless(FREE, target))
    with mock.patch.object(Speculation, "joined", autospec=True) as joined:
        for seed in (1, 2):
            engine.add(request(5, seed, 3))
        assert [call.args[1:] for call in joined.call_args_list] == [(drafter, 1), (drafter, 2)]


def test_a_small_draft_says_nothing_good_of_what_it_left_out() -> None:
    made, drafter = controller(FREE), Adaptive()
    for _ in range(100):
        made.choose([Row([9], 1, SamplingParams())], [drafter], [star(0.2)], {drafter: 2})
    worth = made.lately(drafter).worth
    assert worth[0] == pytest.approx(0.2, rel=0.02)
    assert (worth[1:] <= worth[0]).all()


def test_costs_that_turn_out_higher_end_the_drafts() -> None:
    made, drafter = controller("1:10/16:11/512:20"), Adaptive()
    assert made.plan({drafter: 1}, 0.0) == {drafter: 16}
    for _ in range(50):
        made.costs.saw_pass(10.0, 1, 1, 0.0)
        for nodes in (2, 3, 4, 5, 6, 8, 10, 12, 16):
            made.costs.saw_pass(10.0 * nodes, nodes, 1, 0.0)
    assert settled(made, drafter) == 1


def test_the_engine_times_its_steps() -> None:
    target = small()
    drafter = make_drafter("streams:tree=auto,nodes=8", target, small_adapter(target))
    made = Speculation(Costs(PassCosts(StepCosts.parse(FREE)), 1e-3), ragged=target.ragged)
    engine = Engine(target, drafter, rows=2, capacity=96, speculation=made)
    for seed in range(2):
        engine.add(request(5, seed, 30))
    steps = list(engine.run())
    assert max(step.tree.size for step in steps) > 1
    took = 1e3 * np.median([step.timings.forward for step in steps])
    (known,) = made.costs.pass_ms(np.array([8]), 2, 0.0)
    assert 0.1 * took < known < 10 * took, "the table said 10 ms, and follows what passes take"


# -- the text --------------------------------------------------------------------------------------------------------
QUICK = {
    ("auto", 1, FREE),
    ("auto", 8, CLIFF),
    ("streams:tree=auto,nodes=12", 1, CLIFF),
    ("streams:tree=auto,nodes=12", 8, LINEAR),
    ("streams:tree=auto+prompt_lookup", 1, LINEAR),
    ("streams:tree=auto+prompt_lookup", 8, FREE),
}
LOADS = [
    pytest.param(spec, rows, table, marks=() if (spec, rows, table) in QUICK else pytest.mark.thorough)
    for spec in ("streams:tree=auto,nodes=12", "streams:tree=auto+prompt_lookup", "auto")
    for rows in (1, 3, 8)
    for table in (FREE, CLIFF, LINEAR)
]


@pytest.mark.parametrize(("spec", "rows", "table"), LOADS)
def test_the_text_is_plain_decodings_at_every_load(spec: str, rows: int, table: str) -> None:
    target = small()
    drafter = make_drafter(spec, target, small_adapter(target))
    asked = [
        request(5 + seed, seed, 10 + 3 * seed, sampling=SamplingParams(temperature=0.9 * (seed % 2), seed=seed))
        for seed in range(9)
    ]
    wanted, _ = decode(target, asked)
    scheduler = Scheduler(target, rows=rows, speculation=controller(table, ragged=target.ragged), prefix_bytes=0)
    tickets = [scheduler.submit(each, drafter) for each in asked]
    while scheduler.busy:
        scheduler.tick()
    assert [ticket.emitted for ticket in tickets] == wanted


def test_a_row_stops_drafting_while_others_fill_the_pass_and_its_text_stays_the_same() -> None:
    target = small()
    drafter = make_drafter("streams:tree=auto", target, small_adapter(target))
    scheduler = Scheduler(target, speculation=Timeless(CLIFF, target), prefix_bytes=0)
    stays = scheduler.submit(Request(prompt(6), 60), drafter)
    drafted: list[list[int]] = [[], [], []]
    for phase, others in enumerate((0, 9, 0)):
        tickets = [scheduler.submit(Request(prompt(5, 20 + n), 50), drafter) for n in range(others)]
        while any(ticket.row is None for ticket in tickets):
            scheduler.tick()
        for _ in range(6):
            drafted[phase] += [step.drafted for ticket, step in scheduler.tick() if ticket is stays]
        for ticket in tickets:
            scheduler.cancel(ticket)
    while scheduler.busy:
        scheduler.tick()
    alone, beside_nine, alone_again = drafted
    assert min(alone[1:]) > 0
    assert beside_nine == [0] * 6
    assert min(alone_again[1:]) > 0, "drafts are back one step after the load has gone"
    assert stays.emitted == decode(target, [Request(prompt(6), 60)])[0][0]
