"""The trained form of a LoRA: the low-rank terms of a target's layers as modules (Hu et al. 2022).

Whatever tunes a target has the same terms, ``train lora`` and the methods that tune it with what drafts for it: one for
each linear module of the Hugging Face model, beginning as PEFT's do.

I inputs and O outputs of a module, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.model.config import ModelConfig
from anabranch.model.lora import PARTS, Lora, Place, SideTerms, Term, decoder_rows, places, stored_rows

__all__ = ["SCALE", "LayerTuning", "LowRank", "fresh_terms", "layers_of", "lora_of", "terms_of"]


class LowRank(nn.Module):
    """x -> up(down(x)), initialised to zero like LoRA (Hu et al. 2022). 2 * rank parameters per channel."""

    def __init__(self, width_in: int, width_out: int, rank: int, *, activation: bool = False) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(rank, width_in))
        self.up = nn.Parameter(torch.zeros(width_out, rank))
        self.activation = activation
        if not self.down.is_meta:
            nn.init.normal_(self.down, std=1.0 / math.sqrt(width_in))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width_in] -> [..., width_out]."""
        y = F.linear(x, self.down)
        return F.linear(F.silu(y) if self.activation else y, self.up)


SCALE = 2.0  # alpha / rank


def fresh_terms(model: ModelConfig, rank: int, scale: float = SCALE, ends: Collection[str] | None = None) -> Lora:
    """Terms that PEFT would begin with: A uniform (Kaiming), B zero; ``ends`` of the modules' names, None: all."""
    terms = {}
    for name, place in places(model).items():
        if ends is None or name.rpartition(".")[2] in ends:
            down_RI = torch.empty(rank, place.width)
            if not down_RI.is_meta:
                nn.init.kaiming_uniform_(down_RI, a=math.sqrt(5))
            terms[name] = Term(down_RI, torch.zeros(place.outputs, rank), scale)
    return Lora(terms)


class LayerTuning(SideTerms, nn.Module):
    """The terms of one layer: those of modules that the decoder fuses are added side by side."""

    def __init__(self, model: ModelConfig, layer: int, terms: Mapping[str, tuple[Place, Term]]) -> None:
        super().__init__()
        self.model, self.layer = model, layer
        self.parts: dict[str, list[tuple[str, Place, float]]] = {part: [] for part in PARTS}
        self.terms = nn.ModuleDict()
        for name, (place, term) in terms.items():
            key = _key(name, place.layer)
            self.terms[key] = made = LowRank(place.width, place.outputs, term.rank)
            with torch.no_grad():
                made.down.copy_(term.down_RI)
                made.up.copy_(decoder_rows(model, place, term.up_OR))
            self.parts[place.part].append((key, place, term.scale))

    def term(self, name: str) -> Term:
        """The term of a module, as it is stored."""
        key = _key(name, self.layer)
        place, scale = next((place, scale) for part in self.parts.values() for k, place, scale in part if k == key)
        made = self._made(key)
        return Term(made.down.detach(), stored_rows(self.model, place, made.up.detach()), scale)

    def added(self, part: str, linear: nn.Module, x: Tensor, *, fixed: bool = False) -> Tensor:
        """The output of a linear layer with its modules' terms; ``fixed``: the terms get no gradients from it."""
        y: Tensor = linear(x)
        if not (terms := self.parts[part]):
            return y
        made = [self._made(key) for key, _, _ in terms]
        down_RI = torch.cat([each.down for each in made])
        up_OR, first = x.new_zeros(y.shape[-1], len(down_RI)), 0
        for each, (_, place, scale) in zip(made, terms, strict=True):
            rank = len(each.down)
            up_OR[place.rows, first : first + rank] = scale * each.up
            first += rank
        if fixed:
            down_RI, up_OR = down_RI.detach(), up_OR.detach()
        # one product for all modules adds to y as it goes: reading and writing y is what costs time
        inner = F.linear(x, down_RI).flatten(0, -2)
        return torch.addmm(y.flatten(0, -2), inner, up_OR.t()).view_as(y)

    def _made(self, key: str) -> LowRank:
        term = self.terms[key]
        assert isinstance(term, LowRank)
        return term


def _key(name: str, layer: int) -> str:
    """A module's name within its layer, for a ``ModuleDict``: self_attn_q_proj."""
    return name.rpartition(f".{layer}.")[2].replace(".", "_")


def layers_of(model: ModelConfig, lora: Lora) -> nn.ModuleList:
    """The terms of a LoRA as one ``LayerTuning`` for each layer."""
    known = places(model)
    of_layer: list[dict[str, tuple[Place, Term]]] = [{} for _ in range(model.num_layers)]
    for name, term in lora.terms.items():
        of_layer[known[name].layer][name] = known[name], term
    return nn.ModuleList(LayerTuning(model, *layer) for layer in enumerate(of_layer))


def lora_of(model: ModelConfig, layers: nn.ModuleList) -> Lora:
    """The terms of all layers as they are now, by module; those that have one."""
    terms = {}
    for name, place in places(model).items():
        layer = layers[place.layer]
        assert isinstance(layer, LayerTuning)
        if _key(name, place.layer) in layer.terms:
            terms[name] = layer.term(name)
    return Lora(terms)


def terms_of(model: ModelConfig, rank: int) -> nn.ModuleList | None:
    """Fresh terms of a rank for all modules of every layer; None for rank 0."""
    return layers_of(model, fresh_terms(model, rank)) if rank else None
