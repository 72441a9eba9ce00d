"""The objective of shared mode against the naive layout, and from completions to a tuned target with its streams."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from typer.testing import CliRunner

import anabranch
from anabranch import loading
from anabranch.adapters.folder import read_record
from anabranch.cli import app as program
from anabranch.errors import AdapterError, CapabilityError, InputError
from anabranch.learning.examples import Batch, Example
from anabranch.learning.recipe import TrainOptions
from anabranch.learning.recompute import recomputing
from anabranch.methods.lora import LoraConfig
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.begin import begin_with, scale_to_target
from anabranch.methods.streams.joint import shared_objective
from anabranch.methods.streams.objective import LossOptions, StreamObjective
from anabranch.methods.streams.recipes import StreamConfig
from anabranch.methods.terms import LayerTuning, lora_of
from anabranch.methods.tuning import TunedObjective, next_token_scores, tuned_pass
from anabranch.model.decoder import Decoder
from anabranch.model.load import load_target
from anabranch.train.lora import LoraLayers, fresh_lora
from anabranch.train.trainer import Trainer
from shared_layout import LITERAL, Layout
from small import RICH, completions, prompt, small, small_adapter, train_on
from toy_text import ToyFolders, train_toy

OWN = replace(LITERAL, lora_rank=3)
V1 = replace(LITERAL, main_attends="none", lora_rank=3)
RICHER = replace(RICH, root_width=0, mode="shared", main_attends="own", lora_rank=3)
LOSS = LossOptions(main=1.0, streams=0.3, decay=0.7, soft=0.0, unconditioned=0.0, pruning=0.5, pruning_stride=1)


def batch() -> Batch:
    """Ragged prompts and completions, one of the least length."""
    sizes = ((5, 9), (1, 2), (3, 14))
    return Batch.of([Example(tuple(prompt(p, p)), tuple(prompt(a, 30 + a))) for p, a in sizes])


def trainable(target: Decoder, config: StreamConfig) -> StreamAdapter:
    return small_adapter(target, config).requires_grad_(True)


def naive_loss(target: Decoder, adapter: StreamAdapter, of: Batch) -> Tensor:
    """alpha_0 CE(main) + sum_j alpha_j CE(stream j) + the pruning layer's, one text and one row after the other."""
    total = torch.zeros(())
    for tokens, start, length in zip(of.tokens_BT, of.starts_B.tolist(), of.lengths_B.tolist(), strict=True):
        text = tokens[:length].tolist()
        layout = Layout(target, adapter, text, first=start)
        main_TV = target.logits(layout.hidden_TD[None])[0]
        total = total + LOSS.main * F.cross_entropy(main_TV[start:-1], tokens[start + 1 : length], reduction="sum")
        streams = torch.zeros(())
        for t in range(start, length):
            for j in range(1, adapter.config.num_streams + 1):
                if t + 1 + j < length:
                    logits_V = target.logits(layout.states_PSD[None, None, t - start, j - 1])[0, 0]
                    streams = streams + LOSS.decay ** (j - 1) * F.cross_entropy(logits_V, tokens[t + 1 + j])
            if t + 1 < length:
                early = target.logits(target.norm(adapter.early_exit(layout.entry_TD[t].detach()[None, None])))[0, 0]
                streams = streams + LOSS.pruning * F.cross_entropy(early, tokens[t + 1])
        total = total + LOSS.streams * streams
    return adapter.config.num_streams * total


def gradients(adapter: StreamAdapter, loss: Tensor) -> dict[str, Tensor]:
    adapter.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.clone() for name, p in adapter.named_parameters() if p.grad is not None}


def segmented(target: Decoder, adapter: StreamAdapter, of: Batch, segment: int) -> Tensor:
    objective = shared_objective(target, adapter, LOSS, segment=segment)
    (whole,) = objective.segments(of)
    return objective.loss(of, objective.freeze(of), whole).loss


