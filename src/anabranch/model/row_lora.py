"""LoRAs beside a loaded target, chosen row by row: their terms are added to the linear layers of some rows of a pass.

The weights stay as they are, so one loaded target serves several applications, and rows of different applications
share a pass.

B rows of the batch, R rows of a pass, I inputs and O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.errors import InputError
from anabranch.model.blocks import RowSide
from anabranch.model.lora import Lora, SideTerms, decoder_rows, places

if TYPE_CHECKING:
    from anabranch.model.network import Network

__all__ = ["RowLoras"]

KEPT = 32  # most recent combinations of rows whose terms are kept

# of one layer, by part: output rows, down [r, I] and scaled up [O, r] of each module
LayerTerms: TypeAlias = Mapping[str, Sequence[tuple[slice, Tensor, Tensor]]]


class RowLoras:
    """The LoRAs of a target by name, and their terms for the rows of a pass."""

    def __init__(self) -> None:
        self._terms: dict[str, list[LayerTerms]] = {}
        self._sides: dict[tuple[str | None, ...], list[RowSide]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """What a request may name."""
        return tuple(self._terms)

    def check(self, name: str) -> None:
        """Raise InputError for a LoRA that was not loaded."""
        if name not in self._terms:
            known = f"those loaded are {', '.join(self._terms)}" if self._terms else "none was loaded (loras=)"
            raise InputError(f"there is no LoRA {name!r}; {known}")

    def add(self, name: str, lora: Lora, network: Network) -> None:
        """Keep the terms of a LoRA in the type of a target's weights, on their device."""
        config, known = network.config, places(network.config)
        layers: list[dict[str, list[tuple[slice, Tensor, Tensor]]]] = [{} for _ in range(config.num_layers)]
        for module, term in lora.terms.items():
            place = known[module]
            up = decoder_rows(config, place, term.up_OR) * term.scale
            down, up = (x.to(network.device, network.dtype) for x in (term.down_RI, up))
            layers[place.layer].setdefault(place.part, []).append((place.rows, down, up))
        self._terms[name] = list(layers)
        self._sides.clear()

    def sides(self, names_B: Sequence[str | None]) -> list[RowSide] | None:
        """What is added in each layer to the rows of a pass, given the name of each row's LoRA; None: nothing."""
        key = tuple(names_B)
        if not any(key):
            return None
        if key not in self._sides:
            rows = {name: [b for b, each in enumerate(key) if each == name] for name in dict.fromkeys(key) if name}
            found: list[RowSide] = [
                _RowTerms([(torch.tensor(places), self._terms[name][layer]) for name, places in rows.items()])
                for layer in range(len(self._terms[next(iter(rows))]))
            ]
            while len(self._sides) >= KEPT:
                del self._sides[next(iter(self._sides))]
            self._sides[key] = found
        return self._sides[key]


class _RowTerms(SideTerms):
    """The terms of one layer for groups of rows of the batch."""

    def __init__(self, groups: Sequence[tuple[Tensor, LayerTerms]]) -> None:
        self.groups = groups

    def added(self, part: str, linear: nn.Module, x_BRI: Tensor) -> Tensor:
        """The layer's output, with each group's terms added to its rows."""
        y: Tensor = linear(x_BRI)
        for rows, terms in self.groups:
            if part in terms:
                rows = rows.to(y.device)
                own = x_BRI[rows]
                for outputs, down, up in terms[part]:
                    y[rows, :, outputs] += F.linear(F.linear(own, down), up)
        return y
