"""A draft model: its trees are those of its own distributions, whatever rows did before, and the output is exact."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anabranch
from anabranch.decoding.engine import Engine, Request
from anabranch.drafting.reader import Continuations
from anabranch.errors import CapabilityError, FileError
from anabranch.methods import Drafter, Row, make_drafter, parse_spec, resolve_spec
from anabranch.methods.draft_model.drafter import DraftModelDrafter, DraftModelSettings
from anabranch.methods.draft_model.load import check_vocabulary
from anabranch.methods.prompt_lookup import LookupSettings, PromptLookupDrafter
from anabranch.methods.staged import AGAIN, LAST, Faster, StagedDrafter
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder
from anabranch.model.inputs import Inputs
from anabranch.model.weights import build_decoder
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree
from small import (
    CASES,
    LLAMA,
    SAMPLINGS,
    SOME_CASES,
    VOCABULARY,
    Timeless,
    decode,
    plain,
    prompt,
    randomise,
    request,
    same_tree,
    small,
    small_adapter,
)
from toy_distribution import assert_pairs_from, pair_probs
from toy_text import ToyFolders, byte_tokenizer, save_toys

SHAPES = {
    "chain": DraftModelSettings("chain", tokens="4"),
    "best": DraftModelSettings("best", nodes=9, tokens="4", k="4"),
    "iid": DraftModelSettings("iid", tokens="3", k="2/1"),
    "without": DraftModelSettings("without", tokens="3", k="2"),
    "unsure": DraftModelSettings("chain", tokens="6", threshold=0.2),
}


def near(target: Decoder, scale: float = 0.03, seed: int = 7) -> Decoder:
    """A copy of a target whose weights differ a little: its drafts are right now and then."""
    model = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return model


def other(vocabulary: int = VOCABULARY, **changes: Any) -> Decoder:
    """A draft model of another shape with random weights."""
    model = build_decoder(replace(LLAMA, num_layers=1, vocab_size=vocabulary, **changes), device="cpu")
    randomise(model, seed=5)
    return model


def logits_after(model: Decoder, text: Sequence[int]) -> torch.Tensor:
    cache = Cache(model.config, rows=1, capacity=len(text), dtype=model.dtype, device=model.device)
    cache.add_row()
    with torch.inference_mode():
        result = model(Inputs.of_prompt(text), cache, need="logits")
    assert result.logits_MV is not None
    return result.logits_MV[-1].float()


class Compared(DraftModelDrafter):
    """Drafts each tree a second time with an empty cache."""

    compared = 0

    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        trees = super().draft(rows, budget)
        for row, tree in zip(rows, trees, strict=True):
            fresh = DraftModelDrafter(self.target, self.model, self.settings)
            again = Row(row.tokens, row.prompt_length, row.sampling, row.rule, row.max_depth)
            (wanted,) = fresh.draft([again], budget)
            same_tree(tree, wanted)
            self.compared += tree.size > 1
        return trees


class ComparedStaged(Compared, StagedDrafter):
    """The same with an inner drafter."""


# -- what is drafted -------------------------------------------------------------------------------------------------
def test_a_chain_is_the_draft_models_own_greedy_text() -> None:
    target, model = small(), other()
    drafter = DraftModelDrafter(target, model, DraftModelSettings("chain", tokens="4"))
    row = Row(prompt(9), 9, SamplingParams(), max_depth=20)
    (tree,) = drafter.draft([row], 5)
    text, joint = list(row.tokens), 0.0
    for token, stated in zip(tree.tokens[1:].tolist(), tree.log_probs[1:].tolist(), strict=True):  # type: ignore[index]
        law = logits_after(model, text).log_softmax(-1)
        assert token == int(law.argmax())
        joint += float(law[token])
        assert stated == pytest.approx(joint, abs=1e-4)
        text.append(token)
    assert tree.size == 5
    assert tree.sources == ("target", "draft 1", "draft 2", "draft 3", "draft 4")


def test_a_best_first_tree_holds_the_most_probable_continuations() -> None:
    target, model = small(), other()
    nodes, depth = 8, 3
    drafter = DraftModelDrafter(
        target, model, DraftModelSettings("best", nodes=nodes, tokens=str(depth), k=str(VOCABULARY))
    )
    row = Row(prompt(9), 9, SamplingParams(), max_depth=20)
    (tree,) = drafter.draft([row], nodes)
    every: list[tuple[float, tuple[int, ...]]] = []

    def spread(path: tuple[int, ...], joint: float) -> None:
        law = logits_after(model, [*row.tokens, *path]).log_softmax(-1)
        for token in law.topk(nodes).indices.tolist():
            every.append((joint + float(law[token]), (*path, token)))
            if len(path) + 1 < depth:
                spread((*path, token), joint + float(law[token]))

    spread((), 0.0)
    wanted = {path for _, path in sorted(every, reverse=True)[: nodes - 1]}
    found = {tuple(tree.tokens[list(tree.path_to(n)[1:])].tolist()) for n in range(1, tree.size)}
    assert found == wanted


@pytest.mark.parametrize(
    ("shape", "temperature"),
    [
        pytest.param(shape, temperature, marks=() if i % 2 == k else pytest.mark.thorough)
        for i, shape in enumerate(SHAPES)
        for k, temperature in enumerate((0.9, 0.0))
    ],
)
def test_trees_do_not_depend_on_what_the_cache_went_through(shape: str, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=3)
    target = small()
    drafter = Compared(target, near(target), SHAPES[shape])
    asked = [request(4 + 3 * n, n, 5 + 4 * n, sampling=replace(sampling, seed=n)) for n in range(6)]
    wanted = plain(target, asked)
    assert decode(target, asked, drafter, rows=3)[0] == wanted
    assert drafter.compared > 20


@pytest.mark.parametrize("case", SOME_CASES)
@pytest.mark.parametrize("shape", ["chain", "best"])
def test_draft_models_of_every_wiring(case: str, shape: str) -> None:
    target, model = small(), build_decoder(CASES[case], device="cpu")
    randomise(model, seed=4)
    drafter = Compared(target, model, SHAPES[shape])
    asked = [request(4 + 5 * n, n, 12) for n in range(3)]
    assert decode(target, asked, drafter, rows=2)[0] == plain(target, asked)
    assert drafter.compared


@pytest.mark.parametrize("rule", ["match", "rejection"])
@pytest.mark.parametrize("shape", ["chain", "iid", "without"])
def test_sampled_trees_do_not_depend_on_what_the_cache_went_through(shape: str, rule: Any) -> None:
    target = small()
    drafter = Compared(target, near(target), SHAPES[shape])
    warm = [SamplingParams(temperature=0.9, top_k=6, seed=n) for n in range(5)]
    asked = [request(4 + 3 * n, n, 9 + n, sampling=warm[n], rule=rule) for n in range(5)]
    tokens, _ = decode(target, asked, drafter, rows=3)
    assert [len(row) for row in tokens] == [9 + n for n in range(5)]
    assert drafter.compared > 5


# -- what is emitted -------------------------------------------------------------------------------------------------
QUICK = {("best", "greedy"), ("best", "cut"), ("without", "warm"), ("chain", "penalty"), ("without", "processors")}
EMITTED = [
    pytest.param(shape, how, marks=() if (shape, how) in QUICK else pytest.mark.thorough)
    for shape in SHAPES
    for how in SAMPLINGS
]


@pytest.mark.parametrize(("shape", "sampling"), EMITTED)
def test_matching_emits_what_plain_decoding_emits(shape: str, sampling: str) -> None:
    target = small("gemma2")
    asked = [request(3 + 4 * n, n, 14, sampling=replace(SAMPLINGS[sampling], seed=n)) for n in range(4)]
    wanted = plain(target, asked)
    for rows in (1, 3):
        drafter = DraftModelDrafter(target, near(target), SHAPES[shape])
        assert decode(target, asked, drafter, rows=rows)[0] == wanted


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(temperature=1.0, seed=4), SamplingParams(repetition_penalty=1.5)],
    ids=["greedy", "warm", "penalty"],
)
@pytest.mark.parametrize(
    "shape",
    [DraftModelSettings("chain", tokens="4"), DraftModelSettings("best", nodes=5, tokens="4", k="3")],
    ids=["chain", "best"],
)
def test_a_draft_model_that_is_the_target_is_always_right(sampling: SamplingParams, shape: DraftModelSettings) -> None:
    target = small()
    _, ((*steps, last),) = decode(
        target, [request(7, 1, 23, sampling=sampling)], DraftModelDrafter(target, target, shape)
    )
    if shape.tree == "chain":
        assert [len(step.tokens) for step in steps] == [5] * len(steps)
        assert len(last.tokens) == 23 % 5
    assert all(step.verdict.accepted >= 1 for step in steps)


@pytest.mark.parametrize("shape", ["chain", "iid", "without"])
def test_rejection_accepts_all_that_is_sampled_from_the_target_itself(shape: str) -> None:
    target = small()
    asked = [request(7, n, 20, sampling=SamplingParams(temperature=1.0, seed=n), rule="rejection") for n in range(4)]
    _, steps = decode(target, asked, DraftModelDrafter(target, target, SHAPES[shape]), rows=2)
    for row in steps:
        assert all(step.verdict.accepted == min(SHAPES[shape].deepest, step.tree.max_depth) for step in row)


@pytest.mark.thorough  # test_enumerated.py computes such distributions exactly
@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (DraftModelSettings("chain", tokens="2", threshold=0.2), 4),
        (DraftModelSettings("without", tokens="2", k="3/2"), 7),
    ],
)
def test_rejection_keeps_the_joint_distribution_of_two_tokens(shape: DraftModelSettings, words: int) -> None:
    """The first two tokens of 1,600 samples; the draft model may have more words than the target's 5, or fewer."""
    count = 1600
    target = build_decoder(replace(LLAMA, vocab_size=5, num_layers=2), device="cpu")
    randomise(target, seed=3, scale=0.2)
    model = build_decoder(replace(LLAMA, vocab_size=words, num_layers=1), device="cpu")
    randomise(model, seed=8, scale=0.2)
    text = [1, 4, 2]
    asked = [Request(text, 3, SamplingParams(temperature=3.0, seed=seed), rule="rejection") for seed in range(count)]
    found, steps = decode(target, asked, DraftModelDrafter(target, model, shape), rows=64)
    assert_pairs_from([(one, two) for one, two, _ in found], pair_probs(target, text, temperature=3.0))
    assert 0.2 < np.mean([row[0].verdict.accepted > 0 for row in steps]) < 1.0  # drafts were judged both ways


