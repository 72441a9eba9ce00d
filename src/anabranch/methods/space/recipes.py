"""Training of SPACE's masks: shape, weights of the loss, recipes, and the values that users can override.

frozen   five masks on the frozen target, trained on its tokens and its distributions
tokens   the same on tokens alone with equal weights, the loss of the paper
sar-sft  five masks and low-rank terms on the target, which becomes a target of its own, as in the paper
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from anabranch.errors import InputError
from anabranch.learning.recipe import (
    COMMON,
    MOST_RANK,
    RECOMPUTE,
    LossWeights,
    Option,
    Recipe,
    Shape,
    Training,
    TrainOptions,
)
from anabranch.methods.streams.recipes import MOST_STREAMS, LossOptions

__all__ = ["TRAINING", "TUNED_UNIT", "MaskConfig", "MaskLossOptions"]

LR = 0.1  # embeddings are learned in units of the target's own
TUNED_UNIT = 200.0  # of the masks' embeddings beside terms of the layers: the ratio of their learning rates


@dataclass(frozen=True)
class MaskConfig(Shape):
    """The configuration of SPACE's masks.

    num_masks  k: mask j behind the token at position t predicts token t + 1 + j
    lora_rank  rank of the terms on the target's layers that are trained with the masks (SAR-SFT); 0: the target is
               frozen. An adapter always has 0: the terms are merged into a target of its own
    """

    ranges: ClassVar[Mapping[str, tuple[int, int]]] = {"num_masks": (1, MOST_STREAMS), "lora_rank": (0, MOST_RANK)}
    num_masks: int = 5
    lora_rank: int = 0


@dataclass(frozen=True)
class MaskLossOptions(LossWeights):
    """Weights of the loss; ``decay`` and ``soft`` are those of streams (``LossOptions``).

    stride  masks are trained behind every n-th position
    masks   weight of the masks beside the tuned target's own next token, where the target is tuned too
    """

    least = (("stride", 1),)
    decay: float = 0.8
    soft: float = 0.5
    stride: int = 4
    masks: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.masks > 0:
            raise InputError(f"masks must be greater than 0, got {self.masks}")

    @property
    def of_streams(self) -> LossOptions:
        """The weights that the streams' objective reads."""
        return LossOptions(decay=self.decay, soft=self.soft, unconditioned=0.0, pruning=0.0)


_RECIPES = {
    "frozen": Recipe(MaskConfig(), MaskLossOptions(), TrainOptions(epochs=3.0, lr=LR), draft_vocabulary=8192),
    "tokens": Recipe(
        MaskConfig(), MaskLossOptions(decay=1.0, soft=0.0), TrainOptions(epochs=3.0, lr=LR), draft_vocabulary=8192
    ),
    "sar-sft": Recipe(
        MaskConfig(lora_rank=32),
        MaskLossOptions(),
        TrainOptions(epochs=2.0, lr=LR / TUNED_UNIT),
        draft_vocabulary=8192,
    ),
}
_OPTIONS: dict[str, Option] = {
    "num_masks": Option(int, "mask tokens after each node (k): tokens drafted beyond the next one", "config"),
    "soft": Option(float, "share of the target's distribution in the loss (distillation)", "loss"),
    "decay": Option(float, "weight of mask j is decay ** (j - 1)", "loss"),
    "stride": Option(int, "train masks after every n-th position only", "loss"),
    "lora_rank": Option(int, "rank of the terms that tune the target with the masks (SAR-SFT); 0: frozen", "config"),
    "masks": Option(float, "weight of the masks beside the target in SAR-SFT", "loss"),
    **COMMON,
    **RECOMPUTE,
}
TRAINING = Training("SPACE", _OPTIONS, _RECIPES)
