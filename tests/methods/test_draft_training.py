"""A draft model that is trained for a target: its loss, its pass, and from completions to a folder that drafts."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import anabranch
from anabranch.errors import InputError
from anabranch.learning import loss as loss_module
from anabranch.learning.examples import Batch
from anabranch.learning.loss import distillation_loss
from anabranch.methods import make_drafter
from anabranch.methods.draft_model.drafter import DraftModelDrafter
from anabranch.methods.draft_model.entry import TRAINED
from anabranch.methods.draft_model.module import DraftConfig, DraftModule, begin_with, start_from_target
from anabranch.methods.draft_model.objective import DraftObjective, LossOptions
from anabranch.model.cache import Cache
from anabranch.model.inputs import Inputs
from small import LLAMA, VOCABULARY, completions, decoded_length, prompt, small, train_on
from toy_text import ToyFolders, train_toy

TINY = DraftConfig(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=48)


def module(seed: int = 0) -> DraftModule:
    torch.manual_seed(seed)
    return DraftModule(small().config, TINY)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("soft", [0.0, 0.3, 1.0])
def test_the_loss_is_cross_entropy_to_tokens_and_teacher(
    soft: float, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "CHUNK", 4)  # several chunks and a rest
    torch.manual_seed(0)
    states, head = torch.randn(11, 6, requires_grad=True), torch.randn(9, 6, requires_grad=True)
    tokens, teacher = torch.randint(9, (11,)), torch.randn(11, 9).softmax(-1)
    bias = None if cap is None else torch.randn(9)
    found, right = distillation_loss(states, head, tokens, teacher.__getitem__, soft, bias, cap)
    (3 * found).backward()
    mine = states.grad, head.grad
    states.grad = head.grad = None
    z = states @ head.T
    if cap is not None:
        assert bias is not None
        z = torch.tanh((z + bias) / cap) * cap
    wanted = (1 - soft) * F.cross_entropy(z, tokens, reduction="sum") + soft * F.cross_entropy(
        z, teacher, reduction="sum"
    )
    (3 * wanted).backward()
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert right.tolist() == (z.argmax(-1) == tokens).tolist()
    torch.testing.assert_close(mine[0], states.grad)
    torch.testing.assert_close(mine[1], head.grad)


def test_the_pass_that_is_trained_is_the_one_that_drafts() -> None:
    made, text = module(), prompt(14)
    cache = Cache(made.model.config, rows=1, capacity=14, dtype=torch.float32, device=torch.device("cpu"))
    cache.add_row()
    with torch.inference_mode():  # also makes the rotation tables, which the pass below must not keep
        wanted = made.model(Inputs.of_prompt(text), cache, need="hidden").hidden_MD
    states = made.states(torch.tensor([text]))
    torch.testing.assert_close(states[0], wanted.clone())
    states.sum().backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in made.parameters())


def test_a_draft_model_begins_with_the_best_narrow_copy_of_the_targets_head() -> None:
    target = small()
    drafting = DraftModule(target.config, replace(TINY, hidden_size=16))
    start_from_target(target, drafting)
    table, head = drafting.model.embedding.weight.detach(), target.head.weight.detach().float()
    assert table.shape[1] < head.shape[1]
    assert float(table.pow(2).mean().sqrt()) == pytest.approx(0.1)
    left, spectrum, _ = torch.linalg.svd(head - head.mean(0), full_matrices=False)
    best = left[:, : table.shape[1]] * spectrum[: table.shape[1]]
    products, wanted = table @ table.T, best @ best.T  # equal up to a rotation of the width, and the scale
    torch.testing.assert_close(products / products.norm(), wanted / wanted.norm(), rtol=1e-3, atol=1e-5)
    wide = DraftModule(target.config, replace(TINY, hidden_size=2 * head.shape[1]))
    before = wide.model.embedding.weight.detach().clone()
    start_from_target(target, wide)
    assert torch.equal(wide.model.embedding.weight, before), "a head has no more components than its width"


def test_the_loss_falls_and_acceptance_rises() -> None:
    made, texts = module(), completions(small(), new=12)
    learner = DraftObjective(small(), made, LossOptions(soft=0.5))
    batch = Batch.of(texts)
    (segment,) = learner.segments(batch)
    scores = learner.loss(batch, learner.freeze(batch), segment)
    assert float(scores.count_S) == learner.predictions(batch) == 6 * 12
    before = learner.evaluate(texts, nodes=(4,))
    losses = train_on(texts, learner, made, steps=60, lr=1e-2)
    after = learner.evaluate(texts, nodes=(4,))
    assert losses[-1] < 0.7 * losses[0]
    assert set(after) == {"tree", "chain", "4 nodes", "top 1", "top 8", "at least", "by source"}
    assert after["tree"] > before["tree"] + 0.5
    assert after["tree"] >= after["4 nodes"] >= 1
    assert after["top 1"][0] > 0.8
    # the replay predicts what decoding reaches
    assert decoded_length(small(), texts, DraftModelDrafter(small(), made.model)) >= after["chain"] - 0.05


def test_a_draft_of_the_default_models_vocabulary_has_less_than_20_megabytes() -> None:
    target = replace(LLAMA, vocab_size=49_152, max_positions=8192)
    with torch.device("meta"):
        made = TRAINED.make(target, TRAINED.training.recipe().config, None)
    assert (
        sum(value.numel() for name, value in made.state_dict().items() if name != "vocabulary") == made.num_parameters()
    )
    assert 2 * made.num_parameters() < 20e6


def test_shapes_that_are_refused() -> None:
    with pytest.raises(InputError, match="drafts from the whole vocabulary of 19 tokens, got 3"):
        DraftModule(small().config, TINY, torch.arange(3))
    assert len(DraftModule(small().config, TINY, torch.arange(VOCABULARY)).vocabulary) == VOCABULARY
    with pytest.raises(InputError, match="soft must be from 0 to 1, got 2"):
        LossOptions(soft=2)
    with pytest.raises(InputError, match="num_layers 2, but this training uses 3"):
        begin_with(DraftModule(small().config, replace(TINY, num_layers=3)), module())
    fresh, trained = module(1), module(2)
    begin_with(fresh, trained)
    assert all(bool((a == b).all()) for a, b in zip(fresh.parameters(), trained.parameters(), strict=True))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::anabranch.errors.TrainingWarning")
def test_from_completions_to_a_draft_model_that_drafts(toys: ToyFolders, tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    sizes = ("--hidden-size", 32, "--num-layers", 1, "--num-heads", 2, "--intermediate-size", 48)
    rest = ("--epochs", 12, "--batch-tokens", 200, "--warmup", 4, "--lr", 0.02, "--no-timing")
    record = json.loads(train_toy(toys, folder, "draft-model", "--recipe", "small", *sizes, *rest).stdout)
    assert record["method"] == "draft_model"
    assert record["run"]["command"].endswith(f"--adapter {folder}")
    lengths = record["measured"]["predicted mean acceptance length"]
    assert lengths["tree"] > 1.2
    text: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}
    with anabranch.load(toys.model, adapter=folder, drafter="draft_model:tree=8", dtype="float32") as model:
        wanted = model.generate("the other", drafter="none", **text)
        assert model.generate("the other", **text).token_ids == wanted.token_ids
        for name in ("draft_model", "staged"):  # the same weights as a model of their own
            spec = f"{name}:model={folder / 'model'}"
            assert model.generate("the other", drafter=spec, **text).token_ids == wanted.token_ids
        trained = make_drafter("draft_model", model.target.decoder, *(each.module for each in model.adapters))
        folders = make_drafter(f"draft_model:model={folder / 'model'}", model.target.decoder)
        assert isinstance(trained, DraftModelDrafter)
        assert isinstance(folders, DraftModelDrafter)
        mine, theirs = (copy.copy(dict(each.model.named_parameters())) for each in (trained, folders))
        assert mine.keys() == theirs.keys()
        assert all(bool((mine[name] == theirs[name]).all()) for name in mine)
    with anabranch.load(folder / "model", drafter="none") as alone:
        assert alone.generate("the", max_new_tokens=4, ignore_eos=True).text
