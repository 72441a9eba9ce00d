"""Medusa: heads on the target's last hidden state draft (Cai et al. 2024); and the method's entry."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from anabranch.errors import CapabilityError
from anabranch.methods.base import Drafter, Method, numbered, sized
from anabranch.methods.heads.drafter import HeadDrafter
from anabranch.methods.heads.shape import BUDGETS, HeadSettings
from anabranch.methods.medusa.draft import MedusaDraft
from anabranch.methods.medusa.module import MedusaModule
from anabranch.methods.medusa.recipes import COUNTS, TRAINED
from anabranch.model.decoder import Decoder

__all__ = ["METHOD", "MedusaSettings"]


@dataclass(frozen=True)
class MedusaSettings(HeadSettings):
    """Settings of ``medusa:...``."""


def _build(target: Decoder, settings: MedusaSettings, module: nn.Module | None) -> Drafter:
    if not isinstance(module, MedusaModule):
        raise CapabilityError(
            "the drafter 'medusa' needs heads that were trained for this target, and there are none; give an adapter "
            "with adapter=FOLDER, train one with 'anabranch train medusa', or use drafter='prompt_lookup'"
        )
    return HeadDrafter("medusa", MedusaDraft(target, module, settings.shape), adaptive=settings.adaptive)


METHOD = Method(
    name="medusa",
    summary="Medusa: heads on the model's last hidden state draft; needs a trained adapter",
    settings=MedusaSettings,
    build=_build,
    trained=TRAINED,
    variants=("", "tree=auto", "tree=chain", "tree=sparse", "tree=product,k=2"),
    candidates=sized(MedusaSettings, BUDGETS),
    order=numbered("head"),
    counts=COUNTS,
)
