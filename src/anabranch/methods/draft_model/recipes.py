"""How a draft model is trained for a target: recipes, the values that users may override, and the entry's part.

distilled    four layers of width 128: 14 MB for a vocabulary of 49,152
small        two layers of width 64, one epoch, to see that everything works
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from anabranch.drafting.trained import Trained
from anabranch.learning.recipe import COMMON, RECOMPUTE, Option, Recipe, TrainOptions
from anabranch.methods.draft_model.module import DraftConfig, DraftModule, begin_with, export, start_from_target
from anabranch.methods.draft_model.objective import DraftObjective, LossOptions
from anabranch.model.decoder import Decoder

__all__ = ["TRAINED"]


def distilled() -> Recipe:
    """A draft model from fresh weights, on the target's own completions."""
    return Recipe(DraftConfig(), LossOptions(), TrainOptions(epochs=4.0, lr=3e-3, weight_decay=0.01))


def small() -> Recipe:
    """Two narrow layers, one epoch."""
    config = DraftConfig(hidden_size=64, num_layers=2, num_heads=2, intermediate_size=192)
    return Recipe(config, LossOptions(), TrainOptions(epochs=1.0, lr=3e-3), max_tokens=512)


RECIPES: dict[str, Callable[[], Recipe]] = {"distilled": distilled, "small": small}
OPTIONS: dict[str, Option] = {
    "hidden_size": Option(int, "width of the draft model", "config"),
    "num_layers": Option(int, "number of layers", "config"),
    "num_heads": Option(int, "number of attention heads", "config"),
    "intermediate_size": Option(int, "width of the feed-forward layers", "config"),
    "soft": Option(float, "share of the target's distribution in the loss (distillation)", "loss"),
    **{name: option for name, option in COMMON.items() if name not in ("draft_vocabulary", "segment")},
    **RECOMPUTE,
}


def change(recipe: Recipe, given: Mapping[str, Any]) -> Recipe:
    """A recipe with the ``given`` values of ``OPTIONS``. Raises InputError for unknown names and values."""
    return recipe.changed(OPTIONS, given)


def _objective(target: Decoder, module: DraftModule, recipe: Recipe, *, frozen: Decoder) -> DraftObjective:
    return DraftObjective(target, module, recipe.loss, frozen=frozen)


def _describe(config: DraftConfig) -> str:
    return f"{config.num_layers} layers of width {config.hidden_size}"


TRAINED = Trained(
    title="a draft model",
    module=DraftModule,
    config=DraftConfig,
    make=DraftModule,
    objective=_objective,
    recipes=RECIPES,
    options=OPTIONS,
    change=change,
    describe=_describe,
    begin=begin_with,
    fresh=start_from_target,
    export=export,
)
