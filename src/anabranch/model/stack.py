"""Layers of a target run by the native kernels: one call for any number of them.

B rows of the batch, M nodes of a pass, those of its first row first, L committed tokens, D model width.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from anabranch.errors import PerformanceWarning
from anabranch.model.cache import Cache
from anabranch.model.decoder import Block, Decoder, Norm
from anabranch.model.quantize import QuantizedLinear, QuantizedWeight
from anabranch.native import library as native
from anabranch.native.build import Shortfall

KEPT = 16  # layers made ready for a cache, that many times

__all__ = [
    "HeadTable",
    "KernelUse",
    "LayerWeights",
    "NativeLinear",
    "Stack",
    "StackStep",
    "kernels_of",
    "native_for",
    "table_of",
    "warn_about_kernels",
    "why_not_native",
]


class NativeLinear(nn.Module):
    """``nn.Linear`` over a packed weight; each row is computed as if it were alone. Inference only.

    weight  bf16 or float32 [N, D], or quantised; rows come and go in bf16 if it is quantised, else in its type
    wide    returns float32 (scores) instead
    keep    weight to keep as it was beside the packed one, where ``rows`` cannot be had from that
    gated   the two halves of the outputs, gate and up, are packed block by block in turn, so that they are read as one

    bf16 weights are packed in pairs of inputs: an odd D is padded with a zero.
    """

    def __init__(
        self,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None,
        *,
        keep: Tensor | None = None,
        wide: bool = False,
        gated: bool = False,
    ) -> None:
        super().__init__()
        kernels = native.library()
        assert kernels is not None, native.why_not()
        self.kernels, self.wide, self.gated, self.weight = kernels, wide, gated, keep
        self.kind: str  # one of native.KINDS
        if isinstance(weight, QuantizedWeight):
            q = weight.outputs(self._in_turn) if gated else weight
            self.kind, self.dtype = q.kind, torch.bfloat16
            self.packed, self._memory = kernels.pack(q.kind, q.values, q.scale, q.least)
        else:
            self.kind, self.dtype = str(weight.dtype).removeprefix("torch."), weight.dtype
            more = -weight.shape[1] % (4 // weight.dtype.itemsize)
            whole = F.pad(weight.detach(), (0, more)) if more else weight
            self.packed, self._memory = kernels.pack(self.kind, self._in_turn(whole) if gated else whole)
        self.in_features = (weight.values if isinstance(weight, QuantizedWeight) else weight).shape[1]
        self.out_features = self.packed.outputs
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.offset = None if bias is None else bias.detach().float().contiguous()

    @property
    def nbytes(self) -> int:
        """What a product reads of memory."""
        return self._memory.nbytes

    @staticmethod
    def _in_turn(y: Tensor, *, back: bool = False) -> Tensor:
        """Blocks of the first half and of the second of axis 0 in turn, or that undone."""
        shape = (-1, 2, native.BLOCK) if back else (2, -1, native.BLOCK)
        return y.view(*shape, *y.shape[1:]).transpose(0, 1).reshape(y.shape)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        y = self.kernels.linear(self._padded(x), self.packed, self.offset)
        if self.gated:
            y = self._in_turn(y.T.contiguous(), back=True).T
        y = y.reshape(*x.shape[:-1], self.out_features)
        return y if self.wide else y.to(self.dtype)

    def choose(self, x: Tensor) -> Tensor:
        """Where the largest output of each row [..., in] first stands: int64 [...]."""
        return self.kernels.choose(self._padded(x), self.packed, self.offset).view(x.shape[:-1])

    def _padded(self, x: Tensor) -> Tensor:
        """Rows [..., in] as the kernels take them: [M, packed width]."""
        rows = x.reshape(-1, self.in_features).to(self.dtype)
        more = self.packed.width - self.in_features
        return F.pad(rows, (0, more)) if more else rows

    def rows(self, outputs: Tensor) -> Tensor:
        """Rows of the weight as it was, of some outputs [...]: [..., in]."""
        if self.weight is not None:
            return self.weight[outputs]
        return self._blocks()[outputs // native.BLOCK, :, outputs % native.BLOCK].flatten(-2)[..., : self.in_features]

    def _blocks(self) -> Tensor:
        """A weight that is not quantised [blocks, packed width / together, BLOCK, together]."""
        together = 4 // self.dtype.itemsize
        return self._memory.view(self.dtype).view(-1, self.packed.width // together, native.BLOCK, together)

    def dense(self) -> Tensor:
        """The weight [out, in] as it was, in the rows' type; a quantised one as products see it, rounded to it."""
        if self.kind in ("int8", "int4"):
            # each column of the unit matrix is exact in int8, so its product is the weight's column
            y = self.kernels.linear(torch.eye(self.in_features), self.packed, None).T.to(self.dtype)
        else:
            y = self._blocks().permute(0, 2, 1, 3).reshape(-1, self.packed.width)
            y = y[: self.out_features, : self.in_features].contiguous()
        return self._in_turn(y, back=True) if self.gated else y


