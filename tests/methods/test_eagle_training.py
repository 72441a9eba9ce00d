"""EAGLE's training: its loss, parameters, and from completions to a folder that drafts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import anabranch
from anabranch.analysis.cost import target as published
from anabranch.errors import AdapterError, InputError
from anabranch.learning.examples import Batch
from anabranch.methods.eagle.drafter import EagleDrafter, EagleSettings
from anabranch.methods.eagle.entry import TRAINED
from anabranch.methods.eagle.module import EagleConfig, EagleModule
from anabranch.methods.eagle.objective import EagleObjective, LossOptions
from small import completions, decoded_length, small, train_on
from toy_text import ToyFolders, train_toy


def module(config: EagleConfig | None = None, words: torch.Tensor | None = None) -> EagleModule:
    torch.manual_seed(0)
    return EagleModule(small().config, config or EagleConfig(), words)


def test_the_first_step_is_the_papers_loss() -> None:
    """Smooth-L1 on features plus a tenth of the cross-entropy to the target's distribution, summed over tokens."""
    made, texts, target = module(), completions(small(), 3, first=1, new=12), small()
    learner = EagleObjective(target, made, LossOptions(feature=1.0, token=0.1, soft=1.0, unroll=1))
    batch = Batch.of(texts)
    frozen = learner.freeze(batch)
    (segment,) = learner.segments(batch)
    scores = learner.loss(batch, frozen, segment)
    (features_BID,) = learner.unrolled(batch, frozen)
    wanted, count, right = 0.0, 0, 0
    for b, example in enumerate(texts):
        text = [*example.prompt_ids, *example.answer_ids]
        for place in range(max(len(example.prompt_ids) - 1, 1), len(text) - 1):  # predicts the token after it
            mine, true = features_BID[b, place - 1].detach(), frozen.hidden_BTD[b, place]
            law = target.logits(true).softmax(-1)
            wanted += float(F.smooth_l1_loss(mine, true) + 0.1 * F.cross_entropy(target.logits(mine), law))
            right += int(target.logits(mine).argmax()) == text[place + 1]
            count += 1
    assert float(scores.loss.detach()) == pytest.approx(wanted, rel=1e-4)
    assert scores.count_S.tolist() == [count]
    assert scores.right_S.tolist() == [right]
    assert learner.predictions(batch) == count
    scores.loss.backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in made.parameters())


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(EagleConfig(), id="feature"),
        pytest.param(EagleConfig(taps="1/2"), id="taps", marks=pytest.mark.thorough),
    ],
)
def test_the_loss_falls_and_acceptance_rises(config: EagleConfig) -> None:
    made, texts = module(config, torch.arange(0, 19, 2)), completions(small(), first=1, new=12)
    learner = EagleObjective(small(), made, LossOptions(unroll=3, noise=0.05))
    assert len(list(learner.segments(Batch.of(texts)))) == 1
    before, losses = learner.evaluate(texts), train_on(texts, learner, made, steps=80, lr=5e-3)
    after = learner.evaluate(texts, nodes=(4,))
    assert losses[-1] < 0.7 * losses[0]
    assert set(after) == {"tree", "chain", "static tree", "4 nodes", "top 1", "top 8", "at least", "by source"}
    assert after["tree"] > before["tree"] + 0.5
    assert after["static tree"] >= after["chain"]
    assert len(after["top 1"]) == 3
    assert min(after["top 1"]) > 0.6
    # the replay predicts what decoding reaches; decoding drafts for the first token of a longer prompt, too
    drafter = EagleDrafter(small(), made.requires_grad_(False), EagleSettings("chain", depth=5))
    assert decoded_length(small(), texts, drafter) >= after["chain"] - 0.05


@pytest.mark.parametrize(("name", "printed"), [("Llama-2-7B", 2.4e8), ("Phi-3", 1.3e8)])
def test_parameters_are_those_that_the_papers_print(name: str, printed: float) -> None:
    with torch.device("meta"):
        made = EagleModule(
            replace(published(name).config, vocab_size=1),
            EagleConfig(embedding_norm=False, input_norm=False, bias=True),
        )
    h = published(name).config.hidden_size
    layer = sum(parameter.numel() for parameter in published(name).blocks[0].parameters())
    assert made.num_parameters() == 2 * h * h + h + layer - h
    assert round(made.num_parameters(), -7) == printed


@pytest.mark.parametrize("name", ["OPT-1.3b", "Phi-1.3b", "Mistral-7B"])
def test_every_published_target_has_a_head(name: str) -> None:
    config = published(name).config
    with torch.device("meta"):
        plain, fused = (EagleModule(config, EagleConfig(taps=taps)) for taps in ("", "2/12/21"))
    h, norm = config.hidden_size, config.hidden_size * (2 if config.norm == "layer" else 1)
    layer = sum(parameter.numel() for parameter in published(name).blocks[0].parameters())
    assert plain.num_parameters() == 2 * h * h + layer + norm
    assert fused.num_parameters() == plain.num_parameters() + 3 * h * h + 2 * norm


def test_options_that_are_refused() -> None:
    for given, message in (
        ({"unroll": 0}, "unroll must be from 1 to 16, got 0"),
        ({"soft": 2.0}, "soft must be from 0 to 1"),
        ({"decay": 0.0}, "decay must be greater than 0"),
        ({"noise": -1.0}, "noise must be at least 0"),
        ({"feature": 0.0, "token": 0.0}, "there is nothing to learn"),
        ({"taps": "x"}, "taps must be numbers of layers"),
    ):
        with pytest.raises(InputError, match=message):
            TRAINED.training.recipe("small", given)
    assert TRAINED.training.recipe("eagle-1").loss.token == 0.1
    with pytest.raises(InputError, match="there is no option 'streams'"):
        TRAINED.training.recipe(None, {"streams": 3})


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::anabranch.errors.TrainingWarning")
def test_from_completions_to_a_head_that_drafts(toys: ToyFolders, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    options = ("--taps", "1/2", "--epochs", 12, "--batch-tokens", 200, "--warmup", 4, "--lr", 0.01, "--no-timing")
    record = json.loads(train_toy(toys, folder, "eagle", "--recipe", "small", *options).stdout)
    assert record["method"] == "eagle"
    assert record["config"]["taps"] == "1/2"
    assert record["measured"]["predicted mean acceptance length"]["tree"] > 1.2
    text: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}
    with anabranch.load(toys.model, adapter=folder, drafter="eagle:tree=8", dtype="float32") as model:
        wanted = model.generate("the other", drafter="none", **text)
        assert model.generate("the other", **text).token_ids == wanted.token_ids
        assert "".join(chunk.text for chunk in model.stream("the other", **text)) == wanted.text
        both = [wanted.token_ids, model.generate("and then", drafter="none", **text).token_ids]
        found = model.generate(["the other", "and then"], drafter="eagle:tree=auto+suffix", **text)
        assert [each.token_ids for each in found] == both
        again = model.generate("the other" * 3, **text)  # begins like an earlier text
        assert again.token_ids == model.generate("the other" * 3, drafter="none", **text).token_ids
    with pytest.raises(AdapterError, match="another"):
        anabranch.load(toys.model, adapter=toys.other)
    (folder / "adapter.safetensors").write_bytes((folder / "adapter.safetensors").read_bytes()[:-50])
    with pytest.raises(AdapterError):
        anabranch.load(toys.model, adapter=folder)
