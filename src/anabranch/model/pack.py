"""Weights packed once for the matrix kernels that read them.

The native kernels (``anabranch.native``) are preferred: they run whole layers in one call, and are batch-invariant.
Otherwise PyTorch's kernels for packed weights are used, if they fit. For bf16 on a CPU these are oneDNN's, which would
otherwise reorder the weight in each call, half of its time (measured: docs/log.md); for quantised weights, those that
multiply int8 and int4 values directly, on a CPU or a GPU.

The packed copy replaces the weight, so memory stays the same, with two exceptions. A head that is quantised or packed
for oneDNN keeps the original as well, since drafters read its rows. And bf16 layers from a Q4_1 file, such as the
default model's, are stored in four bits a value if the native kernels expand them fast enough, to the same bf16.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.model.blocks import Block
from anabranch.model.decoder import Decoder
from anabranch.model.experts import Experts
from anabranch.model.kernel_use import native_for, products_for, warn_about_kernels
from anabranch.model.native_backend import backend_of
from anabranch.model.native_linear import HeadTable, NativeLinear
from anabranch.model.quantize import GROUP, QuantizedLinear, QuantizedWeight
from anabranch.native import library as native
from anabranch.support.memory import give_back

__all__ = [
    *("Packable", "PackedLinear", "PackedQuantized", "PackedWeight", "can_pack", "pack_decoder", "packed_like"),
    *("read_bytes", "weight_bytes"),
]

PACK_ROWS = 32  # rows that oneDNN optimises the layout for; as fast for 1 to 64 rows
WIDE = 128  # rows from which PyTorch's kernels multiply by a dequantised copy of the weight


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
        """The unpacked weight [out, in]."""
        weight: Tensor = self.packed.to_dense()
        return weight


class PackedQuantized(nn.Module):
    """``nn.Linear`` over a quantised weight for inputs of ``dtype``, by PyTorch's kernels; for inference.

    int8: the values are multiplied directly, then the outputs scaled; on a GPU over a dequantised copy, which is faster
    there than PyTorch's kernel. int4: the kernels take each group's scale and the number that the value 8 stands for,
    both in ``dtype``. They are for few rows: from ``WIDE`` on, as in prompts, a product over the dequantised weight is
    faster, so the int4 values are kept beside their packed copy.
    """

    def __init__(self, linear: QuantizedLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features, self.kind = linear.out_features, linear.in_features, linear.kind
        self.weight, self.bias = linear.weight, linear.bias  # drafters read rows of the head
        made = linear.quantized()
        if made.least is None:
            self.register_buffer("values", (made.values.short() - 128).to(torch.int8))
            self.register_buffer("scale", made.scale)
            self.register_buffer("ones", torch.ones_like(made.scale, dtype=dtype))
            return
        self._dense = [linear]  # in a list, so that it is not a submodule
        self.on_cpu = made.values.device.type == "cpu"
        if self.on_cpu:
            values = torch.ops.aten._convert_weight_to_int4pack_for_cpu(made.values.int(), 1)
        else:
            # a tile of the tensor cores has 16 inputs, and up to eight tiles are stored together
            together = next(n for n in (8, 4, 2) if self.in_features % (16 * n) == 0)
            pairs = made.values[:, ::2] << 4 | made.values[:, 1::2]
            values = torch.ops.aten._convert_weight_to_int4pack(pairs, together)
        middle = made.least.float() + 8 * made.scale.float()
        self.register_buffer("values", values)
        self.register_buffer(
            "scale", torch.stack((made.scale.float(), middle), 2).transpose(0, 1).contiguous().to(dtype)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        rows = x.reshape(-1, self.in_features)
        y = self._int8(rows) if self.kind == "int8" else self._int4(rows)
        return (y if self.bias is None else y + self.bias).view(*x.shape[:-1], self.out_features)

    def _int8(self, rows: Tensor) -> Tensor:
        assert isinstance(self.values, Tensor)
        assert isinstance(self.scale, Tensor)
        if len(rows) < WIDE and rows.device.type == "cpu":
            sums: Tensor = torch.ops.aten._weight_int8pack_mm(rows, self.values, self.ones)
        else:
            sums = F.linear(rows, self.values.to(rows.dtype))
        return (sums.float() * self.scale).to(rows.dtype)

    def _int4(self, rows: Tensor) -> Tensor:
        if len(rows) >= WIDE:
            return F.linear(rows, self._dense[0].quantized().dense().to(rows.dtype))
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu if self.on_cpu else torch.ops.aten._weight_int4pack_mm
        y: Tensor = multiply(rows, self.values, GROUP, self.scale)
        return y

    @staticmethod
    def fits(linear: QuantizedLinear, dtype: torch.dtype) -> bool:
        """True if this build has kernels for this weight on its device that agree with the dense product."""
        if linear.kind == "int4" and linear.out_features % 16:
            return False
        return _multiplies(linear.kind, dtype, linear.scale.device)


@lru_cache
@torch.no_grad()
def _multiplies(kind: Literal["int8", "int4"], dtype: torch.dtype, device: torch.device) -> bool:
    noise = torch.Generator().manual_seed(0)
    for width in (192, 256):  # which are tiled differently on a GPU
        weight = torch.randn(48, width, generator=noise).to(device)
        x = torch.randn(3, width, generator=noise).to(device, dtype)
        linear = QuantizedLinear(weight, None, kind, keep=False)
        try:
            packed = PackedQuantized(linear, dtype)(x).float()
        except (AttributeError, NotImplementedError, RuntimeError):
            return False
        wanted = x.float() @ linear.quantized().dense().T
        if not bool((packed - wanted).abs().max() < 0.02 * wanted.abs().max()):
            return False
    return True


PackedWeight: TypeAlias = "PackedLinear | NativeLinear"


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """True if this build and machine have oneDNN's kernels, and they agree with the plain product."""
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


