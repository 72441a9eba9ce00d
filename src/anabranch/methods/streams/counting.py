"""The cost of a draft of Speculative Streaming, naively and with the optimisations of appendix H."""

from __future__ import annotations

from dataclasses import replace

from anabranch.drafting.counting import WEIGHT_BYTES, DraftCost, DraftShape, attention_operations, matrix_weights
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.config import StreamConfig
from anabranch.model.blocks import Block
from anabranch.model.decoder import Decoder

__all__ = ["COUNTS"]


def _naive(decoder: Decoder, shape: DraftShape) -> DraftCost:
    """Lossless mode: every node's streams pass through complete layers and the head."""
    adapter = StreamAdapter(decoder.config, replace(_config(shape), stream_mlp="mlp+adapter"))
    layer = matrix_weights(decoder.blocks[0]) + matrix_weights(adapter.layer(adapter.start))
    rows = shape.nodes * shape.gamma
    attention = attention_operations(decoder.config, shape.context)
    per_row = shape.layers * (2 * layer + attention) + 2 * decoder.head.weight.numel()
    return _cost(decoder, adapter, shape, rows * per_row)


def _optimised(decoder: Decoder, shape: DraftShape) -> DraftCost:
    """Appendix H: p context positions per stream, an adapter for the MLP, the head only for the accepted node."""
    adapter = StreamAdapter(decoder.config, replace(_config(shape), context_top=shape.context_top))
    block = decoder.blocks[0]
    assert isinstance(block, Block)
    layer = matrix_weights(block.qkv) + matrix_weights(block.out) + matrix_weights(adapter.layer(adapter.start))
    attention = attention_operations(decoder.config, min(shape.context, shape.context_top))
    body = shape.nodes * shape.gamma * shape.layers * (2 * layer + attention)
    return _cost(decoder, adapter, shape, body + shape.gamma * 2 * decoder.head.weight.numel())


def _config(shape: DraftShape) -> StreamConfig:
    return StreamConfig(num_streams=shape.gamma, num_stream_layers=shape.layers, adapter_rank=shape.rank)


def _cost(decoder: Decoder, adapter: StreamAdapter, shape: DraftShape, operations: int) -> DraftCost:
    """The target's weights are not counted as reads; pruning is an early exit through the head at each node."""
    assert adapter.prune is not None
    exits = 2 * shape.nodes * (matrix_weights(adapter.prune) + decoder.head.weight.numel()) if shape.nodes > 1 else 0
    return DraftCost(adapter.num_parameters(), WEIGHT_BYTES * adapter.num_parameters(), operations + exits)


COUNTS = {"streams": _naive, "streams, optimised": _optimised}
