"""How Hydra's heads are trained: recipes, counted costs, and the entry's part.

shared     four heads that the target's head scores: small, for small targets
plus-plus  Hydra++: heads of four blocks on a prefix layer, which learn the target's distributions
paper      Hydra as published: vocabulary heads of their own over all tokens, the tokens alone
small      one epoch, to see that everything works
"""

from __future__ import annotations

from collections.abc import Callable

from anabranch.drafting.counting import DraftCost, DraftShape
from anabranch.drafting.trained import Trained
from anabranch.learning.recipe import Option, Recipe, TrainOptions
from anabranch.methods.heads.module import begin_with, start_from_target
from anabranch.methods.heads.objective import HeadObjective, LossOptions
from anabranch.methods.heads.recipes import OPTIONS as SHARED_OPTIONS
from anabranch.methods.heads.recipes import change, described, read_once
from anabranch.methods.hydra.draft import HydraDraft
from anabranch.methods.hydra.module import HydraConfig, HydraModule
from anabranch.methods.hydra.published import LAYOUTS
from anabranch.model.decoder import Decoder

__all__ = ["COUNTS", "TRAINED"]


def shared() -> Recipe:
    """Heads without vocabulary heads of their own, half of the loss distilled."""
    options = TrainOptions(epochs=4.0, lr=2e-3, keep_states=True)
    return Recipe(HydraConfig(), LossOptions(), options, draft_vocabulary=8192)


def plus_plus() -> Recipe:
    """Hydra++, scored by the target's head."""
    options = TrainOptions(epochs=4.0, lr=1e-3, keep_states=True)
    config = HydraConfig(num_layers=4, prefix=True)
    return Recipe(config, LossOptions(soft=1.0), options, draft_vocabulary=8192)


def paper() -> Recipe:
    """Hydra as published."""
    config = HydraConfig(head="own", embeddings="raw")
    return Recipe(config, LossOptions(decay=1.0, soft=0.0), TrainOptions(epochs=2.0, lr=1e-3))


def small() -> Recipe:
    """Shared heads over a small draft vocabulary, one epoch."""
    options = TrainOptions(epochs=1.0, lr=2e-3)
    return Recipe(HydraConfig(), LossOptions(), options, draft_vocabulary=4096, max_tokens=512)


RECIPES: dict[str, Callable[[], Recipe]] = {"shared": shared, "plus-plus": plus_plus, "paper": paper, "small": small}
OPTIONS: dict[str, Option] = {
    "prefix": Option(bool, "let the heads read the output of an extra decoder layer over the text (Hydra++)", "config"),
    "embeddings": Option(str, "embeddings of draft tokens: unit (at unit RMS) or raw", "config"),
    **SHARED_OPTIONS,
}


def _objective(target: Decoder, module: HydraModule, recipe: Recipe, *, frozen: Decoder) -> HeadObjective:
    return HeadObjective(target, module, HydraDraft, recipe.loss, segment=recipe.options.segment, frozen=frozen)


def _describe(config: HydraConfig) -> str:
    return described(config, " on a prefix layer" if config.prefix else "")


def _published(decoder: Decoder, shape: DraftShape) -> DraftCost:
    """The published layout: head i also reads i embeddings; its residual connection has a matrix, since widths differ.

    One path is counted; a tree runs heads at every node.
    """
    return read_once(HydraModule(decoder.config, HydraConfig(shape.gamma, head="own")))


COUNTS = {"hydra": _published}

TRAINED = Trained(
    title="Hydra",
    module=HydraModule,
    config=HydraConfig,
    make=HydraModule,
    objective=_objective,
    recipes=RECIPES,
    options=OPTIONS,
    change=change(OPTIONS),
    describe=_describe,
    begin=begin_with,
    fresh=start_from_target,
    published=LAYOUTS,
)