def test_rejection_of_a_sharp_distribution_at_temperature_zero() -> None:
    target = small()
    asked = [request(5, n, 16, rule="rejection") for n in range(3)]
    matched = [replace(each, rule="match") for each in asked]
    for shape in ("chain", "without", "iid"):
        drafter = DraftModelDrafter(target, near(target), SHAPES[shape])
        assert decode(target, asked, drafter, rows=2)[0] == plain(target, matched)


@pytest.mark.parametrize("vocabulary", [VOCABULARY - 2, VOCABULARY + 4])
def test_padding_of_the_vocabulary_is_accepted(vocabulary: int) -> None:
    target = small()
    for sampling in (SamplingParams(), SamplingParams(temperature=1.0)):
        asked = [request(5 + n, n, 15, sampling=replace(sampling, seed=n)) for n in range(3)]
        wanted = plain(target, asked)
        for shape in ("chain", "best"):
            drafter = DraftModelDrafter(target, other(vocabulary), SHAPES[shape])
            found, steps = decode(target, asked, drafter, rows=2)
            assert found == wanted
            assert max(int(step.tree.tokens.max()) for row in steps for step in row) < VOCABULARY


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_a_text_that_outgrows_the_draft_model_is_decoded_plainly_from_there(position: Any) -> None:
    target = small()
    short = other(max_positions=24, position=position)
    asked = [request(6, 1, 40), request(20, 2, 12), request(30, 3, 9)]
    for shape in ("chain", "best"):
        found, steps = decode(target, asked, DraftModelDrafter(target, short, SHAPES[shape]), rows=3)
        assert found == plain(target, asked)
        assert [any(step.tree.size > 1 for step in row) for row in steps] == [True, True, False]


