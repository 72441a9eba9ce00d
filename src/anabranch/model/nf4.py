"""A frozen target in NF4, the 4-bit format of QLoRA (Dettmers et al. 2023), for training with less memory.

A weight is cut into blocks of 64 values, row after row. A block keeps its largest magnitude in float32, and each value
the nearest of 16 levels, which divide a normal distribution into parts of equal probability: 4.5 bits a value. Scales
are not quantised a second time.

Weights are dequantised for each product, and again for its gradient, so only one layer is dense at a time. Decoding
uses ``model.quantize`` instead; NF4 has no kernels here.

N outputs, D inputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.model.network import Network
from anabranch.model.quantize import plain_linears

__all__ = ["BLOCK", "LEVELS", "Nf4Linear", "quantize_to_nf4"]

BLOCK = 64
# QLoRA, appendix E
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
AT_ONCE = 1 << 14  # blocks quantised at a time


class Nf4Linear(nn.Module):
    """``nn.Linear`` with a frozen weight in NF4; inputs get gradients, the weight does not."""

    codes: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        flat = weight.detach().flatten()
        blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
        made = [_quantized(part.float()) for part in torch.split(blocks, AT_ONCE)]
        self.register_buffer("codes", torch.cat([codes for codes, _ in made]))  # [blocks, 32] uint8
        self.register_buffer("scale", torch.cat([scale for _, scale in made]))  # [blocks, 1] float32
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The dequantised weight [N, D]."""
        levels = torch.tensor(LEVELS, device=self.codes.device)
        places = torch.stack((self.codes & 15, self.codes >> 4), dim=2).flatten(1).int()
        flat = (levels[places] * self.scale).to(dtype).flatten()
        return flat[: self.out_features * self.in_features].view(self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., N]."""
        found: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        return found


class _Product(torch.autograd.Function):
    """A product with a weight that is dequantised again for the gradient instead of being kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: Nf4Linear) -> Tensor:
        """[..., D] -> [..., N]."""
        ctx.linear, ctx.dtype = linear, x.dtype
        bias = None if linear.bias is None else linear.bias.to(x.dtype)
        return F.linear(x, linear.dense(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        """The gradient of the input."""
        (slope,) = upstream
        return (slope @ ctx.linear.dense(slope.dtype)).to(ctx.dtype), None


def _quantized(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [blocks, 32], two to a byte, and scales [blocks, 1] of values [blocks, 64]."""
    scale = blocks.abs().amax(1, keepdim=True)
    levels = torch.tensor(LEVELS, device=blocks.device)
    edges = (levels[1:] + levels[:-1]) / 2  # nearest level: between which edges a value lies
    places = torch.bucketize(blocks / scale.clamp(min=1e-30), edges).to(torch.uint8)
    return places[:, ::2] | (places[:, 1::2] << 4), scale


def quantize_to_nf4(target: Network) -> None:
    """Replace the linear layers of a target's blocks by ``Nf4Linear``, in place, one after another.

    Embeddings, norms and the head stay as they are. Raises CapabilityError for a target that is quantised already.
    """
    for module, name, linear in plain_linears(target, "NF4"):
        setattr(module, name, Nf4Linear(linear.weight, linear.bias))
