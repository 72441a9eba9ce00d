"""Training with the target's products in int8: values and gradients near the weights' own, and refusals."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.errors import CapabilityError
from anabranch.learning.examples import Batch, Example
from anabranch.methods.streams.objective import StreamObjective
from anabranch.model.decoder import Decoder
from anabranch.model.quantize import quantize_decoder
from anabranch.model.training_formats import Int8Linear, multiply_in_int8
from anabranch.native import library as native
from small import prompt, small, small_adapter

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no native kernels here: {native.why_not()}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_and_gradients_are_near_those_of_the_weight(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 96)
    product = Int8Linear(linear.weight, linear.bias)
    x = torch.randn(3, 5, 64, dtype=dtype, requires_grad=True)
    y, wanted = product(x), F.linear(x.float(), linear.weight, linear.bias)
    assert y.dtype == dtype
    assert y.shape == (3, 5, 96)
    assert float((y.float() - wanted).detach().norm()) < 0.02 * float(wanted.detach().norm())
    slope = torch.randn_like(wanted)
    (mine,), (theirs,) = (torch.autograd.grad(each, x, slope.to(each.dtype)) for each in (y, wanted))
    assert mine.dtype == dtype
    assert float((mine.float() - theirs.float()).norm()) < 0.02 * float(theirs.float().norm())
    assert not any(parameter.requires_grad for parameter in product.parameters())


def loss_and_slope(target: Decoder, stored: Decoder | None = None) -> tuple[float, Tensor]:
    """The streams' loss on a toy batch, and its gradient; of the states of ``stored`` where one is given."""
    adapter = small_adapter(target).requires_grad_(True)
    batch = Batch.of([Example(tuple(prompt(4, n)), tuple(prompt(12, 30 + n))) for n in range(6)])
    objective = StreamObjective(target, adapter, frozen=stored or target)
    frozen = objective.freeze(batch)
    loss = torch.stack([objective.loss(batch, frozen, segment).loss for segment in objective.segments(batch)]).sum()
    loss.backward()
    return float(loss.detach()), torch.cat([p.grad.flatten() for p in adapter.parameters() if p.grad is not None])


def test_streams_learn_from_a_target_in_int8_as_from_the_stored_one() -> None:
    stored, quantised = copy.deepcopy(small()), copy.deepcopy(small())
    multiply_in_int8(quantised)
    assert isinstance(quantised.blocks[0].qkv, Int8Linear)
    (loss, slope), (near, near_slope) = loss_and_slope(stored), loss_and_slope(quantised, stored)
    assert near == pytest.approx(loss, rel=0.01)
    assert float(F.cosine_similarity(slope, near_slope, dim=0)) > 0.99


def test_a_target_that_cannot_be_multiplied_in_int8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    quantised = copy.deepcopy(small())
    quantize_decoder(quantised, "int8")
    with pytest.raises(CapabilityError, match="a quantised target cannot be trained in int8; load it with quantize="):
        multiply_in_int8(quantised)
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(native, "why_not", lambda: "no compiler")
    with pytest.raises(CapabilityError, match=r"need the native kernels on a CPU \(no compiler\)"):
        multiply_in_int8(copy.deepcopy(small()))
