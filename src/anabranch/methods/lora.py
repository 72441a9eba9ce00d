"""Training of a LoRA (Hu et al. 2022), without torch: shape, recipe, and the values that users can override.

The tuned target is another model; nothing here drafts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from anabranch.errors import InputError
from anabranch.learning.recipe import COMMON, MOST_RANK, Option, Recipe, Shape, Training, TrainOptions

__all__ = ["TRAINING", "LoraConfig", "LoraLoss"]


@dataclass(frozen=True)
class LoraConfig(Shape):
    """The modules that get terms, and the size of these.

    rank     r
    alpha    the terms are multiplied by alpha / rank
    modules  the ends of the modules' Hugging Face names, separated by commas; "all" linear modules of the layers
    """

    ranges: ClassVar[Mapping[str, tuple[int, int]]] = {"rank": (1, MOST_RANK)}
    rank: int = 16
    alpha: float = 32.0
    modules: str = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.alpha > 0 and math.isfinite(self.alpha)):
            raise InputError(f"alpha must be greater than 0, got {self.alpha}")


@dataclass(frozen=True)
class LoraLoss:
    """The loss is the cross-entropy of the completions' tokens; it has no weights."""


# options that have no effect where the target itself is trained
_OF_DRAFTS = ("segment", "keep_states", "patience", "draft_vocabulary")
_OPTIONS: dict[str, Option] = {
    "rank": Option(int, "rank of the terms", "config"),
    "alpha": Option(float, "multiply the terms by alpha / rank", "config"),
    "modules": Option(str, "give terms to these modules, such as q_proj,v_proj; or all", "config"),
    **{name: option for name, option in COMMON.items() if name not in _OF_DRAFTS},
}
_RECIPE = Recipe(LoraConfig(), LoraLoss(), TrainOptions(lr=1e-3, batch_tokens=1024, schedule="linear"))
TRAINING = Training("a LoRA", _OPTIONS, {"lora": _RECIPE})
