"""Weights packed once for the CPU's matrix kernels.

A bf16 product on a CPU spends half of its time re-ordering the weight for the kernel, at every call. Packing it once
halves the time of a narrow pass (measured: docs/log.md). The packed copy replaces the weight, so memory stays the
same; only the head keeps the original beside it where it is the embedding table too.

The kernels are those that torch's own compiler calls on packed weights; where this build of torch lacks them, or they
do not agree with the plain product, the module stays as it is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.model.decoder import Block, Decoder

__all__ = ["PackedLinear", "can_pack", "pack_decoder"]

# rows that the packing is laid out for; measured to serve 1 to 64 rows alike
PACK_ROWS = 32


class PackedLinear(nn.Module):
    """``nn.Linear`` over a packed bf16 weight; inference only."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, keep: bool = False) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = weight if keep else None  # drafters read rows of the head
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), PACK_ROWS)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build and machine have the kernels and they agree with the plain product."""
    if device.type != "cpu" or dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).to(dtype)
    x = torch.randn(3, 64, generator=generator).to(dtype)
    try:
        packed = PackedLinear(weight, None)(x)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    plain = F.linear(x, weight)
    return bool(torch.allclose(packed.float(), plain.float(), rtol=2e-2, atol=2e-2))


def _pack(module: nn.Module, name: str, *, keep: bool = False) -> None:
    linear = getattr(module, name)
    assert isinstance(linear, nn.Linear)
    setattr(module, name, PackedLinear(linear.weight, linear.bias, keep=keep))


def pack_decoder(target: Decoder) -> bool:
    """Replace the linear layers of a target by packed ones, in place; returns whether that was possible.

    The target can then no longer be trained through or moved to another device. ``embedding`` stays as it is.
    """
    if not can_pack(target.dtype, target.device):
        return False
    for block in target.blocks:
        assert isinstance(block, Block)
        for module, name in ((block, "qkv"), (block, "out"), (block.mlp, "up"), (block.mlp, "down")):
            _pack(module, name)
    _pack(target, "head", keep=True)
    return True
