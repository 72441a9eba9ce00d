"""The studies of research/studies: what they measure, on toy targets, and the page written from their results."""

from __future__ import annotations

import gzip
import importlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.decoding.engine import Engine, Request
from anabranch.errors import InputError
from anabranch.learning.examples import Batch, Example
from anabranch.methods import make_drafter
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.objective import StreamObjective
from anabranch.methods.streams.recipes import TRAINING, StreamConfig
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder
from anabranch.model.inputs import Inputs
from small import RICH, logits_of, prompt, small, small_adapter, train_on
from toy_text import ToyFolders
from verbs import Anabranch

EXAMPLES = [Example(tuple(prompt(5, seed)), tuple(prompt(9, seed + 50))) for seed in range(3)]


def study(name: str) -> ModuleType:
    return importlib.import_module(f"studies.{name}")


def text(example: Example) -> Tensor:
    return torch.tensor((*example.prompt_ids, *example.answer_ids))


def plain(target: Decoder, tokens: Sequence[int]) -> Tensor:
    """The target's own logits of a text [T, V]."""
    cache = Cache(target.config, rows=1, capacity=len(tokens), dtype=target.dtype, device=target.device)
    cache.add_row()
    with torch.no_grad():
        return logits_of(target(Inputs.of_chains(torch.tensor([list(tokens)]).numpy()), cache))[0]


# -- the pass that the studies of states and gradients share --------------------------------------------------------
@pytest.mark.parametrize("case", ["llama", "gemma2", "gpt2", "mistral"])
def test_a_causal_pass_is_the_targets_own(case: str) -> None:
    forward, target, tokens = study("forward"), small(case), prompt(17)
    with torch.no_grad():
        rows = forward.rows_pass(target, torch.tensor(tokens), torch.arange(17), forward.causal(17))
        torch.testing.assert_close(target.logits(rows.hidden_1RD[0]), plain(target, tokens), atol=2e-5, rtol=1e-4)
    assert len(rows.entries) == target.config.num_layers + 1


# -- figure 5: cosine ------------------------------------------------------------------------------------------------
def test_states_are_as_alike_as_a_loop_finds() -> None:
    cosine, target = study("cosine"), small()
    adapter = small_adapter(target)
    similarity = cosine.streams_similarity(target, adapter, EXAMPLES)
    assert similarity["layers"] == [1, 2, 3]
    for j in (1, 2, 3):
        total, count = 0.0, 0
        for example in EXAMPLES:
            batch, objective = Batch.of([example]), StreamObjective(target, adapter)
            frozen = objective.freeze(batch)
            for t in range(len(example.prompt_ids) - 1, len(example) - j):
                with torch.no_grad():
                    mine = objective.states(frozen, batch.tokens_BT, torch.tensor([[t]]))[0, 0, j - 1]
                total += float(F.cosine_similarity(mine, frozen.hidden_BTD[0, t + j], dim=0))
                count += 1
        assert similarity["cosine"]["streams"][j - 1][-1] == pytest.approx(total / count, abs=2e-4)


def test_what_equals_the_true_states_scores_one() -> None:
    cosine, target, example = study("cosine"), small(), EXAMPLES[0]
    with torch.no_grad():
        rows = cosine._true_rows(target, example)
    positions, inside = cosine._places(example, 3)
    true = cosine.future_rows(rows, 1, positions, 3)
    total = cosine.Similarity()
    total.add(true, true, inside)
    assert total.means() == [[1.0] * 3] * 3
    assert inside[-1].tolist() == [True, False, False]


def test_streams_without_embeddings_enter_as_copies_of_the_main_stream() -> None:
    cosine, target = study("cosine"), small()
    adapter = small_adapter(target, replace(RICH, root_width=0))
    assert adapter.embeddings is not None
    adapter.embeddings.zero_()
    similarity = cosine.streams_similarity(target, adapter, EXAMPLES)["cosine"]
    copies = [layers[0] for layers in similarity["copy of the main stream"]]
    assert [layers[0] for layers in similarity["streams"]] == pytest.approx(copies, abs=1e-4)
    assert [layers[-1] for layers in similarity["streams"]] != pytest.approx(
        [layers[-1] for layers in similarity["copy of the main stream"]], abs=1e-2
    )


