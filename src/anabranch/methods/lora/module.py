"""The trained terms of a LoRA as one module, and fresh ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anabranch.drafting.trained import Trainable
from anabranch.errors import InputError
from anabranch.methods.lora.recipes import LoraConfig
from anabranch.methods.terms import fresh_terms, layers_of, lora_of
from anabranch.model.config import ModelConfig
from anabranch.model.lora import Lora, places

__all__ = ["LoraLayers", "fresh_lora"]


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
