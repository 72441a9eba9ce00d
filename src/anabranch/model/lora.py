"""Low-rank terms of a target's linear layers (LoRA, Hu et al. 2022), merged into its weights or added row by row.

A term belongs to a linear module of the Hugging Face model (``model.layers.0.self_attn.q_proj``), as in PEFT's files,
which ``peft`` reads and writes. The decoder fuses some of these modules; ``places`` maps each to its rows.

I inputs and O outputs of a module, r rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.errors import CapabilityError, InputError
from anabranch.model.blocks import RowSide
from anabranch.model.config import ModelConfig
from anabranch.model.families import Layout, module_rows, weight_source
from anabranch.model.mlp import MLP
from anabranch.model.network import Network
from anabranch.model.passes import LayerTerms, RowSides
from anabranch.model.stored import LazyTensors

__all__ = [
    "PARTS",
    "Lora",
    "Place",
    "RowLoras",
    "SideTerms",
    "Term",
    "decoder_rows",
    "places",
    "stored_rows",
    "widths",
    "with_lora",
]

PARTS = ("qkv", "out", "mlp.up", "mlp.down")  # the linear layers of a block, by their names in the decoder
SIDES_KEPT = 32  # most recent combinations of rows whose terms are kept


@dataclass(frozen=True)
class Term:
    """The low-rank term of one module: ``scale * up @ down`` is added to its weight [O, I].

    down_RI  PEFT's ``lora_A``
    up_OR    PEFT's ``lora_B``
    """

    down_RI: Tensor
    up_OR: Tensor
    scale: float

    @property
    def rank(self) -> int:
        """r."""
        return len(self.down_RI)

    def delta(self) -> Tensor:
        """The change of the weight [O, I], in float32, by PEFT's operations in PEFT's order."""
        return (self.up_OR.float() @ self.down_RI.float()) * self.scale

    def merged(self, weight_OI: Tensor) -> Tensor:
        """The weight with the term added, at least in float32."""
        delta = self.delta().to(weight_OI.device)
        return weight_OI.to(torch.promote_types(weight_OI.dtype, torch.float32)) + delta


@dataclass(frozen=True)
class Lora:
    """The terms of a model's linear modules, by the modules' Hugging Face names (the keys of ``places``)."""

    terms: Mapping[str, Term]

    def parameters(self) -> int:
        """The number of values in all terms."""
        return sum(term.down_RI.numel() + term.up_OR.numel() for term in self.terms.values())


@dataclass(frozen=True)
class Place:
    """The location of a Hugging Face linear module in the decoder: rows of a linear layer of a block.

    part    one of ``PARTS``
    rows    the layer's output rows [start, stop) that are the module's
    width   number of inputs of the layer
    names   the module's names, with and without the outer module's prefix
    layout  how the module's weight is stored
    """

    layer: int
    part: str
    rows: slice
    width: int
    names: tuple[str, ...]
    layout: Layout

    @property
    def outputs(self) -> int:
        """The number of outputs of the module."""
        return int(self.rows.stop - self.rows.start)


def widths(config: ModelConfig, part: str) -> tuple[int, int]:
    """The numbers of inputs and outputs of a linear layer of every block."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inner = config.intermediate_size
    return {
        "qkv": (config.hidden_size, q + 2 * kv),
        "out": (q, config.hidden_size),
        "mlp.up": (config.hidden_size, inner * (2 if config.gated_mlp else 1)),
        "mlp.down": (inner, config.hidden_size),
    }[part]


def places(config: ModelConfig) -> dict[str, Place]:
    """The linear modules of all blocks by name, in the order of the layers; without those of experts.

    Raises CapabilityError for hybrids.
    """
    if config.recurrent is not None:
        raise CapabilityError(f"{config.family} models take no LoRA; use a model without recurrent layers")
    located: dict[str, Place] = {}
    for layer in range(config.num_layers):
        dense = config.experts_of(layer) is None
        for part in PARTS if dense else PARTS[:2]:
            source, (width, rows) = weight_source(config, f"blocks.{layer}.{part}.weight"), widths(config, part)
            start = 0
            for names, count in zip(source.tensors, module_rows(config, len(source.tensors), rows), strict=True):
                modules = tuple(name.removesuffix(".weight") for name in names)
                located[modules[0]] = Place(layer, part, slice(start, start + count), width, modules, source.layout)
                start += count
    return located


