"""One forward pass: the request to a backend, the device state that layers read, riders, and the result.

B rows of the batch, M nodes of all rows, N nodes of the widest row, R rows of one pass (N main rows, then those of a
rider), S rows a node that a rider brings, V vocabulary, D model width, H query heads, K kv heads, G = H / K,
E head width, L cache length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from anabranch.model.blocks import Block, RowSide, attention
from anabranch.model.cache import Cache
from anabranch.model.config import ModelConfig
from anabranch.model.device.layers import attend, trusted
from anabranch.model.encoder import recalled
from anabranch.model.inputs import Inputs, Nodes, starts_of
from anabranch.model.recurrent import Ancestry, DeltaNet
from anabranch.model.relative import relative_bias
from anabranch.model.riding import NativeRider
from anabranch.model.rope import Rope
from anabranch.tree import DraftTree
from anabranch.verify import Verdict

__all__ = ["Entry", "LayerTerms", "Need", "Pass", "PassRequest", "PassResult", "Rider", "RowSides"]


# of a LoRA: the rows, down [r, I] and scaled up [O, r] of each module of a layer, by the layer's part
LayerTerms: TypeAlias = Mapping[str, Sequence[tuple[slice, Tensor, Tensor]]]


class RowSides(NamedTuple):
    """The LoRAs of a pass's rows, whose terms are added in the target's layers.

    names_B  the name of each row's LoRA; None: it has none
    layers   what PyTorch adds in each layer
    terms    the terms of each of these LoRAs in each layer
    """

    names_B: tuple[str | None, ...]
    layers: Sequence[RowSide]
    terms: Mapping[str, Sequence[LayerTerms]]


class Pass:
    """The device side of a pass over some rows of a cache: positions, rotations and masks of its nodes.

    With a ``span`` the pass reads that many positions of the cache, in use or not, and keeps everything that changes
    from step to step in tensors, so that it can be captured as a graph (``graphs``).

    sides     the LoRAs of the rows; None: none
    relative  the network's table of biases by distance
    """

    def __init__(
        self,
        config: ModelConfig,
        nodes: Nodes,
        cache: Cache,
        slots: slice,
        rope: Rope,
        *,
        span: int | None = None,
        sides: RowSides | None = None,
        relative: nn.Module | None = None,
    ) -> None:
        self.sides, self.relative = sides, relative
        self.config, self.cache, self.slots, self.rope = config, cache, slots, rope
        self.prompts = cache.unread(slots) if rope.varies else ()
        device, self.dtype = cache.keys.device, cache.dtype
        self.tokens_BN, self.positions_BN, self.lengths_B, self.tree_BNN = (x.to(device) for x in nodes)
        self.fixed = span
        # a single node sees the whole text: no mask needed
        self.plain = self.tokens_BN.shape == (1, 1) and span is None
        if span is not None:
            cache.place(self.lengths_B[:, None] + torch.arange(self.width, device=device))
        self._prepare()

    @property
    def width(self) -> int:
        """The number of nodes of each row, padding included."""
        return self.tokens_BN.shape[1]

    def _prepare(self) -> None:
        self.cos, self.sin = self.rotations(self.positions_BN)
        self.span = int(max(self.cache.lengths[self.slots])) + self.width if self.fixed is None else self.fixed
        self._visible: Tensor | None = None
        self._parents: Tensor | None = None
        self._order: Ancestry | None = None
        self._bias: dict[bool, Tensor | None] = {}

    def rotations(self, positions_BR: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [B, R, dim] of positions of the rows, in the type of the cache."""
        cos, sin = self.rope(positions_BR, self.cache.capacity, self.prompts)
        return cos.to(self.dtype), sin.to(self.dtype)

    @property
    def parents_BN(self) -> Tensor:
        """The parent of each node: its last ancestor before itself; -1: none."""
        if self._parents is None:
            nodes = torch.arange(self.width, device=self.tree_BNN.device)
            above = self.tree_BNN & (nodes[None, :] < nodes[:, None])
            self._parents = torch.where(above, nodes, -1).max(-1).values
        return self._parents

    @property
    def order(self) -> Ancestry:
        """The nodes by depth, for layers with a recurrent state."""
        if self._order is None:
            assert self.config.recurrent is not None
            self._order = Ancestry(self.parents_BN.cpu().numpy(), self.config.recurrent.width)
        return self._order

    @property
    def visible_BNL(self) -> Tensor:
        """The cache positions visible to each node [B, N, L]: committed tokens, ancestors, itself."""
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
        """The text position of each cache position [B, L]; a tree node's follows from its depth."""
        relative_BL = torch.arange(self.span, device=self.lengths_B.device)[None] - self.lengths_B[:, None]
        node = self.positions_BN.gather(1, relative_BL.clamp(0, self.width - 1))
        return torch.where(relative_BL < 0, relative_BL + self.lengths_B[:, None], node)

    def visible(self, layer: int) -> Tensor:
        """The cache positions visible to each node in a layer [B, N, L], within its sliding window."""
        if not self.config.is_sliding(layer):
            return self.visible_BNL
        assert self.config.sliding_window is not None
        near = self.positions_BN[:, :, None] - self.key_positions()[:, None, :] < self.config.sliding_window
        return self.visible_BNL & near

    def bias(self, layer: int) -> Tensor | None:
        """The additive attention mask of a layer [B, 1 or K, G N, L]; None if every position is visible."""
        sliding = self.config.is_sliding(layer)
        if sliding not in self._bias:
            plain = self.plain and not sliding and self.relative is None
            self._bias[sliding] = None if plain else self._masked(self.visible(layer))
        return self._bias[sliding]

    def _masked(self, visible_BNL: Tensor) -> Tensor:
        """The mask as a bias; with biases by distance, of each head [B, K, G N, L]."""
        kv, group = self.config.num_kv_heads, self.config.num_heads // self.config.num_kv_heads
        if self.relative is not None and self.config.relative is not None:
            # by positions, which siblings in a tree share
            bias = relative_bias(self.relative, self.config.relative, self.positions_BN, self.key_positions())
            bias = bias.to(self.dtype).masked_fill(~visible_BNL[:, None], float("-inf"))
            return bias.reshape(len(bias), kv, -1, self.span)
        bias = torch.zeros(visible_BNL.shape, dtype=self.dtype, device=visible_BNL.device)
        bias.masked_fill_(~visible_BNL, float("-inf"))
        return bias[:, None].repeat(1, 1, group, 1)

    def select(self, layer: int, kept_Bn: Tensor) -> None:
        """Keep only the nodes ``kept_Bn`` from ``layer`` on."""
        assert self.config.recurrent is None, "states are kept of all nodes"
        self.cache.select(layer, kept_Bn)
        n = kept_Bn.shape[1]
        self.tokens_BN = self.tokens_BN.gather(1, kept_Bn)
        self.positions_BN = self.positions_BN.gather(1, kept_Bn)
        rows = self.tree_BNN.gather(1, kept_Bn[:, :, None].expand(-1, -1, self.tree_BNN.shape[2]))
        self.tree_BNN = rows.gather(2, kept_Bn[:, None, :].expand(-1, n, -1))
        self._prepare()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None = None) -> Tensor:
        """Attention of the main rows: append k and v [B, N, K, E] to the cache; returns [B, N, H E]."""
        self.cache.append(layer, k, v)
        keys, values = self.cache.read(layer, self.span)
        if self.fixed is not None and sinks_H is None and trusted(keys.device):
            return attend(self.config, layer, q, keys, values, self.lengths_B, self.tree_BNN, self.positions_BN)
        return attention(self.config, q, keys, values, self.bias(layer), sinks_H)

    def recall(self, layer: int, q_BNHE: Tensor) -> Tensor:
        """Attention of the main rows to the sources of their texts [B, N, H E]."""
        return recalled(self.config, self.cache.memories[self.slots], layer, q_BNHE)

    def recur(self, layer: int, mixer: DeltaNet, inputs_BNC: Tensor, rates: tuple[Tensor, Tensor]) -> Tensor:
        """The outputs [B, N, H, Ev] of a layer with a recurrent state (``recurrent.States.advance``)."""
        assert self.cache.states is not None
        return self.cache.states.advance(layer, self.slots, self.order, mixer, inputs_BNC, rates)


