"""The trained part of SPACE, for the method's entry."""

from __future__ import annotations

from anabranch.drafting.trained import Trained
from anabranch.learning.recipe import Recipe
from anabranch.methods.space.joint import JointMaskObjective
from anabranch.methods.space.module import MaskModule, begin_with, start_from_target
from anabranch.methods.space.objective import MaskObjective
from anabranch.methods.space.recipes import TRAINING, MaskConfig
from anabranch.methods.tuning import export_tuned
from anabranch.model.decoder import Decoder

__all__ = ["TRAINED"]


def _objective(target: Decoder, module: MaskModule, recipe: Recipe, *, frozen: Decoder) -> MaskObjective:
    if module.tuning is not None:
        return JointMaskObjective(target, module, recipe.loss, frozen=frozen)
    return MaskObjective(target, module, recipe.loss, segment=recipe.options.segment, frozen=frozen)


def _describe(config: MaskConfig) -> str:
    return f"{config.num_masks} mask tokens"


TRAINED = Trained(
    training=TRAINING,
    module=MaskModule,
    config=MaskConfig,
    make=MaskModule,
    objective=_objective,
    describe=_describe,
    begin=begin_with,
    fresh=start_from_target,
    export=export_tuned,
)
