"""Streams trailing through the native kernels: the rows of one node's streams are a chain with weights of its own.

B rows of the batch, S streams, D model width.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.model.cache import Cache
from anabranch.model.decoder import Block, Decoder
from anabranch.model.pack import packed_like
from anabranch.model.quantize import QuantizedWeight
from anabranch.model.stack import LayerWeights, NativeLinear, Stack, StackStep
from anabranch.native.library import BLOCK
from anabranch.streams.adapter import LowRank, StreamAdapter, StreamLayer

__all__ = ["NativeTrail"]


class NativeTrail:
    """The top layers with an adapter's deltas, in int8 unless all is float32: they are read a second time, and drafts
    need not be exact. The streams' keys and values are written behind the committed ones,
    where the next pass writes its own: the cache needs room for them.
    """

    def __init__(self, target: Decoder, adapter: StreamAdapter) -> None:
        layers = [self._layer(target.blocks[i], adapter.layer(i)) for i in range(adapter.start, len(target.blocks))]
        self.target, self.adapter = target, adapter
        self.stack = Stack(target.config, layers, adapter.start)
        if adapter.root is not None:
            adapter.root.pack(target.head)

    @staticmethod
    def fits(target: Decoder, adapter: StreamAdapter) -> bool:
        """Whether the kernels run this target and know this adapter's attention."""
        return target.stack is not None and adapter.config.position == "embedding"

    @staticmethod
    def _layer(block: object, weights: StreamLayer) -> LayerWeights:
        assert isinstance(block, Block)
        weights.merge(block)
        qkv, out = (_narrow(block.qkv), _narrow(block.out)) if weights.merged is None else weights.merged
        assert isinstance(qkv, NativeLinear)
        assert isinstance(out, NativeLinear)
        up, down = (_narrow(block.mlp.up), _narrow(block.mlp.down)) if weights.keep_mlp else (None, None)
        return LayerWeights(block, qkv, out, up, down, *_whole_blocks(weights.mlp, block.qkv))

    def __call__(self, entry_BD: Tensor, emitted_BD: Tensor, cache: Cache, planned: int) -> Tensor:
        """Stream states after the last norm [B, S, D] of the newest committed nodes of all rows in use.

        ``entry_BD`` are those nodes' main rows before layer N - N_s, ``emitted_BD`` embeds what they emitted.
        """
        rows, s = len(entry_BD), self.adapter.config.num_streams
        x = self.adapter.initial(entry_BD[:, None], emitted_BD[:, None]).to(torch.float32).contiguous()
        lengths = np.asarray(cache.lengths, np.int64)
        cos, sin = self.target.rope()(torch.from_numpy(lengths[:, None] + np.arange(s)), planned)
        first = None
        if (window := self.target.config.sliding_window) is not None and self.target.config.is_sliding(0):
            first = np.broadcast_to(np.maximum(lengths - window, 0)[:, None], (rows, s))
        upto = np.broadcast_to(np.tril(np.ones((s, s), np.bool_)), (rows, s, s))
        step = StackStep.of(upto, cache.lengths, first)
        self.stack.run(x, cos, sin, step, cache, 0, self.adapter.start, self.target.config.num_layers)
        return self.target.normed(x)


def _narrow(linear: nn.Module) -> NativeLinear:
    """As drafts read it: quantised, unless all is float32."""
    assert isinstance(linear, NativeLinear)
    if linear.kind != "bfloat16":
        return linear
    return NativeLinear(QuantizedWeight.of(linear.dense(), "int8"), linear.bias, gated=linear.gated)


def _whole_blocks(term: LowRank, like: nn.Module) -> tuple[NativeLinear, NativeLinear]:
    """A low-rank term, its rank padded with zeros to what the kernels take."""
    more = -len(term.down) % BLOCK
    low = packed_like(like, F.pad(term.down.detach(), (0, 0, 0, more)), None)
    high = packed_like(like, F.pad(term.up.detach(), (0, more)), None)
    assert isinstance(low, NativeLinear)
    assert isinstance(high, NativeLinear)
    return low, high
