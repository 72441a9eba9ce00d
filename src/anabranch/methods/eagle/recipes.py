"""How EAGLE's head is trained: recipes, the values that users may override, and the entry's part.

eagle    the head's own features in training, with a small weight on their distance to the target's
eagle-1  the paper's loss: one step on the target's features with noise, weights 1 and 0.1
small    one epoch, to see that everything works

``--taps`` fuses several layers' states as EAGLE-3 does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from anabranch.drafting.trained import Trained
from anabranch.learning.recipe import COMMON, Option, Recipe, TrainOptions
from anabranch.methods.eagle.module import EagleConfig, EagleModule, begin_with
from anabranch.methods.eagle.objective import EagleObjective, LossOptions
from anabranch.methods.eagle.published import LAYOUTS
from anabranch.model.decoder import Decoder

__all__ = ["TRAINED"]


def eagle() -> Recipe:
    """Three steps on its own features."""
    options = TrainOptions(epochs=3.0, lr=1e-3, weight_decay=0.01)
    return Recipe(EagleConfig(), LossOptions(), options, draft_vocabulary=8192)


def eagle_1() -> Recipe:
    """EAGLE's published loss, over all tokens of the vocabulary."""
    loss = LossOptions(feature=1.0, token=0.1, soft=1.0, unroll=1, noise=0.1)
    return Recipe(
        EagleConfig(embedding_norm=False, input_norm=False, bias=True),
        loss,
        TrainOptions(epochs=3.0, lr=1e-3, clip=0.5),
    )


def small() -> Recipe:
    """Two steps, one epoch."""
    options = TrainOptions(epochs=1.0, lr=2e-3)
    return Recipe(EagleConfig(), LossOptions(unroll=2), options, draft_vocabulary=4096, max_tokens=512)


RECIPES: dict[str, Callable[[], Recipe]] = {"eagle": eagle, "eagle-1": eagle_1, "small": small}
OPTIONS: dict[str, Option] = {
    "taps": Option(str, "layers whose states are fused, as in 2/15/27; empty: the state after the last norm", "config"),
    "embedding_norm": Option(bool, "normalise the embeddings; always done with taps", "config"),
    "input_norm": Option(bool, "start the layer with a norm", "config"),
    "bias": Option(bool, "add a bias to the matrix before the layer", "config"),
    "unroll": Option(int, "steps in training: the first on the target's features, others on the head's own", "loss"),
    "feature": Option(float, "weight of the Smooth-L1 distance of the features", "loss"),
    "token": Option(float, "weight of the cross-entropy", "loss"),
    "soft": Option(float, "share of the target's distribution in the cross-entropy", "loss"),
    "decay": Option(float, "weight of step k (from 0) is decay ** k", "loss"),
    "noise": Option(float, "noise on the target's features, relative to their mean size", "loss"),
    **{name: option for name, option in COMMON.items() if name != "segment"},
}


def change(recipe: Recipe, given: Mapping[str, Any]) -> Recipe:
    """A recipe with the ``given`` values of ``OPTIONS``. Raises InputError for unknown names and values."""
    return recipe.changed(OPTIONS, given)


def _objective(target: Decoder, module: EagleModule, recipe: Recipe, *, frozen: Decoder) -> EagleObjective:
    return EagleObjective(target, module, recipe.loss, frozen=frozen)


def _describe(config: EagleConfig) -> str:
    return f"one layer on the fused states before layers {config.taps}" if config.taps else "one layer on features"


TRAINED = Trained(
    title="EAGLE",
    module=EagleModule,
    config=EagleConfig,
    make=EagleModule,
    objective=_objective,
    recipes=RECIPES,
    options=OPTIONS,
    change=change,
    describe=_describe,
    begin=begin_with,
    published=LAYOUTS,
)
