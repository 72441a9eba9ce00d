"""How many nodes are verified: hand-made tables, beliefs against what happens, and the same text whatever is cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from anabranch.analysis.simulate import simulate
from anabranch.analysis.trace import TraceWriter, read_trace
from anabranch.costs import pass_costs, usual_costs
from anabranch.engine import Engine
from anabranch.errors import CapabilityError, InputError
from anabranch.methods import StepCosts, check_spec, make_drafter, with_costs
from anabranch.methods.beliefs import MEMORY, PRIOR, Width
from anabranch.methods.combined import CombinedDrafter
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree
from small import decode, request, small, small_adapter

#  9 (0) +-- 1 (1: .6) +-- 3 (3: .5) -- 4 (4: .1)
#        +-- 2 (2: .3)
TREE = DraftTree(
    np.array([9, 1, 2, 3, 4]),
    np.array([-1, 0, 0, 1, 3]),
    sources=("target", "a", "b", "a", "b"),
    log_probs=np.log(np.array([1, 0.6, 0.3, 0.5, 0.1])).astype(np.float32),
)
COSTS = "1:10/3:10.5/6:14/12:25"
SAMPLED = SamplingParams(temperature=1.0, seed=5)


def kept(width: Width, *trees: DraftTree) -> list[list[int]]:
    return [tree.tokens.tolist() for tree in width(range(len(trees)), trees)]


@pytest.mark.parametrize(
    ("table", "nodes"),
    [
        # tokens by nodes: 1, 1.6, 2.1, 2.4, 2.5
        ("1:10/5:10", [9, 1, 2, 3, 4]),
        ("1:1/5:5", [9]),
        ("1:10/2:10/3:20", [9, 1]),
        ("1:10/3:10/4:12/5:30", [9, 1, 3]),  # 2.1 / 10 against 2.4 / 12
        ("1:10/3:10/4:11/5:30", [9, 1, 2, 3]),  # against 2.4 / 11
        ("1:10/4:10/5:10.5", [9, 1, 2, 3]),  # 2.4 / 10 against 2.5 / 10.5
    ],
)
def test_the_width_is_the_one_of_most_tokens_a_millisecond(table: str, nodes: list[int]) -> None:
    assert kept(Width(8, StepCosts.parse(table)), TREE) == [nodes]


def test_a_bound_and_no_costs() -> None:
    assert kept(Width(3), TREE) == [[9, 1, 3]]
    assert kept(Width(3, StepCosts.parse("1:10/5:10")), TREE) == [[9, 1, 3]]
    assert kept(Width(8), DraftTree.root(9)) == [[9]]
    with pytest.raises(InputError, match="at least 2"):
        Width(1)


def test_rows_share_a_width_and_its_cost() -> None:
    costs = StepCosts.parse("1:10/4:10/5:30")
    assert kept(Width(8, costs), TREE) == [[9, 1, 2, 3]]
    # four rows a step for free: two nodes a row
    assert kept(Width(8, costs), TREE, DraftTree.root(7)) == [[9, 1], [7]]


def test_what_is_accepted_corrects_what_is_believed() -> None:
    width = Width(3)
    assert kept(width, TREE) == [[9, 1, 3]]
    # source a errs all the time, b is right more often than it says
    for _ in range(40):
        width.learn(0, TREE, (0, 2))
    row = width._rows[0]
    weight = (1 - MEMORY**40) / (1 - MEMORY)
    assert row.factor("a") == pytest.approx(PRIOR / (PRIOR + 1.1 * weight), rel=1e-5)
    assert row.factor("b") == pytest.approx((PRIOR + weight) / (PRIOR + 0.4 * weight), rel=1e-5)
    assert row.factor("c") == row.factor("target") == 1.0
    assert kept(width, TREE) == [[9, 1, 2]]
    beliefs = np.array(row.beliefs(TREE))
    assert (beliefs[1:] <= beliefs[TREE.parents[1:]]).all()
    # other rows and what comes after it know nothing of it
    assert kept(width, TREE, TREE)[1] == [9, 1, 3]
    width.forget(0)
    assert kept(width, TREE) == [[9, 1, 3]]


def test_steps_without_a_draft_teach_nothing() -> None:
    width = Width(4)
    width([0], [TREE])
    width.learn(0, DraftTree.root(9), (0,))
    width.learn(1, TREE, (0, 1))
    assert width._rows[0].factor("a") == 1.0
    assert list(width._rows) == [0]


def test_step_costs() -> None:
    costs = StepCosts.parse("6:14/1:10/3:11")
    assert str(costs) == "1:10/3:11/6:14"
    assert costs(np.array([1, 2, 3, 6, 11])).tolist() == [10, 10.5, 11, 14, 18]
    assert StepCosts.parse("4:7")(np.array([1, 9])).tolist() == [7, 7]
    for text in ("", "8", "8:x", "8:1/8:2", "0:1", "8:0", "8:-1", "8:inf", "8:nan"):
        with pytest.raises(InputError, match="step costs"):
            StepCosts.parse(text)


def test_costs_in_a_spec() -> None:
    costs = StepCosts.parse(COSTS)
    full = f"streams:tree=auto,nodes=12,costs={COSTS}+prompt_lookup"
    assert with_costs("streams:tree=auto,nodes=12+prompt_lookup", costs) == full
    assert with_costs(full, StepCosts.parse("1:1")) == full
    assert with_costs("streams:tree=8+prompt_lookup", costs) == "streams:tree=8+prompt_lookup"
    check_spec(full)
    for wrong in ("streams:tree=auto,costs=x", "streams:tree=8,costs=1:2"):
        with pytest.raises(InputError, match="costs"):
            check_spec(wrong)
    drafter = make_drafter(full, small(), small_adapter(small()))
    assert isinstance(drafter, CombinedDrafter)
    assert (drafter.width.most, drafter.width.costs) == (12, costs)


def test_steps_with_streams_cost_a_fixed_share_more_than_passes() -> None:
    target = small()
    passes, steps = pass_costs(target), usual_costs(target)
    assert passes.widths == steps.widths
    assert len({round(step - alone, 6) for step, alone in zip(steps.ms, passes.ms, strict=True)}) == 1
    assert steps.ms[0] > passes.ms[0]
    drafter = make_drafter("streams:tree=auto", target, small_adapter(target))
    assert isinstance(drafter, CombinedDrafter)
    assert drafter.width.costs == steps
    assert drafter.max_nodes == 16


@pytest.mark.parametrize("spec", [f"streams:tree=auto,nodes=12,costs={COSTS}", "streams:tree=auto,prune=4"])
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED])
def test_what_is_said_does_not_depend_on_it(spec: str, merged: bool, rows: int, sampling: SamplingParams) -> None:
    target = small()
    requests = [request(7, seed=seed, new=40, sampling=sampling) for seed in range(3)]
    plain, _ = decode(target, requests)
    drafter = make_drafter(spec + "+prompt_lookup" * merged, target, small_adapter(target))
    said, steps = decode(target, requests, drafter, rows=rows)
    assert said == plain
    widths = {step.tree.size for row in steps for step in row}
    assert max(widths) <= drafter.max_nodes
    assert len(widths) > 1


def test_reject_is_refused() -> None:
    drafter = make_drafter("streams:tree=auto", small(), small_adapter(small()))
    with pytest.raises(CapabilityError, match="rule='match'"):
        drafter.check(SAMPLED, "rejection")


@pytest.mark.parametrize("method", ["streams:tree=auto,nodes=20", "streams:tree=auto,nodes=20+prompt_lookup"])
def test_a_replay_chooses_the_widths_that_the_engine_chose(method: str, tmp_path: Path) -> None:
    target, costs = small(), StepCosts.parse(COSTS)
    requests = [request(9, seed=seed, new=40) for seed in range(3)]
    fitted = make_drafter(with_costs(method, costs), target, small_adapter(target))
    assert isinstance(fitted, CombinedDrafter)
    whole = CombinedDrafter(fitted.parts, nodes=40)
    with TraceWriter(tmp_path / "every.jsonl", settings={}, every_position=True) as writer:
        for each in requests:
            engine = Engine(target, writer.watch(whole), capacity=96)
            engine.add(each)
            for step in engine.run():
                writer.add(step)
    _, steps = decode(target, requests, fitted)
    found = simulate(read_trace(tmp_path / "every.jsonl"), width=Width(20, costs))
    chosen = [step.tree.size for row in steps for step in row]
    assert (found.steps, found.draft_nodes) == (len(chosen), sum(chosen) - len(chosen))
    assert [depth for _, depth in found.depths] == [step.tree.max_depth for row in steps for step in row]
    assert len(set(chosen)) > 2


def test_chosen_widths_need_a_draft_at_every_position(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "run.jsonl", settings={}):
        pass
    with pytest.raises(CapabilityError, match="every-position"):
        simulate(read_trace(tmp_path / "run.jsonl"), width=Width(4))
