"""Streams on the native kernels: those that trail a pass are chains with the adapter's weights; those that ride in it.

B rows of the batch, M main rows of a pass, S streams, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.drafting.drafter import Call, Row, tally
from anabranch.drafting.head import DraftHead
from anabranch.methods.streams.adapter import RootTerm, StreamLayer, StreamModule
from anabranch.methods.streams.kernels import StreamKernels, TrailEntry
from anabranch.methods.terms import LowRank
from anabranch.model.blocks import Block, Norm
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder
from anabranch.model.mlp import MLP
from anabranch.model.native_linear import NativeLinear, table_of
from anabranch.model.native_loras import NativeLoras
from anabranch.model.native_terms import Term
from anabranch.model.pack import packed_like, read_bytes
from anabranch.model.riding import NativeRider, Side
from anabranch.model.stack import LayerWeights, Stack, norm_bias, norm_weight
from anabranch.native.arguments import BLOCK, address
from anabranch.native.library import MAX_EMBEDDING_WIDTH
from anabranch.support.memory import give_back

__all__ = ["NativeTrail", "Trailed", "lengths_with", "narrow", "narrow_layer", "native_rider", "trailing"]

_narrowed: WeakKeyDictionary[NativeLinear, NativeLinear] = WeakKeyDictionary()


class _TrailWeights:
    """The top layers of a target merged with an adapter's deltas, packed, shared by all drafters of the two.

    Drafts need not be exact, so the copy is int4 unless the target is float32. ``entry`` computes the initial states of
    streams, if the kernels support it.
    """

    def __init__(self, target: Decoder, adapter: StreamModule) -> None:
        layers = [self._layer(target.blocks[i], adapter.layer(i)) for i in range(adapter.start, len(target.blocks))]
        self.stack = Stack(target, layers, adapter.start)
        mlp = adapter.layer(adapter.start).keep_mlp
        self.loras = NativeLoras(self.stack.kind, target.config, adapter.start, mlp=mlp)
        if adapter.root is not None:
            adapter.root.pack(target.head)
        self.entry, self._kept = self._begin(target, adapter, layers[0])
        give_back()

    @staticmethod
    def _layer(block: object, weights: StreamLayer) -> LayerWeights:
        assert isinstance(block, Block)
        weights.merge(block)
        linears: dict[str, NativeLinear] = {}
        for module, name in block.linears(across=False):
            linear = weights.merged[name] if name in weights.merged else narrow(getattr(module, name))
            assert isinstance(linear, NativeLinear)
            linears[name] = linear
        mlp = (linears["up"], linears["down"]) if weights.keep_mlp else (None, None)
        term = () if weights.mlp is None else _whole_blocks(weights.mlp, block.qkv)
        cross = {} if block.cross is None else {"cross_q": narrow(block.cross.q), "cross_out": narrow(block.cross.out)}
        return LayerWeights(block, linears["qkv"], linears["out"], *mlp, *term, **cross)

    @staticmethod
    def _begin(target: Decoder, adapter: StreamModule, layer: LayerWeights) -> tuple[TrailEntry | None, list[object]]:
        """The computation of initial stream states, if the kernels support it, and the objects it points to."""
        root, places, width = adapter.root, adapter.embeddings, target.config.hidden_size
        if root is None or places is None or adapter.init is not None or width > MAX_EMBEDDING_WIDTH:
            return None, []
        inputs, up = root.packed["inputs"], root.packed["up"]
        assert isinstance(inputs, NativeLinear)
        assert isinstance(up, NativeLinear)
        products = (inputs, up, layer.qkv)
        alike = all(p.quantized for p in products) or len({p.kind for p in products}) == 1
        if not alike or inputs.out_features % BLOCK:
            return None, []
        streams, hidden = (x.detach().float().contiguous() for x in (places, root.streams))
        last = target.norm if isinstance(target.norm, Norm) else None
        norm = None if last is None else norm_weight(last).contiguous()
        bias = None if last is None else norm_bias(last)
        entry = TrailEntry(
            embedding=table_of(target),
            inputs=inputs.packed,
            up=up.packed,
            streams_count=len(places),
            streams=streams.data_ptr(),
            hidden=hidden.data_ptr(),
            norm=None if norm is None else norm.data_ptr(),
            norm_bias=None if bias is None else bias.data_ptr(),
        )
        return entry, [target.embedding, inputs, up, streams, hidden, norm, bias]


class NativeTrail:
    """Runs the first ``streams`` streams of an adapter through the top layers after the pass.

    call  a pass, as rows count it

    Streams attend only to earlier ones. Their keys and values are written to the cache after the committed ones, where
    the next forward pass overwrites them; the cache needs the capacity.
    """

    def __init__(self, target: Decoder, adapter: StreamModule, streams: int) -> None:
        self.target, self.adapter, self.streams = target, adapter, streams
        self._dtype = target.dtype
        self._weights = adapter.shared(target, _TrailWeights, lambda: _TrailWeights(target, adapter))
        self.stack = self._weights.stack
        self._kernels = StreamKernels(self.stack.kernels)
        self._loras = self._weights.loras
        head = adapter.shared(target, DraftHead, lambda: DraftHead(target, adapter.vocabulary))
        layers, read = len(target.blocks), self.stack.nbytes + read_bytes(adapter.terms) + head.read
        self.call = Call("partial", layers - self.stack.first, layers, read)
        entry = self._weights.entry
        self._entry = None if entry is None else TrailEntry.from_buffer_copy(entry)  # each call writes its rows into it

    @staticmethod
    def fits(target: Decoder, adapter: StreamModule) -> bool:
        """Return whether the kernels run this target and know this adapter's attention."""
        return target.backend.kernels is not None and adapter.shape.position == "embedding"

    def run(
        self,
        main_MD: Tensor,
        nodes: Sequence[int],
        emitted: Sequence[int],
        counts: Sequence[int],
        cache: Cache,
        *,
        lengths: Sequence[int] | None = None,
        loras: Sequence[str | None] = (),
    ) -> Tensor:
        """Stream states after the last norm, row by row [sum of ``counts``, D].

        main_MD  main rows of a forward pass before layer N - N_s
        nodes    the main row that each batch row trails: its newest committed node
        emitted  the token emitted at each of these nodes
        counts   number of streams of each batch row, at most ``streams``; 0: the row is skipped (not for all rows)
        lengths  tokens in the cache of each batch row that the streams attend to; None: the committed ones
        loras    the name of each batch row's LoRA, whose terms its streams have too; empty: no row has one
        """
        assert max(counts) <= self.streams
        low, high = self.stack.first, self.stack.config.num_layers
        lengths = cache.lengths if lengths is None else lengths
        sides = self.target.loras.sides(loras)
        about: Any = {
            "trailing": True,
            "sources": cache.memories,
            "loras": None if sides is None else self._loras.pointers(sides, low),
        }
        if self._entry is None:
            active = [b for b, count in enumerate(counts) if count]
            tokens = self.target.embedding(torch.tensor([emitted[b] for b in active]))[:, None]
            main = main_MD[[nodes[b] for b in active], None].to(self._dtype)
            initial = self.adapter.initial(main, tokens)
            x = torch.cat([initial[i, : counts[b]] for i, b in enumerate(active)]).to(torch.float32)
            step = self.stack.step(lengths, counts, None, cache.capacity, x, **about)
            self.stack.run(x, step, cache, 0, low, high)
            return self.target.normed(x)
        main, entry = main_MD, self._entry
        if main.dtype != torch.float32 or not main.is_contiguous():
            main = main.to(torch.float32).contiguous()
        node_B, emitted_B = np.asarray(nodes, np.int64), np.asarray(emitted, np.int64)
        assert len(node_B) == len(emitted_B) == len(counts)
        entry.main, entry.rows = main.data_ptr(), main.shape[0]
        entry.nodes, entry.emitted = address(node_B), address(emitted_B)
        step = self.stack.step(lengths, counts, None, cache.capacity, **about)
        states = torch.empty((step.native.nodes, main.shape[1]), dtype=self._dtype)
        self._kernels.trail(*self.stack.ready(cache, 0, low, high, step), entry, states)
        return states


