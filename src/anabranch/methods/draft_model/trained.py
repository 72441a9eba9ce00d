"""The trained part of a draft model, for the method's entry."""

from __future__ import annotations

from anabranch.drafting.trained import Trained
from anabranch.learning.recipe import Recipe
from anabranch.methods.draft_model.module import DraftModule, begin_with, export, start_from_target
from anabranch.methods.draft_model.objective import DraftObjective
from anabranch.methods.draft_model.recipes import TRAINING, DraftConfig
from anabranch.model.decoder import Decoder

__all__ = ["TRAINED"]


def _objective(target: Decoder, module: DraftModule, recipe: Recipe, *, frozen: Decoder) -> DraftObjective:
    return DraftObjective(target, module, recipe.loss, frozen=frozen)


def _describe(config: DraftConfig) -> str:
    return f"{config.num_layers} layers of width {config.hidden_size}"


TRAINED = Trained(
    training=TRAINING,
    module=DraftModule,
    config=DraftConfig,
    make=DraftModule,
    objective=_objective,
    describe=_describe,
    begin=begin_with,
    fresh=start_from_target,
    export=export,
)