def test_scores_that_are_no_numbers_draft_nothing() -> None:
    target, broken = small(), copy.deepcopy(small())
    with torch.no_grad():
        broken.norm.weight.fill_(float("nan"))
    for rule in ("match", "rejection"):
        asked = [request(5, 1, 6, sampling=SamplingParams(temperature=1.0), rule=rule)]
        _, (steps,) = decode(target, asked, DraftModelDrafter(target, broken, SHAPES["chain"]))
        assert all(step.tree.size == 1 for step in steps)


# -- under load, and with others -------------------------------------------------------------------------------------
@pytest.mark.parametrize("inner", [None, PromptLookupDrafter(LookupSettings(tokens="3"))])
def test_the_load_decides_how_much_is_drafted(inner: PromptLookupDrafter | None) -> None:
    """Eight nodes fit a pass: two or three a row while there are three, more once one is left."""
    target = small()
    asked = [request(4 + n, n, new) for n, new in enumerate((40, 12, 12))]
    wanted = plain(target, asked)
    for shape in (replace(SHAPES["best"], tree="auto"), replace(SHAPES["chain"], tokens="auto")):
        drafter = DraftModelDrafter(target, near(target), shape)
        if inner is not None:
            drafter = StagedDrafter(target, near(target), shape, inner=inner)
        load = Timeless("1:10/8:10/9:60/512:3000", target)
        engine = Engine(target, drafter, rows=3, capacity=96, controller=load)
        rows = [engine.add(each) for each in asked]
        found: dict[int, list[int]] = {row: [] for row in rows}
        together, alone = [], []
        while engine.active:
            steps = engine.step()
            for step in steps:
                found[step.row] += step.tokens
            if len(steps) == 3:
                together.append(sum(step.tree.size for step in steps))
            elif len(steps) == 1:
                alone.append(steps[0].tree.size)
        assert list(found.values()) == wanted
        assert 3 < max(together) <= 8
        assert max(alone) > 3