def narrow(linear: nn.Module) -> NativeLinear:
    """A linear layer for drafts: bf16 weights are quantised to int4, once for all that draft with them."""
    assert isinstance(linear, NativeLinear)
    if linear.of_rows != "bfloat16":
        return linear
    if linear not in _narrowed:
        _narrowed[linear] = linear.as_int4()
    return _narrowed[linear]


def narrow_layer(block: nn.Module) -> LayerWeights:
    """A layer for drafts."""
    assert isinstance(block, Block)
    assert isinstance(block.mlp, MLP)
    return LayerWeights(block, *map(narrow, (block.qkv, block.out, block.mlp.up, block.mlp.down)))


def _whole_blocks(term: LowRank, like: nn.Module) -> tuple[NativeLinear, NativeLinear]:
    """A low-rank term, with its rank zero-padded to a multiple that the kernels support."""
    more = -len(term.down) % BLOCK
    low = packed_like(like, F.pad(term.down.detach(), (0, 0, 0, more)), None)
    high = packed_like(like, F.pad(term.up.detach(), (0, more)), None)
    assert isinstance(low, NativeLinear)
    assert isinstance(high, NativeLinear)
    return low, high


def native_rider(target: Decoder, adapter: StreamModule, kind: str) -> NativeRider:
    """The rider of an adapter, without pruning, beside a target's weights of a ``kind``; shared by its drafters."""
    return adapter.shared(target, NativeRider, lambda: _packed(target, adapter, kind))


