"""Weights in 8 or 4 bits. The quantised model is the target: lossless means lossless against its own output.

    auto    the weights that the file has (``model.as_stored``); those of unquantised files are not rounded
    none    not quantised; a quantised file is dequantised
    int8    symmetric, one scale for each output: w = scale * (value - 128)
    int4    a scale and a minimum for each group of 32 inputs: w = scale * value + least, values 0 to 15 (Q4_1 of GGUF
            files). The head, which decides between near ties, and layers whose inputs do not divide into groups are
            kept in int8

Embeddings, norms and biases are not quantised. The native kernels also quantise the inputs of such a layer to int8,
with a scale for every 32 values; PyTorch's kernels do not (``model.pack``). If neither can run, the weights are
dequantised for each product.

N outputs, D inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.errors import CapabilityError, InputError
from anabranch.model.blocks import Block
from anabranch.model.network import Network
from anabranch.support.nearest import hint

__all__ = [
    "GROUP",
    "QUANTIZATIONS",
    "ROUNDINGS",
    "Quantization",
    "QuantizedLinear",
    "QuantizedWeight",
    "Rounding",
    "check_quantization",
    "plain_linears",
    "quantize_decoder",
    "rounding_of",
]

Rounding: TypeAlias = Literal["none", "int8", "int4"]
Quantization: TypeAlias = Literal["none", "int8", "int4", "stored"]
ROUNDINGS: tuple[Rounding, ...] = ("none", "int8", "int4")
QUANTIZATIONS = ("auto", *ROUNDINGS)  # that can be asked for
GROUP = 32
AT_ONCE = 256


@dataclass(frozen=True)
class QuantizedWeight:
    """``values`` [N, D] uint8; int8: ``scale`` [N] float32; int4: ``scale`` and ``least`` [N, D / 32] float16."""

    kind: Literal["int8", "int4"]
    values: Tensor
    scale: Tensor
    least: Tensor | None = None

    @staticmethod
    def of(weight: Tensor, kind: Literal["int8", "int4"]) -> QuantizedWeight:
        """Quantise a weight [N, D], a few outputs at a time, since a head in float32 is large."""
        return QuantizedWeight._joined(
            [QuantizedWeight._of(part.float(), kind) for part in torch.split(weight.detach(), AT_ONCE)]
        )

    @staticmethod
    def exact(weight: Tensor) -> QuantizedWeight | None:
        """The int4 values that a bf16 weight [N, D] equals when they are rounded to bf16; None if there are none.

        Weights of Q4_1 files have such values: if both ends of a group's range occur, its scale and minimum follow from
        them. Other weights usually fail within the first outputs.
        """
        if weight.dtype != torch.bfloat16 or weight.shape[1] % GROUP:
            return None
        parts = []
        for part in torch.split(weight.detach(), AT_ONCE):
            made = QuantizedWeight._of(part.float(), "int4")
            tiny = (part != 0) & (part.abs() < torch.finfo(part.dtype).smallest_normal)  # kernels round these to zero
            if bool(tiny.any()) or not torch.equal(made.dense().to(part.dtype), part):
                return None
            parts.append(made)
        return QuantizedWeight._joined(parts)

    @staticmethod
    def _joined(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
        kind = parts[0].kind
        values, scale = (torch.cat(part) for part in zip(*((p.values, p.scale) for p in parts), strict=True))
        least = [part.least for part in parts if part.least is not None]
        return QuantizedWeight(kind, values, scale, torch.cat(least) if least else None)

    @staticmethod
    def _of(w: Tensor, kind: Literal["int8", "int4"]) -> QuantizedWeight:
        if kind == "int8":
            scale = w.abs().amax(1).clamp(min=1e-12) / 127
            return QuantizedWeight("int8", ((w / scale[:, None]).round() + 128).to(torch.uint8), scale)
        groups = w.view(len(w), -1, GROUP)
        least, most = groups.amin(2).half(), groups.amax(2).half()
        scale = ((most.float() - least.float()) / 15).half()
        steps = scale.float().clamp(min=1e-8)
        values = ((groups - least.float()[:, :, None]) / steps[:, :, None]).round().clamp(0, 15)
        return QuantizedWeight("int4", values.to(torch.uint8).view(w.shape), scale, least)

    def dense(self) -> Tensor:
        """The dequantised weight [N, D], float32."""
        if self.least is None:
            return (self.values.float() - 128) * self.scale[:, None]
        groups = self.values.view(len(self.values), -1, GROUP).float()
        return (groups * self.scale.float()[:, :, None] + self.least.float()[:, :, None]).view(self.values.shape)

    def outputs(self, change: Callable[[Tensor], Tensor]) -> QuantizedWeight:
        """The weight with its outputs (axis 0) reordered by ``change``."""
        least = None if self.least is None else change(self.least)
        return QuantizedWeight(self.kind, change(self.values), change(self.scale), least)


class QuantizedLinear(nn.Module):
    """``nn.Linear`` over a quantised weight, which is dequantised for each product; two int4 values share a byte.

    ``keep`` keeps the unquantised weight as ``weight``, for drafters, which read rows of the head.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, kind: Literal["int8", "int4"], *, keep: bool) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.kind: Literal["int8", "int4"] = kind if self.in_features % GROUP == 0 else "int8"
        made = QuantizedWeight.of(weight, self.kind)
        values = made.values if self.kind == "int8" else made.values[:, ::2] | (made.values[:, 1::2] << 4)
        self.weight = weight if keep else None
        self.register_buffer("values", values)
        self.register_buffer("scale", made.scale)
        self.register_buffer("least", made.least)
        self.bias = bias

    def quantized(self) -> QuantizedWeight:
        """The weight with one byte for each value."""
        values, least = self.values, self.least
        assert isinstance(values, Tensor)
        assert isinstance(self.scale, Tensor)
        assert least is None or isinstance(least, Tensor)
        if self.kind == "int4":
            values = torch.stack((values & 15, values >> 4), dim=2).view(self.out_features, self.in_features)
        return QuantizedWeight(self.kind, values, self.scale, least)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return F.linear(x, self.quantized().dense().to(x.dtype), self.bias)


def check_quantization(kind: str) -> None:
    """Raise InputError for an unknown name of a quantisation."""
    if kind not in QUANTIZATIONS:
        raise InputError(f"quantize must be one of {', '.join(QUANTIZATIONS)}, got {kind!r}{hint(kind, QUANTIZATIONS)}")


def rounding_of(kind: str) -> Rounding:
    """The rounding that a name of a quantisation asks for; "none" for "auto". Raises InputError for an unknown name."""
    check_quantization(kind)
    return next((known for known in ROUNDINGS if known == kind), "none")


def plain_linears(target: Network, form: str) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """The linear layers of a target's blocks as (parent module, attribute name, layer), to replace them by ``form``.

    Raises CapabilityError at a layer that is quantised already.
    """
    for block in target.blocks:
        assert isinstance(block, Block)
        for module, name in block.linears():
            linear = getattr(module, name)
            if not isinstance(linear, nn.Linear):
                raise CapabilityError(f"a quantised target cannot be trained in {form}; load it with quantize='none'")
            yield module, name, linear


def quantize_decoder(target: Network, kind: Rounding) -> None:
    """Replace the linear layers of a target by quantised ones, in place."""
    if kind == "none":
        return
    for block in target.every_block:
        assert isinstance(block, Block)
        for module, name in block.linears():
            linear = getattr(module, name)
            setattr(module, name, QuantizedLinear(linear.weight, linear.bias, kind, keep=False))
    target.head = QuantizedLinear(target.head.weight, target.head.bias, "int8", keep=True)
