"""LoRAs that requests choose, packed for the native kernels.

B rows of the batch.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from anabranch.model.config import ModelConfig
from anabranch.model.lora import PARTS, widths
from anabranch.model.native_terms import PackedTerms, Term
from anabranch.model.passes import LayerTerms, RowSides
from anabranch.native import structs

__all__ = ["NativeLoras"]


class NativeLoras:
    """The LoRAs of a packed target, whose terms are packed in the type of its rows when a pass first has them.

    first  the lowest layer of the passes
    mlp    whether their layers have the target's MLP
    """

    def __init__(self, kind: str, config: ModelConfig, first: int = 0, *, mlp: bool = True) -> None:
        self._config, self._packed, self._first = config, PackedTerms(kind), first
        self._parts = PARTS if mlp else PARTS[:2]
        self._known: dict[str, tuple[Sequence[LayerTerms], int]] = {}

    def pointers(self, sides: RowSides, layer: int) -> array[int]:
        """The addresses of the rows' terms from a layer on [B], 0 for rows without a LoRA."""
        for name, layers in sides.terms.items():
            if name not in self._known or self._known[name][0] is not layers:
                self._known[name] = (
                    layers,
                    self._packed.addresses([self._layer(terms) for terms in layers[self._first :]]),
                )
        skipped = (layer - self._first) * ctypes.sizeof(structs.Terms)
        return array("Q", [0 if name is None else self._known[name][1] + skipped for name in sides.names_B])

    def _layer(self, terms: LayerTerms) -> structs.Terms:
        own = [part for part in self._parts if part in terms]
        parts = [_fused(self._config, part, terms[part]) if part in own else None for part in PARTS]
        return self._packed.layer(*parts, gated=self._config.gated_mlp)


def _fused(config: ModelConfig, part: str, terms: Sequence[tuple[slice, Tensor, Tensor]]) -> Term:
    """The terms of modules that the decoder fuses as one, whose rank is the sum of theirs."""
    down, (_, outputs) = torch.cat([each for _, each, _ in terms]), widths(config, part)
    up, first = down.new_zeros(outputs, len(down)), 0
    for rows, _, each in terms:
        up[rows, first : first + each.shape[1]] = each
        first += each.shape[1]
    return Term(down, up)
