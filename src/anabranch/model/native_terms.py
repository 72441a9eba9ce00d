"""Low-rank terms packed for the native kernels.

I inputs and O outputs of a linear layer, r rank.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.model.native_linear import NativeLinear
from anabranch.model.quantize import QuantizedWeight
from anabranch.native import structs
from anabranch.native.arguments import BLOCK

__all__ = ["PackedTerms", "Term"]


class Term(NamedTuple):
    """The weights of a low-rank term x -> (x down') up': [r, I] and [O, r]."""

    down: Tensor
    up: Tensor


class PackedTerms:
    """Packs terms in the type of a target's rows, and keeps what the structs point to.

    kind  of the target's weights, one of ``KINDS``; if these are quantised, the terms are packed in int8
    """

    def __init__(self, kind: str) -> None:
        self.kind, self._kept = kind, list[object]()

    def pointer(self, tensor: Tensor | None) -> int | None:
        """The address of a float32 copy; None for None."""
        if tensor is None:
            return None
        kept = tensor.detach().float().contiguous()
        self._kept.append(kept)
        return int(kept.data_ptr())

    def pack(self, weight: Tensor, *, gated: bool = False) -> structs.Packed:
        """A weight [O, I]; ``gated``: its first half is a gate, whose blocks alternate with the others."""
        weight = weight.detach()
        plain = self.kind in ("bfloat16", "float32")
        stored = weight.to(getattr(torch, self.kind)) if plain else QuantizedWeight.of(weight, "int8")
        linear = NativeLinear(stored, None, gated=gated)
        self._kept.append(linear)
        return linear.packed

    def term(self, term: Term | None, *, gated: bool = False) -> structs.LowRank:
        """A term, with its rank zero-padded to a multiple that the kernels support."""
        if term is None:
            return structs.LowRank()
        more = -len(term.down) % BLOCK
        down = self.pack(F.pad(term.down.detach(), (0, 0, 0, more)))
        return structs.LowRank(down, self.pack(F.pad(term.up.detach(), (0, more)), gated=gated))

    def layer(
        self, qkv: Term | None, out: Term | None, up: Term | None, down: Term | None, *, gated: bool
    ) -> structs.Terms:
        """The terms of a layer's products."""
        return structs.Terms(self.term(qkv), self.term(out), self.term(up, gated=gated), self.term(down))

    def addresses(self, layers: Sequence[ctypes.Structure]) -> int:
        """The address of an array of structs of one type."""
        made = (type(layers[0]) * len(layers))(*layers)
        self._kept.append(made)
        return ctypes.addressof(made)
