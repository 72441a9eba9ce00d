"""Speculative Streaming: adapter, multi-stream attention, pruning, scoring, drafting, and the method's entry."""

from __future__ import annotations

from typing import Any

from torch import nn

from anabranch.drafting.drafter import Drafter, Method, numbered, sized
from anabranch.drafting.settings import BUDGETS
from anabranch.drafting.trained import Trained
from anabranch.learning.objective import Objective
from anabranch.learning.recipe import Recipe
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.begin import adopt_streams, begin_with, start_streams
from anabranch.methods.streams.config import StreamConfig
from anabranch.methods.streams.copying import COPIED
from anabranch.methods.streams.counting import COUNTS
from anabranch.methods.streams.draft import StreamSettings
from anabranch.methods.streams.drafter import StreamDrafter
from anabranch.methods.streams.joint import shared_objective
from anabranch.methods.streams.objective import StreamObjective
from anabranch.methods.streams.recipes import TRAINING
from anabranch.methods.streams.rider import own_rider
from anabranch.methods.tuning import export_tuned
from anabranch.model.decoder import Decoder

__all__ = ["METHOD", "TRAINED"]

LAST = 99  # rank of what is copied among the sources
# tokens per step and speedup of lossless Speculative Streaming on MT-Bench, for Vicuna (ACL tables 6 and 1)
PUBLISHED = {"Llama-2-7B": (3.52, 3.08), "Llama-2-13B": (3.63, 3.21), "Vicuna-33B": (3.75, 3.24)}


def _build(target: Decoder, settings: StreamSettings, module: nn.Module | None) -> Drafter:
    return StreamDrafter(target, TRAINED.require(module, "streams"), settings)


def _order(source: str) -> int | None:
    return numbered("stream")(source) or (LAST if source == COPIED else None)


def _objective(target: Decoder, module: StreamAdapter, recipe: Recipe, *, frozen: Decoder) -> Objective[Any]:
    if module.config.mode == "shared":
        return shared_objective(target, module, recipe.loss, segment=recipe.options.segment, frozen=frozen)
    return StreamObjective(target, module, recipe.loss, segment=recipe.options.segment, frozen=frozen)


def _describe(config: StreamConfig) -> str:
    size = f"{config.num_streams} streams through the top {config.num_stream_layers} layers"
    if config.mode == "lossless":
        return size
    if config.main_attends == "none":
        return f"{size}; shared mode: the target was tuned with them"
    torch = "; PyTorch runs these layers, so near-ties in bf16 may differ with drafts"
    where = torch if config.context_top else ""
    return f"{size}; shared mode: main rows attend to their own streams, which are part of the target{where}"


def _packed(recipe: Recipe) -> bool:
    """Return whether the target may be packed: its weights are neither tuned, nor rounded with those of streams."""
    return recipe.config.mode == "lossless" and not recipe.loss.rounding


TRAINED = Trained(
    training=TRAINING,
    module=StreamAdapter,
    objective=_objective,
    describe=_describe,
    begin=begin_with,
    adopt=adopt_streams,
    fresh=start_streams,
    export=export_tuned,
    rider=own_rider,
    packed=_packed,
)

METHOD = Method(
    name="streams",
    summary="Speculative Streaming: the model's own streams draft; needs a trained adapter",
    settings=StreamSettings,
    build=_build,
    trained=TRAINED,
    variants=("", "tree=chain", "tree=auto", "tree=product", "tree=chain,prune=3", "placement=ride"),
    candidates=sized(StreamSettings, BUDGETS),
    default=True,
    order=_order,
    counts=COUNTS,
    published=PUBLISHED,
)
