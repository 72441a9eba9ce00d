"""Plain LoRA fine-tuning (Hu et al. 2022): low-rank terms of a target's linear layers, trained on completions.

The tuned target is another model; nothing here drafts. ``lora_job`` trains it and writes it in PEFT's format.

B rows, T text length, P positions, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anabranch.drafting.trained import Trainable
from anabranch.errors import InputError
from anabranch.learning.examples import Batch, Example
from anabranch.learning.objective import Scores, Segment, segments
from anabranch.methods.lora.recipes import LoraConfig, LoraLoss
from anabranch.methods.terms import fresh_terms, layers_of, lora_of
from anabranch.methods.tuning import check_weights, next_token_scores, tuned_pass
from anabranch.model.config import ModelConfig
from anabranch.model.decoder import Decoder
from anabranch.model.lora import Lora, places
from anabranch.train.data import batches

__all__ = ["LoraLayers", "LoraObjective", "fresh_lora"]

EVALUATED = 2048  # padded tokens of a batch that is evaluated


def fresh_lora(model: ModelConfig, config: LoraConfig) -> Lora:
    """Terms that PEFT would begin with: A uniform (Kaiming), B zero. Raises InputError for unknown modules."""
    ends = list(dict.fromkeys(name.rpartition(".")[2] for name in places(model)))
    chosen = ends if config.modules == "all" else [name.strip() for name in config.modules.split(",")]
    if unknown := [name for name in chosen if name not in ends]:
        raise InputError(
            f"a {model.family} model has no linear module {unknown[0]!r}; give some of {', '.join(ends)}, or all"
        )
    return fresh_terms(model, config.rank, config.alpha / config.rank, chosen)


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


class LoraLayers(Trainable):
    """The terms of all layers, beginning with those of ``lora``."""

    config: LoraShape

    def __init__(self, model: ModelConfig, lora: Lora) -> None:
        super().__init__()
        self.config, self.model = LoraShape.of(lora), model
        self.layers = layers_of(model, lora)

    def lora(self) -> Lora:
        """The terms as they are now."""
        return lora_of(self.model, self.layers)


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