@dataclass(frozen=True)
class Entry:
    """A rider's state in a pass: the nodes it ``kept`` (as in ``PassResult``), and data of its ``own``.

    allowed  tokens below each node after pruning [B, N, V] that it would have kept; None: it may drop any
    """

    kept: Sequence[NDArray[np.int64]] | None = None
    own: Any = None
    allowed: Tensor | None = None


class Rider(Protocol):
    """A drafter's part in the target's forward pass: from layer ``start`` on it adds rows, or prunes nodes, or both.

    rides   it adds rows; if not, ``layer`` and ``leave`` are not called
    fixed   its shapes follow from the pass alone, so that the pass can be captured as a graph
    native  the native kernels compute all main rows, if they run the target
    alters  the trained module whose rows the main rows attend to, which is then part of the decoded model; None: main
            rows are the same as without the rider

    A rider keeps no state between calls: that of a pass travels as an ``Entry``.
    """

    start: int
    rides: bool
    fixed: bool
    native: bool
    alters: object | None

    def positions(self, nodes: int) -> int:
        """Cache positions that a row of so many nodes uses while the pass runs."""

    def in_kernels(self, kind: str) -> NativeRider | None:
        """This rider for the native kernels, beside weights of a kind; None: PyTorch computes its rows."""

    def enter(self, x_BND: Tensor, run: Pass) -> tuple[Tensor, Entry]:
        """All rows [B, R, D] from the main rows before layer ``start``, which come first; may ``run.select``."""

    def layer(self, index: int, block: Block, x_BRD: Tensor, run: Pass, entry: Entry) -> Tensor:
        """Run one block over all rows."""

    def leave(self, x_BRD: Tensor, run: Pass) -> tuple[Tensor, Tensor]:
        """Split the last layer's output into the main rows [B, N, D] and the states of the rider's rows [M, S, D]."""


