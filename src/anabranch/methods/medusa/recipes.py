"""How Medusa's heads are trained: recipes, counted costs, and the entry's part.

shared  four heads that the target's head scores: small, for small targets
paper   heads with vocabulary heads of their own over all tokens, trained on the completions' tokens alone
small   one epoch, to see that everything works
"""

from __future__ import annotations

from collections.abc import Callable

from anabranch.learning.recipe import Recipe, TrainOptions
from anabranch.methods.counting import DraftCost, DraftShape
from anabranch.methods.heads.module import HeadConfig, begin_with, start_from_target
from anabranch.methods.heads.objective import HeadObjective, LossOptions
from anabranch.methods.heads.recipes import OPTIONS, change, read_once
from anabranch.methods.medusa.draft import MedusaDraft
from anabranch.methods.medusa.module import MedusaModule
from anabranch.methods.medusa.published import LAYOUTS
from anabranch.methods.trained import Trained
from anabranch.model.decoder import Decoder

__all__ = ["COUNTS", "TRAINED"]


def shared() -> Recipe:
    """Heads without vocabulary heads of their own, half of the loss distilled."""
    options = TrainOptions(epochs=4.0, lr=2e-3, keep_states=True)
    return Recipe(HeadConfig(), LossOptions(), options, draft_vocabulary=8192)


def paper() -> Recipe:
    """Medusa-1 as published: a vocabulary head for each head, the tokens alone."""
    return Recipe(HeadConfig(head="own"), LossOptions(soft=0.0), TrainOptions(epochs=2.0, lr=1e-3))


def small() -> Recipe:
    """Shared heads over a small draft vocabulary, one epoch."""
    options = TrainOptions(epochs=1.0, lr=2e-3)
    return Recipe(HeadConfig(), LossOptions(), options, draft_vocabulary=4096, held_out=32, max_tokens=512)


RECIPES: dict[str, Callable[[], Recipe]] = {"shared": shared, "paper": paper, "small": small}


def _objective(target: Decoder, module: MedusaModule, recipe: Recipe, *, frozen: Decoder) -> HeadObjective:
    return HeadObjective(target, module, MedusaDraft, recipe.loss, segment=recipe.options.segment, frozen=frozen)


def _describe(config: HeadConfig) -> str:
    scored = "scored by the target's head" if config.head == "shared" else "with vocabulary heads of their own"
    return f"{config.num_heads} heads of {config.num_layers} residual blocks, {scored}"


def _published(decoder: Decoder, shape: DraftShape) -> DraftCost:
    """The published layout: gamma heads, each a residual block and a vocabulary head: gamma (h^2 + h + h v)."""
    return read_once(MedusaModule(decoder.config, HeadConfig(shape.gamma, head="own")))


COUNTS = {"medusa": _published}

TRAINED = Trained(
    title="Medusa",
    module=MedusaModule,
    config=HeadConfig,
    make=MedusaModule,
    objective=_objective,
    recipes=RECIPES,
    options=OPTIONS,
    change=change(OPTIONS),
    describe=_describe,
    begin=begin_with,
    fresh=start_from_target,
    published=LAYOUTS,
)
