"""Training at size: parts of a batch and layers that are computed again give the loss and gradients of the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from anabranch.drafting.trained import TrainedModule
from anabranch.errors import InputError
from anabranch.learning.examples import Batch, Example
from anabranch.learning.objective import Objective
from anabranch.learning.recipe import TrainOptions
from anabranch.learning.recompute import recomputing
from anabranch.methods.streams.objective import StreamObjective
from anabranch.train.job import trainable
from anabranch.train.trainer import Progress, Trainer
from small import VOCABULARY, prompt, randomise, small, small_adapter

WORDS = torch.arange(0, VOCABULARY, 2)
TOY = {
    "streams": {"num_streams": 3, "stream_layers": 2, "adapter_rank": 3, "attention_rank": 2, "pruning_rank": 2}
    | {"conditioning": "path", "conditioning_rank": 5, "root_width": 7, "unconditioned": 0.5},
    "medusa": {"num_heads": 3},
    "medusa:medusa-2": {"num_heads": 3, "lora_rank": 2},
    "hydra": {"num_heads": 3},
    "eagle": {},
    "space": {"num_masks": 2, "stride": 2},
    "space:sar-sft": {"num_masks": 2, "stride": 2, "lora_rank": 2},
    "draft_model": {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 24},
}
RECOMPUTED = ("streams", "medusa:medusa-2", "space", "space:sar-sft", "draft_model")


def texts() -> list[Example]:
    """Ragged prompts and completions, the last two too short for some methods to predict anything."""
    sizes = ((5, 9), (1, 2), (3, 14), (4, 6), (2, 11), (6, 1), (7, 1))
    return [Example(tuple(prompt(p, p)), tuple(prompt(a, 30 + a)), "toy", n) for n, (p, a) in enumerate(sizes)]


def learner(name: str) -> tuple[TrainedModule, Objective[Any]]:
    """A module with random weights and a small draft vocabulary, and its objective, of ``METHOD`` or METHOD:RECIPE."""
    trained, target = trainable(name.partition(":")[0]).trained, small()
    assert trained is not None
    given = {**TOY[name], **({"segment": 8} if "segment" in trained.training.options else {})}
    recipe = trained.training.recipe(name.partition(":")[2] or None, given)
    module = trained.make(target.config, recipe.config, None if name == "draft_model" else WORDS)
    randomise(module, seed=2, scale=0.1)
    return module, trained.learn(target, module, recipe, frozen=target)


def gradients(
    module: TrainedModule, objective: Objective[Any], parts: list[Batch], *, recompute: bool = False
) -> tuple[float, dict[str, Tensor]]:
    """The loss of the parts of a batch together, and their gradients."""
    module.zero_grad(set_to_none=True)
    total = 0.0
    for part in parts:
        frozen = objective.freeze(part)
        for segment in objective.segments(part):
            with recomputing(recompute):
                loss = objective.loss(part, frozen, segment).loss
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
    return total, {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", TOY)
@pytest.mark.parametrize("parts", [5, *(pytest.param(parts, marks=pytest.mark.thorough) for parts in (2, 20))])
def test_the_parts_of_a_batch_have_the_loss_of_the_whole(name: str, parts: int) -> None:
    module, objective = learner(name)
    batch = Batch.of(texts())
    split = batch.split(parts)
    assert len(split) == min(parts, batch.size)
    assert sorted(name for part in split for name in part.names) == sorted(batch.names)
    assert sum(map(objective.predictions, split)) == objective.predictions(batch) > 0
    loss, whole = gradients(module, objective, [batch])
    found, added = gradients(module, objective, split)
    assert found == pytest.approx(loss, rel=1e-5)
    assert added.keys() == whole.keys()
    for key, gradient in added.items():
        assert float((gradient - whole[key]).norm()) <= 1e-5 * float(whole[key].norm()) + 1e-7, key


@pytest.mark.parametrize("name", RECOMPUTED)
def test_layers_that_are_computed_again_have_the_same_gradients_and_keep_less(name: str) -> None:
    module, objective = learner(name)
    batch, kept = Batch.of(texts()), {}

    def keep(x: Tensor, on: bool) -> Tensor:
        kept[on] = kept.get(on, 0) + x.nbytes
        return x

    found = {}
    for on in (False, True):
        frozen = objective.freeze(batch)
        segment = next(objective.segments(batch))
        with recomputing(on), saved_tensors_hooks(lambda x, on=on: keep(x, on), lambda x: x):
            objective.loss(batch, frozen, segment)
        found[on] = gradients(module, objective, [batch], recompute=on)
    assert kept[True] < 0.7 * kept[False]
    assert found[True][0] == found[False][0]
    assert found[True][1].keys() == found[False][1].keys()
    assert all(torch.equal(gradient, found[False][1][key]) for key, gradient in found[True][1].items())


def test_methods_that_recompute_say_so() -> None:
    known = {name.partition(":")[0] for name in TOY}
    trained = {name: trainable(name).trained for name in known}
    have = {name for name, found in trained.items() if found is not None and "recompute" in found.training.options}
    assert have == {name.partition(":")[0] for name in RECOMPUTED}


def losses(tmp_path: Path, options: TrainOptions, examples: list[Example]) -> list[float]:
    torch.manual_seed(0)
    adapter = small_adapter(small()).requires_grad_(True)
    objective = StreamObjective(small(), adapter, segment=options.segment)
    seen: list[Progress] = []
    Trainer(small(), adapter, objective, examples, [], options, tmp_path).run(seen.append)
    return [progress.loss for progress in seen]


@pytest.mark.parametrize("keep_states", [pytest.param("none", marks=pytest.mark.thorough), "exact"])
def test_a_run_in_parts_is_the_run(keep_states: str, tmp_path: Path) -> None:
    common = {"epochs": 3.0, "batch_tokens": 60, "warmup": 1, "segment": 8, "keep_states": keep_states}
    whole = losses(tmp_path / "a", TrainOptions(**common), texts())  # type: ignore[arg-type]
    parts = losses(tmp_path / "b", TrainOptions(**common, accumulate=3, recompute=True), texts())  # type: ignore[arg-type]
    assert len(whole) > 3
    assert parts == pytest.approx(whole, rel=1e-4)


def test_a_batch_of_padding_changes_nothing(tmp_path: Path) -> None:
    """Completions of one token leave streams nothing to predict."""
    nothing = [Example(tuple(prompt(20, n)), (3,), "toy", n) for n in range(3)]
    with pytest.raises(InputError, match=r"none of the 3 examples has a token to predict; give longer completions"):
        losses(tmp_path / "none", TrainOptions(), nothing)
    some = losses(tmp_path / "some", TrainOptions(batch_tokens=20, epochs=1.0, warmup=0), [*nothing, *texts()[:2]])
    assert sum(loss == 0.0 for loss in some) >= 3
    assert all(loss < 100 for loss in some)
