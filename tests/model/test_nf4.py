"""NF4: the levels of the paper, products and gradients of the dequantised weight, and trainings on less memory."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from statistics import NormalDist

import pytest
import torch
import torch.nn.functional as F
from test_int8_training import loss_and_slope
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from typer.testing import CliRunner

from anabranch.cli.train import app
from anabranch.errors import CapabilityError, InputError
from anabranch.learning.recipe import TrainOptions
from anabranch.model.quantize import quantize_decoder
from anabranch.model.training_formats import BLOCK, LEVELS, Nf4Linear, quantize_to_nf4
from anabranch.native import library as native
from small import prompt, small
from toy_text import ToyFolders

pytestmark = pytest.mark.filterwarnings("ignore::anabranch.errors.TrainingWarning")


def test_levels_are_quantiles_of_a_normal_distribution() -> None:
    """QLoRA's construction: 8 levels below zero, 9 above, and zero itself, scaled to [-1, 1]."""
    offset = 0.9677083  # keeps the outermost quantiles finite

    def quantiles(count: int) -> list[float]:
        shares = torch.linspace(offset, 0.5, count, dtype=torch.float64)[:-1].tolist()
        return [NormalDist().inv_cdf(share) for share in shares]

    whole = sorted([*(-q for q in quantiles(8)), 0.0, *quantiles(9)])
    assert [level / max(whole) for level in whole] == pytest.approx(LEVELS, abs=1e-6)


@pytest.mark.parametrize(("outputs", "inputs"), [(96, 32), (7, 9), (3, 200)])
def test_a_weight_is_rounded_to_the_nearest_level_of_its_block(outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs)
    dense = Nf4Linear(weight, None).dense(torch.float32)
    assert dense.shape == weight.shape
    flat, found = weight.flatten(), dense.flatten()
    for first in range(0, len(flat), BLOCK):
        block = flat[first : first + BLOCK]
        levels = torch.tensor(LEVELS) * block.abs().max()
        nearest = levels[(block[:, None] - levels).abs().argmin(1)]
        assert torch.allclose(found[first : first + BLOCK], nearest)
    again = Nf4Linear(dense, None).dense(torch.float32)
    assert torch.allclose(again, dense)
    assert torch.equal(Nf4Linear(torch.zeros(4, 40), None).dense(torch.float32), torch.zeros(4, 40))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_and_gradients_are_those_of_the_dequantised_weight(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear, bias = nn.Linear(40, 24), torch.randn(24)
    quantised = Nf4Linear(linear.weight, bias)
    x = torch.randn(3, 5, 40, dtype=dtype, requires_grad=True)
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda saved: kept.append(saved) or saved, lambda saved: saved):
        y = quantised(x)
    assert not kept, "neither the dequantised weight nor the input is kept"
    wanted = F.linear(x, quantised.dense(dtype), bias.to(dtype))
    assert torch.equal(y, wanted)
    slope = torch.randn_like(y)
    (mine,), (theirs,) = (torch.autograd.grad(each, x, slope) for each in (y, wanted))
    assert torch.equal(mine, theirs)
    assert not any(parameter.requires_grad for parameter in quantised.parameters())


def layer_bytes(decoder: nn.Module) -> int:
    return sum(x.nbytes for block in decoder.blocks for x in (*block.parameters(), *block.buffers()))


def test_streams_learn_from_a_target_in_nf4_with_a_loss_near_its_own() -> None:
    """4.5 bits instead of 32; the loss and its gradient stay near those of the unquantised target."""
    stored, quantised = copy.deepcopy(small()), copy.deepcopy(small())
    quantize_to_nf4(quantised)
    (loss, slope), (near, near_slope) = loss_and_slope(stored), loss_and_slope(quantised)
    assert near == pytest.approx(loss, rel=0.1)
    assert float(F.cosine_similarity(slope, near_slope, dim=0)) > 0.8
    assert layer_bytes(quantised) < 0.16 * layer_bytes(stored)
    target = copy.deepcopy(small())
    quantize_decoder(target, "int8")
    with pytest.raises(CapabilityError, match="a quantised target cannot be trained in NF4; load it with quantize="):
        quantize_to_nf4(target)


@pytest.mark.parametrize("verb", [("streams", "--stream-layers", 1), ("medusa", "--lora-rank", 2)])
@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_a_training_in_another_format_from_the_command_line(
    verb: tuple[object, ...], form: str, toys: ToyFolders, tmp_path: Path
) -> None:
    if form == "int8" and native.library() is None:
        pytest.skip(f"no native kernels here: {native.why_not()}")
    data = tmp_path / "a.jsonl"
    rows = [{"id": n, "prompt_ids": prompt(4, n), "answer_ids": prompt(9, 50 + n)} for n in range(12)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = ("--model", toys.model, "--answers", data, "--recipe", "small", "--held-out", 2, "--no-timing", "--json")
    words = (*verb, *options, "--out", tmp_path / "out")
    done = CliRunner().invoke(app, [*map(str, words), "--target-format", form])
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["training"]["options"]["target_format"] == form
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file() == (verb[0] == "medusa")
    refused = CliRunner().invoke(app, [*map(str, words), "--force"])
    assert f"was started with target_format {form} (now stored)" in str(refused.exception)
    with pytest.raises(InputError, match="target_format must be stored, int8 or nf4, got 'fp4'"):
        TrainOptions(target_format="fp4")
