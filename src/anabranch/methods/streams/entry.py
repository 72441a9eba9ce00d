"""Speculative Streaming: adapter, multi-stream attention, pruning, scoring, drafting, and the method's entry."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from anabranch.drafting.counting import WEIGHT_BYTES, DraftCost, DraftShape, attention_operations, matrix_weights
from anabranch.drafting.drafter import Drafter, Method, sized
from anabranch.drafting.settings import BUDGETS
from anabranch.drafting.trained import Trained
from anabranch.learning.objective import Objective
from anabranch.learning.recipe import Recipe
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.begin import adopt_streams, begin_with, start_streams
from anabranch.methods.streams.copying import COPIED
from anabranch.methods.streams.draft import StreamSettings
from anabranch.methods.streams.drafter import StreamDrafter
from anabranch.methods.streams.joint import shared_objective
from anabranch.methods.streams.objective import StreamObjective
from anabranch.methods.streams.recipes import TRAINING, LossOptions, StreamConfig
from anabranch.methods.streams.rider import own_rider
from anabranch.methods.tuning import export_tuned
from anabranch.model.blocks import Block
from anabranch.model.decoder import Decoder

__all__ = ["METHOD", "TRAINED"]

# tokens per step and speedup of lossless Speculative Streaming on MT-Bench, for Vicuna (ACL tables 6 and 1)
PUBLISHED = {"Llama-2-7B": (3.52, 3.08), "Llama-2-13B": (3.63, 3.21), "Vicuna-33B": (3.75, 3.24)}


def _build(target: Decoder, settings: StreamSettings, module: nn.Module | None) -> Drafter:
    return StreamDrafter(target, TRAINED.require(module, "streams"), settings)


def _objective(
    target: Decoder, module: StreamAdapter, options: LossOptions, *, segment: int, frozen: Decoder
) -> Objective[Any]:
    made = shared_objective if module.config.mode == "shared" else StreamObjective
    return made(target, module, options, segment=segment, frozen=frozen)


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


def _naive(decoder: Decoder, shape: DraftShape) -> DraftCost:
    """Lossless mode: every node's streams pass through complete layers and the head."""
    adapter = StreamAdapter(decoder.config, replace(_shape(shape), stream_mlp="mlp+adapter"))
    layer = matrix_weights(decoder.blocks[0]) + matrix_weights(adapter.layer(adapter.start))
    rows = shape.nodes * shape.gamma
    attention = attention_operations(decoder.config, shape.context)
    per_row = shape.layers * (2 * layer + attention) + 2 * decoder.head.weight.numel()
    return _cost(decoder, adapter, shape, rows * per_row)


def _optimised(decoder: Decoder, shape: DraftShape) -> DraftCost:
    """Appendix H: p context positions per stream, an adapter for the MLP, the head only for the accepted node."""
    adapter = StreamAdapter(decoder.config, replace(_shape(shape), context_top=shape.context_top))
    block = decoder.blocks[0]
    assert isinstance(block, Block)
    layer = matrix_weights(block.qkv) + matrix_weights(block.out) + matrix_weights(adapter.layer(adapter.start))
    attention = attention_operations(decoder.config, min(shape.context, shape.context_top))
    body = shape.nodes * shape.gamma * shape.layers * (2 * layer + attention)
    return _cost(decoder, adapter, shape, body + shape.gamma * 2 * decoder.head.weight.numel())


def _shape(shape: DraftShape) -> StreamConfig:
    return StreamConfig(num_streams=shape.gamma, num_stream_layers=shape.layers, adapter_rank=shape.rank)


def _cost(decoder: Decoder, adapter: StreamAdapter, shape: DraftShape, operations: int) -> DraftCost:
    """The target's weights are not counted as reads; pruning is an early exit through the head at each node."""
    assert adapter.prune is not None
    exits = 2 * shape.nodes * (matrix_weights(adapter.prune) + decoder.head.weight.numel()) if shape.nodes > 1 else 0
    return DraftCost(adapter.num_parameters(), WEIGHT_BYTES * adapter.num_parameters(), operations + exits)


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
    with_source=True,
    labels=("stream", COPIED),
    counts={"streams": _naive, "streams, optimised": _optimised},
    published=PUBLISHED,
)
