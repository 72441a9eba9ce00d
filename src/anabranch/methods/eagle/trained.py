"""The trained part of EAGLE, for the method's entry."""

from __future__ import annotations

from anabranch.drafting.trained import Trained
from anabranch.learning.recipe import Recipe
from anabranch.methods.eagle.module import EagleModule, begin_with
from anabranch.methods.eagle.objective import EagleObjective
from anabranch.methods.eagle.published import LAYOUTS
from anabranch.methods.eagle.recipes import TRAINING, EagleConfig
from anabranch.model.decoder import Decoder

__all__ = ["TRAINED"]


def _objective(target: Decoder, module: EagleModule, recipe: Recipe, *, frozen: Decoder) -> EagleObjective:
    return EagleObjective(target, module, recipe.loss, frozen=frozen)


def _describe(config: EagleConfig) -> str:
    return f"one layer on the fused states before layers {config.taps}" if config.taps else "one layer on features"


TRAINED = Trained(
    training=TRAINING,
    module=EagleModule,
    config=EagleConfig,
    make=EagleModule,
    objective=_objective,
    describe=_describe,
    begin=begin_with,
    published=LAYOUTS,
)
