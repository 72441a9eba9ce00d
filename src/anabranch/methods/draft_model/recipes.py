"""Training of a draft model for a target: shape, weights of the loss, recipes, and the values that users can override.

distilled  four layers of width 128 from fresh weights: 14 MB for a vocabulary of 49,152
small      two layers of width 64, one epoch, to see that everything works
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from anabranch.errors import InputError
from anabranch.learning.recipe import (
    COMMON,
    MOST_WIDTH,
    RECOMPUTE,
    LossWeights,
    Option,
    Recipe,
    Shape,
    Training,
    TrainOptions,
)
from anabranch.model.config import ModelConfig, RopeConfig

__all__ = ["TRAINING", "DraftConfig", "LossOptions"]


@dataclass(frozen=True)
class DraftConfig(Shape):
    """The shape of a trained draft model; vocabulary and context length are the target's.

    The default is 14 MB in bf16 for a vocabulary of 49,152: 12.6 MB of it are the table of token embeddings.
    """

    ranges: ClassVar[Mapping[str, tuple[int, int]]] = dict.fromkeys(
        ("hidden_size", "num_layers", "num_heads", "intermediate_size"), (1, MOST_WIDTH)
    )
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    intermediate_size: int = 384

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size % (2 * self.num_heads):
            raise InputError(
                f"hidden_size must be a multiple of twice num_heads, got {self.hidden_size} and {self.num_heads}"
            )

    def model(self, target: ModelConfig) -> ModelConfig:
        """The draft model for a target."""
        width = self.hidden_size // self.num_heads
        return ModelConfig(
            family="llama",
            vocab_size=target.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=width,
            intermediate_size=self.intermediate_size,
            max_positions=target.max_positions,
            rope=RopeConfig(dim=width, max_positions=target.max_positions),
            tied_head=True,
            eos_token_ids=target.eos_token_ids,
            bos_token_id=target.bos_token_id,
        )


@dataclass(frozen=True)
class LossOptions(LossWeights):
    """Weights of the loss.

    soft  share of the target's distribution in the training target; the rest is the completion's token
    """

    soft: float = 0.9


_RECIPES = {
    "distilled": Recipe(DraftConfig(), LossOptions(), TrainOptions(epochs=4.0, lr=3e-3, weight_decay=0.01)),
    "small": Recipe(
        DraftConfig(hidden_size=64, num_layers=2, num_heads=2, intermediate_size=192),
        LossOptions(),
        TrainOptions(epochs=1.0, lr=3e-3),
        max_tokens=512,
    ),
}
_OPTIONS: dict[str, Option] = {
    "hidden_size": Option(int, "width of the draft model", "config"),
    "num_layers": Option(int, "number of layers", "config"),
    "num_heads": Option(int, "number of attention heads", "config"),
    "intermediate_size": Option(int, "width of the feed-forward layers", "config"),
    "soft": Option(float, "share of the target's distribution in the loss (distillation)", "loss"),
    **{name: option for name, option in COMMON.items() if name not in ("draft_vocabulary", "segment")},
    **RECOMPUTE,
}
TRAINING = Training("a draft model", _OPTIONS, _RECIPES)