def test_an_error_in_a_draft_leaves_nothing_half_done(monkeypatch: pytest.MonkeyPatch) -> None:
    target = small()
    drafter = DraftModelDrafter(target, near(target), SHAPES["chain"])
    engine = Engine(target, drafter, rows=2)
    asked = request(8, 1, 20)
    engine.add(asked)
    engine.step()
    ask, calls = drafter.reader.model.logits, 0

    def fails(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("no memory")
        return ask(hidden)

    monkeypatch.setattr(drafter.reader.model, "logits", fails)
    with pytest.raises(RuntimeError, match="no memory"):
        engine.step()
    engine.clear()
    monkeypatch.undo()
    engine.add(asked)
    assert [token for step in engine.run() for token in step.tokens] == decode(target, [asked])[0][0]


def test_a_text_that_begins_like_an_earlier_one_is_not_read_again() -> None:
    target = small()
    drafter = Compared(target, near(target), SHAPES["chain"])
    first = request(40, 1, 10)
    (said,), _ = decode(target, [first], drafter)
    tokens = [*first.prompt_ids, *said, 4, 5]
    row = Row(tokens, len(tokens), SamplingParams(), max_depth=9)
    reader = drafter.reader
    drafter.join(row)
    reader.read(row, 1, most=1)
    assert reader.cache is not None
    assert reader.cache.lengths[0] >= 45
    drafter.draft([row], 5)
    beside = Row([*tokens[:30], 7, 8], 32, SamplingParams(), max_depth=9)
    drafter.draft([row, beside], 5)
    drafter.leave(row)
    drafter.draft([beside], 5)
    assert reader.cache.count == 1


def test_a_sampled_tree_is_as_deep_as_fits_the_budget() -> None:
    warm = SamplingParams(temperature=1.0, seed=1)
    for settings, budget, depth in (
        (DraftModelSettings("without", tokens="3", k="3/2/1"), 10, 2),
        (DraftModelSettings("chain"), 3, 2),
    ):
        drafter = DraftModelDrafter(small(), near(small()), settings)
        row = Row(prompt(6), 6, warm, rule="rejection", max_depth=9)
        (tree,) = drafter.draft([row], budget)
        assert tree.max_depth == depth


# -- staged ----------------------------------------------------------------------------------------------------------
def saves_passes_and_changes_no_tree(shape: str, asked: list[Request], inner: Drafter) -> None:
    """Check that an inner drafter saves passes of the draft model, and that trees and texts are those without it."""
    target = small()
    alone = DraftModelDrafter(target, near(target), SHAPES[shape])
    staged = ComparedStaged(target, alone.model, SHAPES[shape], inner=inner)
    found, with_inner = decode(target, asked, staged, rows=2)
    wanted, without = decode(target, asked, alone, rows=2)
    assert found == wanted == plain(target, asked)
    for one, two in zip(with_inner, without, strict=True):
        assert [step.tree.tokens.tolist() for step in one] == [step.tree.tokens.tolist() for step in two]
    assert staged.reader.passes < alone.reader.passes


@pytest.mark.parametrize("shape", ["chain", "best", "unsure"])
def test_an_inner_drafter_saves_passes_and_changes_no_tree(shape: str) -> None:
    asked = [Request([3, 4, 5, 6, 7] * 5, 30), Request([8, 9] * 9, 20), request(6, 1, 30)]
    saves_passes_and_changes_no_tree(shape, asked, PromptLookupDrafter(LookupSettings(tokens="4")))


@pytest.mark.parametrize("shape", ["chain", "iid", "without"])
def test_an_inner_drafter_changes_no_sampled_tree(shape: str) -> None:
    target = small()
    warm = SamplingParams(temperature=0.7, seed=3)
    asked = [Request([3, 4, 5, 6, 7] * 4, 20, warm, rule="rejection")]
    alone = DraftModelDrafter(target, near(target), SHAPES[shape])
    staged = StagedDrafter(target, alone.model, SHAPES[shape], inner=PromptLookupDrafter(LookupSettings(tokens="3")))
    assert decode(target, asked, staged)[0] == decode(target, asked, alone)[0]


# -- from folders ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a model whose tokenizer calls its end token something else."""
    folders = save_toys(tmp_path_factory.mktemp("strangers"))
    path = folders.model / "tokenizer.json"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"<end>"', '"<stop>"'), encoding="utf-8")
    return folders.model


@pytest.mark.parametrize(
    "settings",
    [",tree=chain", ",tree=6", ",tree=without,k=2/1,tokens=3", ",tree=auto", ",tokens=auto", ",quantize=int8"],
)
def test_a_draft_model_from_a_folder(toys: ToyFolders, settings: str) -> None:
    model = anabranch.load(toys.model, drafter=f"draft_model:model={toys.model}{settings}", dtype="float32")
    with model:
        asked: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}
        found = model.generate(["the other", "a"], **asked)
        wanted = model.generate(["the other", "a"], drafter="none", **asked)
        assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
        pieces = list(model.stream("the other", **asked))
        assert "".join(piece.text for piece in pieces) == wanted[0].text
        if settings == ",tree=chain":
            assert found[0].stats.mean_acceptance_length > 4
            warm = model.generate("the other", temperature=1.0, rule="rejection", **asked)
            assert warm.stats.mean_acceptance_length > 4


