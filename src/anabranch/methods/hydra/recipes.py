"""Training of Hydra's heads: shape, recipes, and the values that users can override.

shared     four heads that the target's head scores, half of the loss distilled: small, for small targets
plus-plus  Hydra++: heads of four blocks on a prefix layer, which learn the target's distributions
paper      Hydra as published: vocabulary heads of their own over all tokens, the tokens alone
small      one epoch, to see that everything works
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from anabranch.errors import InputError
from anabranch.learning.recipe import Option, Recipe, Training, TrainOptions
from anabranch.methods.heads.recipes import OPTIONS, HeadConfig, LossOptions

__all__ = ["TRAINING", "HydraConfig"]


@dataclass(frozen=True)
class HydraConfig(HeadConfig):
    """The shape of Hydra's heads.

    embeddings  of draft tokens: "unit" at unit RMS, or "raw" as the target has them (the paper)
    prefix      whether the heads read a prefix layer (Hydra++)
    published   the form in which the authors publish heads: their vocabulary heads have biases, and a norm follows the
                prefix layer
    """

    embeddings: Literal["unit", "raw"] = "unit"
    prefix: bool = False
    published: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.published and self.head != "own":
            raise InputError("published heads have vocabulary heads of their own; use head own, or published false")


_RECIPES = {
    "shared": Recipe(
        HydraConfig(), LossOptions(), TrainOptions(epochs=4.0, lr=2e-3, keep_states="exact"), draft_vocabulary=8192
    ),
    "plus-plus": Recipe(
        HydraConfig(num_layers=4, prefix=True),
        LossOptions(soft=1.0),
        TrainOptions(epochs=4.0, lr=1e-3, keep_states="exact"),
        draft_vocabulary=8192,
    ),
    "paper": Recipe(
        HydraConfig(head="own", embeddings="raw"),
        LossOptions(decay=1.0, soft=0.0),
        TrainOptions(epochs=2.0, lr=1e-3),
    ),
    "small": Recipe(
        HydraConfig(), LossOptions(), TrainOptions(epochs=1.0, lr=2e-3), draft_vocabulary=4096, max_tokens=512
    ),
}
_OPTIONS: dict[str, Option] = {
    "prefix": Option(bool, "let the heads read the output of an extra decoder layer over the text (Hydra++)", "config"),
    "embeddings": Option(str, "embeddings of draft tokens: unit (at unit RMS) or raw", "config"),
    **OPTIONS,
}
TRAINING = Training("Hydra", _OPTIONS, _RECIPES)
