"""Hydra: draft heads that also read the draft tokens before their own (Ankner et al. 2024); and the method's entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from anabranch.drafting.drafter import Drafter, Method, numbered, sized
from anabranch.errors import CapabilityError
from anabranch.methods.heads.drafter import HeadDrafter
from anabranch.methods.heads.shape import BUDGETS, HeadSettings
from anabranch.methods.hydra.draft import HydraDraft
from anabranch.methods.hydra.drafter import PrefixDrafter
from anabranch.methods.hydra.module import HydraModule
from anabranch.methods.hydra.trained import COUNTS, TRAINED
from anabranch.model.decoder import Decoder

__all__ = ["METHOD", "HydraSettings"]


@dataclass(frozen=True)
class HydraSettings(HeadSettings):
    """Settings of ``hydra:...``."""

    trees: ClassVar[tuple[str, ...]] = (*HydraDraft.trees, "auto")


def _build(target: Decoder, settings: HydraSettings, module: nn.Module | None) -> Drafter:
    if not isinstance(module, HydraModule):
        raise CapabilityError(
            "the drafter 'hydra' needs heads that were trained for this target, and there are none; give an adapter "
            "with adapter=FOLDER, train one with 'anabranch train hydra', or use drafter='prompt_lookup'"
        )
    made = PrefixDrafter if module.config.prefix else HeadDrafter
    return made("hydra", HydraDraft(target, module, settings.shape), adaptive=settings.adaptive)


METHOD = Method(
    name="hydra",
    summary="Hydra: heads that read the drafted tokens before theirs; needs a trained adapter",
    settings=HydraSettings,
    build=_build,
    trained=TRAINED,
    variants=("", "tree=auto"),
    candidates=sized(HydraSettings, BUDGETS),
    order=numbered("head"),
    counts=COUNTS,
)
