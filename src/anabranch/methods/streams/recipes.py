"""Training of stream adapters: recipes, the values that users can override, and the registry's entry.

default-adapter    the adapter shipped for the default model
small              a first adapter in minutes, to check that everything works
paper-lossless     ACL section 2, lossless mode: stream adapters of rank 8 in place of the MLP, no conditioning
shared             the target and its streams tuned together on the data, starting from the shipped adapter
paper-shared       ACL section 2, shared mode: (gamma + 16) h parameters beside the terms of the target's layers
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from anabranch.drafting.trained import Trained
from anabranch.learning.recipe import COMMON, RECOMPUTE, Option, Recipe, TrainOptions
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.begin import adopt_streams, begin_with, scale_to_target
from anabranch.methods.streams.config import StreamConfig
from anabranch.methods.streams.joint import SharedObjective
from anabranch.methods.streams.objective import LossOptions, StreamObjective
from anabranch.methods.streams.rider import own_rider
from anabranch.methods.tuning import export_tuned
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
    return Recipe(config, LossOptions(), options, draft_vocabulary=4096, max_tokens=512)


def default_adapter() -> Recipe:
    """The shipped adapter: twelve layers, frozen MLP with deltas, conditioned on the root and on the path."""
    config = StreamConfig(
        num_streams=5,
        num_stream_layers=12,
        stream_mlp="mlp+adapter",
        adapter_rank=32,
        attention_rank=64,
        mlp_rank=64,
        conditioning="path",
        conditioning_rank=512,
        root_width=512,
    )
    options = TrainOptions(epochs=3.0, lr=1.5e-3, batch_tokens=2048, keep_states=True)
    return Recipe(config, LossOptions(), options, draft_vocabulary=8192)


def shared() -> Recipe:
    """Shared mode at its best: the streams of the shipped adapter, to which main rows do not attend.

    The target is tuned as ``train lora`` tunes it, on its own loss. In a joint loss at the paper's weights, the part of
    the streams outweighs the main rows' after a few dozen steps, and the terms of the target's layers follow it.
    """
    shape = default_adapter().config
    config = replace(shape, attention_rank=16, mlp_rank=13, mode="shared", lora_rank=16)
    options = TrainOptions(epochs=3.0, lr=1e-3, batch_tokens=1024, schedule="linear")
    return Recipe(config, LossOptions(main=1.0, detach=True), options, draft_vocabulary=8192, init="shipped")


def paper_shared() -> Recipe:
    """The paper's shared mode, gamma = 4, N_s = 4, alpha_0 = 1, alpha_j = 0.1; streams run through the tuned layers."""
    config = StreamConfig(stream_mlp="mlp+adapter", adapter_rank=0, mode="shared", main_attends="own", lora_rank=32)
    loss = LossOptions(main=1.0, streams=0.1, decay=1.0, soft=0.0, unconditioned=0.0)
    return Recipe(config, loss, TrainOptions(epochs=3.0, lr=5e-4, schedule="linear"))


RECIPES: dict[str, Callable[[], Recipe]] = {
    "default-adapter": default_adapter,
    "small": small,
    "paper-lossless": paper_lossless,
    "shared": shared,
    "paper-shared": paper_shared,
}

OPTIONS: dict[str, Option] = {
    "num_streams": Option(int, "tokens drafted beyond the next one (gamma)", "config"),
    "stream_layers": Option(int, "top layers that streams run through (N_s)", "config", "num_stream_layers"),
    "stream_mlp": Option(str, "adapter (the paper) or mlp+adapter", "config"),
    "adapter_rank": Option(int, "rank of the stream adapters (R_s)", "config"),
    "attention_rank": Option(int, "rank of the deltas on q, k, v and o; 0: none", "config"),
    "mlp_rank": Option(int, "rank of the deltas on the MLP's products, with mlp+adapter; 0: none", "config"),
    "position": Option(str, "what tells streams apart: embedding (the paper) or rotation (of values, eq. 8)", "config"),
    "conditioning": Option(str, "what scores are conditioned on: none, parent or path", "config"),
    "conditioning_rank": Option(int, "width of the conditioning term", "config"),
    "root_width": Option(int, "width of the term that conditions streams on the root; 0: none", "config"),
    "pruning_rank": Option(int, "rank of the early-exit pruning layer; 0: none", "config"),
    "lora_rank": Option(int, "rank of the terms that tune the target, in shared mode", "config"),
    "main_attends": Option(
        str, "what main rows attend to besides, in shared mode: own (their streams) or none", "config"
    ),
    "main": Option(float, "weight of the target's own next token, in shared mode", "loss"),
    "streams": Option(float, "weight of the streams beside it, in shared mode", "loss"),
    "detach": Option(
        bool, "tune the target on its own next token alone, as train lora does, and streams on theirs", "loss"
    ),
    "soft": Option(float, "share of the target's distribution in the loss (distillation)", "loss"),
    "unconditioned": Option(float, "weight of the loss without conditioning", "loss"),
    "decay": Option(float, "weight of stream j is decay ** (j - 1)", "loss"),
    "rounding": Option(bool, "round weights in every other step as drafting on a CPU does, to four bits", "loss"),
    **COMMON,
    **RECOMPUTE,
}


def change(recipe: Recipe, given: Mapping[str, Any]) -> Recipe:
    """A recipe with the ``given`` values of ``OPTIONS``. Raises InputError for unknown names and values."""
    if given.get("conditioning") == "none":
        given = {"conditioning_rank": 0, **given}
    if given.get("main_attends") == "own":
        # such streams are computed before the next token is known, and are part of the target
        given = {"root_width": 0, "detach": False, **given}
    return recipe.changed(OPTIONS, given)


def _objective(target: Decoder, module: StreamAdapter, recipe: Recipe, *, frozen: Decoder) -> StreamObjective:
    made = SharedObjective if module.config.mode == "shared" else StreamObjective
    return made(target, module, recipe.loss, segment=recipe.options.segment, frozen=frozen)


def _describe(config: StreamConfig) -> str:
    size = f"{config.num_streams} streams through the top {config.num_stream_layers} layers"
    if config.mode == "lossless":
        return size
    if config.main_attends == "none":
        return f"{size}; shared mode: the target was tuned with them"
    where = "" if config.bare else "; PyTorch runs these layers, so near-ties in bf16 may differ with drafts"
    return f"{size}; shared mode: main rows attend to their own streams, which are part of the target{where}"


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
    adopt=adopt_streams,
    fresh=scale_to_target,
    export=export_tuned,
    rider=own_rider,
)