def decoder_rows(config: ModelConfig, place: Place, up_OR: Tensor) -> Tensor:
    """The rows of ``Term.up_OR`` in the decoder's order: q, k and v of all heads where the file has them by head."""
    if place.layout != "by_head":
        return up_OR
    return up_OR.reshape(config.num_heads, 3, config.head_dim, -1).transpose(0, 1).reshape(up_OR.shape)


def stored_rows(config: ModelConfig, place: Place, up_OR: Tensor) -> Tensor:
    """The inverse of ``decoder_rows``."""
    if place.layout != "by_head":
        return up_OR
    return up_OR.reshape(3, config.num_heads, config.head_dim, -1).transpose(0, 1).reshape(up_OR.shape)


class SideTerms(ABC):
    """A ``RowSide`` that adds something to the outputs of a block's linear layers."""

    @abstractmethod
    def added(self, part: str, linear: nn.Module, x: Tensor) -> Tensor:
        """The output [..., O] of a linear layer, one of ``PARTS``, with the side's terms added."""

    def qkv(self, h_BRD: Tensor, qkv: nn.Module) -> Tensor:
        """The fused query, key and value projections."""
        return self.added("qkv", qkv, h_BRD)

    def out(self, a: Tensor, out: nn.Module) -> Tensor:
        """The attention's output projection."""
        return self.added("out", out, a)

    def mlp(self, h_BRD: Tensor, mlp: MLP) -> Tensor:
        """The feed-forward part."""
        up, down = partial(self.added, "mlp.up", mlp.up), partial(self.added, "mlp.down", mlp.down)
        return mlp.through(h_BRD, up, down)


def with_lora(tensors: Mapping[str, Tensor], lora: Lora, config: ModelConfig) -> LazyTensors:
    """The stored tensors of a model (by Hugging Face names) with a LoRA merged into them on access.

    Tensors of the wrong shape or type are returned unchanged, and refused when they are assembled.
    """
    located = places(config)
    terms = {f"{name}.weight": (term, located[m]) for m, term in lora.terms.items() for name in located[m].names}
    return LazyTensors({name: partial(_merged, tensors, name, *terms.get(name, (None, None))) for name in tensors})


def _merged(tensors: Mapping[str, Tensor], name: str, term: Term | None, place: Place | None) -> Tensor:
    tensor = tensors[name]
    if term is None or place is None or not tensor.is_floating_point():
        return tensor
    weight_OI = tensor.t() if place.layout == "transposed" else tensor
    if weight_OI.shape != (place.outputs, place.width):
        return tensor
    merged = term.merged(weight_OI)
    return merged.t() if place.layout == "transposed" else merged


class RowLoras:
    """LoRAs beside a loaded target, chosen for each row of the batch by name.

    Their terms are added to the linear layers of these rows and the weights stay as they are, so one loaded target
    serves several applications, and rows of different applications share a pass. B rows of the batch.
    """

    def __init__(self) -> None:
        self._terms: dict[str, list[LayerTerms]] = {}
        self._sides: dict[tuple[str | None, ...], RowSides] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names that a request may give."""
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

    def sides(self, names_B: Sequence[str | None]) -> RowSides | None:
        """The terms of the rows of a pass, given the name of each row's LoRA; None: no row has one."""
        key = tuple(names_B)
        if not any(key):
            return None
        if key not in self._sides:
            rows = {name: [b for b, each in enumerate(key) if each == name] for name in dict.fromkeys(key) if name}
            made: list[RowSide] = [
                _RowTerms([(torch.tensor(places), self._terms[name][layer]) for name, places in rows.items()])
                for layer in range(len(self._terms[next(iter(rows))]))
            ]
            while len(self._sides) >= SIDES_KEPT:
                del self._sides[next(iter(self._sides))]
            self._sides[key] = RowSides(key, made, {name: self._terms[name] for name in rows})
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
