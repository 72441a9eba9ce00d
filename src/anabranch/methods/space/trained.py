"""The trained part of SPACE, for the method's entry."""

from __future__ import annotations

from typing import Any

from anabranch.drafting.trained import Trained
from anabranch.learning.objective import Objective
from anabranch.learning.recipe import Recipe
from anabranch.methods.space.module import MaskModule, begin_with, start_from_target
from anabranch.methods.space.objective import MaskObjective
from anabranch.methods.space.recipes import TRAINING, MaskConfig, MaskLossOptions
from anabranch.methods.tuning import TunedObjective, export_tuned
from anabranch.model.decoder import Decoder

__all__ = ["TRAINED", "mask_objective"]


def mask_objective(
    target: Decoder, module: MaskModule, loss: MaskLossOptions, *, segment: int = 128, frozen: Decoder | None = None
) -> Objective[Any]:
    """The objective of masks, or of masks and target together (SAR-SFT): ``CE(main) + masks * CE(masks)``.

    The paper replaces k tokens at one random place of some answers by masks, so that one model learns both to continue
    a text and to fill in masks. Here masks follow every ``stride``-th position of each completion, beside the text.
    """
    masks = MaskObjective(target, module, loss, segment=segment, frozen=frozen)
    if module.tuning is None:
        return masks
    each = masks.predictors / loss.stride
    return TunedObjective(*(target, module.tuning, masks), frozen=frozen, each=each, share=loss.masks, soft=loss.soft)


def _objective(target: Decoder, module: MaskModule, recipe: Recipe, *, frozen: Decoder) -> Objective[Any]:
    return mask_objective(target, module, recipe.loss, segment=recipe.options.segment, frozen=frozen)


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