@pytest.mark.parametrize(
    ("case", "config"),
    [
        pytest.param("llama", OWN, id="own"),
        pytest.param("llama", replace(OWN, context_top=4), id="own, top"),
        pytest.param("llama", replace(V1, context_top=4), id="none, top"),
        *(
            pytest.param(case, config, id=f"{case}-{config.main_attends}", marks=pytest.mark.thorough)
            for case, config in (("llama", V1), ("mistral", OWN), ("mistral", V1), ("gemma2", OWN), ("gemma2", V1))
        ),
    ],
)
def test_loss_and_gradients_are_those_of_the_naive_layout(case: str, config: StreamConfig) -> None:
    target, of = small(case), batch()
    adapter = trainable(target, config)
    by_hand = naive_loss(target, adapter, of)
    wanted = gradients(adapter, by_hand)
    assert {name.split(".")[0] for name in wanted} == {"embeddings", "prune", "tuning"}
    for segment in (100, 4):
        loss = segmented(target, adapter, of, segment)
        found = gradients(adapter, loss)
        assert float(loss.detach()) == pytest.approx(float(by_hand.detach()), rel=1e-5)
        assert found.keys() == wanted.keys()
        for name, gradient in found.items():
            assert torch.allclose(gradient, wanted[name], rtol=1e-3, atol=1e-4 * float(wanted[name].abs().max())), name


RICH_V1 = replace(RICH, mode="shared", lora_rank=3)
APART = LossOptions(main=1.0, streams=0.3, detach=True)


def losses_of(target: Decoder, adapter: StreamAdapter, options: LossOptions, segment: int) -> dict[str, Tensor]:
    """The gradients of a batch's loss, per prediction."""
    objective, of = shared_objective(target, adapter, options, segment=segment), batch()
    (whole,) = objective.segments(of)
    return gradients(adapter, objective.loss(of, objective.freeze(of), whole).loss / objective.predictions(of))


@pytest.mark.parametrize(("recompute", "segment"), [(False, 100), (False, 4), (True, 100)])
def test_losses_that_are_apart_train_what_is_theirs(recompute: bool, segment: int) -> None:
    """Terms have the gradients of LoRA training, and streams those of their own loss, whose weight is beside it."""
    target, of = small(), batch()
    adapter = trainable(target, RICH_V1)
    assert adapter.tuning is not None
    states = tuned_pass(target, adapter.tuning, of.tokens_BT).hidden_BTD
    (whole,) = shared_objective(target, adapter, APART).segments(of)
    tokens = float((of.lengths_B - 1 - of.starts_B).sum())
    alone = gradients(adapter, next_token_scores(target, of, states, whole)[0] / tokens)
    joint = losses_of(target, adapter, replace(APART, detach=False), 100)
    with recomputing(recompute):
        found = losses_of(target, adapter, APART, segment)
    assert found.keys() == joint.keys()
    assert {name for name in found if name.startswith("tuning.")} == alone.keys()
    for name, gradient in found.items():
        wanted = alone.get(name, joint[name])
        assert torch.allclose(gradient, wanted, rtol=1e-4, atol=1e-6), name
    assert any(not torch.allclose(joint[name], alone[name], rtol=0.1, atol=1e-6) for name in alone)


def test_the_target_is_tuned_as_lora_alone_tunes_it(tmp_path: Path) -> None:
    target = small()
    examples = [Example(tuple(prompt(4 + n % 5, n)), tuple(prompt(9, 30 + n % 3))) for n in range(12)]
    options = TrainOptions(epochs=3, batch_tokens=60, lr=1e-2)
    torch.manual_seed(5)
    adapter = StreamAdapter(target.config, replace(RICH_V1, lora_rank=4))
    torch.manual_seed(5)
    plain = LoraLayers(target.config, fresh_lora(target.config, LoraConfig(4, 8.0)))
    for name, module, objective in (
        ("streams", adapter, shared_objective(target, adapter, replace(APART, streams=7.0))),
        ("lora", plain, TunedObjective(target, plain.layers)),
    ):
        run: Trainer = Trainer(target, module, objective, examples, [], options, tmp_path / name)  # type: ignore[arg-type]
        run.run(lambda now: None)
        assert run.done > 5
    assert adapter.tuning is not None
    for name, term in lora_of(target.config, adapter.tuning).terms.items():
        wanted = plain.lora().terms[name]
        assert term.scale == wanted.scale
        assert torch.allclose(term.delta(), wanted.delta(), rtol=1e-3, atol=1e-4 * float(wanted.delta().abs().max()))


