"""The trained part of Speculative Streaming, for the method's entry."""

from __future__ import annotations

from typing import Any

from anabranch.drafting.trained import Trained
from anabranch.learning.objective import Objective
from anabranch.learning.recipe import Recipe
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.begin import adopt_streams, begin_with, scale_to_target
from anabranch.methods.streams.config import StreamConfig
from anabranch.methods.streams.joint import shared_objective
from anabranch.methods.streams.objective import StreamObjective
from anabranch.methods.streams.recipes import TRAINING
from anabranch.methods.streams.rider import own_rider
from anabranch.methods.tuning import export_tuned
from anabranch.model.decoder import Decoder

__all__ = ["TRAINED"]


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
    where = "" if config.bare else "; PyTorch runs these layers, so near-ties in bf16 may differ with drafts"
    return f"{size}; shared mode: main rows attend to their own streams, which are part of the target{where}"


TRAINED = Trained(
    training=TRAINING,
    module=StreamAdapter,
    config=StreamConfig,
    make=StreamAdapter,
    objective=_objective,
    describe=_describe,
    begin=begin_with,
    adopt=adopt_streams,
    fresh=scale_to_target,
    export=export_tuned,
    rider=own_rider,
)
