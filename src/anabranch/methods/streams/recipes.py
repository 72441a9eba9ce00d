"""Training of stream adapters: recipes, the values that users can override, and the registry's entry.

default-adapter    the adapter shipped for the default model
small              a first adapter in minutes, to check that everything works
paper-lossless     ACL section 2, lossless mode: stream adapters of rank 8 in place of the MLP, no conditioning
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from anabranch.learning.recipe import COMMON, RECOMPUTE, Option, Recipe, TrainOptions
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.begin import begin_with
from anabranch.methods.streams.config import StreamConfig
from anabranch.methods.streams.objective import LossOptions, StreamObjective
from anabranch.methods.trained import Trained
from anabranch.model.decoder import Decoder

__all__ = ["OPTIONS", "RECIPES", "TRAINED", "change"]


def paper_lossless() -> Recipe:
    """The paper's lossless mode with gamma = 4, N_s = 4: no distillation, equal weights for all streams."""
    return Recipe(StreamConfig(), LossOptions(decay=1.0, soft=0.0, unconditioned=0.0))


def small() -> Recipe:
    """Four layers, scores conditioned on the parent token, a small draft vocabulary, one epoch."""
    config = StreamConfig(
        stream_mlp="mlp+adapter", adapter_rank=16, attention_rank=16, conditioning="parent", conditioning_rank=64
    )
    options = TrainOptions(epochs=1.0)
    return Recipe(config, LossOptions(), options, draft_vocabulary=4096, held_out=32, max_tokens=512)


def default_adapter() -> Recipe:
    """The shipped adapter: twelve layers, frozen MLP with deltas, conditioned on the root and on the path."""
    config = StreamConfig(
        num_streams=5,
        num_stream_layers=12,
        stream_mlp="mlp+adapter",
        adapter_rank=32,
        attention_rank=32,
        conditioning="path",
        conditioning_rank=512,
        root_width=512,
    )
    options = TrainOptions(epochs=3.0, lr=1.5e-3, batch_tokens=2048, keep_states=True)
    return Recipe(config, LossOptions(), options, draft_vocabulary=8192, held_out=96)


RECIPES: dict[str, Callable[[], Recipe]] = {
    "default-adapter": default_adapter,
    "small": small,
    "paper-lossless": paper_lossless,
}

OPTIONS: dict[str, Option] = {
    "num_streams": Option(int, "tokens drafted beyond the next one (gamma)", "config"),
    "stream_layers": Option(int, "top layers that streams run through (N_s)", "config", "num_stream_layers"),
    "stream_mlp": Option(str, "adapter (the paper) or mlp+adapter", "config"),
    "adapter_rank": Option(int, "rank of the stream adapters (R_s)", "config"),
    "attention_rank": Option(int, "rank of the deltas on q, k, v and o; 0: none", "config"),
    "conditioning": Option(str, "what scores are conditioned on: none, parent or path", "config"),
    "conditioning_rank": Option(int, "width of the conditioning term", "config"),
    "root_width": Option(int, "width of the term that conditions streams on the root; 0: none", "config"),
    "pruning_rank": Option(int, "rank of the early-exit pruning layer; 0: none", "config"),
    "soft": Option(float, "share of the target's distribution in the loss (distillation)", "loss"),
    "unconditioned": Option(float, "weight of the loss without conditioning", "loss"),
    "decay": Option(float, "weight of stream j is decay ** (j - 1)", "loss"),
    **COMMON,
    **RECOMPUTE,
}


def change(recipe: Recipe, given: Mapping[str, Any]) -> Recipe:
    """A recipe with the ``given`` values of ``OPTIONS``. Raises InputError for unknown names and values."""
    if given.get("conditioning") == "none":
        given = {"conditioning_rank": 0, **given}
    return recipe.changed(OPTIONS, given)


def _objective(target: Decoder, module: StreamAdapter, recipe: Recipe, *, frozen: Decoder) -> StreamObjective:
    return StreamObjective(target, module, recipe.loss, segment=recipe.options.segment, frozen=frozen)


def _describe(config: StreamConfig) -> str:
    return f"{config.num_streams} streams through the top {config.num_stream_layers} layers"


TRAINED = Trained(
    title="Speculative Streaming",
    module=StreamAdapter,
    config=StreamConfig,
    make=StreamAdapter,
    objective=_objective,
    recipes=RECIPES,
    options=OPTIONS,
    change=change,
    describe=_describe,
    begin=begin_with,
    any_dtype=True,
)
