"""Training of Medusa's heads: shape, weights of the loss, recipes, and the values that users can override.

shared    four heads that the target's head scores, half of the loss distilled: small, for small targets
paper     Medusa-1 as published: heads with vocabulary heads of their own over all tokens, the tokens alone
medusa-2  heads and low-rank terms on the target, which becomes a target of its own; begin with heads of the frozen
          target (``--init``)
small     one epoch, to see that everything works
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from anabranch.errors import InputError
from anabranch.learning.recipe import MOST_RANK, RECOMPUTE, Option, Recipe, Training, TrainOptions
from anabranch.methods.heads.recipes import OPTIONS, HeadConfig, LossOptions

__all__ = ["TRAINING", "TUNING", "MedusaConfig", "MedusaLoss"]


@dataclass(frozen=True)
class MedusaConfig(HeadConfig):
    """The shape of Medusa's heads.

    lora_rank  rank of the terms on the target's layers that are trained with the heads (Medusa-2); 0: the target is
               frozen. An adapter always has 0: the terms are merged into a target of its own
    """

    ranges: ClassVar[Mapping[str, tuple[int, int]]] = {**HeadConfig.ranges, "lora_rank": (0, MOST_RANK)}
    lora_rank: int = 0


@dataclass(frozen=True)
class MedusaLoss(LossOptions):
    """Weights of the loss.

    heads  weight of the heads beside the tuned target's own next token (lambda_0 of the paper)
    """

    heads: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.heads > 0:
            raise InputError(f"heads must be greater than 0, got {self.heads}")


_RECIPES = {
    "shared": Recipe(
        MedusaConfig(), MedusaLoss(), TrainOptions(epochs=4.0, lr=2e-3, keep_states="exact"), draft_vocabulary=8192
    ),
    "paper": Recipe(MedusaConfig(head="own"), MedusaLoss(soft=0.0), TrainOptions(epochs=2.0, lr=1e-3)),
    "medusa-2": Recipe(
        MedusaConfig(lora_rank=32), MedusaLoss(), TrainOptions(epochs=2.0, lr=5e-4), draft_vocabulary=8192
    ),
    "small": Recipe(
        MedusaConfig(), MedusaLoss(), TrainOptions(epochs=1.0, lr=2e-3), draft_vocabulary=4096, max_tokens=512
    ),
}
_OPTIONS: dict[str, Option] = {
    **OPTIONS,
    "lora_rank": Option(int, "rank of the terms that tune the target with the heads (Medusa-2); 0: frozen", "config"),
    "heads": Option(float, "weight of the heads beside the target in Medusa-2", "loss"),
    **RECOMPUTE,
}
TRAINING = Training("Medusa", _OPTIONS, _RECIPES)
TUNING = replace(TRAINING, title="Medusa-2", recipes={"medusa-2": _RECIPES["medusa-2"]})
