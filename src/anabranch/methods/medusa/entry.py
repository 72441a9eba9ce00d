"""Medusa: heads on the target's last hidden state draft (Cai et al. 2024); and its entries.

``medusa2`` trains the target with the heads. The two draft alike, and each reads the other's adapters.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from anabranch.drafting.counting import DraftCost, DraftShape
from anabranch.drafting.drafter import Drafter, Method, sized
from anabranch.drafting.settings import BUDGETS
from anabranch.drafting.trained import Trained
from anabranch.learning.objective import Objective
from anabranch.methods.heads.drafter import HeadDrafter, HeadSettings
from anabranch.methods.heads.module import described, read_once, start_from_target
from anabranch.methods.heads.objective import HeadObjective
from anabranch.methods.medusa.draft import MedusaDraft
from anabranch.methods.medusa.module import MedusaModule, begin_with_heads
from anabranch.methods.medusa.published import LAYOUTS
from anabranch.methods.medusa.recipes import TRAINING, TUNING, MedusaConfig, MedusaLoss
from anabranch.methods.tuning import TunedObjective, export_tuned
from anabranch.model.decoder import Decoder

__all__ = ["METHOD", "METHOD_2", "medusa_objective"]


def _build(name: str, target: Decoder, settings: HeadSettings, module: nn.Module | None) -> Drafter:
    return HeadDrafter(name, MedusaDraft(target, TRAINED.require(module, name), settings))


def medusa_objective(
    target: Decoder, module: MedusaModule, options: MedusaLoss, *, segment: int = 128, frozen: Decoder | None = None
) -> Objective[Any]:
    """The objective of heads, or of heads and target together: ``CE(main) + heads * sum_k CE(head k)``.

    Begin the latter with heads that were trained on the frozen target (``--init``): the paper's first stage, without
    which the large loss of fresh heads would disturb the target.
    """
    heads = HeadObjective(target, module, options, draft=MedusaDraft, segment=segment, frozen=frozen)
    if module.tuning is None:
        return heads
    each = heads.predictors
    return TunedObjective(
        *(target, module.tuning, heads), frozen=frozen, each=each, share=each * options.heads, soft=options.soft
    )


def _published(decoder: Decoder, shape: DraftShape) -> DraftCost:
    """The published layout: gamma heads, each a residual block and a vocabulary head: gamma (h^2 + h + h v)."""
    return read_once(MedusaModule(decoder.config, MedusaConfig(shape.gamma, head="own")))


COUNTS = {"medusa": _published}

TRAINED = Trained(
    training=TRAINING,
    module=MedusaModule,
    objective=medusa_objective,
    describe=described,
    begin=begin_with_heads,
    export=export_tuned,
    fresh=lambda target, module, examples, frozen: start_from_target(target, module),
    packed=lambda recipe: not recipe.config.lora_rank,
    published=LAYOUTS,
)

TUNED = replace(TRAINED, training=TUNING, published=())

METHOD = Method(
    name="medusa",
    summary="Medusa: heads on the model's last hidden state draft; needs a trained adapter",
    settings=HeadSettings,
    build=partial(_build, "medusa"),
    with_source=True,
    trained=TRAINED,
    variants=("", "tree=auto", "tree=sparse"),
    candidates=sized(HeadSettings, BUDGETS),
    labels=("head",),
    counts=COUNTS,
)

METHOD_2 = Method(
    name="medusa2",
    summary="Medusa-2: the same with a target that was tuned together with its heads; needs a trained adapter",
    settings=HeadSettings,
    build=partial(_build, "medusa2"),
    trained=TUNED,
    variants=("", "tree=auto", "tree=sparse"),
)
