"""Stream rows in the target's pass (riding), or after it for the accepted node only (trailing).

In lossless mode main rows do not attend to streams, so both give the same stream states. Riding computes them for every
node before it is known which one is accepted; trailing computes them for one node but reads the top layers' weights
again. Trailing streams can be conditioned on the emitted token (the adapter's root term), which makes better drafts.
Training is trailing over all positions of a segment.

In shared mode a main row may attend to its own streams (ACL eq. 3). They then ride in every pass that decodes, plain
decoding included, and are part of the target: ``own_rider``.

B rows of the batch, N nodes, S streams, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from anabranch.learning.recompute import through
from anabranch.methods.streams.adapter import StreamModule
from anabranch.methods.streams.attention import (
    distance_bias,
    main_attention,
    row_attention,
    row_mask,
    stream_attention,
    stream_bias,
    stream_positions,
    stream_values,
)
from anabranch.methods.streams.native import native_rider
from anabranch.methods.streams.prune import prune_nodes
from anabranch.methods.streams.recipes import StreamConfig
from anabranch.model.blocks import Block
from anabranch.model.config import ModelConfig
from anabranch.model.decoder import Decoder
from anabranch.model.device.layers import attend, trusted
from anabranch.model.encoder import Memory, recalled
from anabranch.model.native_backend import stack_of
from anabranch.model.passes import Entry, Pass
from anabranch.model.riding import NativeRider

Look: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]

__all__ = ["Looks", "StreamRider", "initial_streams", "own_rider", "trail"]


@dataclass
class _Own:
    """Inputs of the layers for stream rows: rotations, by themselves and after those of main rows, and masks."""

    rotations: tuple[Tensor, Tensor]
    all_rotations: tuple[Tensor, Tensor]
    biases: dict[bool, Tensor | None] = field(default_factory=dict)


class StreamRider:
    """A ``Rider``: prunes the tree at layer N - N_s, then inserts gamma stream rows at every remaining node.

    ride       whether stream rows are inserted (the paper); not if they trail the pass
    prune      number of nodes that the early-exit pruning layer keeps; 0: all
    threshold  minimum early-exit probability of a node given its parent; 0: none
    """

    def __init__(
        self, target: Decoder, adapter: StreamModule, *, ride: bool, prune: int = 0, threshold: float = 0.0
    ) -> None:
        self.start = adapter.start
        self.target, self.adapter, self.rides, self.prune, self.threshold = target, adapter, ride, prune, threshold
        self.fixed = not (prune or threshold)
        self.alters: object | None = adapter if ride and adapter.shape.main_attends == "own" else None
        self.native = self.alters is None or not adapter.shape.context_top
        self._packed: tuple[NativeRider, NativeRider] | None = None  # with and without what does not ride or is pruned

    def in_kernels(self, kind: str) -> NativeRider | None:
        """The rider with its weights packed, unless its streams attend to a part of the context only."""
        if self.adapter.shape.context_top:
            return None
        packed = native_rider(self.target, self.adapter, kind)
        if self._packed is None or self._packed[0] is not packed:
            least = math.log(self.threshold) if self.threshold else -math.inf
            self._packed = packed, packed.limited(ride=self.rides, keep=self.prune, least=least)
        return self._packed[1]

    def positions(self, nodes: int) -> int:
        """Cache positions of a row's nodes and, where the kernels run them, of their streams."""
        if not self.rides or stack_of(self.target.backend) is None:
            return nodes
        kept = min(nodes, self.prune) if self.prune else nodes
        return max(nodes, kept * (1 + self.adapter.shape.num_streams))

    def enter(self, x_BND: Tensor, run: Pass) -> tuple[Tensor, Entry]:
        """Prune, then append the stream rows to the main rows."""
        kept = allowed = None
        if self.threshold or 0 < self.prune < run.width:
            main_BND = x_BND.to(self.target.dtype)
            pruned = prune_nodes(self.target, self.adapter, main_BND, run, self.prune, self.threshold)
            kept_Bn = pruned.nodes_Bn
            x_BND = x_BND.gather(1, kept_Bn[:, :, None].expand(-1, -1, x_BND.shape[2]))
            run.select(self.start, kept_Bn)
            kept = [row[:count] for row, count in zip(kept_Bn.cpu().numpy(), pruned.counts_B, strict=True)]
            allowed = pruned.allowed_BnV
        if not self.rides:
            return x_BND, Entry(kept, allowed=allowed)
        positions = stream_positions(run.positions_BN, self.adapter.shape.num_streams)
        cos, sin = run.rotations(positions)
        own = _Own((cos, sin), (torch.cat((run.cos, cos), dim=1), torch.cat((run.sin, sin), dim=1)))
        streams = initial_streams(self.target, self.adapter, x_BND.to(self.target.dtype), positions)
        return torch.cat((x_BND, streams.to(x_BND.dtype)), dim=1), Entry(kept, own, allowed)

    def layer(self, index: int, block: Block, x_BRD: Tensor, run: Pass, entry: Entry) -> Tensor:
        """One block over main rows and stream rows together, which reads the weights once.

        If the target runs on the native kernels, which do not know these streams, the kernels compute the main rows,
        which are then bit-identical to a pass without streams. If main rows attend to them, PyTorch computes both, in
        the weights' type.
        """
        n, own = run.width, entry.own
        assert isinstance(own, _Own)

        def look(q: Tensor, k: Tensor, v: Tensor, main_q: Tensor | None) -> Tensor:
            keys, values = run.cache.read(index, run.span)
            if trusted(run.lengths_B.device) and not self.adapter.shape.context_top:
                where = run.lengths_B, run.tree_BNN, run.positions_BN
                return _look_in_place(self.target.config, self.adapter.shape, index, keys, values, *where, q, k, v)
            visible, bias = run.visible(index), self._bias(index, run, own)
            config, shape = self.target.config, self.adapter.shape
            return stream_attention(config, shape, (q, k, v), keys, values, visible, main_q, bias)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            main = self._attend_main(index, q[:, :n], k, v, run)
            return torch.cat((main, look(q[:, n:], k[:, n:], v[:, n:], q[:, :n])), dim=1)

        narrow = x_BRD.to(self.target.dtype)
        if self.target.backend.kernels is None or self.alters is not None:
            return block(narrow, *own.all_rotations, attend, self.adapter.side(index, n))  # type: ignore[no-any-return]
        main_q = None
        if self.adapter.shape.context_top:
            main_q = main_queries(block, narrow[:, :n], (run.cos, run.sin))
        main = self.target.layers(x_BRD[:, :n], run, index, index + 1)
        streams = block(narrow[:, n:], *own.rotations, partial(look, main_q=main_q), self.adapter.side(index, 0))
        return torch.cat((main, streams.to(main.dtype)), dim=1)

    def _attend_main(self, index: int, q: Tensor, k: Tensor, v: Tensor, run: Pass) -> Tensor:
        """Attention of the main rows, which come first in ``k`` and ``v``."""
        n = run.width
        if self.alters is None:
            return run.attend(index, q, k[:, :n], v[:, :n])
        run.cache.append(index, k[:, :n], v[:, :n])
        keys, values = run.cache.read(index, run.span)
        streams = k[:, n:], v[:, n:]
        return main_attention(self.target.config, self.adapter.shape, q, keys, values, streams, run.visible(index))

    def _bias(self, index: int, run: Pass, own: _Own) -> Tensor | None:
        sliding = self.target.config.is_sliding(index)
        if sliding not in own.biases:
            own.biases[sliding] = stream_bias(self.target.config, self.adapter.shape, run.visible(index), run.dtype)
        return own.biases[sliding]

    def leave(self, x_BRD: Tensor, run: Pass) -> tuple[Tensor, Tensor]:
        """The main rows, and the streams' states after the last norm [M, S, D]."""
        streams = self.target.norm(x_BRD[:, run.width :].to(self.target.dtype))
        states = streams.reshape(-1, self.adapter.shape.num_streams, x_BRD.shape[2])
        return x_BRD[:, : run.width], states