@pytest.mark.parametrize("shape", ["chain", "best"])
def test_a_draft_model_inside_a_draft_model_changes_no_tree(shape: str) -> None:
    asked = [Request([3, 4, 5, 6, 7] * 3, 24), request(6, 1, 24), Request([8, 9] * 9, 16)]
    inmost = StagedDrafter(
        small(),
        near(small()),
        DraftModelSettings("chain", tokens="3"),
        inner=PromptLookupDrafter(LookupSettings(tokens="3")),
    )
    saves_passes_and_changes_no_tree(shape, asked, inmost)
    assert inmost.reader.passes > 0


@pytest.mark.parametrize("most", [1, 2, 5])
def test_no_pass_has_more_guesses_than_asked_for(most: int) -> None:
    target, widest = small(), 0

    class Watched(StagedDrafter):
        def _guesses(self, row: Row, asked: Continuations, nodes: Sequence[int], depth: int) -> list[int]:
            nonlocal widest
            found = super()._guesses(row, asked, nodes, depth)
            widest = max(widest, len(found))
            return found

    drafter = Watched(
        target, near(target), SHAPES["best"], inner=PromptLookupDrafter(LookupSettings(tokens="9")), guesses=most
    )
    decode(target, [Request([3, 4, 5, 6, 7] * 5, 20)], drafter)
    assert widest == min(most, SHAPES["best"].deepest - 1)


