"""Quantised weights: how near they are, what they cost, and decoding with them without the kernels."""

from __future__ import annotations

import copy
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anabranch.drafters.streams import StreamDrafter
from anabranch.errors import InputError
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder, Feed
from anabranch.model.load import load_target
from anabranch.model.quantize import GROUP, QuantizedLinear, QuantizedWeight, check_quantization, quantize_decoder
from small import decode, request, small, small_adapter

Kind = Literal["int8", "int4"]


def logits(model: Decoder) -> torch.Tensor:
    cache = Cache(model.config, rows=1, capacity=32, dtype=model.dtype, device=model.device)
    cache.add_row()
    found = model(Feed.of_prompt([3, 5, 7]), cache).logits_BNV
    assert found is not None
    return found


@pytest.mark.parametrize(("kind", "levels"), [("int8", 254), ("int4", 15)])
def test_no_weight_is_further_than_half_a_step(kind: Kind, levels: int) -> None:
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    made = QuantizedWeight.of(weight, kind)
    spread = weight.view(40, -1, GROUP) if kind == "int4" else weight.view(40, 1, 96)
    reach = spread.amax(2) - spread.amin(2) if kind == "int4" else 2 * spread.abs().amax(2)
    error = (made.dense() - weight).abs().view(spread.shape).amax(2)
    assert (error <= 0.502 * reach / levels + 2e-3 * spread.abs().amax(2)).all()


def test_four_bits_are_found_again() -> None:
    """Weights that were stored in groups of 32 with a scale and a least value (GGUF's Q4_1) lose nothing more."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(0, 16, (8, 3, GROUP), generator=generator)
    values[:, :, 0], values[:, :, 1] = 0, 15
    scale = torch.rand(8, 3, 1, generator=generator).half().float()
    least = torch.randn(8, 3, 1, generator=generator).half().float()
    weight = (values * scale + least).view(8, -1)
    made = QuantizedWeight.of(weight, "int4")
    assert torch.equal(made.values.view(8, 3, GROUP), values.to(torch.uint8))
    torch.testing.assert_close(made.dense(), weight, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_constant_weights(kind: Kind) -> None:
    for value in (0.0, 0.5):
        weight = torch.full((3, 64), value)
        torch.testing.assert_close(QuantizedWeight.of(weight, kind).dense(), weight)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_linear_is_its_dense_weight(kind: Kind) -> None:
    weight, bias, x = torch.randn(10, 64), torch.randn(10), torch.randn(3, 64)
    linear = QuantizedLinear(weight, bias, kind, keep=False)
    torch.testing.assert_close(linear(x), F.linear(x, QuantizedWeight.of(weight, kind).dense(), bias))
    assert linear.weight is None
    stored = sum(b.nbytes for b in linear.buffers())
    assert stored <= 10 * 64 * (1.1 if kind == "int8" else 0.63)


def test_odd_inputs_stay_in_int8() -> None:
    assert QuantizedLinear(torch.randn(4, 40), None, "int4", keep=False).kind == "int8"


@pytest.mark.parametrize("case", ["llama", "gpt2", "phi"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_speculation_says_what_the_quantized_model_says(case: str, kind: Kind) -> None:
    plain = copy.deepcopy(small(case))
    whole = logits(plain)
    quantize_decoder(plain, kind)
    assert all(not isinstance(module, nn.Linear) for module in plain.modules())
    near = logits(plain)
    assert not torch.equal(whole, near)
    assert F.cosine_similarity(whole, near, dim=-1).min() > 0.8
    asked = [request(5, seed, 20) for seed in range(3)]
    wanted, _ = decode(plain, asked)
    got, _ = decode(plain, asked, drafter=StreamDrafter(plain, small_adapter(plain)))
    assert got == wanted


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(InputError, match="none, int8, int4"):
        check_quantization("int3")
    with pytest.raises(InputError, match="none, int8, int4"):
        load_target("nowhere", quantize="q8")