def own_rider(target: Decoder, adapter: StreamModule) -> StreamRider | None:
    """The streams that are part of the target itself (``Decoder.rider``); None if main rows do not attend to them."""
    return StreamRider(target, adapter, ride=True) if adapter.shape.main_attends == "own" else None


def main_queries(block: Block, x_BND: Tensor, rotations: tuple[Tensor, Tensor]) -> Tensor:
    """The queries [B, N, H, E] of main rows before a layer, whose weights choose the context of their streams."""
    q: Tensor = block.split(block.qkv(block.norm_in(x_BND)), *rotations)[0]
    return q


def initial_streams(
    target: Decoder, adapter: StreamModule, main_BND: Tensor, positions_BR: Tensor, emitted_BND: Tensor | None = None
) -> Tensor:
    """Stream rows [B, N S, D], with the target's learned positions where they enter as tokens do."""
    x = adapter.initial(main_BND, emitted_BND)
    if not adapter.positioned or target.positions is None:
        return x
    table = target.positions  # streams of the last nodes may reach past its end: they are never used
    places: Tensor = table((positions_BR + target.config.learned_offset).clamp(max=table.num_embeddings - 1))
    return x + places


def trail(
    target: Decoder,
    adapter: StreamModule,
    entry_BND: Tensor,
    emitted_BND: Tensor | None,
    positions_BN: Tensor,
    keys_values: Sequence[tuple[Tensor, Tensor]],
    visible_BNL: list[Tensor],
    longest: int,
    *,
    lengths_B: Tensor | None = None,
    mains: Sequence[Tensor] = (),
    memories: Sequence[Memory] = (),
) -> Tensor:
    """Stream states after the last norm [B, N, S, D] of nodes whose main rows are already in the cache.

    ``entry_BND`` are their main rows before layer N - N_s, ``emitted_BND`` the embeddings of the tokens emitted at them
    (zero or None: not conditioned on these), ``keys_values`` the main stream's cache of each top layer, and
    ``visible_BNL`` the mask of what each node attends to. No position is ``longest`` or beyond. If the nodes are the
    last ones of rows of ``lengths_B`` committed tokens, a GPU reads the cache in place. ``mains`` [B, N, D] are their
    main rows before each of these layers, whose queries choose the context with ``context_top``. ``memories`` are the
    keys and values of each row's source in these layers, in an encoder-decoder target.
    """
    b, n, d = entry_BND.shape
    assert mains or not adapter.shape.context_top, "context_top needs the main rows' queries: ride"
    positions = stream_positions(positions_BN, adapter.shape.num_streams)
    x = initial_streams(target, adapter, entry_BND, positions, emitted_BND)
    cos, sin = target.rope()(positions, longest)
    of_mains = target.rope()(positions_BN, longest) if mains else None
    looks = Looks(target, adapter, entry_BND.dtype, positions_BN)
    for index in range(adapter.start, len(target.blocks)):
        block = target.blocks[index]
        keys, values = keys_values[index - adapter.start]
        visible = visible_BNL[index - adapter.start]
        if lengths_B is not None and trusted(lengths_B.device):
            look: Look = partial(
                _look_in_place, target.config, adapter.shape, index, keys, values, lengths_B, None, positions_BN
            )
        else:
            main_q = None
            if of_mains is not None:
                assert isinstance(block, Block)
                with torch.no_grad():
                    main_q = main_queries(block, mains[index - adapter.start], of_mains)
            look = looks.of(keys, values, visible, main_q)
        recall = partial(recalled, target.config, memories, index - adapter.start) if memories else None
        x = through(partial(block, cos=cos, sin=sin, attend=look, side=adapter.side(index, 0), recall=recall), x)
    streams: Tensor = target.norm(x)
    return streams.view(b, n, adapter.shape.num_streams, d)