def test_drafts_are_made_in_the_faster_way() -> None:
    faster, ms = Faster(), {True: 20.0, False: 10.0}

    def share_with_guesses(drafts: int, rows: int = 1) -> float:
        ways = []
        for number in range(drafts):
            ways.append(faster.guess(rows))
            faster.saw(ways[-1], rows, 500.0 if number == 3 else ms[ways[-1]])  # one is interrupted
        return sum(ways) / drafts

    assert share_with_guesses(2 * LAST) == 0.5
    assert share_with_guesses(10 * AGAIN) == 1 / AGAIN
    ms[True] = 5.0
    share_with_guesses(LAST * AGAIN)
    assert share_with_guesses(10 * AGAIN) == 1 - 1 / AGAIN
    assert share_with_guesses(2 * LAST, rows=8) == 0.5, "of other numbers of rows nothing is known yet"


def test_only_the_passes_of_the_draft_model_depend_on_their_time() -> None:
    target, passes, trees = small(), [], []
    asked = [Request([3, 4, 5, 6, 7] * 5, 30), Request([8, 9] * 9, 20), request(6, 1, 30)]
    for ms in (1e-6, 2e6):  # of drafts with guesses; without any a draft takes 1e6
        faster = Faster()
        for _ in range(LAST):
            faster.saw(True, 1, ms)
            faster.saw(False, 1, 1e6)
        inner = PromptLookupDrafter(LookupSettings(tokens="4"))
        drafter = StagedDrafter(target, near(target), SHAPES["chain"], inner=inner, faster=faster)
        _, found = decode(target, asked, drafter)
        trees.append([step.tree.tokens.tolist() for each in found for step in each])
        passes.append(drafter.reader.passes)
    assert trees[0] == trees[1]
    assert passes[0] < passes[1]


def test_staged_from_folders(toys: ToyFolders) -> None:
    text = f"staged:model={toys.model},nodes=8,inner=prompt_lookup:tokens=3;ngram=2"
    assert str(parse_spec(text)) == text
    with anabranch.load(toys.model, drafter=text, dtype="float32") as model:
        asked: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}
        for temperature in (0.0, 0.9):
            found = model.generate("the the the", temperature=temperature, **asked)
            assert (
                found.token_ids
                == model.generate("the the the", drafter="none", temperature=temperature, **asked).token_ids
            )
            assert found.stats.mean_acceptance_length > 1.5


def test_a_staged_drafter_inside_a_staged_drafter(toys: ToyFolders) -> None:
    text = f"staged:model={toys.model},nodes=8,inner=staged:model={toys.model};inner=suffix,guesses=3"
    assert str(parse_spec(text)) == text
    with anabranch.load(toys.model, drafter=text, dtype="float32") as model:
        asked: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}
        found = model.generate("the the the", **asked)
        assert found.token_ids == model.generate("the the the", drafter="none", **asked).token_ids


def test_combined_from_folders(toys: ToyFolders) -> None:
    text = f"draft_model:model={toys.model},nodes=6+prompt_lookup"
    with anabranch.load(toys.model, drafter=text, dtype="float32") as model:
        asked: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}
        assert model.generate("the", **asked).token_ids == model.generate("the", drafter="none", **asked).token_ids


