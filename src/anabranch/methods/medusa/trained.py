"""The trained part of Medusa and Medusa-2, for the methods' entries, and the counted cost of published heads."""

from __future__ import annotations

from dataclasses import replace

from anabranch.drafting.counting import DraftCost, DraftShape
from anabranch.drafting.trained import Trained
from anabranch.learning.recipe import Recipe
from anabranch.methods.heads.module import start_from_target
from anabranch.methods.heads.objective import HeadObjective
from anabranch.methods.heads.trained import described, read_once
from anabranch.methods.medusa.draft import MedusaDraft
from anabranch.methods.medusa.joint import JointObjective
from anabranch.methods.medusa.module import MedusaModule, begin_with_heads
from anabranch.methods.medusa.published import LAYOUTS
from anabranch.methods.medusa.recipes import TRAINING, TUNING, MedusaConfig
from anabranch.methods.tuning import export_tuned
from anabranch.model.decoder import Decoder

__all__ = ["COUNTS", "TRAINED", "TUNED"]


def _objective(target: Decoder, module: MedusaModule, recipe: Recipe, *, frozen: Decoder) -> HeadObjective:
    if module.tuning is not None:
        return JointObjective(target, module, recipe.loss, frozen=frozen)
    return HeadObjective(target, module, MedusaDraft, recipe.loss, segment=recipe.options.segment, frozen=frozen)


def _published(decoder: Decoder, shape: DraftShape) -> DraftCost:
    """The published layout: gamma heads, each a residual block and a vocabulary head: gamma (h^2 + h + h v)."""
    return read_once(MedusaModule(decoder.config, MedusaConfig(shape.gamma, head="own")))


COUNTS = {"medusa": _published}

TRAINED = Trained(
    training=TRAINING,
    module=MedusaModule,
    config=MedusaConfig,
    make=MedusaModule,
    objective=_objective,
    describe=described,
    begin=begin_with_heads,
    export=export_tuned,
    fresh=start_from_target,
    published=LAYOUTS,
)

TUNED = replace(TRAINED, training=TUNING, published=())
