"""The controller: hand-made probabilities and costs, simulated machines, loads that change; the text never does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from unittest import mock

import numpy as np
import pytest

from anabranch.control.controller import (
    EXPLORE,
    PERIOD,
    PRIOR,
    Controller,
    DraftStats,
    Plan,
    acceptance_by_rank,
    best_count,
)
from anabranch.control.costs import Costs, PassCosts, StepCosts
from anabranch.decoding.engine import Engine, Request
from anabranch.decoding.scheduler import Scheduler
from anabranch.drafting.drafter import Drafter, Row, Traits
from anabranch.methods import make_drafter
from anabranch.methods.none import NoDrafter
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree
from small import Timeless, decode, prompt, request, small, small_adapter

FREE = "1:10/512:10"
LINEAR = "1:10/512:5120"  # every node costs as much as the first row
CLIFF = "1:10/8:10/9:60/512:3000"  # eight nodes fit a pass
SHORT = SamplingParams()


class Adaptive(NoDrafter):
    name, max_nodes, adaptive = "adaptive", 16, True


def controller(table: str, *, ragged: bool = True, drafts: float = 0.0) -> Controller:
    """A controller that has seen a plain pass."""
    made = Controller(Costs(PassCosts(StepCosts.parse(table)), {"": drafts}), ragged=ragged)
    made.costs.saw_pass(StepCosts.parse(table).ms[0], 1, 1, 0.0)
    return made


def star(*probs: float) -> DraftTree:
    """Children of the root 9, with these probabilities; their tokens are 0, 1, ..."""
    logs = np.log(np.array([1.0, *probs])).astype(np.float32)
    parents = np.array([-1, *[0] * len(probs)])
    return DraftTree(np.array([9, *range(len(probs))]), parents, log_probs=logs)


def chosen(made: Controller, trees: Sequence[DraftTree], drafters: Sequence[Drafter] | None = None) -> list[list[int]]:
    drafter = Adaptive()
    drafters = drafters or [drafter] * len(trees)
    rows = [Row([9], 1, SHORT) for _ in trees]
    found = made.choose(rows, drafters, trees, {each: Plan(each.max_nodes) for each in drafters})
    return [tree.tokens[1:].tolist() for tree in found]


def planned(made: Controller, drafter: Drafter, rows: int = 1) -> int:
    return made.plan({drafter: rows}, 0.0)[drafter].nodes


# -- one tree ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("probs", "ms", "count"),
    [
        ([0.9, 0.1], [10.0, 11.0, 12.0], 2),
        ([], [10.0], 1),
        ([0.5, 0.4], [10.0, 10.0, 10.0], 3),
        ([0.5, 0.4], [10.0, 20.0, 30.0], 1),
        ([0.5, 0.5], [10.0, 15.0, 16.0], 3),  # the first node pays only with the second
        ([0.5], [10.0, 15.0], 1),  # no gain, no node
    ],
)
def test_best_count(probs: list[float], ms: list[float], count: int) -> None:
    assert best_count(probs, ms) == count


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
def test_nothing_is_drafted_where_a_node_costs_a_row_and_all_where_it_costs_nothing(rows: int) -> None:
    assert planned(controller(LINEAR), Adaptive(), rows) == 0
    assert planned(controller(FREE), Adaptive(), rows) == 16
    assert planned(controller(FREE, drafts=100.0), Adaptive(), rows) == 0, "tuned: the draft costs more than it brings"


def test_drafts_end_under_load_and_are_back_one_step_after_it() -> None:
    made, drafter = controller(CLIFF), Adaptive()
    assert [planned(made, drafter, rows) for rows in (1, 2, 8, 8, 8, 2, 1)] == [8, 4, 0, 0, 0, 4, 8]


def test_rows_of_other_drafters_are_load_too() -> None:
    made, drafter, plain = controller(CLIFF), Adaptive(), NoDrafter()
    assert made.plan({drafter: 1, plain: 7}, 100.0)[drafter].nodes == 0
    assert made.plan({drafter: 1, plain: 4}, 100.0)[drafter].nodes == 4


def test_the_first_step_is_plain_since_typical_costs_have_no_unit() -> None:
    made, drafter = Controller(Costs(PassCosts(StepCosts.parse("1:1/512:1"), busy=True)), ragged=True), Adaptive()
    assert planned(made, drafter) == 0
    made.saw_step(1, 1, 0.0, tokens=1, pass_ms=12.0, other_ms=0.1)
    assert planned(made, drafter) == 16
    assert made.costs.pass_ms(8, 1, 0.0) == pytest.approx(12.0)


def test_acceptance_follows_the_drafts_and_a_new_text_starts_from_the_usual_one() -> None:
    made, drafter, row = controller("1:10/2:12/16:30/512:900"), Adaptive(), Row([9], 1, SHORT)

    def see(tree: DraftTree, times: int, nodes: int = 16) -> tuple[float, ...]:
        for _ in range(times):
            made.choose([row], [drafter], [tree], {drafter: Plan(nodes)})
        return made.stats(drafter, 2, 1).acceptance

    assert see(star(*[0.95] * 15), 300)[14] == pytest.approx(0.95, rel=0.01)
    assert planned(made, drafter) == 16
    hard = see(star(0.01, 0.01), 250)
    assert hard[0] < 0.02
    assert planned(controller("1:10/2:12/16:30/512:900"), drafter) > 1
    for _ in range(PERIOD):  # the plan in use is kept for a while
        planned(made, drafter)
    assert planned(made, drafter) == 0
    made.joined(drafter, 1)
    assert made.stats(drafter, 2, 1).acceptance[0] > 0.3
    assert planned(made, drafter) > 1
    low = see(star(0.1), 40, nodes=2)
    assert all(prob <= low[0] for prob in low), "a small draft says nothing good of the nodes that it left out"
    assert made.stats(Adaptive(), 2, 1) is made.stats(drafter, 2, 1), "drafters of one name share statistics"


def test_statistics_of_a_new_batch_size_are_those_of_the_nearest() -> None:
    made, drafter = controller(FREE), Adaptive()
    seen = DraftStats((0.9,) * 15, (0.9,) * 15, fixed_ms=2.0, drafts=60, steps=9)
    made._stats[drafter.name, 2, 1] = seen
    made._stats[drafter.name, 2, 6] = DraftStats((PRIOR,) * 15, (PRIOR,) * 15, fixed_ms=30.0, steps=9)
    near = made.stats(drafter, 2, 2)
    assert (near.acceptance, near.fixed_ms, near.steps) == (seen.acceptance, 2.0, 0)
    hard = [star(*[0.01] * 15)] * 2
    made.choose([Row([9], 1, SHORT)] * 2, [drafter] * 2, hard, {drafter: Plan(16)})
    assert min(made.stats(drafter, 2, 2).acceptance) > 0.8, "one step of another batch size is little evidence"


# -- simulated machines -----------------------------------------------------------------------------------------------
ZEN = "1:3/8:6/9:7.5/16:9/24:13/512:300"  # of the default model, in ms
MODES = (0, 1, 2)


class Machine:
    """Steps of rows whose drafts are chains: of each node, the probability that it is accepted is the one it states.

    ms, accepted  of drafting by mode
    """

    def __init__(
        self,
        table: str,
        ms: dict[int, float],
        accepted: dict[int, float],
        *,
        known: str = "",
        cards: Mapping[str, Mapping[int, float]] | None = None,
    ) -> None:
        self.table, self.ms, self.accepted = StepCosts.parse(table), ms, accepted
        self.noise = np.random.default_rng(0)
        self.made = Controller(Costs(PassCosts(StepCosts.parse(known or table))), ragged=True, cards=cards)
        self.used = dict.fromkeys(MODES, 0)

    def run(self, drafter: Drafter, steps: int, rows: int = 1, *, interrupted: Sequence[int] = ()) -> float:
        """Tokens per millisecond."""
        total = spent = 0.0
        each = [Row([9], 1, SHORT) for _ in range(rows)]
        for step in range(steps):
            plan = self.made.plan({drafter: rows}, 0.0)[drafter]
            self.used[plan.mode] += 1
            share = self.accepted.get(plan.mode, 0.0)
            count = (plan.nodes or 1) - 1 if plan.nodes != 1 else 3
            logs = (np.arange(1, count + 1) * np.log(share)).tolist() if count else []
            trees = [DraftTree.chain(9, [1] * count, log_probs=logs) for _ in each]
            if plan.nodes:
                trees = self.made.choose(each, [drafter] * rows, trees, {drafter: plan})
            tokens = sum(min(tree.size, int(self.noise.geometric(1 - share)) if share else 1) for tree in trees)
            nodes = sum(tree.size for tree in trees)
            passed, other = float(self.table(np.array(nodes))), 0.1 * rows + rows * self.ms.get(plan.mode, 0.0)
            if step in interrupted:
                other += 100.0
            self.made.saw_step(nodes, rows, 0.0, tokens=tokens, pass_ms=passed, other_ms=other)
            total, spent = total + tokens, spent + passed + other
        return total / spent

    def plain(self, rows: int = 1) -> float:
        return rows / (float(self.table(np.array(rows))) + 0.1 * rows)


class Merged(Adaptive):
    name, traits = "streams+prompt_lookup", Traits(free="some")


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("draft_ms", [0.2, 1.0, 4.0])
@pytest.mark.parametrize("accepted", [0.1, 0.5, 0.8])
def test_never_far_below_plain_decoding(rows: int, draft_ms: float, accepted: float) -> None:
    machine = Machine(ZEN, {2: draft_ms}, {2: accepted})
    assert machine.run(Adaptive(), 600, rows) > 0.95 * machine.plain(rows)


@pytest.mark.parametrize("known", ["1:1/8:1/512:2", "1:1/8:2.5/512:160", ZEN])
def test_wrong_costs_are_corrected_from_a_cold_start(known: str) -> None:
    machine, right = Machine(ZEN, {2: 0.5}, {2: 0.8}, known=known), Machine(ZEN, {2: 0.5}, {2: 0.8})
    machine.run(Adaptive(), 200)
    right.run(Adaptive(), 200)
    assert machine.run(Adaptive(), 600) > 0.95 * right.run(Adaptive(), 600) > 1.2 * right.plain()


def test_an_interrupted_first_draft_does_not_end_drafting() -> None:
    machine = Machine(ZEN, {2: 0.5}, {2: 0.8})
    machine.run(Adaptive(), 200, interrupted=[1, 2])
    assert machine.run(Adaptive(), 400) > 1.2 * machine.plain()


def test_acceptance_by_rank_adds_up_to_the_lengths_of_the_card() -> None:
    found = acceptance_by_rank({4: 2.6, 8: 3.2, 16: 3.6}, 20)
    assert len(found) == 20
    for nodes, length in ((4, 2.6), (8, 3.2), (16, 3.6)):
        assert 1 + sum(found[: nodes - 1]) == pytest.approx(length)
    assert found[15:] == found[14:15] * 5
    assert acceptance_by_rank({8: 1.7, 16: 4.1}, 15) == (pytest.approx(0.1),) * 15, (
        "no rank is likelier than one before"
    )


def test_a_card_keeps_drafts_through_a_hard_beginning() -> None:
    """The first words of an answer are hard to guess; a prior that a few drafts replace would end drafts there."""
    rates = []
    for cards in ({"streams": {4: 2.8, 8: 3.4, 16: 3.6}}, {}):
        machine = Machine(ZEN, {2: 1.5}, {1: 0.05, 2: 0.1}, cards=cards)
        machine.run(Merged(), 8)
        machine.accepted = {1: 0.05, 2: 0.7}
        rates.append(machine.run(Merged(), 40))
    assert rates[0] > 1.3 * rates[1]


@pytest.mark.parametrize(
    ("ms", "accepted", "best"),
    [
        ({1: 0.05, 2: 1.0}, {1: 0.05, 2: 0.7}, 2),
        ({1: 0.05, 2: 3.0}, {1: 0.85, 2: 0.85}, 1),  # a text that repeats itself
        ({1: 0.05, 2: 3.0}, {1: 0.01, 2: 0.2}, 0),
    ],
)
def test_measured_steps_decide_between_the_modes(ms: dict[int, float], accepted: dict[int, float], best: int) -> None:
    machine = Machine(ZEN, ms, accepted)
    machine.run(Merged(), 300)
    machine.used = dict.fromkeys(MODES, 0)
    machine.run(Merged(), 500)
    assert machine.used[best] > 400 or (best == 0 and machine.used[0] + machine.used[1] > 400)


def test_probabilities_that_are_too_high_are_not_believed_for_long() -> None:
    machine, drafter = Machine("1:3/2:3.6/512:900", {2: 0.3}, {2: 0.6}), Adaptive()
    machine.noise = mock.Mock(geometric=lambda p, noise=machine.noise: 1 if noise.random() < 0.9 else 2)
    machine.run(drafter, 400)
    machine.used = dict.fromkeys(MODES, 0)
    machine.run(drafter, 400)
    assert machine.used[0] > 350


def test_drafts_are_back_after_a_hard_text() -> None:
    machine, drafter = Machine(ZEN, {2: 0.5}, {2: 0.8}), Adaptive()
    machine.run(drafter, 300)
    machine.accepted = {2: 0.02}
    machine.run(drafter, 100)
    assert planned(machine.made, drafter) <= 2
    machine.accepted = {2: 0.8}
    machine.made.joined(drafter, 1)
    assert machine.run(drafter, 60) > 1.2 * machine.plain()


def test_other_modes_are_tried_less_and_less_often() -> None:
    machine, drafter = Machine(ZEN, {2: 2.0}, {2: 0.5}), Adaptive()
    machine.run(drafter, EXPLORE)
    counts = []
    for _ in range(3):
        before = machine.used[2]
        machine.run(drafter, 8 * EXPLORE)
        counts.append(machine.used[2] - before)
    assert 0 < counts[0] <= 4 * PERIOD
    assert counts[2] <= PERIOD


# -- the engine -------------------------------------------------------------------------------------------------------
def test_the_engine_reports_new_rows_and_timed_steps() -> None:
    target = small()
    drafter = make_drafter("streams:tree=auto,nodes=8", target, small_adapter(target))
    made = Controller(Costs(PassCosts(StepCosts.parse(FREE))), ragged=target.ragged)
    engine = Engine(target, drafter, rows=2, capacity=96, controller=made)
    with mock.patch.object(Controller, "joined", autospec=True) as joined:
        for seed in range(2):
            engine.add(request(5, seed, 30))
        assert [call.args[1:] for call in joined.call_args_list] == [(drafter, 1), (drafter, 2)]
    steps = list(engine.run())
    assert max(step.tree.size for step in steps) > 1
    took = [1e3 * step.timings.forward for step in steps]
    known = made.costs.pass_ms(8, 2, 0.0)
    assert 0.1 * min(took) < known < 10 * max(took), "the table said 10 ms, and follows what passes take"
    assert made.stats(drafter, 2, 2).draft_ms(16, 2) > 0


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
    scheduler = Scheduler(target, rows=rows, controller=controller(table, ragged=target.ragged), prefix_bytes=0)
    tickets = [scheduler.submit(each, drafter) for each in asked]
    while scheduler.busy:
        scheduler.tick()
    assert [ticket.emitted for ticket in tickets] == wanted


def test_a_row_stops_drafting_while_others_fill_the_pass_and_its_text_stays_the_same() -> None:
    target = small()
    drafter = make_drafter("streams:tree=auto", target, small_adapter(target))
    scheduler = Scheduler(target, controller=Timeless(CLIFF, target), prefix_bytes=0)
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