def _look_in_place(
    model: ModelConfig,
    shape: StreamConfig,
    layer: int,
    keys_BKLE: Tensor,
    values_BKLE: Tensor,
    lengths_B: Tensor,
    tree_BNN: Tensor | None,
    positions_BN: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """Attention of stream rows in a layer by the operations for GPUs, which copy no keys and values of the cache."""
    own = k.transpose(1, 2), stream_values(shape, v).transpose(1, 2)
    return attend(
        *(model, layer, q, keys_BKLE, values_BKLE, lengths_B, tree_BNN, positions_BN, *own, shape.num_streams)
    )


class Looks:
    """The attention of trailing rows; layers with the same ``visible`` tensor share one mask."""

    def __init__(self, target: Decoder, adapter: StreamModule, dtype: torch.dtype, positions_BN: Tensor) -> None:
        self.model, self.shape, self.dtype = target.config, adapter.shape, dtype
        self._distances = partial(
            distance_bias, target.relative, target.config, adapter.shape.num_streams, positions_BN
        )
        self._by_distance: Tensor | None = None
        self._biases: dict[int, Tensor | None] = {}
        self._masks: dict[int, Tensor] = {}

    def of(self, keys: Tensor, values: Tensor, visible: Tensor, main_q: Tensor | None = None) -> Look:
        """(q, k, v) -> the result for one layer's cache; ``main_q`` are the main rows' queries, for ``context_top``."""
        if self.model.relative is not None:
            if self._by_distance is None:
                self._by_distance = self._distances(keys.shape[2])
            distances = self._by_distance
            return lambda q, k, v: stream_attention(
                self.model, self.shape, (q, k, v), keys, values, visible, distances=distances
            )
        if id(visible) not in self._biases:
            self._biases[id(visible)] = stream_bias(self.model, self.shape, visible, self.dtype)
        bias = self._biases[id(visible)]
        whole = main_q is None or not 0 < self.shape.context_top < keys.shape[2]
        if whole and bias is None and self.model.attention_softcap is None and self.shape.position == "embedding":
            if id(visible) not in self._masks:
                groups = self.model.num_heads // self.model.num_kv_heads
                self._masks[id(visible)] = row_mask(visible, self.shape.num_streams, groups, self.dtype)
            mask = self._masks[id(visible)]
            return lambda q, k, v: row_attention(self.model, (q, k, v), keys, values, mask)

        def look(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return stream_attention(self.model, self.shape, (q, k, v), keys, values, visible, main_q, bias)

        return look
