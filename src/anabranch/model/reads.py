"""Bytes of weights that a forward pass reads."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from anabranch.model.decoder import Decoder
from anabranch.model.experts import Experts
from anabranch.model.native_linear import NativeLinear
from anabranch.model.pack import Packable, PackedLinear, PackedQuantized
from anabranch.model.quantize import QuantizedLinear

__all__ = ["read_bytes", "weight_bytes"]


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
