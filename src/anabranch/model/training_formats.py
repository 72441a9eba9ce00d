"""Frozen targets with quantised products, for training modules that depend on them.

int8   products in the native kernels on a CPU: faster. A weight is packed twice, as it is for the forward pass and
       transposed for the gradient of the input. It has a scale for each output, rows and gradients one for every 32
       values (``model.quantize``), so both products are rounded to about a part in 250 of the largest of 32 values.
       SwitchBack (Wortsman et al. 2023) found such products harmless with one scale for a whole row
NF4    QLoRA's 4-bit format (Dettmers et al. 2023): less memory. A block of 64 values is stored as its largest magnitude
       in float32 and the nearest of 16 levels for each value, which divide a normal distribution into parts of equal
       probability: 4.5 bits a value. Weights are dequantised for each product and again for its gradient, so
       only one layer is dense at a time. Scales are not quantised a second time

Inputs get gradients, weights do not. N outputs, D inputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.errors import CapabilityError
from anabranch.model.network import Network
from anabranch.model.quantize import GROUP, QuantizedWeight, plain_linears
from anabranch.native import library as native
from anabranch.native import structs

__all__ = ["BLOCK", "LEVELS", "Int8Linear", "Nf4Linear", "multiply_in_int8", "quantize_to_nf4"]

BLOCK = 64
# QLoRA, appendix E
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
BLOCKS_AT_ONCE = 1 << 14
ROWS_AT_ONCE = 1024  # enough for the products; their outputs are in float32 before they are rounded


class _Product(torch.autograd.Function):
    """``linear.product(x)``, whose gradient is ``linear.gradient``: nothing but the layer is kept for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: Int8Linear | Nf4Linear) -> Tensor:
        """[..., D] -> [..., N]."""
        ctx.linear, ctx.dtype = linear, x.dtype
        return linear.product(x)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        """The gradient of the input."""
        return ctx.linear.gradient(upstream[0]).to(ctx.dtype), None


class Int8Linear(nn.Module):
    """``nn.Linear`` with a frozen weight in int8."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        kernels = native.library()
        assert kernels is not None, native.why_not()
        self.kernels = kernels
        self.out_features, self.in_features = weight.shape
        self.offset = None if bias is None else bias.detach().float().contiguous()
        made = [QuantizedWeight.of(each.contiguous(), "int8") for each in (weight, weight.T)]
        (self._forward, self._memory), (self._backward, self._transposed) = (
            kernels.pack(each.kind, each.values, each.scale, None) for each in made
        )

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., N]."""
        y: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        return y

    def product(self, x: Tensor) -> Tensor:
        """The output, without a gradient."""
        return self._multiply(x, self._forward, self.offset)

    def gradient(self, slope: Tensor) -> Tensor:
        """The gradient of the input [..., D] for that of the output [..., N]."""
        return self._multiply(slope, self._backward, None)

    def _multiply(self, x: Tensor, weight: structs.Packed, bias: Tensor | None) -> Tensor:
        known = x if x.dtype in (torch.float32, torch.bfloat16) else x.float()
        rows, shape = known.flatten(0, -2).contiguous(), (*x.shape[:-1], weight.outputs)
        if x.dtype == torch.float32:
            return self.kernels.linear(rows, weight, bias).view(shape)
        y = torch.empty(len(rows), weight.outputs, dtype=x.dtype)
        for first in range(0, len(rows), ROWS_AT_ONCE):  # float32 outputs of all rows would take twice the memory of y
            part = slice(first, first + ROWS_AT_ONCE)
            y[part] = self.kernels.linear(rows[part], weight, bias)
        return y.view(shape)


class Nf4Linear(nn.Module):
    """``nn.Linear`` with a frozen weight in NF4."""

    codes: Tensor  # [blocks, 32] uint8, two codes to a byte
    scale: Tensor  # [blocks, 1] float32

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        flat = weight.detach().flatten()
        blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
        made = [_nf4(part.float()) for part in torch.split(blocks, BLOCKS_AT_ONCE)]
        self.register_buffer("codes", torch.cat([codes for codes, _ in made]))
        self.register_buffer("scale", torch.cat([scale for _, scale in made]))
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The dequantised weight [N, D]."""
        levels = torch.tensor(LEVELS, device=self.codes.device)
        places = torch.stack((self.codes & 15, self.codes >> 4), dim=2).flatten(1).int()
        flat = (levels[places] * self.scale).to(dtype).flatten()
        return flat[: self.out_features * self.in_features].view(self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., N]."""
        y: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        return y

    def product(self, x: Tensor) -> Tensor:
        """The output, without a gradient."""
        return F.linear(x, self.dense(x.dtype), None if self.bias is None else self.bias.to(x.dtype))

    def gradient(self, slope: Tensor) -> Tensor:
        """The gradient of the input [..., D] for that of the output [..., N]."""
        return slope @ self.dense(slope.dtype)


def _nf4(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [blocks, 32] and scales [blocks, 1] of values [blocks, 64]."""
    scale = blocks.abs().amax(1, keepdim=True)
    levels = torch.tensor(LEVELS, device=blocks.device)
    edges = (levels[1:] + levels[:-1]) / 2  # a value between two edges is nearest to the level between them
    places = torch.bucketize(blocks / scale.clamp(min=1e-30), edges).to(torch.uint8)
    return places[:, ::2] | (places[:, 1::2] << 4), scale


def multiply_in_int8(target: Network) -> None:
    """Replace the linear layers of a target's blocks by ``Int8Linear``, in place.

    Embeddings, norms, the head and layers whose width is not a multiple of 32 stay as they are. Raises CapabilityError
    if the native kernels do not run here, or the target is quantised already.
    """
    if next(target.parameters()).device.type != "cpu" or native.library() is None:
        raise CapabilityError(
            f"products in int8 need the native kernels on a CPU ({native.why_not() or 'the target is on a GPU'}); "
            "leave --target-format int8 out"
        )
    for module, name, linear in plain_linears(target, "int8"):
        if linear.in_features % GROUP == 0 and linear.out_features % GROUP == 0:
            setattr(module, name, Int8Linear(linear.weight, linear.bias))


def quantize_to_nf4(target: Network) -> None:
    """Replace the linear layers of a target's blocks by ``Nf4Linear``, in place, one after another.

    Embeddings, norms and the head stay as they are. Raises CapabilityError for a target that is quantised already.
    """
    for module, name, linear in plain_linears(target, "NF4"):
        setattr(module, name, Nf4Linear(linear.weight, linear.bias))
