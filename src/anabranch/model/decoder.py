"""The target: one decoder for every family, plain PyTorch, its wiring read from a ModelConfig.

B rows of the batch, N tree nodes, R rows of one pass (N main rows, then any stream rows), V vocabulary,
D model width, H query heads, K kv heads, G = H / K, E head width, L cache length.

The decoder verifies trees: a pass takes a ``Inputs`` of nodes with an ancestor mask, and a chain or a prompt is
the tree without branches. Whoever wants to ride in the pass (speculative streams) implements ``Rider``:
it enters at a layer, may drop nodes there, brings rows of its own, and attends for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache as remembered
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from anabranch.errors import InputError
from anabranch.model.cache import Cache
from anabranch.model.config import ModelConfig
from anabranch.model.graphs import Recorder, span_bucket, width_bucket
from anabranch.model.rope import Rope, rotate
from anabranch.sampling import COLDEST, SamplingParams, argmax, target_tokens
from anabranch.tree import DraftTree, depths_of, mask_of

if TYPE_CHECKING:
    from anabranch.model.stack import Stack

__all__ = ["Block", "Decoder", "Entry", "Inputs", "Nodes", "Pass", "PassResult", "Rider", "RowSide"]


@dataclass(frozen=True)
class Inputs:
    """The nodes of one pass, those of the first row first: tokens and parents [M], and how many each row has [B].

    Parents are counted within a row and precede their children; -1: none. A row of 0 nodes takes no part. Where all
    rows need one width, they are padded at the end ([B, N]): a padding node sees itself alone, and nobody sees it.
    """

    tokens_M: NDArray[np.int64]
    parents_M: NDArray[np.int64]
    counts_B: Sequence[int]

    @staticmethod
    def of_trees(trees: Sequence[DraftTree]) -> Inputs:
        """The trees of one step."""
        if len(trees) == 1:
            return Inputs(trees[0].tokens, trees[0].parents, (trees[0].size,))
        tokens, parents = (
            np.concatenate(x) for x in zip(*((tree.tokens, tree.parents) for tree in trees), strict=True)
        )
        return Inputs(tokens, parents, [tree.size for tree in trees])

    @staticmethod
    def of_chains(tokens_BN: NDArray[np.int64]) -> Inputs:
        """Stretches of text of one length."""
        rows, width = tokens_BN.shape
        return Inputs(tokens_BN.reshape(-1), np.tile(np.arange(-1, width - 1), rows), (width,) * rows)

    @staticmethod
    def of_prompt(tokens: Sequence[int]) -> Inputs:
        """A stretch of one prompt."""
        return Inputs.of_chains(np.asarray([tokens], np.int64))

    @cached_property
    def starts_B(self) -> list[int]:
        """Where each row's nodes begin in [M]."""
        return [0, *accumulate(self.counts_B)][:-1]

    @property
    def width(self) -> int:
        """Nodes of the widest row."""
        return max(self.counts_B)

    @cached_property
    def alike(self) -> bool:
        """Whether all rows have the same number of nodes."""
        return min(self.counts_B) == self.width

    def _padded(self, values_M: NDArray[np.int64], padding: int) -> NDArray[np.int64]:
        shape = len(self.counts_B), self.width
        if self.alike:
            return values_M.reshape(shape)
        whole = np.full(shape, padding, np.int64)
        for row, start, count in zip(whole, self.starts_B, self.counts_B, strict=True):
            row[:count] = values_M[start : start + count]
        return whole

    @cached_property
    def tokens_BN(self) -> NDArray[np.int64]:
        """Tokens, padded with 0."""
        return self._padded(self.tokens_M, 0)

    @cached_property
    def parents_BN(self) -> NDArray[np.int64]:
        """Parents, padded with -1."""
        return self._padded(self.parents_M, -1)

    @cached_property
    def depths_BN(self) -> NDArray[np.int64]:
        """Depth below the last committed token [B, N]."""
        return np.stack([depths_of(parents) for parents in self.parents_BN])

    @cached_property
    def mask_BNN(self) -> NDArray[np.bool_]:
        """Which nodes of its row a node sees, itself among them [B, N, N]."""
        return np.stack([mask_of(parents) for parents in self.parents_BN])

    def widened(self, width: int) -> Inputs:
        """The same with every row padded to ``width`` nodes."""
        more = ((0, 0), (0, width - self.width))
        tokens, parents = np.pad(self.tokens_BN, more), np.pad(self.parents_BN, more, constant_values=-1)
        return Inputs(tokens.reshape(-1), parents.reshape(-1), (width,) * len(self.counts_B))