# -- figures 10 and 13: trees ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("module", ["pruning", "branching"])
def test_pruned_trees_have_at_most_their_nodes(module: str) -> None:
    target = small()
    adapter, sizes = small_adapter(target), {}
    specs = study(module).specs(adapter)
    for name, spec in specs.items():
        drafter = make_drafter(spec, target, adapter)
        engine = Engine(target, drafter, capacity=96)
        engine.add(Request(prompt(6), 16))
        steps = [step for step in engine.run() if step.drafted]
        sizes[name] = max(len(step.tree.tokens) for step in steps)
        if kept := re.search(r"prune=(\d+)", spec):
            assert sizes[name] <= int(kept[1])
    if module == "branching":
        assert sizes["k = 3"] == 1 + 3 + 9 + 27
        assert sizes["k = 3, pruned to 16"] == 16
        assert "k = 2, pruned to 16" not in sizes  # has 15 nodes
    assert any("prune_threshold=" in spec and "placement=ride" in spec for spec in specs.values())
    bare = small_adapter(target, replace(RICH, pruning_rank=0))
    assert not any("prune" in spec for spec in study(module).specs(bare).values())
    shared = small_adapter(target, replace(RICH, root_width=0, mode="shared", main_attends="own"))
    assert not any("placement" in spec for spec in study(module).specs(shared).values())


# -- riding ----------------------------------------------------------------------------------------------------------
def test_a_riding_step_costs_the_rows_of_its_layers_and_of_the_head() -> None:
    riding = study("riding")
    tree, full = riding.Tree(3, 4, 32), riding.Tree(2, 2)
    assert riding.SHAPES[0] == tree
    assert full in riding.SHAPES
    assert (tree.nodes, tree.kept, tree.scored, tree.rows(4)) == (121, 32, 40, 160)
    assert (full.nodes, full.kept, full.scored, full.rows(4)) == (7, 7, 0, 35)
    heads = {rows: 2.0 * rows for rows in (7, 32, 35, 40, 121, 160)}
    passes = {rows: 10.0 * rows + heads[rows] for rows in heads}
    assert riding.expected(tree, 4, 0.25, passes, heads) == 0.75 * 1210 + 0.25 * 1600 + 2 * 72
    assert riding.expected(full, 4, 0.5, passes, heads) == 0.5 * 70 + 0.5 * 350 + 2 * 7


# -- figure 6: gradients ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("streams", [False, True])
def test_gradient_norms_are_the_slopes_of_the_loss(streams: bool) -> None:
    gradients, forward, target = study("gradients"), study("forward"), small()
    adapter = small_adapter(target) if streams else None
    norms = gradients.gradient_norms(target, EXAMPLES, adapter)

    def loss() -> Tensor:
        total = torch.zeros(())
        for example in EXAMPLES:
            tokens = text(example)
            rows = forward.rows_pass(target, tokens, torch.arange(len(tokens)), forward.causal(len(tokens)))
            if adapter is None:
                total = total + gradients.next_token_loss(target, rows, example) / len(EXAMPLES)
            else:
                total = total + gradients.streams_loss(target, adapter, rows, example) / len(EXAMPLES)
        return total

    weight = target.blocks[1].mlp.down.weight
    others = list(target.blocks[1].mlp.up.parameters())
    weights = [weight, *others]
    for each in weights:
        each.requires_grad_(True)
    slopes = torch.autograd.grad(loss(), weights)
    for each in weights:
        each.requires_grad_(False)
    norm = sum(float(slope.square().sum()) for slope in slopes) ** 0.5
    assert norms[1] == pytest.approx(norm, rel=1e-4)
    kept, step = [each.clone() for each in weights], 1e-2
    ends = []
    try:
        for sign in (1.0, -1.0):
            for each, before, slope in zip(weights, kept, slopes, strict=True):
                each.copy_(before + sign * step * slope / norm)
            with torch.no_grad():
                ends.append(float(loss()))
    finally:
        for each, before in zip(weights, kept, strict=True):
            each.copy_(before)
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(norms[1], rel=0.02)


def test_the_papers_streams_do_not_reach_the_last_mlp() -> None:
    """Adapters stand in for it in stream rows, and nothing attends to what comes after it."""
    gradients, target = study("gradients"), small()
    paper = small_adapter(target, StreamConfig(num_streams=3, num_stream_layers=2, adapter_rank=3, pruning_rank=0))
    norms = gradients.gradient_norms(target, EXAMPLES, paper)
    assert norms[-1] == 0.0
    assert min(norms[:-1]) > 0.0
    assert min(gradients.gradient_norms(target, EXAMPLES)) > 0.0


