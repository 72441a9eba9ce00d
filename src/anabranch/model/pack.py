"""Weights packed once for the CPU's matrix kernels.

Two ways, the better one that this machine has: our own kernels (``anabranch.native``), which run whole layers in one
call and whose rows do not depend on how many there are; else those of oneDNN that torch's own compiler calls on packed
bf16 weights, which spare each call the re-ordering of the weight, half of its time (measured: docs/log.md). Quantised
weights are packed for the former only.

The packed copy replaces the weight, so memory stays the same; only a head that is quantised or packed for oneDNN keeps
the original beside it, of which drafters read rows. Where neither is to be had, the module stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.memory import give_back
from anabranch.model.decoder import Block, Decoder
from anabranch.model.quantize import GROUP, QuantizedLinear, QuantizedWeight
from anabranch.model.stack import HeadTable, NativeLinear, Stack, native_for

__all__ = ["Packable", "PackedLinear", "PackedWeight", "can_pack", "pack_decoder", "packed_like"]

# rows that oneDNN's packing is laid out for; measured to serve 1 to 64 rows alike
PACK_ROWS = 32


class PackedLinear(nn.Module):
    """``nn.Linear`` over a bf16 weight packed for oneDNN; inference only."""

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

    def dense(self) -> Tensor:
        """The weight [out, in] as it was."""
        weight: Tensor = self.packed.to_dense()
        return weight


PackedWeight: TypeAlias = "PackedLinear | NativeLinear"


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build and machine have oneDNN's kernels and they agree with the plain product."""
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


def packed_like(module: nn.Module, weight: Tensor, bias: Tensor | None) -> PackedWeight | None:
    """``weight`` packed in the way that ``module`` is; None if that is not packed.

    For drafts, which need not be exact: the native kernels take them in int8, at half the cost, unless all is float32.
    """
    if isinstance(module, NativeLinear):
        exact = module.dtype == torch.float32 or weight.shape[1] % GROUP
        return NativeLinear(weight if exact else QuantizedWeight.of(weight, "int8"), bias, wide=module.wide)
    return PackedLinear(weight, bias) if isinstance(module, PackedLinear) else None


class Packable(nn.Module):
    """A module whose weights [out, in] can be packed as another module's are; inference only."""

    def __init__(self) -> None:
        super().__init__()
        self.packed: dict[str, PackedWeight] = {}

    def pack(self, like: nn.Module) -> None:
        """Pack the weights as the linear module ``like`` is packed, if it is."""
        for name, weight in () if self.packed else self.products():
            packed = packed_like(like, weight.detach(), None)
            if packed is not None:
                self.packed[name] = packed

    def products(self) -> Iterable[tuple[str, Tensor]]:
        """The weights that ``linear`` multiplies by, and their names."""
        return self.named_parameters()

    def linear(self, x: Tensor, name: str) -> Tensor:
        """``x`` [..., in] times the weight of a name: [..., out]."""
        packed = self.packed.get(name)
        return F.linear(x, getattr(self, name)) if packed is None else packed(x)


def _stored(linear: nn.Linear | QuantizedLinear) -> Tensor | QuantizedWeight:
    return linear.quantized() if isinstance(linear, QuantizedLinear) else linear.weight


def pack_decoder(target: Decoder) -> bool:
    """Replace the linear layers of a target by packed ones, in place; returns whether that was possible.

    The target can then no longer be trained through or moved to another device.
    """
    if isinstance(target.head, PackedLinear | NativeLinear):
        return True
    native = native_for(target)
    if not native and (isinstance(target.head, QuantizedLinear) or not can_pack(target.dtype, target.device)):
        return False
    for block in target.blocks:
        assert isinstance(block, Block)
        for module, name in ((block, "qkv"), (block, "out"), (block.mlp, "up"), (block.mlp, "down")):
            linear = getattr(module, name)
            if native:
                packed: nn.Module = NativeLinear(_stored(linear), linear.bias, gated=name == "up")
            else:
                packed = PackedLinear(linear.weight, linear.bias)
            setattr(module, name, packed)
        give_back()
    head = target.head
    if native:
        exact = isinstance(head, nn.Linear)
        target.head = NativeLinear(_stored(head), head.bias, keep=None if exact else head.weight, wide=True)
        if exact and target.config.tied_head:
            target.embedding = HeadTable(target.head)
        target.stack = Stack.of_decoder(target)
    else:
        target.head = PackedLinear(head.weight, head.bias, keep=True)
    return True
