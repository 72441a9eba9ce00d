"""Quantised weights: how near they are, what they cost, and decoding with them without the kernels."""

from __future__ import annotations

import copy
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anabranch.errors import InputError
from anabranch.methods.streams.drafter import StreamDrafter
from anabranch.model import pack
from anabranch.model.decoder import Decoder
from anabranch.model.load import load_target
from anabranch.model.pack import WIDE, PackedQuantized
from anabranch.model.quantize import GROUP, QuantizedLinear, QuantizedWeight, check_quantization, quantize_decoder
from small import decode, logits_after, request, small, small_adapter

Kind = Literal["int8", "int4"]


def logits(model: Decoder) -> torch.Tensor:
    return logits_after(model, [3, 5, 7])


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
def test_speculation_gives_the_tokens_of_the_quantized_model(case: str, kind: Kind) -> None:
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_packed_products(kind: Kind, dtype: torch.dtype) -> None:
    """Torch's kernels for quantised weights say what the dense weight says, for any number of rows."""
    torch.manual_seed(0)
    weight, bias = torch.randn(48, 160), torch.randn(48).to(dtype)
    linear = QuantizedLinear(weight, bias, kind, keep=True)
    assert PackedQuantized.fits(linear, dtype)
    packed = PackedQuantized(linear, dtype)
    assert packed.weight is weight
    for shape in ((1, 160), (2, 3, 160), (33, 160), (WIDE, 160)):
        x = torch.randn(*shape).to(dtype)
        wanted = F.linear(x.float(), linear.quantized().dense(), bias.float())
        loose = 1e-5 if dtype == torch.float32 else 0.02
        assert (packed(x).float() - wanted).abs().max() < loose * wanted.abs().max()
        assert packed(x).dtype == dtype


@pytest.mark.parametrize("case", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_speculation_on_packed_weights(case: str, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "native_for", lambda target: False)
    dense = copy.deepcopy(small(case))
    quantize_decoder(dense, kind)
    packed = copy.deepcopy(dense)
    assert pack.pack_decoder(packed)
    assert pack.pack_decoder(packed)  # it is already
    assert isinstance(packed.head, PackedQuantized)
    torch.testing.assert_close(logits(packed), logits(dense), rtol=1e-3, atol=1e-3)
    asked = [request(5, seed, 20) for seed in range(3)]
    wanted, _ = decode(packed, asked)
    assert decode(packed, asked, drafter=StreamDrafter(packed, small_adapter(packed)))[0] == wanted


def test_without_kernels_for_them_weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build without these kernels, and shapes that they do not take."""
    narrow = QuantizedLinear(torch.randn(40, 64), None, "int4", keep=False)
    assert not PackedQuantized.fits(narrow, torch.float32)
    monkeypatch.setattr(pack, "native_for", lambda target: False)
    monkeypatch.setattr(PackedQuantized, "forward", lambda self, x: x.new_zeros(len(x), self.out_features))
    pack._multiplies.cache_clear()
    target = copy.deepcopy(small("llama"))
    quantize_decoder(target, "int8")
    before = logits(target)
    assert not pack.pack_decoder(target)
    assert torch.equal(logits(target), before)
    pack._multiplies.cache_clear()


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(InputError, match="none, int8, int4"):
        check_quantization("int3")
    with pytest.raises(InputError, match="none, int8, int4"):
        load_target("nowhere", quantize="q8")
