"""Medusa-2: the pass that is trained is that of the tuned target, which is written as a model of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anabranch
from anabranch.errors import AdapterError, CapabilityError, InputError
from anabranch.learning.examples import Batch, Example
from anabranch.learning.target import run_frozen
from anabranch.methods.medusa.entry import medusa_objective
from anabranch.methods.medusa.module import MedusaConfig, MedusaModule, begin_with_heads
from anabranch.methods.medusa.recipes import MedusaLoss
from anabranch.methods.terms import fresh_terms, layers_of
from anabranch.methods.tuning import export_tuned, save_tuned, tuned_pass
from anabranch.model.load import load_target
from anabranch.model.quantize import quantize_decoder
from anabranch.model.weights import build_decoder
from small import CASES, completions, prompt, randomise, small, train_on, with_terms
from toy_text import ToyFolders, train_toy

BATCH = Batch.of([Example(tuple(prompt(9, 1)), tuple(prompt(6, 2))), Example(tuple(prompt(4, 3)), tuple(prompt(7, 4)))])


def tuning(case: str = "llama") -> nn.ModuleList:
    layers = layers_of(CASES[case], fresh_terms(CASES[case], 3))
    randomise(layers, 4, scale=0.1)
    return layers


def inside(states_BTD: torch.Tensor) -> torch.Tensor:
    return torch.cat([row[:n] for row, n in zip(states_BTD, BATCH.lengths_B.tolist(), strict=True)])


@pytest.mark.parametrize("case", ["gemma2", "gpt2", "llama", "mistral", "phi", "qwen3"])
def test_the_pass_that_is_trained_is_the_tuned_targets(case: str) -> None:
    target, layers = small(case), tuning(case)
    found = tuned_pass(target, layers, BATCH.tokens_BT).hidden_BTD
    assert torch.allclose(inside(found), inside(run_frozen(with_terms(target, layers), BATCH).hidden_BTD), atol=1e-4)
    assert not torch.allclose(inside(found), inside(run_frozen(target, BATCH).hidden_BTD), atol=1e-2)
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in layers.parameters())


def test_training_lowers_the_loss_of_both() -> None:
    target, texts = small(), completions(small())
    torch.manual_seed(0)
    module = MedusaModule(target.config, MedusaConfig(3, lora_rank=4), None)
    objective = medusa_objective(target, module, MedusaLoss())
    assert len(list(objective.segments(Batch.of(texts)))) == 1
    before = objective.evaluate(texts)
    losses = train_on(texts, objective, module, steps=30, lr=1e-2)
    assert losses[-1] < 0.8 * losses[0]
    assert objective.evaluate(texts)["tree"] > before["tree"] + 0.3
    assert all(parameter.grad is None for parameter in target.parameters())


def test_the_target_learns_the_last_token_too() -> None:
    target = small()
    module = MedusaModule(target.config, MedusaConfig(1, lora_rank=2), None)
    objective = medusa_objective(target, module, MedusaLoss(soft=0.0, heads=1e-6))
    losses = []
    for last in (5, 9):
        batch = Batch.of([Example(tuple(prompt(5, 1)), (*prompt(4, 2), last))])
        (segment,) = objective.segments(batch)
        losses.append(objective.loss(batch, objective.freeze(batch), segment).loss.item())
    assert abs(losses[0] - losses[1]) > 1e-3  # otherwise a tuned target would never end a text


def test_heads_of_the_frozen_target_are_where_it_begins() -> None:
    target = small()
    trained, fresh = (MedusaModule(target.config, MedusaConfig(3, lora_rank=rank), None) for rank in (0, 2))
    randomise(trained, 2)
    begin_with_heads(fresh, trained)
    assert fresh.config.lora_rank == 2
    assert torch.equal(fresh.chain(1)[0].weight, trained.chain(1)[0].weight)
    again = MedusaModule(target.config, MedusaConfig(3, lora_rank=2), None)
    randomise(fresh, 3)
    begin_with_heads(again, fresh)
    assert all(bool((a == b).all()) for a, b in zip(again.parameters(), fresh.parameters(), strict=True))
    with pytest.raises(InputError, match="it has num_heads 3, but this training uses 2"):
        begin_with_heads(MedusaModule(target.config, MedusaConfig(2, lora_rank=2), None), trained)
    assert export_tuned(Path("unused"), trained, None) is None  # type: ignore[arg-type]


def test_what_cannot_be_tuned() -> None:
    def objective(target: Any) -> Any:
        return medusa_objective(target, MedusaModule(target.config, MedusaConfig(2, lora_rank=2), None), MedusaLoss())

    with pytest.raises(CapabilityError, match="family 'gpt2' cannot be written as a model folder"):
        objective(small("gpt2"))
    narrow = build_decoder(CASES["llama"], device="cpu")
    quantize_decoder(narrow, "int8")
    with pytest.raises(CapabilityError, match="a quantised target cannot be tuned"):
        objective(narrow)
    with pytest.raises(InputError, match="heads must be greater than 0, got 0"):
        MedusaLoss(heads=0)


def test_a_tuned_target_is_a_model_of_its_own(toys: ToyFolders, tmp_path: Path) -> None:
    target = load_target(str(toys.model), dtype="float32")
    layers = layers_of(target.config, fresh_terms(target.config, 3))
    randomise(layers, 4, scale=0.1)
    tuned = save_tuned(tmp_path / "model", layers, target)
    assert tuned.fingerprint != target.fingerprint
    assert tuned.config.eos_token_ids == target.config.eos_token_ids
    found, trained = run_frozen(tuned.decoder, BATCH), tuned_pass(target.decoder, layers, BATCH.tokens_BT)
    assert torch.allclose(inside(found.hidden_BTD), inside(trained.hidden_BTD), atol=1e-4)


@pytest.mark.thorough
@pytest.mark.default_model
def test_the_default_model_is_tuned_from_its_gguf_file(tmp_path: Path) -> None:
    target = load_target("default")
    layers = layers_of(target.config, fresh_terms(target.config, 1))  # at zero
    tuned = save_tuned(tmp_path / "model", layers, target)
    assert tuned.config == target.config
    mine, theirs = (dict(each.decoder.named_parameters()) for each in (tuned, target))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::anabranch.errors.TrainingWarning")
def test_from_completions_to_a_tuned_target_with_its_heads(toys: ToyFolders, tmp_path: Path) -> None:
    shared = ("--num-heads", 2, "--batch-tokens", 200, "--warmup", 2, "--lr", 0.01)
    first, folder = tmp_path / "first", tmp_path / "joint"
    train_toy(toys, first, "medusa", *shared, "--recipe", "small", "--epochs", 2, "--no-timing", count=16)
    rest = ("--init", first, "--epochs", 3, "--lora-rank", 4)
    record = json.loads(train_toy(toys, folder, "medusa2", *shared, *rest, count=16).stdout)
    assert record["config"]["lora_rank"] == 0
    assert record["run"]["command"].endswith(f"--model {folder / 'model'} --adapter {folder}")
    text: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}
    with anabranch.load(folder / "model", adapter=folder, drafter="medusa2", dtype="float32") as model:
        assert model.target.fingerprint == record["target"]["fingerprint"] != load_target(str(toys.model)).fingerprint
        wanted = model.generate("the other", drafter="none", **text)
        for drafter in ("medusa2", "medusa:tree=4"):  # either reads the adapters of both
            assert model.generate("the other", drafter=drafter, **text).token_ids == wanted.token_ids
    with pytest.raises(AdapterError, match="was trained for model"):
        anabranch.load(toys.model, adapter=folder, dtype="float32")
    # the terms alone are there too, and make the same target of the original
    with anabranch.load(toys.model, lora=folder / "lora", adapter=folder, drafter="medusa2", dtype="float32") as model:
        assert model.generate("the other", **text).token_ids == wanted.token_ids
