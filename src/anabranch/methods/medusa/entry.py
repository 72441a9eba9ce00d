"""Medusa: heads on the target's last hidden state draft (Cai et al. 2024); and its entries.

``medusa2`` trains the target with the heads. The two draft alike, and each reads the other's adapters.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import nn

from anabranch.drafting.drafter import Drafter, Method, numbered, sized
from anabranch.errors import CapabilityError
from anabranch.methods.heads.drafter import HeadDrafter
from anabranch.methods.heads.shape import BUDGETS, HeadSettings
from anabranch.methods.medusa.draft import MedusaDraft
from anabranch.methods.medusa.module import MedusaModule
from anabranch.methods.medusa.trained import COUNTS, TRAINED, TUNED
from anabranch.model.decoder import Decoder

__all__ = ["METHOD", "METHOD_2", "MedusaSettings"]


@dataclass(frozen=True)
class MedusaSettings(HeadSettings):
    """Settings of ``medusa:...`` and ``medusa2:...``."""


def _build(name: str, target: Decoder, settings: MedusaSettings, module: nn.Module | None) -> Drafter:
    if not isinstance(module, MedusaModule):
        raise CapabilityError(
            f"the drafter {name!r} needs heads that were trained for this target, and there are none; give an adapter "
            f"with adapter=FOLDER, train one with 'anabranch train {name}', or use drafter='prompt_lookup'"
        )
    return HeadDrafter(name, MedusaDraft(target, module, settings.shape), adaptive=settings.adaptive)


METHOD = Method(
    name="medusa",
    summary="Medusa: heads on the model's last hidden state draft; needs a trained adapter",
    settings=MedusaSettings,
    build=partial(_build, "medusa"),
    trained=TRAINED,
    variants=("", "tree=auto", "tree=sparse"),
    candidates=sized(MedusaSettings, BUDGETS),
    order=numbered("head"),
    counts=COUNTS,
)

METHOD_2 = Method(
    name="medusa2",
    summary="Medusa-2: the same with a target that was tuned together with its heads; needs a trained adapter",
    settings=MedusaSettings,
    build=partial(_build, "medusa2"),
    trained=TUNED,
    variants=("", "tree=auto", "tree=sparse"),
)
