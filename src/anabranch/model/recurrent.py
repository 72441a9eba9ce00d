"""Layers with a recurrent state: gated DeltaNet (Yang et al. 2025), as in Qwen3.5.

    S = decay S' + beta k (v - decay S'^T k)^T      state [Ek, Ev] of each head, from that of the token before
    output = S^T q                                  q and k of unit length, after a short convolution over the inputs

In a tree, the state of a node follows from its parent's, and of a node without a parent from the committed state of
its row. The nodes are computed depth by depth, and only the states of one depth are kept. A pass changes no committed
state: commit computes that of the accepted node, from the inputs of the nodes on its path, so that a rejected draft
leaves nothing behind.

B rows of the batch, N nodes of the widest row, n nodes of one depth, M = B N, H value heads, Ek and Ev the widths of
their keys and values, C channels of the convolution, W its width, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from anabranch.model.config import DeltaConfig, ModelConfig
from anabranch.model.mlp import ACTIVATIONS
from anabranch.tree import depths_of

__all__ = ["Ancestry", "DeltaNet", "States"]

UNIT_EPS = 1e-6  # of the lengths of q and k


class Ancestry:
    """The nodes of a pass by depth, with their parents.

    depths        (nodes [n] in M, place of each node's parent in the depth above [n], or its row for depth 0)
    windows_BNW   the inputs of each node's convolution, in [W - 1 committed ones, then the N nodes of its row]

    For parents -1 0 0 1 and W = 3 the windows are 0 1 2 | 1 2 3 | 1 2 4 | 2 3 5.
    """

    def __init__(self, parents_BN: NDArray[np.int64], width: int) -> None:
        b, n = parents_BN.shape
        depths_BN = np.stack([depths_of(parents) for parents in parents_BN])
        rows_B1, nodes_N = np.arange(b)[:, None], np.arange(n)[None]
        place_BN = np.zeros((b, n), np.int64)
        self.depths: list[tuple[Tensor, Tensor]] = []
        for depth in range(int(depths_BN.max()) + 1):
            rows, nodes = np.nonzero(depths_BN == depth)
            place_BN[rows, nodes] = np.arange(len(rows))
            above = place_BN[rows, parents_BN[rows, nodes]] if depth else rows
            self.depths.append((torch.from_numpy(rows * n + nodes), torch.from_numpy(above)))
        windows = np.empty((b, n, width), np.int64)
        at_BN = np.broadcast_to(nodes_N, (b, n)) + width - 1
        for lag in range(width):
            windows[:, :, width - 1 - lag] = at_BN
            inside = at_BN >= width - 1
            parent_BN = parents_BN[rows_B1, np.maximum(at_BN - width + 1, 0)]
            at_BN = np.where(inside & (parent_BN >= 0), parent_BN + width - 1, np.minimum(at_BN, width - 1) - 1)
        self.windows_BNW = torch.from_numpy(windows)


class _Tokens(NamedTuple):
    """The terms that nodes add to the state: k [M, H, Ek], v [M, H, Ev], beta and decay [M, H]; float32."""

    k: Tensor
    v: Tensor
    beta: Tensor
    decay: Tensor

    def of(self, nodes: Tensor) -> _Tokens:
        """The terms of some nodes."""
        return _Tokens(*(part[nodes] for part in self))

    def after(self, state_nHKV: Tensor) -> Tensor:
        """The states of the nodes, from their parents' [n, H, Ek, Ev]."""
        state = state_nHKV * self.decay[..., None, None]
        known = (state * self.k[..., None]).sum(-2)
        return state + self.k[..., None] * ((self.v - known) * self.beta[..., None])[..., None, :]


@dataclass(frozen=True)
class _Pending:
    """A layer of the last pass, as commit needs it.

    inputs_BLC  the convolution's: W - 1 committed ones, then the nodes'
    deepest     the nodes of the last depth, and their states
    """

    inputs_BLC: Tensor
    tokens: _Tokens
    deepest: tuple[list[int], Tensor]


class States:
    """The committed states of the rows of a cache, by layer.

    inputs    the last W - 1 inputs of the convolution [rows, W - 1, C], in the cache's type
    matrices  [rows, H, Ek, Ev] float32
    """

    def __init__(self, config: ModelConfig, delta: DeltaConfig, rows: int, dtype: torch.dtype, device: torch.device):
        layers = [layer for layer in range(config.num_layers) if config.is_recurrent(layer)]
        inputs, matrix = (rows, delta.width - 1, delta.channels), (rows, delta.heads, delta.key_dim, delta.value_dim)
        with torch.inference_mode(False):  # rows are also written outside of it
            self.inputs = {layer: torch.zeros(inputs, dtype=dtype, device=device) for layer in layers}
            self.matrices = {layer: torch.zeros(matrix, device=device) for layer in layers}
        self._pending: dict[int, _Pending] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(part.nbytes for kind in (self.inputs, self.matrices) for part in kind.values())

    def clear(self, slot: int) -> None:
        """Set a row's states to those before any token."""
        for kind in (self.inputs, self.matrices):
            for part in kind.values():
                part[slot] = 0

    def copy(self, source: int, slot: int) -> None:
        """Copy a row's states to another."""
        for kind in (self.inputs, self.matrices):
            for part in kind.values():
                part[slot] = part[source]

    def row(self, slot: int) -> list[Tensor]:
        """Copies of a row's states, for ``put``."""
        return [part[slot].clone() for kind in (self.inputs, self.matrices) for part in kind.values()]

    def put(self, slot: int, row: Sequence[Tensor]) -> None:
        """Set a row's states to those that ``row`` returned."""
        parts = [part for kind in (self.inputs, self.matrices) for part in kind.values()]
        for part, state in zip(parts, row, strict=True):
            part[slot] = state

    def take(self, other: States, rows: int) -> None:
        """Copy the first ``rows`` rows of other states."""
        for mine, theirs in ((self.inputs, other.inputs), (self.matrices, other.matrices)):
            for layer, part in mine.items():
                part[:rows] = theirs[layer][:rows]

    def begin(self) -> None:
        """Forget the nodes of the last pass."""
        self._pending = {}

    def advance(
        self,
        layer: int,
        slots: slice,
        order: Ancestry,
        mixer: DeltaNet,
        inputs_BNC: Tensor,
        rates: tuple[Tensor, Tensor],
    ) -> Tensor:
        """The outputs of a layer's nodes [B, N, H, Ev]; ``rates`` are beta and decay [B, N, H]."""
        inputs = torch.cat((self.inputs[layer][slots], inputs_BNC), 1)
        rows_B11 = torch.arange(len(inputs), device=inputs.device)[:, None, None]
        q, k, v = mixer.heads(inputs[rows_B11, order.windows_BNW.to(inputs.device)])
        tokens = _Tokens(k, v, *(rate.float().flatten(0, 1) for rate in rates))
        out, state = torch.empty_like(v), self.matrices[layer][slots]
        for nodes, above in order.depths:
            state = tokens.of(nodes).after(state[above])
            out[nodes] = (state * q[nodes][..., None]).sum(-2)
        self._pending[layer] = _Pending(inputs, tokens, (order.depths[-1][0].tolist(), state))
        return out.view(*inputs_BNC.shape[:2], *out.shape[1:])

    def commit(self, first: int, paths: Sequence[Sequence[int]]) -> None:
        """Make the last node of each path the row's state; the rows start at slot ``first``."""
        for layer, pending in self._pending.items():
            count = self.inputs[layer].shape[1]
            width = pending.inputs_BLC.shape[1] - count
            for row, path in enumerate(paths):
                if not len(path):
                    continue
                kept = [*range(count), *(count + node for node in path)][-count:]
                self.inputs[layer][first + row] = pending.inputs_BLC[row, kept]
                self.matrices[layer][first + row] = self._state(
                    layer, first + row, pending, [row * width + i for i in path]
                )
        self._pending = {}

    def _state(self, layer: int, slot: int, pending: _Pending, nodes: Sequence[int]) -> Tensor:
        deepest, states = pending.deepest
        if nodes[-1] in deepest:
            return states[deepest.index(nodes[-1])]
        state = self.matrices[layer][slot][None]
        for node in nodes:
            state = pending.tokens.of(torch.tensor([node])).after(state)
        return state[0]


class DeltaNet(nn.Module):
    """The part of a gated DeltaNet layer that takes the place of attention."""

    def __init__(self, config: ModelConfig, delta: DeltaConfig) -> None:
        super().__init__()
        values = delta.heads * delta.value_dim
        self.delta, self.eps, self.activation = delta, config.norm_eps, ACTIVATIONS[config.activation]
        self.qkv: nn.Module = nn.Linear(config.hidden_size, delta.channels, bias=False)
        self.gate: nn.Module = nn.Linear(config.hidden_size, values, bias=False)
        self.rates: nn.Module = nn.Linear(config.hidden_size, 2 * delta.heads, bias=False)
        self.out: nn.Module = nn.Linear(values, config.hidden_size, bias=False)
        self.conv = nn.Parameter(torch.zeros(delta.channels, 1, delta.width))
        self.bias_dt = nn.Parameter(torch.ones(delta.heads))
        self.log_a = nn.Parameter(torch.zeros(delta.heads))
        self.scale = nn.Parameter(torch.ones(delta.value_dim))

    def linears(self) -> tuple[tuple[nn.Module, str], ...]:
        """The linear layers as (parent module, attribute name); those of the rates are few and stay as they are."""
        return (self, "qkv"), (self, "gate"), (self, "out")

    def forward(self, h_BND: Tensor, recur: Callable[..., Tensor]) -> Tensor:
        """[B, N, D] -> [B, N, D]; ``recur`` has the states."""
        b, a = self.rates(h_BND).chunk(2, dim=-1)
        decay = (-self.log_a.float().exp() * F.softplus(a.float() + self.bias_dt.float())).exp()
        o = recur(self, self.qkv(h_BND), (b.sigmoid(), decay)).to(h_BND.dtype).float()
        o = (o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + self.eps)).to(h_BND.dtype) * self.scale
        gate = F.silu(self.gate(h_BND).float()).view(o.shape)
        y: Tensor = self.out((o * gate).to(h_BND.dtype).flatten(2))
        return y

    def heads(self, windows_BNWC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs of each node's convolution -> q and k [M, H, Ek], v [M, H, Ev], in float32."""
        d, m = self.delta, windows_BNWC.shape[0] * windows_BNWC.shape[1]
        mixed = self.activation((windows_BNWC * self.conv[:, 0].T).sum(2)).flatten(0, 1).float()
        q, k, v = torch.split(mixed, [d.key_heads * d.key_dim, d.key_heads * d.key_dim, d.heads * d.value_dim], -1)
        q, k = (_unit(x.view(m, d.key_heads, d.key_dim)).repeat_interleave(d.heads // d.key_heads, 1) for x in (q, k))
        return q * d.key_dim**-0.5, k, v.reshape(m, d.heads, d.value_dim)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + UNIT_EPS)