# -- figure 4: peeking -----------------------------------------------------------------------------------------------
def test_the_rows_of_the_drawn_example() -> None:
    places, visible, main = study("peeking").leak_free_rows(4, torch.tensor([1]), 1)
    assert places.tolist() == [0, 1, 2, 3, 3, 1]
    assert visible[4].tolist() == [True, True, False, False, True, False]
    assert visible[5].tolist() == [True, False, False, False, True, True]
    assert main.tolist() == [5]


@pytest.mark.parametrize("mask", ["leak-free", "literal"])
def test_without_future_tokens_peeking_is_the_target_itself(mask: str) -> None:
    peeking, tokens = study("peeking"), prompt(12)
    positions = torch.arange(4, 11)
    for case in ("llama", "mistral"):
        with torch.no_grad():
            rows = peeking.predictions(small(case), torch.tensor(tokens), positions, 0, mask)
        torch.testing.assert_close(rows, plain(small(case), tokens)[positions], atol=2e-5, rtol=1e-4)


def test_only_the_literal_mask_shows_the_next_token() -> None:
    """The token that is predicted, and the last one in sight, each replaced by another."""
    peeking, target, tokens, at = study("peeking"), small(), torch.tensor(prompt(12)), 5

    def changed(place: int, mask: str) -> bool:
        other = tokens.clone()
        other[place] = (tokens[place] + 1) % 19
        with torch.no_grad():
            before, after = (
                peeking.predictions(target, each, torch.tensor([at]), 2, mask)[0] for each in (tokens, other)
            )
        return not torch.allclose(before, after, atol=1e-6)

    assert [changed(at + ahead, "leak-free") for ahead in (0, 1, 2, 3, 4)] == [True, False, True, True, False]
    assert [changed(at + ahead, "literal") for ahead in (1, 2, 3)] == [True, True, True]


@pytest.mark.parametrize("gamma", [0, 2])
@pytest.mark.parametrize("case", ["llama", "mistral"])
def test_completions_written_side_by_side_are_those_of_whole_passes(case: str, gamma: int) -> None:
    peeking, target = study("peeking"), small(case)
    written = peeking.written(target, EXAMPLES, gamma, end=18)
    for example, found in zip(EXAMPLES, written, strict=True):
        text = list(example.prompt_ids)
        for count, token in enumerate([*found, 18][: peeking.MOST]):
            ahead = example.answer_ids[count + 1 :][:gamma]
            tokens = torch.tensor([*text, 0, *ahead] if ahead else text)
            with torch.no_grad():
                logits = peeking.predictions(target, tokens, torch.tensor([len(text) - 1]), gamma, "leak-free")
            assert token == int(logits[0].argmax())
            text.append(token)


# -- figures 8, 9, 17, 19: counts ------------------------------------------------------------------------------------
def test_a_plain_steps_arithmetic_and_reads() -> None:
    weights = 24 * 12 * 2048**2 + 50_272 * 2048  # OPT-1.3b
    plain_step = study("overhead").step("plain decoding")
    assert plain_step["operations"] == 2 * weights + 24 * 4 * 2048 * 1024
    assert plain_step["bytes"] == 2 * (weights + 2 * 24 * 2048 * 1024)
    streams, medusa, draft = (study("overhead").step(name) for name in ("streams, optimised", "medusa", "draft model"))
    assert draft["intensity"] < streams["intensity"] < medusa["intensity"]
    assert 0 < draft["serial_share"] < 0.5


def test_speedups_of_long_contexts_follow_from_steps() -> None:
    rows = [
        {"context": 512, "method": "none", "step_ms": 6.0, "tokens_per_step": 1.0},
        {"context": 512, "method": "streams", "step_ms": 9.0, "tokens_per_step": 2.4},
        {"context": 512, "method": "lookup", "step_ms": 12.0, "tokens_per_step": 2.4},
    ]
    assert study("long_context").STUDY.ours({"rows": rows}) == "fastest: 512 tokens 1.60x (`streams`)"


# -- figure 12a: value rotation --------------------------------------------------------------------------------------
def test_value_rotation_can_be_trained() -> None:
    target, recipe = small(), TRAINING.recipe("paper-lossless", {"position": "rotation", "stream_layers": 2})
    torch.manual_seed(0)
    adapter = StreamAdapter(target.config, recipe.config)
    assert adapter.embeddings is None
    objective = StreamObjective(target, adapter, recipe.loss)
    losses = train_on(EXAMPLES, objective, adapter, steps=12, lr=0.05)
    assert losses[-1] < 0.8 * losses[0]