def _packed(target: Decoder, adapter: StreamModule, kind: str) -> NativeRider:
    shape = adapter.shape
    angles = shape.rotation_step * torch.arange(1, shape.num_streams + 1)
    return NativeRider(
        kind,
        start=adapter.start,
        streams=shape.num_streams,
        own=shape.main_attends == "own",
        from_main=adapter.reads_main,
        positioned=adapter.positioned,
        embeddings=adapter.initial_embeddings,
        init=_term(adapter.init),
        root=None if adapter.root is None else _root(adapter.root),
        angles=angles if shape.position == "rotation" else None,
        sides=_sides(adapter),
        exit=_term(adapter.prune),
        softcap=target.config.logit_softcap,
    )


def _sides(adapter: StreamModule) -> Sequence[Side]:
    return [
        Side(
            qkv=_term(layer.delta("qkv")),
            out=_term(layer.delta("out")),
            up=_term(layer.delta("up")),
            down=_term(layer.delta("down")),
            mlp=_term(layer.mlp),
            replaces=not layer.keep_mlp,
            gated=adapter.model.gated_mlp,
        )
        for layer in (adapter.layer(index) for index in range(adapter.start, adapter.model.num_layers))
    ]


def _term(term: LowRank | None) -> Term | None:
    return None if term is None else Term(term.down, term.up)


def _root(root: RootTerm) -> tuple[Tensor, Tensor, Tensor]:
    """The term of streams that ride, which do not know the emitted token."""
    return root.main, root.streams, root.up


@dataclass(eq=False)
class Trailed:
    """The committed rows that streams trail.

    row      the row
    slot     its place in the cache
    latest   the newest token of its text, or of the draft after it
    main_MD  main rows before the streams' first layer; ``node`` is the one of the token before that
    tokens   drafted after its text; all but the last one are in the cache
    """

    row: Row
    slot: int
    latest: int
    main_MD: Tensor
    node: int
    tokens: list[int] = field(default_factory=list)


def trailing(trail: NativeTrail, rows: Sequence[Trailed], cache: Cache, streams: int) -> list[Tensor]:
    """The states [S, D] of streams that trail the latest token of rows, whose slots ascend."""
    nodes, emitted, counts = ([0] * cache.count for _ in range(3))
    loras: list[str | None] = [None] * cache.count
    main_MD, together = rows[0].main_MD, all(row.main_MD is rows[0].main_MD for row in rows)
    if not together:
        main_MD = torch.stack([row.main_MD[row.node] for row in rows])
    for i, row in enumerate(rows):
        nodes[row.slot], emitted[row.slot] = row.node if together else i, row.latest
        counts[row.slot], loras[row.slot] = streams, row.row.lora
    tally(trail.call, [row.row for row in rows])
    states = trail.run(main_MD, nodes, emitted, counts, cache, lengths=lengths_with(rows, cache), loras=loras)
    return [states] if len(rows) == 1 else list(states.view(len(rows), streams, -1))


def lengths_with(rows: Sequence[Trailed], cache: Cache) -> list[int]:
    """The tokens that each row of the cache has, with those that were drafted."""
    lengths = list(cache.lengths)
    for row in rows:
        lengths[row.slot] += len(row.tokens)
    return lengths
