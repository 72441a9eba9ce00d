"""How Medusa's heads are trained: recipes, counted costs, and the entry's part.

shared    four heads that the target's head scores: small, for small targets
paper     heads with vocabulary heads of their own over all tokens, trained on the completions' tokens alone
medusa-2  heads and low-rank terms on the target, which becomes a target of its own
small     one epoch, to see that everything works
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from anabranch.drafting.counting import DraftCost, DraftShape
from anabranch.drafting.trained import Trained
from anabranch.learning.recipe import RECOMPUTE, Option, Recipe, TrainOptions
from anabranch.methods.heads.module import start_from_target
from anabranch.methods.heads.objective import HeadObjective
from anabranch.methods.heads.recipes import OPTIONS as SHARED_OPTIONS
from anabranch.methods.heads.recipes import change, described, read_once
from anabranch.methods.medusa.draft import MedusaDraft
from anabranch.methods.medusa.joint import JointObjective, MedusaLoss
from anabranch.methods.medusa.module import MedusaConfig, MedusaModule, begin_with_heads
from anabranch.methods.medusa.published import LAYOUTS
from anabranch.methods.tuning import export_tuned
from anabranch.model.decoder import Decoder

__all__ = ["COUNTS", "TRAINED", "TUNED"]


def shared() -> Recipe:
    """Heads without vocabulary heads of their own, half of the loss distilled."""
    options = TrainOptions(epochs=4.0, lr=2e-3, keep_states=True)
    return Recipe(MedusaConfig(), MedusaLoss(), options, draft_vocabulary=8192)


def paper() -> Recipe:
    """Medusa-1 as published: a vocabulary head for each head, the tokens alone."""
    return Recipe(MedusaConfig(head="own"), MedusaLoss(soft=0.0), TrainOptions(epochs=2.0, lr=1e-3))


def medusa_2() -> Recipe:
    """Medusa-2: heads and target trained together; begin with heads of the frozen target (``--init``)."""
    options = TrainOptions(epochs=2.0, lr=5e-4)
    return Recipe(MedusaConfig(lora_rank=32), MedusaLoss(), options, draft_vocabulary=8192)


def small() -> Recipe:
    """Shared heads over a small draft vocabulary, one epoch."""
    options = TrainOptions(epochs=1.0, lr=2e-3)
    return Recipe(MedusaConfig(), MedusaLoss(), options, draft_vocabulary=4096, max_tokens=512)


RECIPES: dict[str, Callable[[], Recipe]] = {"shared": shared, "paper": paper, "medusa-2": medusa_2, "small": small}
OPTIONS: dict[str, Option] = {
    **SHARED_OPTIONS,
    "lora_rank": Option(int, "rank of the terms that tune the target with the heads (Medusa-2); 0: frozen", "config"),
    "heads": Option(float, "weight of the heads beside the target in Medusa-2", "loss"),
    **RECOMPUTE,
}


def _objective(target: Decoder, module: MedusaModule, recipe: Recipe, *, frozen: Decoder) -> HeadObjective:
    if module.tuning is not None:
        return JointObjective(target, module, recipe.loss, frozen=frozen)
    return HeadObjective(target, module, MedusaDraft, recipe.loss, segment=recipe.options.segment, frozen=frozen)


def _published(decoder: Decoder, shape: DraftShape) -> DraftCost:
    """The published layout: gamma heads, each a residual block and a vocabulary head: gamma (h^2 + h + h v)."""
    return read_once(MedusaModule(decoder.config, MedusaConfig(shape.gamma, head="own")))


COUNTS = {"medusa": _published}

TRAINED = Trained(
    title="Medusa",
    module=MedusaModule,
    config=MedusaConfig,
    make=MedusaModule,
    objective=_objective,
    recipes=RECIPES,
    options=OPTIONS,
    change=change(OPTIONS),
    describe=described,
    begin=begin_with_heads,
    export=export_tuned,
    fresh=start_from_target,
    published=LAYOUTS,
)

TUNED = replace(TRAINED, title="Medusa-2", recipes={"medusa-2": medusa_2}, published=())