def packed_like(
    module: nn.Module, weight: Tensor, bias: Tensor | None, kind: Literal["int8", "int4"] = "int4"
) -> PackedWeight | None:
    """``weight`` packed for the kernels of ``module``; None if that is not packed.

    For drafts, which need not be exact: for the native kernels the weight is quantised to ``kind``, which is read
    faster, unless ``module`` is float32.
    """
    if isinstance(module, NativeLinear):
        exact = module.dtype == torch.float32 or weight.shape[1] % GROUP
        stored = weight if exact else QuantizedWeight.of(weight, kind)
        return NativeLinear(stored, bias, wide=module.wide, gated=module.gated)
    return PackedLinear(weight, bias) if isinstance(module, PackedLinear) else None


def rounding(weight: Tensor) -> Tensor:
    """The rounding error of a weight in four bits, as ``packed_like`` stores it for the native kernels."""
    if weight.shape[1] % GROUP:
        return torch.zeros_like(weight)
    exact = weight.detach().float()
    return (QuantizedWeight.of(exact, "int4").dense() - exact).to(weight.dtype)


class Packable(nn.Module):
    """A module whose weights [out, in] can be packed for the kernels of another module, for inference."""

    def __init__(self) -> None:
        super().__init__()
        self.packed: dict[str, PackedWeight] = {}
        self._rounding: dict[str, Tensor] = {}

    def round(self, on: bool) -> None:
        """Switch training with weights rounded as by ``pack`` on or off."""
        self._rounding = {name: rounding(weight) for name, weight in self.products()} if on else {}

    def pack(self, like: nn.Module) -> None:
        """Pack the weights for the kernels of the linear module ``like``; do nothing if it is not packed."""
        for name, weight in () if self.packed else self.products():
            packed = packed_like(like, weight.detach(), None)
            if packed is not None:
                self.packed[name] = packed

    def products(self) -> Iterable[tuple[str, Tensor]]:
        """Names and weights that ``linear`` multiplies by."""
        return self.named_parameters()

    def linear(self, x: Tensor, name: str) -> Tensor:
        """``x`` [..., in] times the weight called ``name``: [..., out]."""
        packed = self.packed.get(name)
        weight: Tensor = getattr(self, name)
        if name in self._rounding:
            weight = weight + self._rounding[name]
        return F.linear(x, weight) if packed is None else packed(x)


def _stored(linear: nn.Linear | QuantizedLinear) -> Tensor | QuantizedWeight:
    return linear.quantized() if isinstance(linear, QuantizedLinear) else linear.weight


