"""The trained part of Hydra, for the method's entry, and the counted cost of published heads."""

from __future__ import annotations

from anabranch.drafting.counting import DraftCost, DraftShape
from anabranch.drafting.trained import Trained
from anabranch.learning.recipe import Recipe
from anabranch.methods.heads.module import begin_with, start_from_target
from anabranch.methods.heads.objective import HeadObjective
from anabranch.methods.heads.trained import described, read_once
from anabranch.methods.hydra.draft import HydraDraft
from anabranch.methods.hydra.module import HydraModule
from anabranch.methods.hydra.published import LAYOUTS
from anabranch.methods.hydra.recipes import TRAINING, HydraConfig
from anabranch.model.decoder import Decoder

__all__ = ["COUNTS", "TRAINED"]


def _objective(target: Decoder, module: HydraModule, recipe: Recipe, *, frozen: Decoder) -> HeadObjective:
    return HeadObjective(target, module, HydraDraft, recipe.loss, segment=recipe.options.segment, frozen=frozen)


def _describe(config: HydraConfig) -> str:
    return described(config, " on a prefix layer" if config.prefix else "")


def _published(decoder: Decoder, shape: DraftShape) -> DraftCost:
    """The published layout: head i also reads i embeddings; its residual connection has a matrix, since widths differ.

    One path is counted; a tree runs heads at every node.
    """
    return read_once(HydraModule(decoder.config, HydraConfig(shape.gamma, head="own")))


COUNTS = {"hydra": _published}

TRAINED = Trained(
    training=TRAINING,
    module=HydraModule,
    config=HydraConfig,
    make=HydraModule,
    objective=_objective,
    describe=_describe,
    begin=begin_with,
    fresh=start_from_target,
    published=LAYOUTS,
)