def test_streams_of_training_are_those_of_decoding() -> None:
    """The tuned target with its terms merged, decoding token by token, has the states that training computed."""
    target, adapter = small(), small_adapter(small(), RICHER)
    of = batch()
    objective = shared_objective(target, adapter, replace(LOSS, unconditioned=0.1))
    (segment,), streams = objective.segments(of), objective.drafts
    assert isinstance(streams, StreamObjective)
    with torch.no_grad():
        states = streams.states(streams.freeze(of), of.tokens_BT, segment.positions_BP)
        for b, (start, length) in enumerate(zip(of.starts_B.tolist(), of.lengths_B.tolist(), strict=True)):
            layout = Layout(target, adapter, of.tokens_BT[b, :length].tolist(), first=start)
            count = length - 1 - start
            assert torch.allclose(states[b, :count], layout.states_PSD[:count], atol=1e-4)


@pytest.mark.thorough
def test_training_lowers_the_loss_of_both() -> None:
    target, texts = small(), completions(small())
    torch.manual_seed(0)
    adapter = StreamAdapter(target.config, replace(RICHER, lora_rank=4), None)
    objective = shared_objective(target, adapter, LossOptions(main=1.0, streams=0.5))
    before = objective.evaluate(texts)
    losses = train_on(texts, objective, adapter, steps=30, lr=1e-2)
    assert losses[-1] < 0.8 * losses[0]
    assert objective.evaluate(texts)["tree"] > before["tree"] + 0.3
    assert all(parameter.grad is None for parameter in target.parameters())


def test_what_is_refused() -> None:
    target = small()
    with pytest.raises(InputError, match="lora_rank must be at least 1, got 0"):
        shared_objective(target, small_adapter(target, LITERAL))
    with pytest.raises(InputError, match=r"main_attends 'own'.* use detach no"):
        shared_objective(target, small_adapter(target, OWN), APART)
    with pytest.raises(InputError, match="mode 'lossless' trains streams only; use a recipe of shared mode"):
        StreamObjective(target, small_adapter(target), LossOptions(main=1.0))
    with pytest.raises(InputError, match="streams must be greater than 0, got 0"):
        LossOptions(streams=0.0)
    with pytest.raises(CapabilityError, match="family 'gpt2' cannot be written as a model folder"):
        shared_objective(small("gpt2"), small_adapter(small("gpt2"), OWN))


@pytest.mark.parametrize("root_width", [0, 8])
def test_streams_of_a_frozen_target_are_a_start(root_width: int) -> None:
    target = small()
    trained = small_adapter(target, replace(RICH, root_width=root_width))
    adapter = StreamAdapter(target.config, RICHER, None)
    begin_with(adapter, trained)
    assert adapter.config.main_attends == "own"
    assert torch.equal(adapter.embeddings, trained.embeddings)  # type: ignore[arg-type]
    assert all(isinstance(layer, LayerTuning) for layer in adapter.tuning or ())
    assert adapter.root is None


@pytest.mark.parametrize("config", [OWN, RICHER], ids=["embeddings only", "with deltas"])
def test_embeddings_learn_in_proportion_to_the_states(config: StreamConfig, tmp_path: Path) -> None:
    target = copy.deepcopy(small())
    adapter = trainable(target, config)
    scale_to_target(target, adapter)
    (rate,) = adapter.rates().values()
    with torch.no_grad():  # what enters the top layers grows with the embeddings of tokens
        target.embedding.weight.mul_(64)
    scale_to_target(target, adapter)
    assert math.log2(rate) % 1 == 0
    faster = adapter.rates()["embeddings"]
    assert faster > 2 * rate
    examples = [Example(tuple(prompt(4, n)), tuple(prompt(9, 30 + n))) for n in range(6)]
    objective = shared_objective(target, adapter, LOSS)
    options = TrainOptions(epochs=1, batch_tokens=1000, warmup=0, lr=1e-3)
    before = adapter.embeddings.detach().clone()
    run = Trainer(target, adapter, objective, examples, [], options, tmp_path)
    run.run(lambda now: None)
    moved = (adapter.embeddings.detach() - before).abs().median()
    assert float(moved) == pytest.approx(1e-3 * faster, rel=0.2)  # the first step of Adam


