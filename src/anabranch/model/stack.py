"""Layers of a target in the native kernels, any number of them in one call.

B rows of the batch, M nodes of all rows, S positions of a source, D model width.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from anabranch.model.blocks import Block, Norm
from anabranch.model.cache import Cache
from anabranch.model.encoder import Memory
from anabranch.model.experts import Experts
from anabranch.model.layers import Layers, rounded
from anabranch.model.native_linear import Held, NativeLinear, table_of
from anabranch.model.network import Network
from anabranch.model.passes import Need
from anabranch.model.relative import biases_of
from anabranch.model.riding import RiderCall
from anabranch.native import library as native
from anabranch.native import structs
from anabranch.native.arguments import address, require

__all__ = ["LayerWeights", "Stack", "StackStep", "norm_bias", "norm_weight"]

_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")  # as in plan.h
_WIRINGS = {"sequential": 0, "parallel": 1, "parallel_two_norms": 1, "post": 2}
KEPT = 16  # pairs of a cache and a range of layers whose structs are kept, besides one for each layer


@dataclass(frozen=True)
class LayerWeights:
    """One layer: the norms of a block, projections, the MLP, and a low-rank term added to the MLP or instead of it.

    low, high           the low-rank term silu(h low') high'
    cross_q, cross_out  of attention to a source
    """

    block: Block
    qkv: NativeLinear
    out: NativeLinear
    up: NativeLinear | None = None
    down: NativeLinear | None = None
    low: NativeLinear | None = None
    high: NativeLinear | None = None
    cross_q: NativeLinear | None = None
    cross_out: NativeLinear | None = None

    @staticmethod
    def of(block: nn.Module) -> LayerWeights:
        """The weights of a packed block, without experts (``ExpertsBackend``)."""
        assert isinstance(block, Block)
        mlp, cross = block.mlp, block.cross
        parts: dict[str, Any] = {"qkv": block.qkv, "out": block.out}
        parts |= {} if isinstance(mlp, Experts) else {"up": mlp.up, "down": mlp.down}
        parts |= {} if cross is None else {"cross_q": cross.q, "cross_out": cross.out}
        return LayerWeights(block, **parts)

    @property
    def linears(self) -> list[NativeLinear]:
        """The products of the layer."""
        every = (self.qkv, self.out, self.up, self.down, self.low, self.high, self.cross_q, self.cross_out)
        return [linear for linear in every if linear is not None]


class StackStep(NamedTuple):
    """The rows of a pass for the kernels, and the memory that they point to."""

    native: structs.RaggedBatch
    held: tuple[object, ...]


class Stack:
    """Consecutive layers of a target or of its encoder for the kernels; ``first`` is the index of the lowest one.

    nbytes  bytes of weights that a pass reads, without those of the head
    """

    def __init__(self, target: Layers, layers: Sequence[LayerWeights], first: int) -> None:
        kernels = native.library()
        assert kernels is not None, native.why_not()
        config = target.config
        self.kernels, self.config, self.first, self._rope = kernels, config, first, target.rope()
        self.dtype = target.dtype
        self.kind = layers[0].qkv.of_rows  # of the rows between two products, one of KINDS
        self._window = config.sliding_window or 0  # 0: none
        self._held = Held()  # memory that the structs point to
        self._ready: dict[tuple[int, ...], tuple[structs.Shape, structs.Layers]] = {}
        self._norms: dict[Norm, tuple[Tensor, Tensor | None]] = {}
        self._table = (torch.empty(0), 0, 0)  # the last result of ``_pointers``
        self._ends: structs.Ends | None = None
        self._layers = [self._struct(layer, index) for index, layer in enumerate(layers, first)]
        self.nbytes = sum(linear.nbytes for layer in layers for linear in layer.linears)
        scale = config.attention_scale if config.attention_scale is not None else config.head_dim**-0.5
        self._shape = structs.Shape(
            d=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            e=config.head_dim,
            inner=config.intermediate_size,
            rope_dim=self._rope.columns,
            activation=_ACTIVATIONS.index(config.activation),
            gated=config.gated_mlp,
            wiring=_WIRINGS[config.wiring],
            layer_norm=config.norm == "layer",
            heads_normed=config.qk_norm == "all",
            eps=config.norm_eps,
            scale=scale,
            softcap=config.attention_softcap or 0.0,
            residual_scale=config.residual_scale,
            embedding_scale=rounded(config.embedding_scale, target.dtype),
        )
        if target.relative is not None and config.relative is not None:
            biases, self._shape.distance = biases_of(target.relative, config.relative)
            self._shape.biases = self._held.pointer(biases)

    @staticmethod
    def of_target(target: Network, layers: Sequence[LayerWeights] | None = None) -> Stack:
        """All layers of a packed target, with its embedding, last norm and head; ``layers`` replace its own."""
        stack = Stack(target, layers or [LayerWeights.of(block) for block in target.blocks], 0)
        stack._ends = structs.Ends(
            embedding=table_of(target),
            places=stack._places(target),
            **stack._norm("norm", target.norm),
            **stack._norm("norm_embedding", target.norm_embedding),
            head=stack._held.packed(target.head),
            bias=stack._held.pointer(target.head.offset),
            screen=structs.Screen() if target.head.screen is None else target.head.screen.native,
        )
        stack._held.keep(target.embedding)
        return stack

    def _norm(self, name: str, norm: nn.Module | None) -> dict[str, int | None]:
        """The fields of a norm, none if there is none."""
        if not isinstance(norm, Norm):
            return {}
        return {name: self._held.pointer(norm_weight(norm)), f"{name}_bias": self._held.pointer(norm_bias(norm))}

    def _places(self, target: Network) -> structs.Table:
        """The embeddings of positions in the weights' type; empty if there are none."""
        if target.places(torch.arange(0), self.dtype) is None:
            return structs.Table()  # before all positions are listed: of a context without bound they take 8 GB
        places = target.places(torch.arange(self.config.max_positions), self.dtype)
        assert places is not None
        self._held.keep(places)
        return structs.Table(rows=places.data_ptr(), packed=0, words=len(places))

    def _struct(self, layer: LayerWeights, index: int) -> structs.Layer:
        block, turn = layer.block, layer.block.rotation
        # in a parallel block one norm may be for both
        before_mlp = block.norm_in if block.config.wiring == "parallel" else block.norm_mlp
        norms = {
            "norm_in": block.norm_in,
            "norm_mlp": before_mlp,
            "q_norm": block.q_norm,
            "k_norm": block.k_norm,
            "after_attention": block.norm_after_attention,
            "after_mlp": block.norm_after_mlp,
        }
        fields: dict[str, Any] = {}
        for name, norm in norms.items():
            fields |= self._norm(name, norm)
            # the kernels have LayerNorm only before or after attention and MLP
            assert name in ("norm_in", "norm_mlp") or fields.pop(f"{name}_bias", None) is None
        cross = structs.Cross(
            **self._norm("norm", block.norm_cross),
            q_bias=self._held.pointer(None if layer.cross_q is None else layer.cross_q.offset),
            out_bias=self._held.pointer(None if layer.cross_out is None else layer.cross_out.offset),
            q=self._held.packed(layer.cross_q),
            out=self._held.packed(layer.cross_out),
        )
        return structs.Layer(
            **fields,
            cross=cross,
            source=index,
            qkv_bias=self._held.pointer(layer.qkv.offset),
            out_bias=self._held.pointer(layer.out.offset),
            up_bias=self._held.pointer(None if layer.up is None else layer.up.offset),
            down_bias=self._held.pointer(None if layer.down is None else layer.down.offset),
            rope_queries=0 if turn is None else turn.queries,
            rope_keys=0 if turn is None else turn.keys,
            rope_width=0 if turn is None else turn.width,
            slides=block.slides,
            qkv=self._held.packed(layer.qkv),
            out=self._held.packed(layer.out),
            up=self._held.packed(layer.up),
            down=self._held.packed(layer.down),
            low=self._held.packed(layer.low),
            high=self._held.packed(layer.high),
        )

    def ready(
        self, cache: Cache, slot: int, low: int, high: int, step: StackStep
    ) -> tuple[structs.Shape, structs.Layers, structs.RaggedBatch]:
        """Sizes and structs of layers ``low`` to ``high`` - 1, and the step over the cache's rows from ``slot`` on."""
        assert slot + step.native.batch <= cache.rows
        step.native.places = cache.places.buffer_info()[0] + cache.places.itemsize * slot
        size = cache.keys.element_size()
        key = (cache.keys.data_ptr(), cache.values.data_ptr(), low, high, *cache.keys.stride())
        if key not in self._ready:
            while len(self._ready) >= KEPT + len(self._layers):
                del self._ready[next(iter(self._ready))]
            chosen = (structs.Layer * (high - low))(*self._layers[low - self.first : high - self.first])
            layer_bytes = cache.keys.stride(0) * size
            for index, layer in enumerate(chosen, low):
                layer.keys = cache.keys.data_ptr() + index * layer_bytes
                layer.values = cache.values.data_ptr() + index * layer_bytes
            shape = structs.Shape.from_buffer_copy(self._shape)
            shape.row_stride, shape.head_stride = cache.keys.stride(1), cache.keys.stride(2)
            shape.quantized_cache = cache.quantized
            self._ready[key] = shape, chosen
        return *self._ready[key], step.native

    def step(
        self,
        lengths: Sequence[int],
        counts: Sequence[int],
        parents_M: NDArray[np.int64] | None,
        positions: int,
        x_MD: Tensor | None = None,
        *,
        trailing: bool = False,
        whole: bool = False,
        prompts: Sequence[int] = (),
        sources: Sequence[Memory | None] = (),
        loras: array[int] | None = None,
    ) -> StackStep:
        """The nodes of a pass over rows of ``lengths`` committed tokens.

        counts     nodes of each row [B]; a row of 0 nodes takes no part, and its cache is left as it is
        parents_M  indices within the row, each before its child; -1: no parent; None: chains
        positions  the capacity of the cache; only nodes of a rider or of trailing streams lie beyond it
        x_MD       the initial rows, float32; None: the pass starts from tokens
        trailing   the nodes follow the newest committed token and see its sliding window, not one of their own
        whole      each node sees all nodes of its row
        prompts    the length of the prompt of each row that has prompt tokens to read [B], else 0 (``Rope``); empty: 0
        sources    the keys and values of the rows' sources [B]; empty: they have none
        loras      the addresses of the rows' terms in the pass's first layer (``NativeLoras``); None: they have none
        """
        lengths_B, starts = array("q", lengths), array("q", accumulate(counts, initial=0))
        nodes = starts[-1]
        parents_M = None if parents_M is None else np.ascontiguousarray(parents_M, np.int64)
        assert len(lengths_B) == len(counts)
        assert parents_M is None or parents_M.shape == (nodes,)
        assert x_MD is None or x_MD.shape == (nodes, self.config.hidden_size)
        rotations = self._rope.rotations(positions, prompts)
        table, cos, sin = self._pointers(rotations.table)
        angles_B = None if rotations.starts_B is None else array("q", rotations.starts_B)
        step = structs.RaggedBatch(
            len(lengths),
            nodes,
            self._window,
            trailing,
            table.shape[1],
            whole,
            None if x_MD is None else x_MD.data_ptr(),
            cos,
            sin,
            starts.buffer_info()[0],
            lengths_B.buffer_info()[0],
            None if parents_M is None else address(parents_M),
            None if angles_B is None else angles_B.buffer_info()[0],
        )  # ``ready`` sets the places
        held = _point_to(step, sources) if self.config.encoder is not None else ()
        if loras is not None:
            step.loras = loras.buffer_info()[0]
        return StackStep(step, (lengths_B, starts, parents_M, angles_B, table, x_MD, held, loras))

    def _pointers(self, table: Tensor) -> tuple[Tensor, int, int]:
        """A rotation table [2, positions, dim], and the addresses of its cosines and sines."""
        if table is not self._table[0]:
            assert table.dtype == torch.float32
            assert table[0].is_contiguous()
            cos = table.data_ptr()
            self._table = (table, cos, cos + table.stride(0) * table.element_size())
        return self._table

    def run(self, x_MD: Tensor, step: StackStep, cache: Cache, slot: int, low: int, high: int) -> None:
        """Run layers ``low`` to ``high`` - 1 of the target over the float32 rows of ``step``, in place.

        ``slot`` is the cache slot of the first row. Keys and values are written after the committed tokens.
        """
        assert x_MD.dtype == torch.float32
        assert x_MD.is_contiguous()
        assert x_MD.data_ptr() == step.native.x
        if low < high:
            self.kernels.layers(*self.ready(cache, slot, low, high, step))

    def through(
        self,
        tokens_M: NDArray[np.int64],
        step: StackStep,
        cache: Cache,
        slot: int,
        *,
        need: Need,
        taps: Sequence[int] = (),
        prefill: Sequence[int] = (),
        rider: RiderCall | None = None,
    ) -> tuple[Tensor, NDArray[np.int64] | None, dict[int, Tensor]]:
        """Run a whole pass in one call.

        Returns hidden states after the last norm [M, D] in the weights' type (empty if only keys and values are
        needed), the greedy tokens [M] if these are needed, and the float32 rows before the layers ``taps`` [M, D]; all
        without each row's first ``prefill`` nodes (``Inputs.prefill_B``) and without what a ``rider`` prunes.
        """
        assert self._ends is not None, "only a stack made by of_target runs whole passes"
        tokens_M, d = np.ascontiguousarray(tokens_M, np.int64), self.config.hidden_size
        assert tokens_M.shape == (step.native.nodes,)
        nodes = len(tokens_M) - sum(prefill)
        require(len(prefill) in (0, step.native.batch), "{} counts of prompt tokens in a pass", len(prefill))
        hidden = torch.empty((0 if need == "keys" else nodes, d), dtype=cache.dtype)
        chosen = np.empty(nodes, np.int64) if need == "tokens" else None
        layers = np.array(sorted(set(taps)), np.int32)
        seen = torch.empty((len(layers), nodes, d), dtype=torch.float32)
        tapped = structs.Taps(len(layers), nodes, address(layers), seen.data_ptr()) if len(layers) else None
        ends = structs.Ends.from_buffer_copy(self._ends)
        ends.tokens, ends.hidden = address(tokens_M), hidden.data_ptr() or None
        ends.chosen = None if chosen is None else address(chosen)
        prefill_B = np.array(prefill, np.int64) if any(prefill) else None
        ends.prefill = None if prefill_B is None else address(prefill_B)
        ready = self.ready(cache, slot, 0, self.config.num_layers, step)
        self.kernels.layers(*ready, ends, None if rider is None else rider.native, tapped)
        if rider is not None:
            nodes = sum(rider.counts)
            hidden, chosen = hidden[:nodes], None if chosen is None else chosen[:nodes]
        return hidden, chosen, {int(layer): rows[:nodes] for layer, rows in zip(layers, seen, strict=True)}

    def encode(self, x_SD: Tensor, norm: nn.Module) -> Tensor:
        """Run all layers over float32 rows that see each other, in place; returns them after the last norm [S, D]."""
        size, c = len(x_SD), self.config
        keys, values = torch.empty(2, c.num_kv_heads, size, c.head_dim, dtype=self.dtype)  # of one layer at a time
        layers = (structs.Layer * len(self._layers))(*self._layers)
        for layer in layers:
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
        shape = structs.Shape.from_buffer_copy(self._shape)
        shape.row_stride, shape.head_stride = keys.numel(), keys.stride(0)
        step = self.step([0], [size], None, size, x_SD, whole=True)
        self.kernels.layers(shape, layers, step.native)
        return self.normed(x_SD, norm)

    def normed(self, x: Tensor, norm: nn.Module) -> Tensor:
        """Normalise float32 rows [..., D], in the weights' type; only convert them if there is no norm."""
        if not isinstance(norm, Norm):
            return x.to(self.dtype)
        if norm not in self._norms:
            self._norms[norm] = norm_weight(norm).contiguous(), norm_bias(norm)
        weight, bias = self._norms[norm]
        return self.kernels.norm(x, weight, norm.eps, self.dtype, bias=bias, layer=norm.kind == "layer")


def _point_to(step: structs.RaggedBatch, sources: Sequence[Memory | None]) -> tuple[object, ...]:
    """Let a batch point to the sources of its rows; returns the memory that it points to."""
    assert len(sources) == step.batch
    sizes = array("q", [0 if each is None else each.keys.shape[2] for each in sources])
    keys = array("Q", [0 if each is None else each.keys.data_ptr() for each in sources])
    values = array("Q", [0 if each is None else each.values.data_ptr() for each in sources])
    step.sizes, step.source_keys, step.source_values = (each.buffer_info()[0] for each in (sizes, keys, values))
    return sizes, keys, values, sources


def norm_weight(norm: Norm) -> Tensor:
    """The float32 factors of a norm [D]."""
    weight = norm.weight.detach().float()
    weight = weight + 1.0 if norm.plus_one else weight
    return weight if norm.scale == 1.0 else weight * norm.scale


def norm_bias(norm: Norm) -> Tensor | None:
    """The float32 terms of a norm [D]; None: it has none."""
    return None if norm.bias is None else norm.bias.detach().float().contiguous() * norm.scale
