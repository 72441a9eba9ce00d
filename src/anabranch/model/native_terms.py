"""Low-rank terms packed for the native kernels.

I inputs and O outputs of a linear layer, r rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.model.native_linear import Held, NativeLinear
from anabranch.model.quantize import QuantizedWeight
from anabranch.native import structs
from anabranch.native.arguments import BLOCK

__all__ = ["PackedTerms", "Term"]


class Term(NamedTuple):
    """The weights of a low-rank term x -> (x down') up': [r, I] and [O, r]."""

    down: Tensor
    up: Tensor


class PackedTerms(Held):
    """Packs terms in the type of a target's rows, and keeps what the structs point to.

    kind  of the target's weights, one of ``KINDS``; if these are quantised, the terms are packed in int8
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def pack(self, weight: Tensor, *, gated: bool = False) -> structs.Packed:
        """A weight [O, I]; ``gated``: its first half is a gate, whose blocks alternate with the others."""
        weight = weight.detach()
        plain = self.kind in ("bfloat16", "float32")
        stored = weight.to(getattr(torch, self.kind)) if plain else QuantizedWeight.of(weight, "int8")
        return self.packed(NativeLinear(stored, None, gated=gated))

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