# the outputs of a pass besides keys, values and taps: nothing, the main rows, their logits, the greedy tokens, or the
# paths of the trees that greedy tokens accept, committed in the cache as far as keys and values go; a backend that does
# not verify returns the tokens instead
Need: TypeAlias = Literal["keys", "hidden", "logits", "tokens", "paths"]


class PassRequest(NamedTuple):
    """The arguments of a pass; ``Decoder.forward`` has checked that it fits the cache and reserved the positions there.

    slots    the cache slots of the rows
    taps     layers before which the main rows are returned
    rider    a drafter's part in the pass
    need     the part of the result that is read; a backend may omit the rest, and choose the greedy tokens itself
    sides    the LoRAs of the rows; None: none
    """

    inputs: Inputs
    cache: Cache
    slots: slice
    taps: Sequence[int]
    rider: Rider | None
    need: Need
    sides: RowSides | None = None


class PassResult(NamedTuple):
    """The result of a pass. The nodes of all rows share one axis M, where those of row b are ``nodes(b)``.

    counts_B      nodes of each row, after pruning
    starts_B      the index of each row's first node in M, which has gaps if rows were padded to one width
    hidden_MD     main rows after the last norm; may be empty if only keys and values were needed
    tokens_M      the target's greedy token after each node, if requested, on the host
    logits_MV     logits, if requested
    verdicts      the accepted path of each row, if requested and the backend verifies: their keys and values lie after
                  the committed tokens already
    taps          main rows [M, D] before each tapped layer
    kept          the nodes of each row that were not pruned, ascending; None: nothing was pruned
    riding_MSD    states of the rows that a rider added, after the last norm; None: it added none
    allowed_B     for each row the tokens below each kept node [N, V] that pruning keeps, whatever else is in the tree;
                  None: that depends on the tree, or no tree was sampled (``Inputs.sampled``)
    """

    counts_B: Sequence[int]
    starts_B: Sequence[int]
    hidden_MD: Tensor
    tokens_M: NDArray[np.int64] | None = None
    logits_MV: Tensor | None = None
    taps: Mapping[int, Tensor] = MappingProxyType({})
    kept: Sequence[NDArray[np.int64]] | None = None
    riding_MSD: Tensor | None = None
    verdicts: Sequence[Verdict] | None = None
    allowed_B: Sequence[Tensor] | None = None

    def nodes(self, row: int) -> slice:
        """The indices of a row's nodes in M."""
        return slice(self.starts_B[row], self.starts_B[row] + self.counts_B[row])

    def pruned(self, trees: list[DraftTree]) -> list[DraftTree]:
        """The trees of the pass without the nodes that were pruned."""
        if self.kept is None:
            return trees
        allowed_B: Sequence[Tensor | None] = self.allowed_B or [None] * len(trees)
        return [tree.select(kept, left) for tree, kept, left in zip(trees, self.kept, allowed_B, strict=True)]

    def without_prefill(self, inputs: Inputs) -> PassResult:
        """The result without the nodes of ``inputs.prefill_B``; before logits are computed, and without a rider."""
        if not inputs.prefill_B:
            return self
        counts = inputs.returned_B
        kept = [torch.arange(self.nodes(b).stop - count, self.nodes(b).stop) for b, count in enumerate(counts)]
        at_M = torch.cat(kept).to(self.hidden_MD.device)
        taps = {layer: rows[at_M] for layer, rows in self.taps.items()}
        return PassResult(counts, starts_of(counts), self.hidden_MD[at_M], taps=taps)
