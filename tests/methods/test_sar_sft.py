"""SAR-SFT: masks and their target are trained together, and the tuned target is written as a model of its own."""

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
from anabranch.methods.space.entry import mask_objective
from anabranch.methods.space.module import (
    MaskConfig,
    MaskLossOptions,
    MaskModule,
    MaskObjective,
    begin_with,
    start_from_target,
)
from anabranch.methods.tuning import TunedObjective
from anabranch.model.decoder import Decoder
from anabranch.model.load import load_target
from small import completions, prompt, randomise, small, train_on, with_terms
from toy_text import ToyFolders, train_toy

TEXTS = [Example(tuple(prompt(9, 1)), tuple(prompt(6, 2))), Example(tuple(prompt(4, 3)), tuple(prompt(9, 4)))]


def tuned(case: str) -> tuple[Decoder, Decoder, MaskModule]:
    """A target, its copy with the terms merged, and masks with these terms."""
    target = small(case)
    module = MaskModule(target.config, MaskConfig(3, lora_rank=2))
    assert module.tuning is not None
    randomise(module, 4, scale=0.1)
    module.scale.fill_(2.0)
    return target, with_terms(target, module.tuning), module


@pytest.mark.parametrize("case", ["gemma2", "llama", "mistral", "phi"])
def test_the_masks_that_are_trained_are_those_of_the_tuned_target(case: str) -> None:
    target, merged, module = tuned(case)
    alone = MaskModule(target.config, MaskConfig(3))
    alone.load_state_dict({n: x for n, x in module.state_dict().items() if not n.startswith("tuning.")})
    batch = Batch.of(TEXTS)
    joint = mask_objective(target, module, MaskLossOptions(stride=1))
    assert isinstance(joint, TunedObjective)
    wanted = MaskObjective(merged, alone, MaskLossOptions(stride=1), segment=64)
    (segment,) = joint.segments(batch)
    found = [
        each.states(each.freeze(batch), batch.tokens_BT, segment.positions_BP)[segment.real_BP]
        for each in (joint.drafts, wanted)
    ]
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-3)
    joint.loss(batch, joint.freeze(batch), segment).loss.backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in module.parameters())
    assert all(parameter.grad is None for parameter in target.parameters())


def test_the_loss_is_that_of_the_target_and_of_the_masks() -> None:
    target, _, module = tuned("llama")
    batch = Batch.of(TEXTS)

    def value(**options: float) -> tuple[float, torch.Tensor]:
        objective = mask_objective(target, module, MaskLossOptions(soft=0.0, stride=1, **options))
        (segment,) = objective.segments(batch)
        scores = objective.loss(batch, objective.freeze(batch), segment)
        return scores.loss.item(), scores.count_S

    (once, count_S), (twice, _), (nearly_none, _) = value(masks=1.0), value(masks=2.0), value(masks=1e-9)
    assert twice - once == pytest.approx(once - nearly_none, rel=1e-4)
    joint = mask_objective(target, module, MaskLossOptions(soft=0.0, stride=1))
    (segment,) = joint.segments(batch)
    # the last token of a text has no token after the next for the first mask
    assert float(count_S[0]) == float(segment.real_BP.sum()) - len(TEXTS)
    # without the masks: the mean over positions of the tuned target's own cross-entropy, as often as there are masks
    _, merged, _ = tuned("llama")
    states = MaskObjective(merged, MaskModule(target.config, MaskConfig(3))).freeze(batch).hidden_BTD
    logits = merged.head(states)
    wanted = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch.tokens_BT[:, 1:].flatten(), reduction="none"
    ).view(len(TEXTS), -1)
    rows = torch.arange(len(TEXTS))[:, None].expand_as(segment.positions_BP)[segment.real_BP]
    places = segment.positions_BP[segment.real_BP]
    assert len(places) == sum(len(text.answer_ids) for text in TEXTS)  # the last token of each included
    assert nearly_none == pytest.approx(3 * float(wanted[rows, places].sum()), rel=1e-4)


@pytest.mark.thorough
def test_training_lowers_the_loss_of_both_and_raises_acceptance() -> None:
    target, texts = small(), completions(small())
    torch.manual_seed(0)
    module = MaskModule(target.config, MaskConfig(2, lora_rank=4))
    start_from_target(target, module)
    objective = mask_objective(target, module, MaskLossOptions(stride=1))
    before = objective.evaluate(texts)
    losses = train_on(texts, objective, module, steps=40, lr=5e-3)
    assert losses[-1] < 0.8 * losses[0]
    assert objective.evaluate(texts)["tree"] > before["tree"] + 0.3


def test_masks_of_the_frozen_target_are_where_it_begins() -> None:
    target = small()
    trained, fresh = (MaskModule(target.config, MaskConfig(3, lora_rank=rank)) for rank in (0, 2))
    for module in (trained, fresh):
        start_from_target(target, module)
    main = torch.zeros(1, 2, target.config.hidden_size)
    assert fresh.initial(main).std().item() == pytest.approx(trained.initial(main).std().item(), rel=0.3)
    begin_with(fresh, trained)
    torch.testing.assert_close(fresh.initial(main), trained.initial(main))


def test_what_is_refused() -> None:
    target = small("gpt2")
    with pytest.raises(CapabilityError, match="family 'gpt2' cannot be written as a model folder"):
        mask_objective(target, MaskModule(target.config, MaskConfig(2, lora_rank=2)), MaskLossOptions())
    with pytest.raises(InputError, match="lora_rank must be a whole number from 0 to 1024, got 2000"):
        MaskConfig(2, lora_rank=2000)
    with pytest.raises(InputError, match="masks must be greater than 0, got 0"):
        MaskLossOptions(masks=0)
    assert MaskConfig.from_dict({"num_masks": 2}) == MaskConfig(2)  # as written before targets could be tuned


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::anabranch.errors.TrainingWarning")
def test_from_completions_to_a_tuned_target_with_its_masks(toys: ToyFolders, tmp_path: Path) -> None:
    folder = tmp_path / "joint"
    options = ("--recipe", "sar-sft", "--num-masks", 2, "--lora-rank", 4, "--batch-tokens", 200, "--warmup", 2)
    result = train_toy(toys, folder, "space", *options, "--epochs", 3, "--lr", 0.01, count=16)
    record = json.loads(result.stdout)
    assert record["config"] == {"num_masks": 2, "lora_rank": 0}
    text: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}
    with anabranch.load(folder / "model", adapter=folder, drafter="space", dtype="float32") as model:
        assert model.target.fingerprint == record["target"]["fingerprint"] != load_target(str(toys.model)).fingerprint
        wanted = model.generate("the other", drafter="none", **text)
        assert model.generate("the other", **text).token_ids == wanted.token_ids
    with pytest.raises(AdapterError, match="was trained for model"):
        anabranch.load(toys.model, adapter=folder, dtype="float32")
