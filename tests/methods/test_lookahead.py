"""Lookahead: the window against the published mask, its iteration against the target's own chains, and its probes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from anabranch.control.controller import Controller
from anabranch.control.costs import Costs, PassCosts, StepCosts
from anabranch.decoding.engine import Engine
from anabranch.decoding.stats import Stats
from anabranch.drafting.acceptance import joint_log_probs
from anabranch.drafting.combined import CombinedDrafter
from anabranch.drafting.drafter import Drafter, Needs, Observation, altered
from anabranch.errors import CapabilityError
from anabranch.methods import Row, make_drafter
from anabranch.methods.lookahead import FIRST, WEIGHT, LookaheadDrafter, LookaheadSettings, Pool, Window
from anabranch.methods.prompt_lookup import PromptLookupDrafter
from anabranch.methods.streams.draft import StreamSettings
from anabranch.methods.streams.drafter import StreamDrafter
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree
from small import decode, request, small, small_adapter


# -- the window -----------------------------------------------------------------------------------------------------
def filled(width: int, ngram: int) -> Window:
    """A full window of tokens 10 * level + column."""
    window = Window([], ngram)
    window.levels = [[10 * i + j for j in range(width)] for i in range(ngram - 1)]
    return window


@pytest.mark.parametrize(("width", "ngram"), [(1, 3), (3, 4), (5, 3), (4, 6)])
def test_the_tree_has_the_positions_and_the_mask_of_the_paper(width: int, ngram: int) -> None:
    tree = filled(width, ngram).tree(0)
    place = {(token // 10, token % 10): node for node, token in enumerate(tree.tokens.tolist())}
    assert len(place) == tree.size == width * (ngram - 1)
    for (level, column), node in place.items():
        assert tree.depths[node] == level + column
        seen = {(0, j) for j in range(column + 1)} | {(i, column) for i in range(1, level + 1)}
        assert {other for other, n in place.items() if tree.mask[node, n]} == seen


def test_a_step_moves_every_level_up() -> None:
    window = filled(3, 4)
    said = [11, 12, 20, 21, 22, 30, 31, 32]
    assert window.advance(said) == [(0, 10, 20, 30), (1, 11, 21, 31), (2, 12, 22, 32)]
    assert window.levels == [[10, 11, 12], [20, 21, 22], [30, 31, 32]]


def test_the_window_fills_a_level_a_step() -> None:
    window = Window(range(6), 4)  # W 4
    sizes = []
    for _ in range(5):
        sizes.append([len(level) for level in window.levels])
        window.advance([7] * (window.tree(0).size - 1))
    assert sizes == [[6], [5, 5], [4, 4, 4], [4, 4, 4], [4, 4, 4]]


def test_columns_behind_the_end_of_the_text_are_dropped() -> None:
    window = filled(4, 4)
    window.cut(5)
    assert window.tree(0).size == 12
    window.cut(4)
    assert window.levels == [[0, 1, 2], [10, 11, 12], [20, 21, 22]]
    assert window.tree(0).max_depth == 4
    window.cut(1)
    assert window.levels == [[]]
    assert window.tree(5).tokens.tolist() == [5]
    assert window.advance([]) == []
    assert window.levels == [[]]
    first = Window([1, 2, 3], 4)
    first.cut(1)
    assert first.levels == [[1, 2]]
    assert first.tree(9).tokens.tolist() == [9, 2]


def test_the_pool_keeps_the_newest_ngrams_of_each_token() -> None:
    pool = Pool(2)
    for rest in ((1, 1), (2, 2), (1, 1), (3, 3)):
        pool.add(5, rest)
    assert pool.after(5) == [(3, 3), (1, 1)]
    assert pool.after(6) == []


# -- the drafter by itself: the "target" says f(token) after each token --------------------------------------------
def follow(token: int) -> int:
    return (3 * token + 1) % 17


def stepped(drafter: LookaheadDrafter, row: Row, budget: int = 99) -> tuple[DraftTree, DraftTree]:
    """One step of a row of such a target: its draft and its window."""
    if drafter not in row.state:
        drafter.join(row)
    (tree,), (probe,) = drafter.draft([row], budget), drafter.probe([row])
    said = np.array([follow(token) for token in probe.tokens[1:].tolist()], np.int64)
    row.tokens.append(follow(row.root))
    row.max_depth -= 1
    seen = Observation(None, None, [0], [tree], [], [True], budget, [said])  # type: ignore[arg-type]
    drafter.observe([row], seen)
    return tree, probe


def test_every_ngram_is_what_the_target_says_after_its_first_token() -> None:
    drafter = LookaheadDrafter(LookaheadSettings(window=4, ngram=4, guesses=3, prompt=False))
    row = Row([3, 8, 2, 11, 5], 5, SamplingParams(), max_depth=60)
    sizes = []
    for _ in range(20):
        _, probe = stepped(drafter, row)
        sizes.append(probe.size - 1)
    assert sizes[:4] == [5, 9, 11, 11]
    assert max(sizes) == drafter.needs.probes == 11
    pool = row.state[drafter].pool._by_first
    assert len(pool) > 8
    ngrams = [(first, *rest) for first, rests in pool.items() for rest in rests]
    for ngram in ngrams:
        assert list(ngram[1:]) == [follow(token) for token in ngram[:-1]]


@pytest.mark.parametrize(("window", "ngram"), [(1, 3), (1, 7), (2, 8), (10, 5), (30, 3)])
def test_a_window_is_never_larger_than_it_says(window: int, ngram: int) -> None:
    drafter = LookaheadDrafter(LookaheadSettings(window=window, ngram=ngram))
    row = Row([3, 8, 2], 3, SamplingParams(), max_depth=99)
    sizes = [stepped(drafter, row)[1].size - 1 for _ in range(12)]
    assert max(sizes) == drafter.needs.probes
    assert drafter.margin == drafter.needs.probes + drafter.max_nodes


def test_guesses_are_drafted_and_what_came_of_them_is_counted() -> None:
    drafter = LookaheadDrafter(LookaheadSettings(window=2, ngram=3, guesses=2, prompt=True))
    row = Row([1, 2, 3, 1, 2, 4, 1], 7, SamplingParams(), max_depth=50)
    drafter.join(row)
    (tree,) = drafter.draft([row], 99)
    assert tree.tokens.tolist() == [1, 2, 4, 3], "the newest first"
    assert tree.parents.tolist() == [-1, 0, 1, 1]
    assert tree.sources == ("target", *["lookahead"] * 3)
    row.tokens += [2, 3, 9]
    drafter.draft([row], 99)
    ahead = row.state[drafter]
    assert ahead.right == [FIRST * WEIGHT + 1, ahead.right[1]]
    assert ahead.all == [WEIGHT + 1, WEIGHT + 2], "4 was wrong and then 3 was right"
    assert drafter.draft([row], 99)[0].size == 1


def test_drafts_and_windows_keep_to_their_depth_and_budget() -> None:
    drafter = LookaheadDrafter(LookaheadSettings(window=3, ngram=4, guesses=2))
    text = [1, 2, 3, 4, 1, 5, 6, 7, 1]
    for budget, depth, size in ((99, 9, 7), (4, 9, 4), (1, 9, 1), (99, 1, 3), (99, 0, 1)):
        row = Row(list(text), 9, SamplingParams(), max_depth=depth)
        drafter.join(row)
        assert drafter.draft([row], budget)[0].size == size
        assert drafter.probe([row])[0].max_depth == min(depth, 4)
    assert drafter.depth_of(99) == 3


def test_continuations_that_leave_an_earlier_one_take_what_it_leaves() -> None:
    (first, second) = joint_log_probs([([1, 2], [0.5, 0.5]), ([1, 3], [0.4, 0.4])])
    assert np.exp(first).tolist() == pytest.approx([0.5, 0.25])
    assert np.exp(second).tolist() == pytest.approx([0.5, 0.1])


# -- probes in the loop ------------------------------------------------------------------------------------------
class Told(Drafter):
    """Probes with the text to come, and drafts nothing; remembers what the target said."""

    name, max_nodes, needs = "told", 2, Needs(probes=4)

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.texts, self.said = texts, 0

    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        return [DraftTree.root(row.root) for row in rows]

    def _coming(self, tokens: Sequence[int]) -> list[int]:
        (text,) = [t for t in self.texts if list(t[: len(tokens)]) == list(tokens)]
        return list(text[len(tokens) :])

    def probe(self, rows: Sequence[Row]) -> list[DraftTree]:
        return [DraftTree.chain(row.root, self._coming(row.tokens)[: min(4, row.max_depth)]) for row in rows]

    def observe(self, rows: Sequence[Row], seen: Observation) -> None:
        for row, said in zip(rows, seen.probed, strict=True):
            wanted = self._coming(row.tokens)[: len(said)]  # the first probe is what was just emitted
            assert said.tolist()[: len(wanted)] == wanted
            self.said += len(said)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_probes_are_answered_and_never_emitted(temperature: float) -> None:
    target = small()
    asked = [request(n, n, 12, sampling=SamplingParams(temperature=temperature, seed=n)) for n in (9, 2, 5)]
    answers, _ = decode(target, asked)
    drafter = Told([[*r.prompt_ids, *a] for r, a in zip(asked, answers, strict=True)])
    found, steps = decode(target, asked, drafter, rows=2)
    assert found == answers
    assert drafter.said > 80
    for row in steps:
        stats = Stats.of(row)
        assert (stats.steps, stats.draft_nodes, stats.accepted_tokens) == (12, 0, 0)
        assert all(step.tree.size == 1 and set(step.sources) == {"target"} for step in row)


def test_rows_with_and_without_windows_share_their_passes() -> None:
    target = small("gemma2")
    asked = [request(n, n, 18) for n in (9, 1, 14, 4)]
    wanted, _ = decode(target, asked)
    drafters = [
        LookaheadDrafter(LookaheadSettings(window=3, ngram=4)),
        None,
        LookaheadDrafter(LookaheadSettings(window=5, ngram=3)),
        PromptLookupDrafter(),
    ]
    engine = Engine(target, rows=4, capacity=96)
    keys = [engine.add(r, d) for r, d in zip(asked, drafters, strict=True)]
    found: dict[int, list[int]] = {key: [] for key in keys}
    for step in engine.run():
        found[step.row] += step.tokens
    assert [found[key] for key in keys] == wanted


def test_a_text_that_repeats_itself_is_decoded_in_fewer_passes() -> None:
    target = small()
    asked = [replace(request(7, 7, 60), max_new_tokens=60)]
    (wanted,), (plain,) = decode(target, asked)
    for prompt in (True, False):
        (found,), (steps,) = decode(
            target, asked, LookaheadDrafter(LookaheadSettings(window=4, ngram=4, prompt=prompt))
        )
        assert found == wanted
        assert len(steps) < len(plain)


def test_windows_join_other_drafts_under_one_budget() -> None:
    target = small()
    asked = [request(n, n, 18) for n in (9, 1, 14)]
    wanted, _ = decode(target, asked)
    trailing = StreamDrafter(target, small_adapter(target), StreamSettings(placement="trail"))
    merged = CombinedDrafter(
        [trailing, LookaheadDrafter(LookaheadSettings(window=3, ngram=3)), PromptLookupDrafter()], nodes=6
    )
    assert merged.needs.probes == 5
    assert merged.margin >= 11
    found, steps = decode(target, asked, altered(merged), rows=2)
    assert found == wanted
    assert max(step.tree.size for row in steps for step in row) <= 6
    for settings in (StreamSettings(placement="ride"), StreamSettings(placement="trail", prune=4)):
        rides = StreamDrafter(target, small_adapter(target), settings)
        with pytest.raises(CapabilityError, match="'streams' and 'lookahead' cannot share the target's pass"):
            CombinedDrafter([rides, LookaheadDrafter()])


@pytest.mark.parametrize("ragged", [False, True])
def test_a_window_that_does_not_pay_is_left_out_and_its_nodes_are_part_of_the_cost(ragged: bool) -> None:
    costs = Costs(PassCosts(StepCosts((1, 101), (1.0, 3.0))))  # 2 % of a plain pass a node
    costs.saw_pass(1.0, 1, 1, 0.0)
    row = Row([1, 2, 3], 3, SamplingParams(), max_depth=9)
    tree = DraftTree.chain(3, [4, 5], log_probs=np.log([0.6, 0.025]))
    for probes, budget, kept in ((0, 10, 2), (40, 10, 3), (400, 1, 1)):
        drafter = LookaheadDrafter(LookaheadSettings(window=3, ngram=4))
        drafter.name, drafter.adaptive, drafter.max_nodes, drafter.needs = str(probes), True, 10, Needs(probes=probes)
        controller = Controller(costs, ragged=ragged)
        planned = controller.plan({drafter: 1}, 10)
        assert (planned[drafter].nodes > 1) == (budget > 1)
        (chosen,) = controller.choose([row], [drafter], [tree.truncate(budget)], planned)
        assert chosen.size == kept, "a node is dear beside a root alone and cheap beside a window"


def test_a_window_larger_than_the_cache_is_refused() -> None:
    with pytest.raises(CapabilityError, match=r"window=40, .* take 200 cache positions a step, but the target has 96"):
        make_drafter("lookahead:window=40", small())
    assert make_drafter("lookahead:window=8,ngram=4", small()).needs.probes == 23


def test_two_trees_beside_each_other() -> None:
    tree = DraftTree.chain(9, [1]).beside(DraftTree.chain(9, [1, 2]))
    assert tree.tokens.tolist() == [9, 1, 1, 2]
    assert tree.parents.tolist() == [-1, 0, 0, 2]
