"""Plain LoRA fine-tuning (Hu et al. 2022): low-rank terms of a target's linear layers, trained on completions.

The tuned target is another model; nothing here drafts. ``lora_job`` trains it and writes it in PEFT's format.

B rows, T text length, P positions, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anabranch.errors import InputError
from anabranch.learning.examples import Batch, Example
from anabranch.learning.objective import Scores, Segment, segments
from anabranch.learning.recipe import COMMON, Option, Recipe, TrainOptions
from anabranch.methods.low_rank import LowRank
from anabranch.methods.trained import Trainable
from anabranch.methods.tuning import MOST_RANK, check_weights, next_token_scores, tuned_pass
from anabranch.model.config import ModelConfig
from anabranch.model.decoder import Decoder
from anabranch.model.lora import PARTS, Lora, Place, SideTerms, Term, decoder_rows, places, stored_rows, widths
from anabranch.train.data import batches

__all__ = ["OPTIONS", "LoraConfig", "LoraLayers", "LoraLoss", "LoraObjective", "recipe"]

EVALUATED = 2048  # padded tokens of a batch that is evaluated


@dataclass(frozen=True)
class LoraConfig:
    """Which modules get terms, and of which size.

    rank     r
    alpha    the terms are multiplied by alpha / rank
    modules  the ends of the modules' Hugging Face names, separated by commas; "all" linear modules of the layers
    """

    rank: int = 16
    alpha: float = 32.0
    modules: str = "all"

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= MOST_RANK:
            raise InputError(f"rank must be from 1 to {MOST_RANK}, got {self.rank}")
        if not (self.alpha > 0 and math.isfinite(self.alpha)):
            raise InputError(f"alpha must be greater than 0, got {self.alpha}")

    def fresh(self, model: ModelConfig) -> Lora:
        """Terms that PEFT would begin with: A uniform (Kaiming), B zero. Raises InputError for unknown modules."""
        known = places(model)
        ends = list(dict.fromkeys(name.rpartition(".")[2] for name in known))
        asked = ends if self.modules == "all" else [name.strip() for name in self.modules.split(",")]
        if unknown := [name for name in asked if name not in ends]:
            raise InputError(
                f"a {model.family} model has no linear module {unknown[0]!r}; give some of {', '.join(ends)}, or all"
            )
        terms = {}
        for name, place in known.items():
            if name.rpartition(".")[2] in asked:
                down = torch.empty(self.rank, place.width)
                nn.init.kaiming_uniform_(down, a=math.sqrt(5))
                terms[name] = Term(down, torch.zeros(place.outputs, self.rank), self.alpha / self.rank)
        return Lora(terms)


@dataclass(frozen=True)
class LoraShape:
    """The sizes of a LoRA's terms, as a run's checkpoint names them."""

    ranks: str
    scales: str
    modules: str

    @staticmethod
    def of(lora: Lora) -> LoraShape:
        """From the terms."""

        def each(values: Sequence[Any]) -> str:
            return ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in sorted(set(values)))

        terms = lora.terms
        ends = [name.rpartition(".")[2] for name in terms]
        return LoraShape(
            each([term.rank for term in terms.values()]), each([term.scale for term in terms.values()]), each(ends)
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return dict(vars(self))


class LayerLora(SideTerms, nn.Module):
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
        made = self.terms[key]
        assert isinstance(made, LowRank)
        return Term(made.down.detach(), stored_rows(self.model, place, made.up.detach()), scale)

    def added(self, part: str, linear: nn.Module, x: Tensor) -> Tensor:
        """The output of a linear layer with its modules' terms."""
        y: Tensor = linear(x)
        found = self.parts[part]
        if not found:
            return y
        _, rows = widths(self.model, part)
        if sum(place.outputs for _, place, _ in found) == rows:
            return y + torch.cat([scale * self.terms[key](x) for key, _, scale in found], dim=-1)
        whole = y.clone()
        for key, place, scale in found:
            whole[..., place.rows] += scale * self.terms[key](x)
        return whole


def _key(name: str, layer: int) -> str:
    """A module's name within its layer, for a ``ModuleDict``: self_attn_q_proj."""
    return name.rpartition(f".{layer}.")[2].replace(".", "_")


