"""Training with rounded weights: streams compute as with what the native kernels draft with, gradients as without."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from anabranch.errors import CapabilityError, InputError
from anabranch.learning.examples import Batch, Example
from anabranch.learning.recipe import TrainOptions
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.objective import LossOptions, StreamObjective
from anabranch.methods.streams.recipes import StreamConfig
from anabranch.model.decoder import Decoder
from anabranch.model.quantize import GROUP, QuantizedWeight
from anabranch.model.training_formats import multiply_in_int8
from anabranch.train.trainer import Trainer
from small import RICH, prompt, small, small_adapter

EXAMPLES = [Example(tuple(prompt(p, p)), tuple(prompt(9, 30 + p))) for p in range(2, 6)]


def rounded(weight: Tensor) -> Tensor:
    return weight if weight.shape[1] % GROUP else QuantizedWeight.of(weight, "int4").dense()


def merged_by_hand(target: Decoder, adapter: StreamAdapter) -> Decoder:
    """A target whose top layers have the rounded merged weights."""
    whole = copy.deepcopy(target)
    for index in range(adapter.start, len(whole.blocks)):
        for module, name in whole.blocks[index].linears():
            delta, linear = adapter.layer(index).delta(name), getattr(module, name)
            assert delta is not None
            linear.weight.copy_(rounded(linear.weight + delta.up @ delta.down))
            delta.up.zero_()
    for part in (adapter.root, adapter.conditioner):
        assert part is not None
        for name in ("main", "token", "up", "to_state", "state", "carry"):
            weight = getattr(part, name, None)
            if weight is not None:
                weight.copy_(rounded(weight))
    return whole


@torch.no_grad()
def loss_of(target: Decoder, adapter: StreamAdapter, frozen: Decoder) -> float:
    objective, batch = StreamObjective(target, adapter, frozen=frozen), Batch.of(EXAMPLES)
    states = objective.freeze(batch)
    return float(sum(objective.loss(batch, states, part).loss for part in objective.segments(batch)))


def test_rounded_products_are_those_of_rounded_weights() -> None:
    target, adapter, other = small(), small_adapter(small()), small_adapter(small())
    plain = loss_of(target, adapter, target)
    adapter.round(target, True)
    found = loss_of(target, adapter, target)
    assert found == pytest.approx(loss_of(merged_by_hand(target, other), other, target), rel=1e-5)
    assert abs(found - plain) > 1e-3
    adapter.round(target, False)
    assert loss_of(target, adapter, target) == plain


def test_gradients_pass_rounding_by() -> None:
    target, adapter = small(), small_adapter(small()).requires_grad_(True)
    side, delta = adapter.side(adapter.start, 0), adapter.layer(adapter.start).qkv
    x, qkv = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(3)), target.blocks[adapter.start].qkv
    found = []
    for on in (False, True):
        adapter.round(target, on)
        (gradient,) = torch.autograd.grad(side.qkv(x, qkv).sum(), delta.down)
        found.append(gradient)
    assert torch.equal(*found)


def test_every_other_step_is_rounded() -> None:
    adapter, target = small_adapter(small()), small()
    plain = loss_of(target, adapter, target)
    objective = StreamObjective(target, adapter, LossOptions(rounding=True))
    seen = []
    for step in range(4):
        adapter.prepare(target, objective.options, step)
        seen.append(loss_of(target, adapter, target) == plain)
    assert seen == [False, True, False, True]
    objective.evaluate(EXAMPLES)
    assert loss_of(target, adapter, target) == plain, "an evaluation leaves nothing behind"


def test_a_stopped_run_with_rounding_ends_alike(tmp_path: Path) -> None:
    ends = []
    for folder, stops in ((tmp_path / "whole", ()), (tmp_path / "stopped", (3,))):
        torch.manual_seed(0)
        for stop in (*stops, None):
            adapter = small_adapter(small()).train().requires_grad_(True)
            objective = StreamObjective(small(), adapter, LossOptions(rounding=True))
            options = TrainOptions(epochs=3.0, batch_tokens=24, warmup=2, evaluate_every=100)
            trainer = Trainer(small(), adapter, objective, EXAMPLES, [], options, folder)

            def report(progress: object, stop: int | None = stop, trainer: Trainer = trainer) -> None:
                if trainer.done == stop:
                    raise KeyboardInterrupt

            try:
                trainer.run(report)
            except KeyboardInterrupt:
                continue
        ends.append(adapter.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_evaluations_of_a_training_in_bf16(tmp_path: Path) -> None:
    target = copy.deepcopy(small()).to(torch.bfloat16)
    adapter = small_adapter(target).float()
    objective = StreamObjective(target, adapter, LossOptions(rounding=True))
    trainer = Trainer(target, adapter, objective, EXAMPLES[1:], EXAMPLES[:1], TrainOptions(epochs=1.0), tmp_path)
    assert trainer.evaluate()["tree"] >= 1.0


def test_what_cannot_be_rounded() -> None:
    shared = StreamConfig(num_stream_layers=2, adapter_rank=0, stream_mlp="mlp+adapter", mode="shared", lora_rank=2)
    with pytest.raises(InputError, match="frozen target"):
        StreamObjective(small(), small_adapter(small(), shared), LossOptions(rounding=True))
    target, adapter = copy.deepcopy(small()), small_adapter(small(), RICH)
    multiply_in_int8(target)
    with pytest.raises(CapabilityError, match="target_format 'stored'"):
        adapter.prepare(target, LossOptions(rounding=True), 0)
