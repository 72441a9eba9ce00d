"""Training of SPACE's masks: recipes, the values that users can override, and the registry's entry.

frozen   five masks on the frozen target, trained on its tokens and its distributions
tokens   the same on tokens alone with equal weights, the loss of the paper
sar-sft  five masks and low-rank terms on the target, which becomes a target of its own, as in the paper
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from anabranch.drafting.trained import Trained
from anabranch.learning.recipe import COMMON, RECOMPUTE, Option, Recipe, TrainOptions
from anabranch.methods.space.joint import JointMaskObjective
from anabranch.methods.space.module import TUNED_UNIT, MaskConfig, MaskModule, begin_with, start_from_target
from anabranch.methods.space.objective import MaskLossOptions, MaskObjective
from anabranch.methods.tuning import export_tuned
from anabranch.model.decoder import Decoder

__all__ = ["OPTIONS", "RECIPES", "TRAINED"]

LR = 0.1  # embeddings are learned in units of the target's own


def frozen() -> Recipe:
    """Five masks, half of the loss to the target's distribution."""
    return Recipe(MaskConfig(), MaskLossOptions(), TrainOptions(epochs=3.0, lr=LR), draft_vocabulary=8192)


def tokens() -> Recipe:
    """The paper's loss: cross-entropy of the tokens, equal for all masks."""
    loss = MaskLossOptions(decay=1.0, soft=0.0)
    return Recipe(MaskConfig(), loss, TrainOptions(epochs=3.0, lr=LR), draft_vocabulary=8192)


def sar_sft() -> Recipe:
    """SAR-SFT: masks and target trained together."""
    options = TrainOptions(epochs=2.0, lr=LR / TUNED_UNIT)
    return Recipe(MaskConfig(lora_rank=32), MaskLossOptions(), options, draft_vocabulary=8192)


RECIPES: dict[str, Callable[[], Recipe]] = {"frozen": frozen, "tokens": tokens, "sar-sft": sar_sft}

OPTIONS: dict[str, Option] = {
    "num_masks": Option(int, "mask tokens after each node (k): tokens drafted beyond the next one", "config"),
    "soft": Option(float, "share of the target's distribution in the loss (distillation)", "loss"),
    "decay": Option(float, "weight of mask j is decay ** (j - 1)", "loss"),
    "stride": Option(int, "train masks after every n-th position only", "loss"),
    "lora_rank": Option(int, "rank of the terms that tune the target with the masks (SAR-SFT); 0: frozen", "config"),
    "masks": Option(float, "weight of the masks beside the target in SAR-SFT", "loss"),
    **COMMON,
    **RECOMPUTE,
}


def _change(recipe: Recipe, given: Mapping[str, Any]) -> Recipe:
    return recipe.changed(OPTIONS, given)


def _objective(target: Decoder, module: MaskModule, recipe: Recipe, *, frozen: Decoder) -> MaskObjective:
    if module.tuning is not None:
        return JointMaskObjective(target, module, recipe.loss, frozen=frozen)
    return MaskObjective(target, module, recipe.loss, segment=recipe.options.segment, frozen=frozen)


def _describe(config: MaskConfig) -> str:
    return f"{config.num_masks} mask tokens"


TRAINED = Trained(
    title="SPACE",
    module=MaskModule,
    config=MaskConfig,
    make=MaskModule,
    objective=_objective,
    recipes=RECIPES,
    options=OPTIONS,
    change=_change,
    describe=_describe,
    begin=begin_with,
    fresh=start_from_target,
    export=export_tuned,
)
