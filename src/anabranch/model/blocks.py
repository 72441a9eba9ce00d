"""The layers of a target in PyTorch: norms, the MLP, attention, and the block that wires them as the config says.

B rows of the batch, N tree nodes, R rows of one pass (N main rows, then those of a rider), D model width,
H query heads, K kv heads, G = H / K, E head width, L cache length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.model.config import ModelConfig
from anabranch.model.rope import rotate

__all__ = ["MLP", "Attend", "Block", "Norm", "RowSide", "attention"]


class Norm(nn.Module):
    """RMSNorm (with weight + 1 for Gemma) or LayerNorm, times ``scale``; statistics in float32."""

    def __init__(self, config: ModelConfig, width: int | None = None, *, scale: float = 1.0) -> None:
        super().__init__()
        width = config.hidden_size if width is None else width
        self.kind, self.eps, self.plus_one, self.scale = config.norm, config.norm_eps, config.norm_plus_one, scale
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if config.norm == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis [..., D]."""
        y = self._normed(x)
        return y if self.scale == 1.0 else y * self.scale

    def _normed(self, x: Tensor) -> Tensor:
        if self.kind == "layer":
            return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)
        if self.plus_one:
            y = x.float()
            y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
            return (y * (1.0 + self.weight.float())).to(x.dtype)
        if x.dtype == torch.float32:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        if x.is_cuda:  # one kernel instead of the seven that follow
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
    """The feed-forward part; a gated MLP keeps gate and up in one matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inner = config.intermediate_size
        self.gated = config.gated_mlp
        self.up = nn.Linear(config.hidden_size, inner * (2 if self.gated else 1), bias=config.mlp_bias)
        self.down = nn.Linear(inner, config.hidden_size, bias=config.mlp_bias)
        self.activation = _ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        """[B, R, D] -> [B, R, D]."""
        return self.through(x, self.up, self.down)

    def through(self, x: Tensor, up: Callable[[Tensor], Tensor], down: Callable[[Tensor], Tensor]) -> Tensor:
        """The feed-forward part with other products in place of ``up`` and ``down``."""
        y = up(x)
        if not self.gated:
            return down(self.activation(y))
        if y.requires_grad and self.activation is F.silu:  # in training
            return down(_SiluGate.apply(y))  # type: ignore[no-untyped-call]
        gate, y = y.chunk(2, dim=-1)
        return down(self.activation(gate) * y)


class _SiluGate(torch.autograd.Function):
    """[gate, up] -> silu(gate) * up, with half of autograd's memory: silu(gate) is recomputed for the gradient.

    The two halves of the gradient are written in place instead of being concatenated, a few rows at a time.
    """

    ROWS = 512

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        """[..., 2 D] -> [..., D]."""
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        """The gradient of both halves."""
        (both,) = ctx.saved_tensors
        inner = both.shape[-1] // 2
        change = torch.empty_like(both)
        rows = (x.flatten(0, -2).split(_SiluGate.ROWS) for x in (both, change, upstream[0]))
        for part, to, slope in zip(*rows, strict=True):
            gate, up = part[:, :inner], part[:, inner:]
            torch.ops.aten.silu_backward.grad_input(slope * up, gate, grad_input=to[:, :inner])
            torch.mul(slope, F.silu(gate), out=to[:, inner:])
        return change


class RowSide(Protocol):
    """A rider's own linear layers in a block, for the rows that it added after the main rows."""

    def qkv(self, h_BRD: Tensor, qkv: nn.Module) -> Tensor:
        """The fused query, key and value projections of all rows."""

    def out(self, a: Tensor, out: nn.Module) -> Tensor:
        """The attention's output projection of all rows."""

    def mlp(self, h_BRD: Tensor, mlp: MLP) -> Tensor:
        """The feed-forward part of all rows."""


Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [B, R, H, E], k and v [B, R, K, E] -> [B, R, H E]."""


class Block(nn.Module):
    """One layer, wired by the config; ``qkv`` and ``out`` may be replaced by quantised or packed modules."""

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        self.config, self.rotation, self.slides = config, config.rotations(layer), config.is_sliding(layer)
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.norm_in: nn.Module = Norm(config) if config.pre_norms else nn.Identity()
        self.qkv: nn.Module = nn.Linear(config.hidden_size, q + 2 * kv, bias=config.qkv_bias)
        self.out: nn.Module = nn.Linear(q, config.hidden_size, bias=config.out_bias)
        self.mlp = MLP(config)
        q_width, k_width = (q, kv) if config.qk_norm == "all" else (config.head_dim, config.head_dim)
        self.q_norm = None if config.qk_norm == "none" else Norm(config, q_width)
        self.k_norm = None if config.qk_norm == "none" else Norm(config, k_width)
        self.norm_mlp = Norm(config) if config.wiring != "parallel" and config.pre_norms else None
        self.norm_after_attention = Norm(config) if config.post_norms else None
        self.norm_after_mlp = Norm(config) if config.post_norms else None

    def linears(self) -> tuple[tuple[nn.Module, str], ...]:
        """The linear layers as (parent module, attribute name), for replacing them."""
        return (self, "qkv"), (self, "out"), (self.mlp, "up"), (self.mlp, "down")

    def split(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Fused projections [B, R, (H+2K)E] -> q [B, R, H, E], k and v [B, R, K, E], q and k rotated."""
        c, turn = self.config, self.rotation
        b, r, _ = qkv.shape
        heads = qkv.view(b, r, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        together = turn is not None and turn.queries == turn.keys
        if turn is not None and together and self.q_norm is None:
            # q and k are rotated together: one call instead of two
            rotated = rotate(heads[:, :, : c.num_heads + c.num_kv_heads], *_columns(cos, sin, turn.keys, turn.width))
            q, k = rotated[:, :, : c.num_heads], rotated[:, :, c.num_heads :]
            return q, k, heads[:, :, c.num_heads + c.num_kv_heads :]
        q, k, v = heads.tensor_split((c.num_heads, c.num_heads + c.num_kv_heads), dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            if c.qk_norm == "all":
                q, k = self.q_norm(q.flatten(2)).view(q.shape), self.k_norm(k.flatten(2)).view(k.shape)
            else:
                q, k = self.q_norm(q), self.k_norm(k)
        if turn is not None:
            q = rotate(q, *_columns(cos, sin, turn.queries, turn.width))
            k = rotate(k, *_columns(cos, sin, turn.keys, turn.width))
        return q, k, v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, side: RowSide | None = None) -> Tensor:
        """x [B, R, D] -> [B, R, D]; ``attend`` does the attention, with the cache and the mask."""
        h = self.norm_in(x)
        qkv = self.qkv(h) if side is None else side.qkv(h, self.qkv)
        a = attend(*self.split(qkv, cos, sin))
        o = self.out(a) if side is None else side.out(a, self.out)
        if self.norm_after_attention is not None:
            o = self.norm_after_attention(o)
        if (scale := self.config.residual_scale) != 1.0:
            o = o * scale
        if self.config.wiring == "sequential":
            x = x + o
            h = x if self.norm_mlp is None else self.norm_mlp(x)
        elif self.norm_mlp is not None:
            h = self.norm_mlp(x)
        m = self.mlp(h) if side is None else side.mlp(h, self.mlp)
        if self.norm_after_mlp is not None:
            m = self.norm_after_mlp(m)
        if scale != 1.0:
            m = m * scale
        return x + m if self.config.wiring == "sequential" else x + o + m


def _columns(cos: Tensor, sin: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """A layer's part of the rotation tables [..., dim]."""
    if width == cos.shape[-1]:
        return cos, sin
    return cos[..., start : start + width], sin[..., start : start + width]


def attention(config: ModelConfig, q_BNHE: Tensor, k_BKLE: Tensor, v_BKLE: Tensor, bias: Tensor | None) -> Tensor:
    """Grouped-query attention without repeated keys: the G query heads of a kv head are stacked as rows.

    ``bias`` [B, 1, G N, L] is added to the scores; None: no mask. Returns [B, N, H E].
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