class Norm(nn.Module):
    """RMSNorm (optionally with weight + 1, Gemma) or LayerNorm; statistics in float32."""

    def __init__(self, config: ModelConfig, width: int | None = None) -> None:
        super().__init__()
        width = config.hidden_size if width is None else width
        self.kind, self.eps, self.plus_one = config.norm, config.norm_eps, config.norm_plus_one
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if config.norm == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        if self.kind == "layer":
            return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)
        if self.plus_one:
            y = x.float()
            y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
            return (y * (1.0 + self.weight.float())).to(x.dtype)
        if x.dtype == torch.float32:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        if x.is_cuda:  # one kernel, where what follows takes seven
            return self.weight * F.rms_norm(x, (x.shape[-1],), None, self.eps)
        y = x.float()
        y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return self.weight * y


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class MLP(nn.Module):
    """The feed-forward part; gate and up lie in one matrix where the MLP is gated."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inner = config.intermediate_size
        self.gated = config.gated_mlp
        self.up = nn.Linear(config.hidden_size, inner * (2 if self.gated else 1), bias=config.mlp_bias)
        self.down = nn.Linear(inner, config.hidden_size, bias=config.mlp_bias)
        self.activation = _ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        """[B, R, D] -> [B, R, D]."""
        y = self.up(x)
        if self.gated:
            gate, y = y.chunk(2, dim=-1)
            return self.down(self.activation(gate) * y)  # type: ignore[no-any-return]
        return self.down(self.activation(y))  # type: ignore[no-any-return]


class RowSide(Protocol):
    """What a rider adds to a block for rows of its own. The main rows come first and are never touched."""

    def qkv(self, h_BRD: Tensor, qkv: nn.Module) -> Tensor:
        """The packed projections of all rows."""

    def out(self, a: Tensor, out: nn.Module) -> Tensor:
        """The attention's output projection of all rows."""

    def mlp(self, h_BRD: Tensor, mlp: MLP) -> Tensor:
        """The feed-forward part of all rows."""


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    """One layer, wired as the config says."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.norm_in = Norm(config)
        self.qkv: nn.Module = nn.Linear(config.hidden_size, q + 2 * kv, bias=config.qkv_bias)
        self.out: nn.Module = nn.Linear(q, config.hidden_size, bias=config.out_bias)
        self.mlp = MLP(config)
        self.q_norm = Norm(config, config.head_dim) if config.qk_norm else None
        self.k_norm = Norm(config, config.head_dim) if config.qk_norm else None
        self.norm_mlp = Norm(config) if config.wiring != "parallel" else None
        self.norm_after_attention = Norm(config) if config.post_norms else None
        self.norm_after_mlp = Norm(config) if config.post_norms else None

    def split(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Packed projections [B, R, (H+2K)E] -> q [B, R, H, E], k, v [B, R, K, E], rotated."""
        c = self.config
        b, r, _ = qkv.shape
        heads = qkv.view(b, r, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        if self.q_norm is None and c.position == "rope":
            # q and k turn together: one rotation instead of two
            turned = rotate(heads[:, :, : c.num_heads + c.num_kv_heads], cos, sin)
            return turned[:, :, : c.num_heads], turned[:, :, c.num_heads :], heads[:, :, c.num_heads + c.num_kv_heads :]
        q, k, v = heads.tensor_split((c.num_heads, c.num_heads + c.num_kv_heads), dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if c.position == "rope":
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return q, k, v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, side: RowSide | None = None) -> Tensor:
        """x [B, R, D] -> [B, R, D]; ``attend`` maps q, k, v to [B, R, H E] and owns cache and mask."""
        h = self.norm_in(x)
        qkv = self.qkv(h) if side is None else side.qkv(h, self.qkv)
        a = attend(*self.split(qkv, cos, sin))
        o = self.out(a) if side is None else side.out(a, self.out)
        if self.norm_after_attention is not None:
            o = self.norm_after_attention(o)
        if self.config.wiring == "sequential":
            x = x + o
            assert self.norm_mlp is not None
            h = self.norm_mlp(x)
        elif self.norm_mlp is not None:
            h = self.norm_mlp(x)
        m = self.mlp(h) if side is None else side.mlp(h, self.mlp)
        if self.norm_after_mlp is not None:
            m = self.norm_after_mlp(m)
        return x + m if self.config.wiring == "sequential" else x + o + m


class Nodes(NamedTuple):
    """A Inputs behind rows of these lengths, as tensors."""

    tokens_BN: Tensor
    positions_BN: Tensor
    lengths_B: Tensor
    tree_BNN: Tensor

    @staticmethod
    def of(feed: Inputs, lengths: Sequence[int]) -> Nodes:
        """On the host."""
        lengths_B = np.asarray(lengths, np.int64)
        arrays = (feed.tokens_BN, feed.depths_BN + lengths_B[:, None], lengths_B, feed.mask_BNN)
        return Nodes(*map(torch.from_numpy, arrays))


class Pass:
    """The device side of a Inputs: positions, rotations and masks of one forward over some rows of a cache.

    With a ``span`` the pass reads that many positions of the cache, in use or not, and all that changes from step to
    step lies in tensors: it can be recorded (``graphs``).
    """

    def __init__(
        self,
        config: ModelConfig,
        nodes: Nodes,
        cache: Cache,
        slots: slice,
        planned: int,
        rope: Rope,
        *,
        span: int | None = None,
    ) -> None:
        self.config, self.cache, self.slots, self.planned, self.rope = config, cache, slots, planned, rope
        device, self.dtype = cache.keys.device, cache.keys.dtype
        self.tokens_BN, self.positions_BN, self.lengths_B, self.tree_BNN = (x.to(device) for x in nodes)
        self.fixed = span
        # one node of one row sees all that is in use: no mask needed
        self.plain = self.tokens_BN.shape == (1, 1) and span is None
        if span is not None:
            cache.place(self.lengths_B[:, None] + torch.arange(self.width, device=device))
        self._prepare()

    @property
    def width(self) -> int:
        """Nodes a row."""
        return self.tokens_BN.shape[1]

    def _prepare(self) -> None:
        self.cos, self.sin = (turn.to(self.dtype) for turn in self.rope(self.positions_BN, self.planned))
        self.span = int(max(self.cache.lengths[self.slots])) + self.width if self.fixed is None else self.fixed
        self._visible: Tensor | None = None
        self._parents: Tensor | None = None
        self._bias: dict[bool, Tensor | None] = {}

    @property
    def parents_BN(self) -> Tensor:
        """Each node's parent, its last ancestor before itself; -1: it has none."""
        if self._parents is None:
            nodes = torch.arange(self.width, device=self.tree_BNN.device)
            above = self.tree_BNN & (nodes[None, :] < nodes[:, None])
            self._parents = torch.where(above, nodes, -1).max(-1).values
        return self._parents

    @property
    def visible_BNL(self) -> Tensor:
        """Which cache positions each node may see [B, N, L]: committed tokens, ancestors, itself."""
        if self._visible is None:
            self._visible = self._see()
        return self._visible

    def _see(self) -> Tensor:
        relative_BL = torch.arange(self.span, device=self.lengths_B.device)[None] - self.lengths_B[:, None]
        inside = (relative_BL >= 0) & (relative_BL < self.width)
        index = relative_BL.clamp(0, self.width - 1)[:, None, :].expand(-1, self.width, -1)
        tree = self.tree_BNN.gather(2, index) & inside[:, None, :]
        return tree | (relative_BL < 0)[:, None, :]

    def key_positions(self) -> Tensor:
        """The text position of each cache position [B, L]; tree nodes sit at their depth."""
        relative_BL = torch.arange(self.span, device=self.lengths_B.device)[None] - self.lengths_B[:, None]
        node = self.positions_BN.gather(1, relative_BL.clamp(0, self.width - 1))
        return torch.where(relative_BL < 0, relative_BL + self.lengths_B[:, None], node)

    def visible(self, layer: int) -> Tensor:
        """Which cache positions each node sees in a layer [B, N, L], sliding window included."""
        if not self.config.is_sliding(layer):
            return self.visible_BNL
        assert self.config.sliding_window is not None
        near = self.positions_BN[:, :, None] - self.key_positions()[:, None, :] < self.config.sliding_window
        return self.visible_BNL & near

    def bias(self, layer: int) -> Tensor | None:
        """Additive attention mask [B, 1, G N, L] of a layer, or None where every position is seen."""
        sliding = self.config.is_sliding(layer)
        if sliding not in self._bias:
            if self.plain and not sliding:
                self._bias[sliding] = None
            else:
                visible = self.visible(layer)
                bias = torch.zeros(visible.shape, dtype=self.dtype, device=visible.device)
                bias.masked_fill_(~visible, float("-inf"))
                group = self.config.num_heads // self.config.num_kv_heads
                self._bias[sliding] = bias[:, None].repeat(1, 1, group, 1)
        return self._bias[sliding]

    def select(self, layer: int, kept_Bn: Tensor) -> None:
        """Go on with the nodes ``kept_Bn`` from ``layer`` on."""
        self.cache.select(layer, kept_Bn)
        n = kept_Bn.shape[1]
        self.tokens_BN = self.tokens_BN.gather(1, kept_Bn)
        self.positions_BN = self.positions_BN.gather(1, kept_Bn)
        rows = self.tree_BNN.gather(1, kept_Bn[:, :, None].expand(-1, -1, self.tree_BNN.shape[2]))
        self.tree_BNN = rows.gather(2, kept_Bn[:, None, :].expand(-1, n, -1))
        self._prepare()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Main rows: append k, v [B, N, K, E] to the cache and attend; returns [B, N, H E]."""
        self.cache.append(layer, k, v)
        keys, values = self.cache.read(layer, self.span)
        return attention(self.config, q, keys, values, self.bias(layer))


def attention(config: ModelConfig, q_BNHE: Tensor, k_BKLE: Tensor, v_BKLE: Tensor, bias: Tensor | None) -> Tensor:
    """Grouped-query attention without repeated heads: the G queries of a kv head are stacked as rows.

    ``bias`` is [B, 1, G N, L], or None. Returns [B, N, H E].
    """
    b, n, h, e = q_BNHE.shape
    kv = k_BKLE.shape[1]
    scale = config.attention_scale if config.attention_scale is not None else e**-0.5
    q = q_BNHE.view(b, n, kv, h // kv, e).permute(0, 2, 3, 1, 4).reshape(b, kv, (h // kv) * n, e)
    if config.attention_softcap is None:
        o = F.scaled_dot_product_attention(q, k_BKLE, v_BKLE, attn_mask=bias, scale=scale)
    else:
        cap = config.attention_softcap
        scores = torch.tanh((q @ k_BKLE.transpose(-1, -2)).float() * (scale / cap)) * cap
        if bias is not None:
            scores = scores + bias
        o = scores.softmax(-1).to(q.dtype) @ v_BKLE
    return o.view(b, kv, h // kv, n, e).permute(0, 3, 1, 2, 4).reshape(b, n, h * e)


@dataclass(frozen=True)
class Entry:
    """What a rider decided when it entered a pass: ``kept``, see ``PassResult``, and whatever its layers need."""

    kept: Sequence[NDArray[np.int64]] | None = None
    own: Any = None


class Rider(Protocol):
    """Rows of a drafter's own that travel in the target's pass from layer ``start`` on, or a tree that shrinks there.

    rides  whether it brings rows; where it does not, ``layer`` and ``leave`` are not called
    fixed  whether it only computes, at shapes that the pass decides, so that the pass can be captured as a graph

    A rider keeps nothing between calls: what it found at the entry travels as an ``Entry``.
    """

    start: int
    rides: bool
    fixed: bool

    def enter(self, x_BND: Tensor, run: Pass) -> tuple[Tensor, Entry]:
        """See the main rows before layer ``start``; may ``run.select``; returns all rows [B, R, D], main rows first."""

    def layer(self, index: int, block: Block, x_BRD: Tensor, run: Pass, entry: Entry) -> Tensor:
        """Run one block over all rows."""

    def leave(self, x_BRD: Tensor, run: Pass) -> tuple[Tensor, Tensor]:
        """The main rows [B, N, D] of the last layer's output, and the states [M, S, D] of the rider's own."""


@dataclass(frozen=True)
class PassResult:
    """What one pass computed. Its rows lie one behind another: row b's nodes are ``nodes(b)`` of the M in all.

    counts_B      nodes of each row, after pruning; rows may be padded to one width: ``starts_B`` says where each begins
    hidden_MD     main rows after the last norm
    tokens_M      the target's greedy token after each node, where asked for
    logits_MV     float logits, where asked for
    taps          main rows [M, D] before each layer that was tapped
    kept          nodes of each row that early-exit pruning kept, ascending; None: all
    streams_MSD   states of the stream rows that rode in the pass, after the last norm; None: none did
    """

    counts_B: Sequence[int]
    starts_B: Sequence[int]
    hidden_MD: Tensor
    tokens_M: Tensor | None = None
    logits_MV: Tensor | None = None
    taps: Mapping[int, Tensor] = field(default_factory=dict)
    kept: Sequence[NDArray[np.int64]] | None = None
    streams_MSD: Tensor | None = None

    def nodes(self, row: int) -> slice:
        """Where the nodes of a row lie in [M]."""
        return slice(self.starts_B[row], self.starts_B[row] + self.counts_B[row])


def table(rows: int, width: int) -> nn.Embedding:
    """``nn.Embedding``; on the meta device without random numbers, whose shapes take 70 MB of imports to work out."""
    weight = torch.empty(rows, width)
    if not weight.is_meta:
        nn.init.normal_(weight)
    made: nn.Embedding = nn.Embedding.from_pretrained(weight, freeze=False)  # type: ignore[no-untyped-call]
    return made


@remembered
def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=dtype))


class Decoder(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding: Any = table(config.vocab_size, config.hidden_size)
        self.positions = (
            table(config.max_positions + config.learned_offset, config.hidden_size)
            if config.position == "learned"
            else None
        )
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = Norm(config)
        self.head: Any = nn.Linear(config.hidden_size, config.vocab_size, bias=config.head_bias)
        if config.tied_head:
            self.head.weight = self.embedding.weight
        self._rope: Rope | None = None
        self.stack: Stack | None = None  # all layers, where the native kernels run them (``pack_decoder``)
        self.recorder: Recorder | None = None  # how passes are recorded, where that pays

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights and activations."""
        return self.norm.weight.dtype

    @property
    def ragged(self) -> bool:
        """Whether the rows of a pass may differ in their number of nodes; otherwise they are padded to the widest."""
        return self.stack is not None

    def rope(self) -> Rope:
        """The rotation tables, made on first use on the weights' device."""
        if self._rope is None or self._rope.device != self.device:
            self._rope = Rope(self.config.rope, self.device)
        return self._rope

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Token ids and positions [...] -> [..., D]."""
        x: Tensor = self.embedding(tokens)
        if self.config.embedding_scale != 1.0:
            x = x * _rounded(self.config.embedding_scale, x.dtype)
        if self.positions is not None:
            x = x + self.positions(positions + self.config.learned_offset)
        return x

    def decoding(self) -> AbstractContextManager[None]:
        """To be held around steps.

        Keeps torch's threads out of the way of the native kernels', where those run. On a GPU keeps attention from
        cuDNN, which makes a plan for each new shape.
        """
        if self.device.type == "cuda":
            return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
        return nullcontext() if self.stack is None else self.stack.kernels.alone()

    def normed(self, x: Tensor) -> Tensor:
        """The last norm; in the weights' type."""
        if self.stack is not None and x.dtype == torch.float32:
            return self.stack.normed(x, self.norm)
        return self.norm(x)  # type: ignore[no-any-return]

    def layers(self, x: Tensor, run: Pass, low: int, high: int) -> Tensor:
        """Main rows through layers ``low`` to ``high`` - 1; float32 where the native kernels run them."""
        if self.stack is not None:
            rows = x.to(torch.float32, copy=True).contiguous().flatten(0, 1)
            lengths = run.cache.lengths[run.slots]
            parents_M = run.parents_BN.flatten().numpy()
            step = self.stack.step(lengths, [run.width] * len(lengths), parents_M, run.planned, rows)
            self.stack.run(rows, step, run.cache, run.slots.start, low, high)
            return rows.view(x.shape)
        for index in range(low, high):
            x = self.blocks[index](x, run.cos, run.sin, lambda q, k, v, i=index: run.attend(i, q, k, v))
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Normed hidden states [..., D] -> [..., V]."""
        z: Tensor = self.head(x)
        if self.config.logit_softcap is not None:
            z = torch.tanh(z / self.config.logit_softcap) * self.config.logit_softcap
        return z

    def head_rows(self, tokens: Tensor) -> Tensor:
        """Rows of the head [..., D] of some tokens [...]."""
        rows: Tensor = self.head.weight[tokens] if self.stack is None else self.head.rows(tokens)
        return rows

    def choose(self, x: Tensor) -> Tensor:
        """Normed hidden states [..., D] -> the greedy tokens [...], the first of equals."""
        if self.stack is not None and self.config.logit_softcap is None:
            tokens: Tensor = self.head.choose(x)
            return tokens
        return argmax(self.logits(x).flatten(0, -2)).view(x.shape[:-1])

    def draw(
        self,
        logits_NV: Tensor,
        params: SamplingParams,
        keys_N: NDArray[np.uint64],
        histories: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """The target's own tokens [N]: ``sampling.target_tokens``, by the kernels where nothing cuts the law."""
        if self.stack is not None and params.whole and logits_NV.dtype == torch.float32:
            return self.stack.kernels.draw(logits_NV, max(params.temperature, COLDEST), keys_N)
        return target_tokens(logits_NV, params, keys_N, histories)

    def forward(
        self,
        inputs: Inputs,
        cache: Cache,
        *,
        slots: slice | None = None,
        planned: int | None = None,
        taps: Sequence[int] = (),
        rider: Rider | None = None,
        need: Literal["hidden", "logits", "tokens"] = "logits",
    ) -> PassResult:
        """Run one pass over the nodes of ``inputs``; their keys and values are appended to ``cache``, not committed.

        slots    the cache slots of the rows (default: all in use)
        planned  the length that the longest row will reach, for rotations that depend on it
        taps     layers before which the main rows are returned
        rider    rows of a drafter's own that travel in the pass
        need     what to compute after the last norm: nothing, the logits, or only the greedy tokens

        Raises InputError where the nodes do not fit the cache or the learned positions.
        """
        slots = slice(0, cache.count) if slots is None else slots
        cache.begin(inputs.width, slots)
        limit = self.config.max_positions
        planned, longest = limit if planned is None else planned, max(cache.lengths[slots])
        reach = longest + inputs.width
        if reach > min(planned, limit):  # perhaps less: nodes side by side reach no further than one of them
            reach = int((inputs.depths_BN.max(axis=1) + cache.lengths[slots]).max()) + 1
        if self.config.position == "learned" and reach > limit:
            raise InputError(
                f"the text with its drafts needs {reach} positions, but the target has {self.config.max_positions}; "
                "lower max_new_tokens"
            )
        # rotation tables end soon after the planned length: a plan that was too short must not read past them
        planned = max(planned, reach)
        if self.stack is not None and rider is None:
            result = self._at_once(self.stack, inputs, cache, slots, planned, taps, choose=need == "tokens")
        else:
            captured = self._recorded(inputs, cache, slots, planned, taps, rider)
            if captured is None:
                nodes = Nodes.of(inputs, cache.lengths[slots])
                run = Pass(self.config, nodes, cache, slots, planned, self.rope())
                captured = self._through(run, inputs.counts_B, taps, rider)
            result = captured
        if need == "logits":
            return replace(result, logits_MV=self.logits(result.hidden_MD))
        if need == "tokens" and result.tokens_M is None:
            return replace(result, tokens_M=self.choose(result.hidden_MD))
        return result

    def _at_once(
        self,
        stack: Stack,
        inputs: Inputs,
        cache: Cache,
        slots: slice,
        planned: int,
        taps: Sequence[int],
        *,
        choose: bool,
    ) -> PassResult:
        """A whole pass in one call of the native kernels, which may choose the tokens too; rows are not padded."""
        assert len(taps) <= 1, "the native kernels tap one layer"
        step = stack.step(cache.lengths[slots], inputs.counts_B, inputs.parents_M, planned)
        tapped, choose = taps[0] if taps else None, choose and self.config.logit_softcap is None
        hidden, tokens, seen = stack.through(inputs.tokens_M, step, cache, slots.start, choose=choose, tapped=tapped)
        found = {} if seen is None or tapped is None else {tapped: seen}
        return PassResult(inputs.counts_B, inputs.starts_B, hidden, tokens, taps=found)

    def _recorded(
        self,
        inputs: Inputs,
        cache: Cache,
        slots: slice,
        planned: int,
        taps: Sequence[int],
        rider: Rider | None,
    ) -> PassResult | None:
        """``_through`` at the next larger shapes, captured as a graph; None where that cannot be."""
        if self.recorder is None or slots.start or (rider is not None and not rider.fixed):
            return None  # what does not begin at the first row is a prompt being read
        rows, nodes = len(inputs.counts_B), inputs.width
        width, longest = width_bucket(nodes, rows), max(cache.lengths[slots])
        if width is None or longest + width > cache.capacity:
            return None
        cache.begin(width, slots)
        span, rope = span_bucket(longest + width, cache.capacity), self.rope()
        table = rope.table(planned)

        def compute(*nodes: Tensor) -> tuple[Tensor, ...]:
            run = Pass(self.config, Nodes(*nodes), cache, slots, planned, rope, span=span)
            found = self._through(run, inputs.counts_B, taps, rider)
            streams = () if found.streams_MSD is None else (found.streams_MSD,)
            return (found.hidden_MD, *(found.taps[layer] for layer in taps), *streams)

        key = ("pass", rows, slots.start, width, span, id(rider), tuple(taps), table.data_ptr())
        padded = Nodes.of(inputs.widened(width), cache.lengths[slots])
        hidden, *found = cache.graphs.run(self.recorder, key, compute, padded, self.device, held=(table, rider))
        tapped, streams = found[: len(taps)], found[len(taps) :]
        return PassResult(
            inputs.counts_B,
            range(0, rows * width, width),
            hidden,
            taps=dict(zip(taps, tapped, strict=True)),
            streams_MSD=streams[0] if streams else None,
        )

    def _through(self, run: Pass, counts_B: Sequence[int], taps: Sequence[int], rider: Rider | None) -> PassResult:
        """Rows through all layers and the last norm."""
        x, top, entry = self.embed(run.tokens_BN, run.positions_BN), len(self.blocks), None
        tapped: dict[int, Tensor] = {}
        stops = sorted({0, *taps, top} | (set() if rider is None else {rider.start}))
        for low, high in pairwise([*stops, top]):
            if rider is not None and low == rider.start:
                x, entry = rider.enter(x, run)
            if low in taps:
                tapped[low] = x[:, : run.width].to(self.dtype).flatten(0, 1)
            if rider is not None and entry is not None and rider.rides:
                for index in range(low, high):
                    block = self.blocks[index]
                    assert isinstance(block, Block)
                    x = rider.layer(index, block, x, run, entry)
            elif low < high:
                x = self.layers(x, run, low, high)
        streams = None
        if rider is not None and rider.rides:
            x, streams = rider.leave(x, run)
        kept = None if entry is None else entry.kept
        if kept is not None:
            counts_B = [int((row < count).sum()) for row, count in zip(kept, counts_B, strict=True)]
        b, n = x.shape[:2]
        return PassResult(
            counts_B,
            range(0, b * n, n),
            self.normed(x).flatten(0, 1),
            taps=tapped,
            kept=None if kept is None else [row[:count] for row, count in zip(kept, counts_B, strict=True)],
            streams_MSD=streams,
        )
