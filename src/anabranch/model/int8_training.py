"""A frozen target whose products run in int8 while something that depends on it is trained on a CPU.

A weight is packed twice for the native kernels, as it is for the forward pass and transposed for the gradient of the
input; it needs no gradient itself. Weights have a scale for each output, the rows of inputs and of gradients one for
every 32 values (``model.quantize``), so both products are rounded to about a part in 250 of the largest value of 32.
SwitchBack (Wortsman et al. 2023) found the same two products harmless with one scale for a whole row.

N outputs, D inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from anabranch.errors import CapabilityError
from anabranch.model.network import Network
from anabranch.model.quantize import GROUP, QuantizedWeight, plain_linears
from anabranch.native import library as native

__all__ = ["Int8Linear", "multiply_in_int8"]


class Int8Linear(nn.Module):
    """``nn.Linear`` with a frozen weight in int8; inputs get gradients, the weight does not."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        kernels = native.library()
        assert kernels is not None, native.why_not()
        self.kernels = kernels
        self.out_features, self.in_features = weight.shape
        self.offset = None if bias is None else bias.detach().float().contiguous()
        self.forwards, self._memory = _packed(kernels, weight)
        self.backwards, self._transposed = _packed(kernels, weight.T)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., N]."""
        found: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        return found

    def product(self, x: Tensor, weight: native.Packed, bias: Tensor | None) -> Tensor:
        """Rows of any type times a packed weight, in the rows' type."""
        rows = x.float().flatten(0, -2).contiguous()
        return self.kernels.linear(rows, weight, bias).to(x.dtype).view(*x.shape[:-1], weight.outputs)


class _Product(torch.autograd.Function):
    """A product, and the product of its gradient, in int8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: Int8Linear) -> Tensor:
        """[..., D] -> [..., N]."""
        ctx.linear = linear
        return linear.product(x, linear.forwards, linear.offset)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        """The gradient of the input."""
        (slope,) = upstream
        return ctx.linear.product(slope, ctx.linear.backwards, None), None


def _packed(kernels: native.Library, weight: Tensor) -> tuple[native.Packed, Tensor]:
    q = QuantizedWeight.of(weight.contiguous(), "int8")
    return kernels.pack(q.kind, q.values, q.scale, None)


def multiply_in_int8(target: Network) -> None:
    """Replace the linear layers of a target's blocks by ``Int8Linear``, in place.

    Embeddings, norms and the head stay as they are, and so does a layer whose width is not a multiple of 32. Raises
    CapabilityError where the native kernels do not run, and for a target that is quantised already.
    """
    if next(target.parameters()).device.type != "cpu" or native.library() is None:
        raise CapabilityError(
            f"products in int8 need the native kernels on a CPU ({native.why_not() or 'the target is on a GPU'}); "
            "leave --target-format int8 out"
        )
    for module, name, linear in plain_linears(target, "int8"):
        if linear.in_features % GROUP == 0 and linear.out_features % GROUP == 0:
            setattr(module, name, Int8Linear(linear.weight, linear.bias))