class HeadTable(nn.Module):
    """The embedding of a target whose packed head is the same weight."""

    def __init__(self, head: NativeLinear) -> None:
        super().__init__()
        self.head = head

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [...] -> [..., D]."""
        return self.head.rows(tokens)


def table_of(target: Decoder) -> native.Table:
    """The embedding, for the kernels; it must outlive their calls."""
    if isinstance(target.embedding, HeadTable):
        packed = target.embedding.head.packed
        return native.Table(rows=packed.data, packed=1, words=packed.outputs)
    weight = target.embedding.weight
    assert weight.is_contiguous()
    return native.Table(rows=weight.data_ptr(), packed=0, words=len(weight))


@dataclass(frozen=True)
class LayerWeights:
    """One layer: the norms of a block of the target, projections, the MLP, and a low-rank term beside or in its place.

    low, high    silu(h low') high' is added to the MLP's output
    """

    block: Block
    qkv: NativeLinear
    out: NativeLinear
    up: NativeLinear | None = None
    down: NativeLinear | None = None
    low: NativeLinear | None = None
    high: NativeLinear | None = None


@dataclass(frozen=True)
class StackStep:
    """The rows of a pass as the kernels read them, and what that points to."""

    native: native.RaggedBatch
    held: tuple[object, ...]


class Stack:
    """Consecutive layers, ready to run. ``first`` is the index in the target of the lowest one."""

    def __init__(self, target: Decoder, layers: Sequence[LayerWeights], first: int) -> None:
        kernels = native.library()
        assert kernels is not None, native.why_not()
        config = target.config
        self.kernels, self.config, self.first, self._rope = kernels, config, first, target.rope()
        self.kind = layers[0].qkv.kind  # of weights, one of native.KINDS
        self._window = (config.sliding_window if config.is_sliding(0) else None) or 0  # 0: none
        self._kept: list[object] = []  # what the structs point to
        self._ready: dict[tuple[int, ...], tuple[native.Shape, native.Layers]] = {}
        self._norms: dict[Norm, Tensor] = {}
        self._ends: native.Ends | None = None
        self._layers = [self._struct(layer) for layer in layers]
        scale = config.attention_scale if config.attention_scale is not None else config.head_dim**-0.5
        self._shape = native.Shape(
            d=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            e=config.head_dim,
            inner=config.intermediate_size,
            rope_dim=config.rope.dim,
            eps=config.norm_eps,
            scale=scale,
        )

    @staticmethod
    def of_decoder(target: Decoder) -> Stack:
        """All layers of a packed target, and what lies before and behind them."""
        layers = []
        for block in target.blocks:
            assert isinstance(block, Block)
            weights = (block.qkv, block.out, block.mlp.up, block.mlp.down)
            layers.append(LayerWeights(block, *(linear for linear in weights if isinstance(linear, NativeLinear))))
        stack = Stack(target, layers, 0)
        stack._ends = native.Ends(
            embedding=table_of(target),
            norm=stack._pointer(norm_weight(target.norm)),
            head=stack._packed(target.head),
            bias=stack._pointer(target.head.offset),
        )
        stack._kept.append(target.embedding)
        return stack

    def _pointer(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        kept = tensor.detach().float().contiguous()
        self._kept.append(kept)
        return int(kept.data_ptr())

    def _packed(self, linear: NativeLinear | None) -> native.Packed:
        if linear is None:
            return native.Packed()
        self._kept.append(linear)
        return linear.packed

    def _struct(self, layer: LayerWeights) -> native.Layer:
        block = layer.block
        assert block.norm_mlp is not None
        return native.Layer(
            norm_in=self._pointer(norm_weight(block.norm_in)),
            norm_mlp=self._pointer(norm_weight(block.norm_mlp)),
            q_norm=self._pointer(None if block.q_norm is None else norm_weight(block.q_norm)),
            k_norm=self._pointer(None if block.k_norm is None else norm_weight(block.k_norm)),
            qkv_bias=self._pointer(layer.qkv.offset),
            out_bias=self._pointer(layer.out.offset),
            qkv=self._packed(layer.qkv),
            out=self._packed(layer.out),
            up=self._packed(layer.up),
            down=self._packed(layer.down),
            low=self._packed(layer.low),
            high=self._packed(layer.high),
        )

    def ready(self, cache: Cache, slot: int, low: int, high: int) -> tuple[native.Shape, native.Layers]:
        """Layers ``low`` to ``high`` - 1 of the target over the cache's rows from ``slot`` on, and their sizes."""
        size = cache.keys.element_size()
        where = (cache.keys.data_ptr(), cache.values.data_ptr(), slot, low, high, *cache.keys.stride())
        if where not in self._ready:
            while len(self._ready) >= KEPT:
                del self._ready[next(iter(self._ready))]
            chosen = (native.Layer * (high - low))(*self._layers[low - self.first : high - self.first])
            layer_bytes, slot_bytes = cache.keys.stride(0) * size, cache.keys.stride(1) * size * slot
            for index, layer in enumerate(chosen, low):
                layer.keys = cache.keys.data_ptr() + slot_bytes + index * layer_bytes
                layer.values = cache.values.data_ptr() + slot_bytes + index * layer_bytes
            shape = native.Shape.from_buffer_copy(self._shape)
            shape.row_stride, shape.head_stride = cache.keys.stride(1), cache.keys.stride(2)
            self._ready[where] = shape, chosen
        return self._ready[where]

    def step(
        self,
        lengths: Sequence[int],
        counts: Sequence[int],
        parents_M: NDArray[np.int64] | None,
        planned: int,
        x_MD: Tensor | None = None,
        *,
        trailing: bool = False,
    ) -> StackStep:
        """The nodes of a pass behind rows of these lengths; all layers slide alike.

        counts          nodes of each row [B]; a row of 0 nodes takes no part, and its cache is left as it is
        parents_M       of the nodes, counted within their row, each before its child; -1: none; None: chains
        planned         the length that the longest row will reach, for rotations that depend on it
        trailing        these are streams, whose sliding window is that of the newest committed token
        """
        lengths_B, starts = np.array(lengths, np.int64), np.array([*accumulate(counts, initial=0)], np.int64)
        nodes = int(starts[-1])
        parents_M = None if parents_M is None else np.ascontiguousarray(parents_M, np.int64)
        table = self._rope.table(planned)  # cos and sin of all positions [2, .., dim]
        assert table.dtype == torch.float32
        assert table[0].is_contiguous()
        assert len(lengths_B) == len(counts)
        assert parents_M is None or parents_M.shape == (nodes,)
        assert x_MD is None or x_MD.shape == (nodes, self.config.hidden_size)
        cos = table.data_ptr()
        step = native.RaggedBatch(
            len(lengths),
            nodes,
            self._window,
            trailing,
            table.shape[1],
            None if x_MD is None else x_MD.data_ptr(),
            cos,
            cos + table.stride(0) * table.element_size(),
            starts.ctypes.data,
            lengths_B.ctypes.data,
            None if parents_M is None else parents_M.ctypes.data,
        )
        return StackStep(step, (lengths_B, starts, parents_M, table, x_MD))

    def run(self, x_MD: Tensor, step: StackStep, cache: Cache, slot: int, low: int, high: int) -> None:
        """Layers ``low`` to ``high`` - 1 of the target over float32 rows, in place, which ``step`` is of.

        ``slot`` is the cache's row of the first one. Keys and values are written behind the committed tokens.
        """
        assert x_MD.dtype == torch.float32
        assert x_MD.is_contiguous()
        assert x_MD.data_ptr() == step.native.x
        assert slot + step.native.batch <= cache.keys.shape[1]
        if low < high:
            self.kernels.layers(*self.ready(cache, slot, low, high), step.native)

    def through(
        self,
        tokens_M: NDArray[np.int64],
        step: StackStep,
        cache: Cache,
        slot: int,
        *,
        choose: bool,
        tapped: int | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """A whole pass in one call, for the stack of a target: rows after the last norm [M, D] in the weights' type,
        what the head ``choose``s [M], and float32 rows as they are before layer ``tapped`` [M, D].
        """
        assert self._ends is not None, "these are not all layers of a target"
        tokens_M, d = np.ascontiguousarray(tokens_M, np.int64), self.config.hidden_size
        assert tokens_M.shape == (step.native.nodes,)
        assert slot + step.native.batch <= cache.keys.shape[1]
        hidden = torch.empty((len(tokens_M), d), dtype=cache.keys.dtype)
        chosen = torch.empty(len(tokens_M), dtype=torch.long) if choose else None
        seen = None if tapped is None else torch.empty(hidden.shape, dtype=torch.float32)
        ends = native.Ends.from_buffer_copy(self._ends)
        ends.tokens, ends.hidden = tokens_M.ctypes.data, hidden.data_ptr()
        ends.chosen = None if chosen is None else chosen.data_ptr()
        ready = self.ready(cache, slot, 0, self.config.num_layers)
        self.kernels.layers(*ready, step.native, ends, seen, tapped or 0)
        return hidden, chosen, seen

    def normed(self, x: Tensor, norm: Norm) -> Tensor:
        """A norm of float32 rows, in the weights' type."""
        if norm not in self._norms:
            self._norms[norm] = norm_weight(norm).contiguous()
        return self.kernels.norm(x, self._norms[norm], norm.eps, norm.weight.dtype)


def norm_weight(norm: Norm) -> Tensor:
    """What an RMS norm multiplies by, float32."""
    weight = norm.weight.detach().float()
    return weight + 1.0 if norm.plus_one else weight


@dataclass(frozen=True)
class KernelUse:
    """Which kernels decode a target: ``name`` is "torch" or one of ``build.FORMS``.

    why         why these and none that are faster; empty where they are the best that this processor can run
    advice      what the user can do about it; empty where there is nothing
    accepted    nothing to warn of: the user asked for these kernels, or this machine can run no better ones
    """

    name: str
    why: str = ""
    advice: str = ""
    accepted: bool = False


_warned: set[str] = set()  # reasons of ``warn_about_kernels``


def kernels_of(target: Decoder) -> KernelUse:
    """Which kernels decode a packed target, and why no faster ones."""
    name = "torch" if target.stack is None else target.stack.kernels.form
    lacking = native.shortfall() if target.stack is not None else _lacking(target)
    if lacking is None:
        return KernelUse(name)
    return KernelUse(name, lacking.why, lacking.advice, lacking.accepted)


def warn_about_kernels(target: Decoder, *, stacklevel: int = 2) -> None:
    """Warn (PerformanceWarning) where a packed target is decoded by slower kernels than the machine could run.

    Once per reason and process; not where the user chose the kernels, nor on a GPU.
    """
    use = kernels_of(target)
    if not use.why or use.accepted or use.why in _warned:
        return
    _warned.add(use.why)
    slower = "decoding runs on PyTorch's kernels, which are slower: " if use.name == "torch" else ""
    advice = f"; {use.advice}" if use.advice else ""
    warnings.warn(f"{slower}{use.why}{advice}", PerformanceWarning, stacklevel=stacklevel + 1)


def why_not_native(target: Decoder) -> str:
    """Why the native kernels cannot run this target; empty where they can."""
    lacking = _lacking(target)
    return "" if lacking is None else lacking.why


def _lacking(target: Decoder) -> Shortfall | None:
    """What keeps the native kernels from this target: the target first, then the machine."""
    c = target.config
    if target.device.type != "cpu":
        return Shortfall(f"the native kernels are for CPUs, not {target.device.type}", accepted=True)
    if target.dtype not in (torch.bfloat16, torch.float32):
        dtype = str(target.dtype).removeprefix("torch.")
        return Shortfall(f"the native kernels take bfloat16 and float32, not {dtype}", "load it in bfloat16")
    if isinstance(target.head, QuantizedLinear) and target.dtype != torch.bfloat16:
        return Shortfall("the native kernels run quantised weights beside bfloat16 only", "load it in bfloat16")
    wired = c.wiring == "sequential" and c.norm == "rms" and c.gated_mlp and c.activation == "silu"
    plain = not (c.post_norms or c.mlp_bias or c.attention_softcap is not None) and c.position == "rope"
    alike = len({c.is_sliding(layer) for layer in range(c.num_layers)}) == 1
    other = "use a model of the Llama, Mistral, SmolLM, Qwen2 or Qwen3 families for the faster kernels"
    if not (wired and plain and alike and c.embedding_scale == 1.0):
        return Shortfall(f"the native kernels do not cover the {c.family} family", other)
    sizes = {"hidden_size": c.hidden_size, "head_dim": c.head_dim, "intermediate_size": c.intermediate_size}
    for name, size in sizes.items():
        if size % native.BLOCK:
            return Shortfall(f"the native kernels take sizes in multiples of 32, and {name} is {size}")
    if c.head_dim > 128:
        return Shortfall(f"the native kernels take heads of at most 128 channels, and these have {c.head_dim}")
    if c.rope.dim % 2 or c.rope.dim > c.head_dim:
        channels = f"{c.rope.dim} of {c.head_dim} channels"
        return Shortfall(f"the native kernels rotate an even number of a head's channels, not {channels}")
    return native.shortfall() if native.library() is None else None


def native_for(target: Decoder) -> bool:
    """Whether the native kernels can run this target."""
    return not why_not_native(target)