def test_the_states_of_a_target_of_few_positions_are_measured() -> None:
    target = copy.deepcopy(small())
    target.config = replace(target.config, max_positions=9)
    adapter = trainable(target, OWN)
    scale_to_target(target, adapter)
    assert adapter.rates()["embeddings"] >= 1


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::anabranch.errors.TrainingWarning")
@pytest.mark.parametrize("recipe", ["paper-shared", "shared"])
def test_from_completions_to_a_tuned_target_with_its_streams(recipe: str, toys: ToyFolders, tmp_path: Path) -> None:
    folder = tmp_path / "joint"
    sizes = ("--recipe", recipe, "--stream-layers", 1, "--lora-rank", 4, "--batch-tokens", 200)
    result = train_toy(toys, folder, "streams", *sizes, "--epochs", 2, "--warmup", 2, "--lr", 0.01, count=16)
    record = read_record(folder)
    scores = record["measured"]["next token"]
    assert [sorted(found) for found in scores.values()] == [["accuracy", "loss"]] * 2
    rows = json.loads(result.stdout)["run"]["quality"]
    assert [(row["model"], row["drafter"]) for row in rows] == [
        *(("untuned", "none"), ("tuned", "none"), ("tuned", "auto"))
    ]
    assert rows[1]["exact_match"] == rows[2]["exact_match"]
    assert all(row["loss"] == scores[row["model"]]["loss"] and row["tokens_per_second"] > 0 for row in rows)
    assert "tokens/s in the first 3 steps: about " in result.stderr
    assert record["config"]["lora_rank"] == 0
    own = recipe == "paper-shared"
    assert record["config"]["main_attends"] == ("own" if own else "none")
    assert (record["target"]["name"], record["target"]["lora"]) == (toys.model.name, "lora")
    if own:
        assert record["parameters"] == (4 + 16) * load_target(str(toys.model)).config.hidden_size
    ids = prompt(4)
    with anabranch.load(folder / "model", adapter=folder, dtype="float32") as model:
        plain = model.generate(ids, max_new_tokens=20, drafter="none", ignore_eos=True).token_ids
        for drafter in ("streams", "streams:prune=4", "streams+prompt_lookup", "auto", "suffix"):
            assert model.generate(ids, max_new_tokens=20, drafter=drafter, ignore_eos=True).token_ids == plain
        assert (model.target.decoder.rider is not None) == own
    if own:  # another model without them: refused, from either folder, and by whoever does not load adapters
        for name, lora in ((folder / "model", None), (toys.model, folder / "lora")):
            with pytest.raises(AdapterError, match="was tuned together with its streams, which its main rows"):
                anabranch.load(name, lora=lora)
        told = CliRunner().invoke(program, ["info", str(folder / "model")]).stdout
        assert "streams: it is another model without it" in " ".join(told.split())
        with pytest.raises(AdapterError, match="is another model without them"):
            loading.load(loading.LoadConfig(str(folder / "model")), pack=False, adapters=False)
        with pytest.raises(CapabilityError, match="which requests cannot choose; merge it"):
            anabranch.load(toys.model, loras={"a": folder / "lora"})
        with pytest.raises(CapabilityError, match="which requests cannot choose; merge it"):
            anabranch.load(toys.model, adapters={"a": folder})
        with anabranch.load(toys.model, lora=folder / "lora", adapter=folder, dtype="float32") as model:
            assert model.generate(ids, max_new_tokens=20, drafter="none", ignore_eos=True).token_ids == plain
    else:
        anabranch.load(folder / "model").close()
        with anabranch.load(toys.model, adapters={"a": folder}, dtype="float32") as model:  # with its LoRA
            found = model.generate(ids, max_new_tokens=20, adapter="a", ignore_eos=True)
            assert found.token_ids == plain
            assert "streams" in found.drafter
    said = "main rows attend to their own streams" if own else "the target was tuned with them"
    assert f"shared mode: {said}" in (folder / "README.md").read_text("utf-8")
