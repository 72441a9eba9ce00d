"""The trained part of Medusa and Medusa-2, for the methods' entries, and the counted cost of published heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anabranch.drafting.counting import DraftCost, DraftShape
from anabranch.drafting.trained import Trained
from anabranch.learning.objective import Objective
from anabranch.learning.recipe import Recipe
from anabranch.methods.heads.module import start_from_target
from anabranch.methods.heads.objective import HeadObjective
from anabranch.methods.heads.trained import described, read_once
from anabranch.methods.medusa.draft import MedusaDraft
from anabranch.methods.medusa.module import MedusaModule, begin_with_heads
from anabranch.methods.medusa.published import LAYOUTS
from anabranch.methods.medusa.recipes import TRAINING, TUNING, MedusaConfig, MedusaLoss
from anabranch.methods.tuning import TunedObjective, export_tuned
from anabranch.model.decoder import Decoder

__all__ = ["COUNTS", "TRAINED", "TUNED", "medusa_objective"]


def medusa_objective(
    target: Decoder, module: MedusaModule, loss: MedusaLoss, *, segment: int = 128, frozen: Decoder | None = None
) -> Objective[Any]:
    """The objective of heads, or of heads and target together: ``CE(main) + heads * sum_k CE(head k)``.

    Begin the latter with heads that were trained on the frozen target (``--init``): the paper's first stage, without
    which the large loss of fresh heads would disturb the target.
    """
    heads = HeadObjective(target, module, MedusaDraft, loss, segment=segment, frozen=frozen)
    if module.tuning is None:
        return heads
    each = heads.predictors
    return TunedObjective(
        *(target, module.tuning, heads), frozen=frozen, each=each, share=each * loss.heads, soft=loss.soft
    )


def _objective(target: Decoder, module: MedusaModule, recipe: Recipe, *, frozen: Decoder) -> Objective[Any]:
    return medusa_objective(target, module, recipe.loss, segment=recipe.options.segment, frozen=frozen)


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