# -- the command and the page ----------------------------------------------------------------------------------------
def run(words: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["study.py", *map(str, words)])
    importlib.import_module("study").main()


def toy_words(name: str, toys: ToyFolders, folder: Path) -> list[Any]:
    suite = folder / "suite.jsonl"
    suite.write_text("".join(f'{{"prompt": "{text}", "completion": "the"}}\n' for text in ("the thing", "other")))
    adapter = [f"one={toys.adapter}", "--adapter", f"two={toys.adapter}"] if name in COMPARED else [toys.adapter]
    words = [name, "--model", toys.model, "--adapter", *adapter, "--suite", suite, "--limit", 2, "--new", 12]
    return [*words, "--steps", 2, "--out", folder / f"study-{name}-toy.json"]


COMPARED = ("layers", "rotation")
LONG = (
    *("gradients", "layers", "pruning", "sampling", "batches", "quantization", "branching", "rotation", "peeking"),
    *("riding", "staged", "leviathan", "lossless", "trace"),
)
NAMES = ("cosine", *(pytest.param(name, marks=pytest.mark.thorough) for name in LONG))


@pytest.mark.parametrize("name", NAMES)
def test_a_study_from_the_command_to_its_section(
    name: str, toys: ToyFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anabranch: Anabranch
) -> None:
    words = toy_words(name, toys, tmp_path)
    if name == "peeking":
        (tmp_path / "e2e_nlg").mkdir()
        for split, field in (("train", '"human_reference": "the pub"'), ("test", '"references": ["the pub"]')):
            line = f'{{"meaning_representation": "a", {field}}}\n'
            (tmp_path / "e2e_nlg" / f"{split}.jsonl.gz").write_bytes(gzip.compress(line.encode() * 2))
        monkeypatch.setattr(study("peeking"), "ASK", "")
        words += ["--data", tmp_path]
    if name == "riding":
        monkeypatch.setattr(study("riding"), "CONTEXT", 7)
        words += ["--rounds", 1]
    if name == "trace":
        words += ["--draft", toys.model]
    if name in ("staged", "leviathan"):
        (tmp_path / "text.txt").write_text("the thing and the other thing of the other\n" * 9)
        out = ("--text", tmp_path / "text.txt", "--out", tmp_path / "counts")
        anabranch("train", "ngram", "--model", toys.model, *out)
        words += ["--draft", toys.model, "--table", tmp_path / "counts"]
    run(words, monkeypatch)
    stored = (tmp_path / f"study-{name}-toy.json").read_text()
    assert str(tmp_path) not in stored
    result = json.loads(stored)
    page = importlib.import_module("reproduction_page")
    (chosen,) = [each for each in importlib.import_module("studies").STUDIES if each.name == name]
    lines = page.section(chosen, ("study-toy", result))
    titles, rows = chosen.table(result)
    assert rows
    assert all(len(row) == len(titles) for row in rows)
    assert chosen.ours(result)
    assert f"## {chosen.title}" in lines
    with pytest.raises(SystemExit, match="exists already"):
        run(words, monkeypatch)
    if name in COMPARED:
        first, second = result["records"]
        assert {**first, "label": "two"} == second
    if name == "gradients":
        assert all(norm > 0 for norm in result["norms"]["trained streams"])
    if name == "lossless":
        zero, both = result["starts"]["zero, one learning rate"], result["starts"]["both"]
        assert all(each["reproduced"] == 0 for each in zero["layers"])
        assert all(each["reproduced"] for each in both["layers"]), "fitted, to too few rows to be near"
    if name == "riding":
        (each,) = result["adapters"]
        assert [step["rows"] for step in each["steps"]] == [
            step["kept"] * (1 + each["streams"]) for step in each["steps"]
        ]
        assert all(step["expected_ms"] > 0 for step in each["steps"])
    if name == "pruning":
        assert result["pruning_layer"]
        assert all(record["equal_outputs"] == 2 for record in result["records"] if record["name"] != "none")
    if name == "trace":
        plain, chain = result["steps"]["plain decoding"], result["steps"]["draft model, gamma 7"]
        assert sum(step[3] for step in plain) == sum(step[3] for step in chain) == 12
        assert [step[5] for step in plain] == [1] * len(plain), "a pass of the target a step, and none of drafts"
        assert sum(step[7] for step in plain) == 0
        assert len(chain) < len(plain), "the target drafts for itself"
    if name == "leviathan":
        assert result["c"] > 0
        assert result["c_operations"] == 1
        assert 0 < result["by_temperature"]["1"]["alpha"]["unigram"] < 1
        for found_there in result["by_temperature"].values():
            assert found_there["alpha"]["draft model"] == pytest.approx(1, abs=1e-3)  # the target itself
            assert all(0 <= alpha < 1 for name, alpha in found_there["alpha"].items() if name != "draft model")
    pytest.importorskip("matplotlib")
    if chosen.chart is not None:
        draw = study("draw").draw
        picture = draw(chosen.chart(result))
        assert picture == draw(chosen.chart(result))
        assert picture.count("<svg") == 1