class LoraLayers(Trainable):
    """The terms of all layers, beginning with those of ``lora``."""

    config: LoraShape

    def __init__(self, model: ModelConfig, lora: Lora) -> None:
        super().__init__()
        self.config = LoraShape.of(lora)
        known = places(model)
        of_layer: list[dict[str, tuple[Place, Term]]] = [{} for _ in range(model.num_layers)]
        for name, term in lora.terms.items():
            of_layer[known[name].layer][name] = known[name], term
        self.names = tuple(lora.terms)
        self.places = known
        self.layers = nn.ModuleList(LayerLora(model, *layer) for layer in enumerate(of_layer))

    def lora(self) -> Lora:
        """The terms as they are now."""
        terms = {}
        for name in self.names:
            layer = self.layers[self.places[name].layer]
            assert isinstance(layer, LayerLora)
            terms[name] = layer.term(name)
        return Lora(terms)


@dataclass(frozen=True)
class LoraLoss:
    """The loss is the cross-entropy of the completions' tokens; it has no weights."""


class LoraObjective:
    """The ``Objective`` of plain fine-tuning: the next token of each completion, prompts excluded."""

    predictor = "token"
    predictors = 1

    def __init__(self, target: Decoder, module: LoraLayers) -> None:
        check_weights(target)
        self.target, self.module, self.options = target, module, LoraLoss()

    def freeze(self, batch: Batch) -> None:
        """Nothing of the frozen target is needed."""

    def keep(self, frozen: None, keep: Callable[[Tensor], Tensor]) -> None:
        """Nothing is kept."""

    def segments(self, batch: Batch) -> Iterator[Segment]:
        """All positions at once: each needs the tuned pass over the whole text before it."""
        return segments(batch, size=batch.tokens_BT.shape[1], ahead=1, device=self.target.device)

    def predictions(self, batch: Batch) -> float:
        """The number of completion tokens."""
        return float((batch.lengths_B - 1 - batch.starts_B).sum())

    def loss(self, batch: Batch, frozen: None, segment: Segment) -> Scores:
        """The cross-entropy of a segment."""
        tuned_BTD = tuned_pass(self.target, self.module.layers, batch.tokens_BT.to(self.target.device)).hidden_BTD
        loss, right_M = next_token_scores(self.target, batch, tuned_BTD, segment)
        count = torch.tensor([float(len(right_M))])
        return Scores(loss, right_M.sum()[None].float(), count)

    @torch.no_grad()
    def evaluate(self, examples: Sequence[Example], *, nodes: Sequence[int] = ()) -> dict[str, Any]:
        """Loss a token, perplexity and accuracy of the tuned target on completions, and perplexity by source."""
        totals: dict[str, list[float]] = {}
        for source in dict.fromkeys(example.source for example in examples):
            total = totals[source] = [0.0, 0.0, 0.0]
            for batch in batches([e for e in examples if e.source == source], EVALUATED, seed=0):
                for segment in self.segments(batch):
                    scores = self.loss(batch, None, segment)
                    found = (scores.loss, scores.right_S[0], scores.count_S[0])
                    total[:] = [a + float(b) for a, b in zip(total, found, strict=True)]
        loss, right, count = (sum(column) for column in zip(*totals.values(), strict=True))
        return {
            "loss": round(loss / count, 4),
            "perplexity": round(math.exp(loss / count), 4),
            "accuracy": round(right / count, 4),
            "by source": {source: round(math.exp(a / c), 4) for source, (a, _, c) in sorted(totals.items())},
        }


def recipe(given: Mapping[str, Any]) -> Recipe:
    """The recipe with the ``given`` values of ``OPTIONS``. Raises InputError."""
    options = TrainOptions(lr=1e-3, batch_tokens=1024, schedule="linear")
    return Recipe(LoraConfig(), LoraLoss(), options).changed(OPTIONS, given)


_SHARED = (
    "epochs",
    "lr",
    "batch_tokens",
    "accumulate",
    "schedule",
    "warmup",
    "seed",
    "evaluate_every",
    "checkpoint_every",
    "target_format",
)
OPTIONS: dict[str, Option] = {
    "rank": Option(int, "rank of the terms", "config"),
    "alpha": Option(float, "multiply the terms by alpha / rank", "config"),
    "modules": Option(str, "give terms to these modules, such as q_proj,v_proj; or all", "config"),
    **{name: COMMON[name] for name in (*_SHARED, "held_out", "max_tokens")},
}
