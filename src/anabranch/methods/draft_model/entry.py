"""A separate small model drafts (Leviathan et al. 2023); and the method's entry."""

from __future__ import annotations

from torch import nn

from anabranch.drafting.drafter import Drafter, Method, sized
from anabranch.drafting.settings import BUDGETS
from anabranch.drafting.trained import Trained
from anabranch.errors import CapabilityError
from anabranch.methods.draft_model.drafter import DraftModelDrafter, DraftModelSettings
from anabranch.methods.draft_model.load import identify, load_draft, shipped_draft
from anabranch.methods.draft_model.module import DraftModule, begin_with, decoder_of, export, start_from_target
from anabranch.methods.draft_model.objective import DraftObjective
from anabranch.methods.draft_model.recipes import TRAINING, DraftConfig
from anabranch.model.decoder import Decoder
from anabranch.model.weights import fingerprint

__all__ = ["METHOD", "TRAINED", "DraftModelSettings", "draft_of"]


def draft_of(target: Decoder, settings: DraftModelSettings, method: str, module: nn.Module | None = None) -> Decoder:
    """The draft model that the settings of a method name, else the trained one, else one that comes with the package.

    Raises CapabilityError if there is none of these.
    """
    if not settings.model:
        if isinstance(module, DraftModule):
            model = decoder_of(module, target)
            identify(model, fingerprint(module.model))
            return model
        if (folder := shipped_draft(target)) is not None:
            return load_draft(str(folder), target, quantize=settings.quantize)
        raise CapabilityError(
            f"the drafter {method!r} needs a draft model with the target's vocabulary, and none is named; name one "
            f"with {method}:model=FOLDER, train one with 'anabranch train draft-model', or use drafter='prompt_lookup'"
        )
    return load_draft(settings.model, target, quantize=settings.quantize)


def _build(target: Decoder, settings: DraftModelSettings, module: nn.Module | None) -> Drafter:
    model = draft_of(target, settings, "draft_model", module)
    return DraftModelDrafter(target, model, settings)


def _describe(config: DraftConfig) -> str:
    return f"{config.num_layers} layers of width {config.hidden_size}"


TRAINED = Trained(
    training=TRAINING,
    module=DraftModule,
    objective=DraftObjective,
    describe=_describe,
    begin=begin_with,
    fresh=lambda target, module, examples, frozen: start_from_target(target, module),
    export=export,
)

METHOD = Method(
    name="draft_model",
    summary="a separate small model with the same vocabulary drafts; needs model=FOLDER or a trained adapter",
    settings=DraftModelSettings,
    with_source=True,
    build=_build,
    trained=TRAINED,
    variants=("", "tree=chain", "tree=auto", "tokens=auto", "tree=iid", "tree=without"),
    candidates=sized(DraftModelSettings, BUDGETS),
    labels=("draft",),
)
