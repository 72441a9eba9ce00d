"""Hydra: draft heads that also read the draft tokens before their own (Ankner et al. 2024); and the method's entry."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import nn

from anabranch.drafting.counting import DraftCost, DraftShape
from anabranch.drafting.drafter import Drafter, Method, sized
from anabranch.drafting.settings import BUDGETS
from anabranch.drafting.trained import Trained
from anabranch.methods.heads.drafter import HeadDrafter, HeadSettings
from anabranch.methods.heads.module import begin_with, described, read_once, start_from_target
from anabranch.methods.heads.objective import HeadObjective
from anabranch.methods.hydra.draft import HydraDraft, PrefixDrafter
from anabranch.methods.hydra.module import HydraModule
from anabranch.methods.hydra.published import LAYOUTS
from anabranch.methods.hydra.recipes import TRAINING, HydraConfig
from anabranch.model.decoder import Decoder

__all__ = ["METHOD", "HydraSettings"]


@dataclass(frozen=True)
class HydraSettings(HeadSettings):
    """Settings of ``hydra:...``."""

    trees = (*HydraDraft.trees, "auto")


def _build(target: Decoder, settings: HydraSettings, module: nn.Module | None) -> Drafter:
    draft = HydraDraft(target, TRAINED.require(module, "hydra"), settings)
    return PrefixDrafter("hydra", draft) if draft.module.config.prefix else HeadDrafter("hydra", draft)


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
    objective=partial(HeadObjective, draft=HydraDraft),
    describe=_describe,
    begin=begin_with,
    fresh=lambda target, module, examples, frozen: start_from_target(target, module),
    packed=lambda recipe: True,
    published=LAYOUTS,
)

METHOD = Method(
    name="hydra",
    summary="Hydra: heads that read the drafted tokens before theirs; needs a trained adapter",
    settings=HydraSettings,
    build=_build,
    with_source=True,
    trained=TRAINED,
    variants=("", "tree=auto"),
    candidates=sized(HydraSettings, BUDGETS),
    labels=("head",),
    counts=COUNTS,
)
