"""How draft heads are trained: the values that users may override, and the counted cost of their drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from anabranch.drafting.counting import WEIGHT_BYTES, DraftCost, matrix_weights, parameters
from anabranch.learning.recipe import COMMON, Option, Recipe
from anabranch.methods.heads.module import HeadConfig

__all__ = ["OPTIONS", "change", "described", "read_once"]

OPTIONS: dict[str, Option] = {
    "num_heads": Option(int, "tokens drafted beyond the next one", "config"),
    "num_layers": Option(int, "residual blocks of a head", "config"),
    "head": Option(str, "vocabulary heads: shared (the target's) or own (one for each head)", "config"),
    "soft": Option(float, "share of the target's distribution in the loss (distillation)", "loss"),
    "decay": Option(float, "weight of head k is decay ** (k - 1)", "loss"),
    **COMMON,
}


def change(options: Mapping[str, Option]) -> Callable[[Recipe, Mapping[str, Any]], Recipe]:
    """``Trained.change`` for these options."""
    return lambda recipe, given: recipe.changed(options, given)


def described(config: HeadConfig, read: str = "") -> str:
    """The size of heads in a few words; ``read`` says what they read besides the target's state."""
    scored = "scored by the target's head" if config.head == "shared" else "with vocabulary heads of their own"
    blocks = "1 residual block" if config.num_layers == 1 else f"{config.num_layers} residual blocks"
    return f"{config.num_heads} heads of {blocks}{read}, {scored}"


def read_once(heads: nn.Module) -> DraftCost:
    """The cost of heads that are read once per draft."""
    read = matrix_weights(heads)
    return DraftCost(parameters(heads), WEIGHT_BYTES * read, 2 * read)