def test_a_stopped_study_continues_with_the_next_part(
    toys: ToyFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, module = toy_words("quantization", toys, tmp_path), study("quantization")
    alone, parts = module.alone, len(module.PRINTED)
    called = 0

    def stopping(*args: Any, **options: Any) -> Any:
        nonlocal called
        called += 1
        if called == 2:
            raise KeyboardInterrupt
        return alone(*args, **options)

    monkeypatch.setattr(module, "alone", stopping)
    with pytest.raises(SystemExit, match="stopped; the same command continues"):
        run(words, monkeypatch)
    kept = tmp_path / "study-quantization-toy.json.parts"
    first = json.loads(kept.read_text())["parts"]
    with pytest.raises(SystemExit, match="parts of a study with other settings"):
        run([*words, "--new", 5], monkeypatch)
    run(words, monkeypatch)
    assert called == parts + 1
    assert not kept.exists()
    result = json.loads((tmp_path / "study-quantization-toy.json").read_text())
    assert list(result["by_weights"]) == list(module.PRINTED)
    assert all(result["by_weights"][name]["records"] == part["records"] for name, part in first.items())


def test_bad_input_is_refused(toys: ToyFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = toy_words("cosine", toys, tmp_path)
    with pytest.raises(SystemExit, match="--limit must be at least 1, got 0"):
        run([*words, "--limit", 0], monkeypatch)
    with pytest.raises(SystemExit, match="label 'adapter' twice"):
        run([*words, "--adapter", toys.adapter], monkeypatch)
    with pytest.raises(SystemExit, match="give the file of the result with --out"):
        run(["cosine"], monkeypatch)
    with pytest.raises(SystemExit, match="e2e_nlg"):
        run(toy_words("peeking", toys, tmp_path), monkeypatch)
    base = study("base")
    with pytest.raises(InputError, match="give each with --adapter"):
        study("adapters").measure(base.Setup(str(toys.model)))
    with pytest.raises(InputError, match="needs a streams adapter"):
        study("pruning").STUDY.measure(base.Setup(str(toys.model)))


def test_the_page_is_that_of_the_newest_results() -> None:
    page = importlib.import_module("reproduction_page")
    for name, wanted in page.outputs().items():
        assert (page.ROOT / name).read_text(encoding="utf-8") == wanted, name


def trained(toys: ToyFolders, folder: Path, *, data: str = "5") -> Path:
    """A copy of the toy's adapter with the log of a training of 40 steps, which stopped after 30."""
    (folder / "training").mkdir(parents=True)
    record = json.loads((toys.adapter / "adapter_config.json").read_text())
    run = {"command": "anabranch train streams", "steps": 30, "options": {"epochs": 2.0}, "answer_tokens": 1000}
    record["training"] |= {**run, "data_sha256": data * 64}
    lengths = {"tree": 1.6, "4 nodes": 1.3, "chain": 1.25}
    record["measured"] = {
        "predicted mean acceptance length": lengths,
        "accuracy by stream": {"best token": [0.5, 0.25]},
    }
    (folder / "adapter_config.json").write_text(json.dumps(record))
    lines = [{"step": step, "steps": 40, "loss": 9.0 - step / 10, "evaluation": None} for step in (10, 20, 30)]
    lines[1]["evaluation"] = {"tree": 1.5}
    (folder / "training" / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_learning_curves_are_read_from_the_logs_of_trainings(toys: ToyFolders, tmp_path: Path) -> None:
    learning, base = study("learning"), study("base")

    def measured(*folders: Path) -> Any:
        return learning.STUDY.measure(base.Setup(adapters={folder.name: folder for folder in folders}))

    result = measured(trained(toys, tmp_path / "heads"))
    curve = result["adapters"]["heads"]
    assert curve["held_out"] == [[1000, 1.5], [1500, 1.6]], "2,000 tokens in 40 steps"
    assert curve["losses"] == [[500, 8.0], [1000, 7.0], [1500, 6.0]]
    assert (curve["tokens"], curve["by_nodes"]) == (1500, {"4 nodes": 1.3, "16 nodes": 1.6})
    assert "heads 1.60" in learning.STUDY.ours(result)
    ((*_, lengths, end, chain, top),) = learning.STUDY.table(result)[1]
    assert (lengths, end, chain, top) == ("1.50 at 1,000, 1.60 at 1,500", "rising", "1.25", "0.50 0.25")
    with pytest.raises(InputError, match="different completions"):
        measured(tmp_path / "heads", trained(toys, tmp_path / "other", data="6"))
    (tmp_path / "other" / "training" / "log.jsonl").unlink()
    with pytest.raises(InputError, match="has no log of a training"):
        measured(tmp_path / "other")
    with pytest.raises(InputError, match="give each with --adapter"):
        measured()


def test_a_pass_lies_under_the_lower_roof() -> None:
    model, head = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", 151_936 * 896
    machine = {"read_gb_s": [0, 50.0, 0], "matrix_tflop_s": [0, 0.5, 0], "weight_mb": 400.0}
    steps = [
        {"kind": "verify 1", "nodes": 1.0, "ms": [0, 10.0, 0]},
        {"kind": "verify 8", "nodes": 8.0, "ms": [0, 20.0, 0]},
        {"kind": "streams", "nodes": 8.0, "ms": [0, 20.0, 0]},
    ]
    timed = {"model": model, "parameters": head + 5e8, "machine": machine, "steps": steps}
    one, eight = study("roofline").points({"timed": [timed, {**timed, "model": "default"}]})
    assert one["intensity"] == pytest.approx(2.5), "a billion operations for 400 MB"
    assert (one["rate"], one["roof"]) == pytest.approx((100, 125)), "of memory"
    assert (eight["rate"], eight["roof"]) == pytest.approx((400, 500)), "of arithmetic"


NUMBERED = {
    "ACL": {("table", 6), ("figure", 23)},
    "v1": {("table", 2), ("figure", 12)},
    "Leviathan et al.": {("table", 3), ("figure", 5)},
    "Spector and Ré": {("table", 2), ("figure", 3)},
}


@pytest.mark.parametrize("paper", NUMBERED)
def test_every_table_and_figure_has_a_row(paper: str) -> None:
    items = importlib.import_module("paper_items")
    numbered: set[tuple[str, int]] = set()
    for item in items.ITEMS:
        assert item.verdict in items.VERDICTS
        own = item.number if item.paper == paper else item.v1 if paper == items.V1 else ""
        for part in filter(None, own.split(", ")):
            kind, _, numbers = part.partition(" ")
            first, *last = (int(n.rstrip("ab")) for n in re.split(" and | to ", numbers))
            span = range(first, last[0] + 1) if " to " in numbers else (first, *last)
            numbered |= {(kind.rstrip("s"), number) for number in span}
    assert numbered == {(kind, n) for kind, most in NUMBERED[paper] for n in range(1, most + 1)}


def test_what_rests_on_a_study_without_a_result_is_inconclusive() -> None:
    page, items = importlib.import_module("reproduction_page"), importlib.import_module("paper_items")
    studies = importlib.import_module("studies").STUDIES
    assert page.judged({study.name: ("stem", {}) for study in studies}) == list(items.ITEMS)
    for item, was in zip(page.judged({study.name: None for study in studies}), items.ITEMS, strict=True):
        linked = any(f"(#{page.anchor(study.title)})" in was.why for study in studies)
        missing = was._replace(verdict="inconclusive", why=f"not run yet: {was.why}", ours=items.nothing)
        assert item == (missing if linked else was)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("python scripts/study.py cosine --data DIR", "`python research/study.py cosine --data DIR`"),
        ("python scripts/study.py --gone 1", "`python scripts/study.py --gone 1` (a script of commit 1fae946)"),
        ("python scripts/memory.py", "`python scripts/memory.py` (a script of commit 1fae946)"),
        ("python scripts/fuzz.py --seed 7", "`python scripts/fuzz.py --seed 7`"),
        ("", ""),
    ],
)
def test_a_moved_script_is_named_where_it_is(command: str, shown: str) -> None:
    tables = importlib.import_module("benchmark_tables")
    assert tables.command_line({"command": command, "environment": {"commit": "1fae946"}}) == shown
