"""Low-rank terms of a target's linear layers (LoRA, Hu et al. 2022): where they belong, and merging them into weights.

A term belongs to a linear module of the Hugging Face model (``model.layers.0.self_attn.q_proj``), as in PEFT's files,
which ``peft`` reads and writes. The decoder fuses some of these modules; ``places`` says which of its rows are whose.

I inputs and O outputs of a module, r rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from anabranch.model.blocks import MLP
from anabranch.model.config import ModelConfig
from anabranch.model.families import Layout, module_rows, weight_source

__all__ = [
    "PARTS",
    "Lora",
    "Place",
    "SideTerms",
    "Term",
    "WithLora",
    "decoder_rows",
    "places",
    "stored_rows",
    "widths",
]

# the linear layers of a block, by their names in the decoder
PARTS = ("qkv", "out", "mlp.up", "mlp.down")


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
        """What is added to the weight [O, I], in float32; the operations and their order are PEFT's."""
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
    """Where a Hugging Face linear module is in the decoder: rows of a linear layer of a block.

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
    """The linear modules of all blocks by name, in the order of the layers."""
    found: dict[str, Place] = {}
    for layer in range(config.num_layers):
        for part in PARTS:
            source, (width, rows) = weight_source(config, f"blocks.{layer}.{part}.weight"), widths(config, part)
            start = 0
            for names, count in zip(source.tensors, module_rows(config, len(source.tensors), rows), strict=True):
                modules = tuple(name.removesuffix(".weight") for name in names)
                found[modules[0]] = Place(layer, part, slice(start, start + count), width, modules, source.layout)
                start += count
    return found


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
        """The output of a linear layer [..., O], which is one of ``PARTS``, with what is added to it."""

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


class WithLora(Mapping[str, Tensor]):
    """The stored tensors of a model (by Hugging Face names) with a LoRA merged into them on access.

    One tensor at a time is merged, so the model is never in memory twice. Tensors of the wrong shape or type are
    returned as they are; whoever assembles them refuses them.
    """

    def __init__(self, tensors: Mapping[str, Tensor], lora: Lora, config: ModelConfig) -> None:
        self.tensors = tensors
        self._terms: dict[str, tuple[Term, Place]] = {}
        found = places(config)
        for module, term in lora.terms.items():
            place = found[module]
            self._terms.update({f"{name}.weight": (term, place) for name in place.names})

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        if name not in self._terms or not tensor.is_floating_point():
            return tensor
        term, place = self._terms[name]
        weight_OI = tensor.t() if place.layout == "transposed" else tensor
        if weight_OI.shape != (place.outputs, place.width):
            return tensor
        merged = term.merged(weight_OI)
        return merged.t() if place.layout == "transposed" else merged

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)
