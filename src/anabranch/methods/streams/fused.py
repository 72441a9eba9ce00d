"""Trailing streams on a GPU in the fused operations: five kernels a layer, over the cache in place.

A stream layer's products have deltas, and its MLP an adapter beside it. Merged into copies of the layer's weights they
take no kernels of their own: the adapter's rank becomes outputs of the MLP without a gate, so its activation has to be
the MLP's. Drafts need not be exact, so they may be rounded once more.

B rows of the batch, S streams, D model width, E head width, L cache length.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from anabranch.methods.streams.adapter import StreamModule
from anabranch.methods.streams.rider import initial_streams
from anabranch.model.blocks import Block
from anabranch.model.decoder import Decoder
from anabranch.model.device.layers import NO_NORM, attend, fits, norm_of, project, trusted
from anabranch.model.device.ops import ACTIVATIONS, ops
from anabranch.model.mlp import MLP
from anabranch.support.memory import free_memory

__all__ = ["FusedTrail"]

SHARE = 2  # of the free memory, the part that merged weights may take


class FusedTrail:
    """The weights of the layers that streams run through, with those of the adapter merged."""

    def __init__(self, target: Decoder, adapter: StreamModule) -> None:
        self.target, self.adapter = target, adapter
        self._layers = [self._merged(index) for index in range(adapter.start, len(target.blocks))]

    @staticmethod
    def fits(target: Decoder, adapter: StreamModule) -> bool:
        """Return whether streams of this adapter can trail this target so, and memory suffices."""
        config, shape = target.config, adapter.shape
        if target.backend.capture is None or not trusted(target.device) or not fits(target):
            return False
        silu = config.activation == "silu" and (config.gated_mlp or not _keeps(adapter))
        if shape.context_top or shape.position != "embedding" or (shape.adapter_rank and not silu):
            return False
        needed = sum(weight.nbytes for block in target.blocks[adapter.start :] for weight in block.parameters())
        free = free_memory(target.device)
        return free is None or needed <= free // SHARE

    def _merged(self, index: int) -> dict[str, Tensor]:
        block, layer = self.target.blocks[index], self.adapter.layer(index)
        assert isinstance(block, Block)
        assert isinstance(block.mlp, MLP)
        merged = {}
        for name, linear in (("qkv", block.qkv), ("out", block.out), ("up", block.mlp.up), ("down", block.mlp.down)):
            assert isinstance(linear, nn.Linear)
            delta = layer.delta(name)
            merged[name] = linear.weight if delta is None else linear.weight + (delta.up @ delta.down)
        if layer.mlp is not None:
            kept = layer.keep_mlp
            merged["up"] = torch.cat((merged["up"], layer.mlp.down)) if kept else layer.mlp.down
            merged["down"] = torch.cat((merged["down"], layer.mlp.up), dim=1) if kept else layer.mlp.up
        return {name: weight.to(self.target.dtype) for name, weight in merged.items()}

    def __call__(
        self,
        entry_BD: Tensor,
        emitted_BD: Tensor | None,
        lengths_B: Tensor,
        keys_values: Sequence[tuple[Tensor, Tensor]],
        table: Tensor,
    ) -> Tensor:
        """Stream states after the last norm [B, S, D] of the last committed token of each row.

        entry_BD     main rows before the first stream layer
        emitted_BD   embeddings of the tokens emitted at them; None: streams are not conditioned on these
        lengths_B    committed tokens
        keys_values  the cache of each layer [B, K, L, E]
        table        of rotations
        """
        b, s = len(entry_BD), self.adapter.shape.num_streams
        config, last_B1 = self.target.config, lengths_B[:, None] - 1
        offsets = torch.arange(s, device=lengths_B.device)
        positions, places = last_B1 + (offsets + 1), offsets.expand(b, s).contiguous()
        emitted = None if emitted_BD is None else emitted_BD[:, None]
        x = initial_streams(self.target, self.adapter, entry_BD[:, None], positions, emitted)
        own: list[Tensor] = [
            entry_BD.new_empty(b, config.num_kv_heads, s, config.head_dim) for _ in range(2)
        ]  # of one layer at a time
        for weights, (keys, values), index in zip(
            self._layers, keys_values, range(self.adapter.start, len(self.target.blocks)), strict=True
        ):
            block = self.target.blocks[index]
            assert isinstance(block, Block)
            q = project(block, weights["qkv"], x, table, positions, own[0], own[1], places)
            a = attend(config, index, q, keys, values, lengths_B, None, last_B1, own[0], own[1], s)
            x = self._fed(block, weights, ops.product(
                a.view(b * s, -1), weights["out"], _bias(block.out), *NO_NORM, 0, 0, x.reshape(b * s, -1)
            )).view(x.shape)  # fmt: skip
        states: Tensor = self.target.norm(x)
        return states

    def _fed(self, block: Block, weights: dict[str, Tensor], x_MD: Tensor) -> Tensor:
        """The MLP, its adapter, and the residual sum."""
        config = block.config
        kept = _keeps(self.adapter)
        gates = config.intermediate_size if config.gated_mlp and kept else 0
        activation = ACTIVATIONS.index(config.activation if kept else "silu")
        assert isinstance(block.mlp, MLP)
        assert block.norm_mlp is not None
        up_bias, down_bias = (_bias(block.mlp.up), _bias(block.mlp.down)) if kept else (None, None)
        if up_bias is not None and len(up_bias) < len(weights["up"]):
            up_bias = torch.cat((up_bias, up_bias.new_zeros(len(weights["up"]) - len(up_bias))))
        y = ops.product(x_MD, weights["up"], up_bias, *norm_of(block.norm_mlp), activation, gates, None)
        fed: Tensor = ops.product(y, weights["down"], down_bias, *NO_NORM, 0, 0, x_MD)
        return fed


def _keeps(adapter: StreamModule) -> bool:
    return adapter.shape.stream_mlp == "mlp+adapter"


def _bias(linear: nn.Module) -> Tensor | None:
    bias = linear.bias
    return bias if isinstance(bias, Tensor) else None