def pack_decoder(target: Decoder) -> bool:
    """Replace the linear layers of a target by packed ones, in place; returns False if no kernels fit.

    Sets the target's backend if the native kernels run its layers. A packed target passes no gradients and cannot be
    moved to another device. Issues a PerformanceWarning if slower kernels will decode than the machine could
    run (``warn_about_kernels``).
    """
    if isinstance(target.head, PackedLinear | PackedQuantized | NativeLinear):
        return True
    kernels = native.library() if native_for(target) or products_for(target) else None
    # While another process is busy, torch's threads wait for each other after each of many small operations: packing
    # the default model took 6.6 s with two threads and 1.1 s with one, and 1.2 and 1.5 s on an idle machine.
    with nullcontext() if kernels is None else kernels.single_threaded():
        possible = _pack(target, kernels)
    warn_about_kernels(target, stacklevel=2)
    return possible


def _pack(target: Decoder, kernels: native.Library | None) -> bool:
    head, dtype = target.head, target.dtype
    narrow = isinstance(head, QuantizedLinear)
    if kernels is None and not (PackedQuantized.fits(head, dtype) if narrow else can_pack(dtype, target.device)):
        return False
    whole = native_for(target)  # the kernels run whole layers, experts excepted
    for block in target.every_block if whole else target.blocks:
        assert isinstance(block, Block)
        if kernels is not None and isinstance(block.mlp, Experts):
            router: Any = block.mlp.router
            block.mlp.router = NativeLinear(router.weight, router.bias, wide=True)
        for module, name in block.linears():
            linear = getattr(module, name)
            if kernels is not None:
                # the rows between two layers that PyTorch joins: those of experts are float32
                packed: nn.Module = NativeLinear(
                    _stored(linear),
                    linear.bias,
                    gated=name == "up" and module is block.mlp and whole and block.config.gated_mlp,
                    wide=isinstance(block.mlp, Experts) and module is not block,
                    compact=kernels.expands,
                )
            elif narrow:
                packed = PackedQuantized(linear, dtype) if PackedQuantized.fits(linear, dtype) else linear
            else:
                packed = PackedLinear(linear.weight, linear.bias)
            setattr(module, name, packed)
        give_back()
    if kernels is not None:
        exact = not narrow
        target.head = NativeLinear(
            _stored(head), head.bias, keep=None if exact else head.weight, wide=True, screen=True
        )
        if exact and target.config.tied_head:
            target.embedding = HeadTable(target.head)
        target.backend = backend_of(target, kernels)
    elif narrow:
        target.head = PackedQuantized(head, dtype)
    else:
        target.head = PackedLinear(head.weight, head.bias, keep=True)
    return True


def weight_bytes(decoder: Decoder) -> int:
    """Bytes of weights read by a greedy pass over one token: blocks, last norm and head, and one row of the embedding.

    For a head with a screen this is the minimum. Of a layer's experts, those that one row passes through are counted.
    """
    return read_bytes((decoder.blocks, decoder.norm, decoder.head))


def read_bytes(parts: Iterable[nn.Module]) -> int:
    """Bytes of the weights of some modules, as they are stored for products."""
    total = 0
    for part in parts:
        inside: set[nn.Module] = set()  # modules that are counted already
        for module in part.modules():
            if module in inside:
                continue
            if isinstance(module, Experts):
                inside.update(module.experts.modules())
                total += read_bytes(module.experts) * module.config.chosen // module.config.count
            elif isinstance(module, NativeLinear):
                total += module.nbytes if module.screen is None else module.screen.nbytes
            elif isinstance(module, PackedLinear):
                total += module.out_features * module.in_features * module.packed.dtype.itemsize
            elif isinstance(module, QuantizedLinear | PackedQuantized):
                total += sum(buffer.nbytes for buffer in module.buffers(recurse=False))
            elif isinstance(module, Packable) and module.packed:
                total += read_bytes(module.packed.values())
                continue
            # ``weight`` is a second copy, which only drafters read
            kept = isinstance(module, NativeLinear | PackedLinear | PackedQuantized | QuantizedLinear)
            parameters = module.named_parameters(recurse=False)
            total += sum(value.nbytes for name, value in parameters if not (kept and name == "weight"))
    return total