def test_drafters_of_one_folder_share_the_model(toys: ToyFolders) -> None:
    with anabranch.load(toys.model, dtype="float32") as loaded:
        target = loaded.target.decoder
        one, two = (make_drafter(f"{name}:model={toys.model}", target) for name in ("draft_model", "staged"))
        assert isinstance(one, DraftModelDrafter)
        assert isinstance(two, DraftModelDrafter)
        assert one.model is two.model
        assert one.model is not target


def test_a_draft_model_that_comes_with_the_package_serves_targets_of_its_vocabulary(
    toys: ToyFolders, strangers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.methods.draft_model.load.SHIPPED", tmp_path)
    shutil.copytree(strangers, tmp_path / "a stranger's")
    with anabranch.load(toys.model, dtype="float32") as model:
        with pytest.raises(CapabilityError, match="none is named"):
            model.generate("the", drafter="draft_model")
        shutil.copytree(toys.model, tmp_path / "the target's")
        wanted = model.generate("the", drafter="none", max_new_tokens=24, ignore_eos=True)
        for drafter in ("draft_model", "staged", "draft_model:tree=4+prompt_lookup"):
            found = model.generate("the", drafter=drafter, max_new_tokens=24, ignore_eos=True)
            assert found.token_ids == wanted.token_ids
            assert found.stats.mean_acceptance_length > 1.4


def test_another_vocabulary_is_refused_and_named(toys: ToyFolders, strangers: Path) -> None:
    with pytest.raises(CapabilityError, match=r"another vocabulary.*token id 262 is '<end>' and '<stop>'"):
        anabranch.load(toys.model, drafter=f"draft_model:model={strangers}")


def test_vocabularies_are_compared_by_id() -> None:
    words = byte_tokenizer().get_vocab()
    check_vocabulary(words, dict(words), "m")
    with pytest.raises(CapabilityError, match="token id 5 is 'a' and no token, 6 is 'b' and 'c'; use a draft model"):
        check_vocabulary({"a": 5, "b": 6, "e": 1}, {"c": 6, "e": 1}, "m")
    with pytest.raises(CapabilityError, match="and 7 more differ"):
        check_vocabulary({str(n): n for n in range(10)}, {}, "m")


def test_draft_models_that_cannot_be_had(toys: ToyFolders, tmp_path: Path) -> None:
    with anabranch.load(toys.model, dtype="float32") as loaded:
        target = loaded.target.decoder
        for name in ("draft_model", "staged"):
            with pytest.raises(CapabilityError, match=f"the drafter '{name}' needs a draft model.*none is named"):
                make_drafter(name, target)
            with pytest.raises(FileError, match="there is no folder /nowhere"):
                make_drafter(f"{name}:model=/nowhere", target)
            with pytest.raises(FileError, match=r"no config\.json"):
                make_drafter(f"{name}:model={tmp_path}", target)
        with pytest.raises(CapabilityError, match="reads 96 tokens at most, too few to draft 96; lower tokens"):
            make_drafter(f"draft_model:model={toys.model},tokens=96", target)
        assert loaded.generate("a", max_new_tokens=3, drafter="none").token_ids
    assert str(resolve_spec("auto")) == "prompt_lookup:tokens=auto", "not a default"


def test_rejection_is_refused_where_it_would_not_be_exact() -> None:
    target = small()
    warm = SamplingParams(temperature=1.0)
    for drafter, words in (
        (DraftModelDrafter(target, target, SHAPES["best"]), "best-first trees hold the most probable nodes"),
        (DraftModelDrafter(target, target, DraftModelSettings("chain", tokens="auto")), "drafts that the load may cut"),
    ):
        with pytest.raises(CapabilityError, match=words):
            Engine(target, drafter).add(request(4, 1, 5, sampling=warm, rule="rejection"))


def test_what_an_inner_drafter_cannot_be() -> None:
    target = small()
    streams = make_drafter("streams", target, small_adapter(target))
    with pytest.raises(CapabilityError, match="needs hidden states"):
        StagedDrafter(target, target, inner=streams)
