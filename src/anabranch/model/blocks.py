"""The layers of a target in PyTorch: norms, attention, and the block that wires them as the config says.

B rows of the batch, N tree nodes, R rows of one pass (N main rows, then those of a rider), D model width,
H query heads, K kv heads, G = H / K, E head width, L cache length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.model.config import ModelConfig
from anabranch.model.experts import Experts
from anabranch.model.mlp import MLP
from anabranch.model.recurrent import DeltaNet
from anabranch.model.rope import rotate

__all__ = ["Attend", "Block", "Cross", "Norm", "Recall", "RowSide", "attention"]


class Norm(nn.Module):
    """RMSNorm (with weight + 1 for Gemma) or LayerNorm, times ``scale``; statistics in float32.

    Weight and bias may be float32 beside rows of another type, which the result has.
    """

    def __init__(self, config: ModelConfig, width: int | None = None, *, scale: float = 1.0) -> None:
        super().__init__()
        width = config.hidden_size if width is None else width
        self.kind, self.eps, self.plus_one, self.scale = config.norm, config.norm_eps, config.norm_plus_one, scale
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if config.norm == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis [..., D]."""
        y = self._normed(x).to(x.dtype)
        return y if self.scale == 1.0 else y * self.scale

    def _normed(self, x: Tensor) -> Tensor:
        if self.kind == "layer":
            same = x.to(torch.promote_types(x.dtype, self.weight.dtype))
            return F.layer_norm(same, (x.shape[-1],), self.weight, self.bias, self.eps)
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


class RowSide(Protocol):
    """A rider's own linear layers in a block, for the rows that it added after the main rows."""

    def qkv(self, h_BRD: Tensor, qkv: nn.Module) -> Tensor:
        """The fused query, key and value projections of all rows."""

    def out(self, a: Tensor, out: nn.Module) -> Tensor:
        """The attention's output projection of all rows."""

    def mlp(self, h_BRD: Tensor, mlp: MLP) -> Tensor:
        """The feed-forward part of all rows."""


Attend: TypeAlias = Callable[..., Tensor]
"""q [B, R, H, E], k and v [B, R, K, E], and sinks [H] if the layer has them -> [B, R, H E]."""
Recall: TypeAlias = Callable[[Tensor], Tensor]
"""q [B, R, H, E] -> [B, R, H E]: attention to the sources of the rows."""


class Cross(nn.Module):
    """Attention of a decoder's layer to the output of the encoder, of width ``source``."""

    def __init__(self, config: ModelConfig, source: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = config.num_heads, config.num_kv_heads, config.head_dim
        q, kv = self.heads * self.width, self.kv_heads * self.width
        self.q: nn.Module = nn.Linear(config.hidden_size, q, bias=config.qkv_bias)
        self.kv: nn.Module = nn.Linear(source, 2 * kv, bias=config.qkv_bias)
        self.out: nn.Module = nn.Linear(q, config.hidden_size, bias=config.out_bias)

    def memory(self, states_SD: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values [K, S, E] of an encoder's output."""
        kv = self.kv(states_SD).view(len(states_SD), 2, self.kv_heads, self.width).permute(1, 2, 0, 3).contiguous()
        return kv[0], kv[1]

    def forward(self, h: Tensor, recall: Recall) -> Tensor:
        """[B, R, D] -> [B, R, D]."""
        q = self.q(h).view(*h.shape[:2], self.heads, self.width)
        o: Tensor = self.out(recall(q))
        return o


class Block(nn.Module):
    """One layer, wired by the config; ``qkv`` and ``out`` may be replaced by quantised or packed modules."""

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        self.config, self.rotation, self.slides = config, config.rotations(layer), config.is_sliding(layer)
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.norm_in: nn.Module = Norm(config) if config.pre_norms else nn.Identity()
        self.mixer: DeltaNet | None = None
        self.qkv: nn.Module = nn.Identity()
        self.out: nn.Module = nn.Identity()
        if config.recurrent is not None and config.is_recurrent(layer):
            self.mixer = DeltaNet(config, config.recurrent)
        else:
            self.qkv = nn.Linear(config.hidden_size, q + 2 * kv, bias=config.qkv_bias)
            self.out = nn.Linear(q, config.hidden_size, bias=config.out_bias)
        attends = self.mixer is None
        gated = config.attention_gate and attends
        self.gate: nn.Module | None = nn.Linear(config.hidden_size, q, bias=config.qkv_bias) if gated else None
        experts = config.experts_of(layer)
        self.mlp = MLP(config) if experts is None else Experts(config, experts)
        self.sinks = nn.Parameter(torch.zeros(config.num_heads)) if config.attention_sinks else None
        q_width, k_width = (q, kv) if config.qk_norm == "all" else (config.head_dim, config.head_dim)
        self.q_norm = Norm(config, q_width) if config.qk_norm != "none" and attends else None
        self.k_norm = Norm(config, k_width) if config.qk_norm != "none" and attends else None
        source = config.encoder
        self.cross = None if source is None else Cross(config, source.layers.hidden_size)
        self.norm_cross = None if source is None else Norm(config)
        self.norm_mlp = Norm(config) if config.wiring != "parallel" and config.pre_norms else None
        self.norm_after_attention = Norm(config) if config.post_norms else None
        self.norm_after_mlp = Norm(config) if config.post_norms else None

    def linears(self, *, across: bool = True) -> tuple[tuple[nn.Module, str], ...]:
        """The linear layers as (parent module, attribute name), for replacing them.

        across  with those of the attention to a source
        """
        parts = self.mlp.experts if isinstance(self.mlp, Experts) else (self.mlp,)
        gate = () if self.gate is None else ((self, "gate"),)
        mixes = ((self, "qkv"), (self, "out"), *gate) if self.mixer is None else self.mixer.linears()
        cross = tuple((self.cross, name) for name in ("q", "kv", "out")) if self.cross is not None and across else ()
        return *mixes, *cross, *((part, name) for part in parts for name in ("up", "down"))

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

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        side: RowSide | None = None,
        recall: Recall | None = None,
    ) -> Tensor:
        """x [B, R, D] -> [B, R, D]; ``attend`` does the attention, with the cache and the mask.

        recall  attends to the rows' sources, in a layer with cross-attention
        """
        post = self.config.wiring == "post"
        h = x if post else self.norm_in(x)
        if self.mixer is not None:
            o = self.mixer(h, attend)
        else:
            qkv = self.qkv(h) if side is None else side.qkv(h, self.qkv)
            parts = self.split(qkv, cos, sin)
            a = attend(*parts) if self.sinks is None else attend(*parts, self.sinks)
            if self.gate is not None:
                a = a * torch.sigmoid(self.gate(h))
            o = self.out(a) if side is None else side.out(a, self.out)
        if self.norm_after_attention is not None:
            o = self.norm_after_attention(o)
        if (scale := self.config.residual_scale) != 1.0:
            o = o * scale
        in_turn = post or self.config.wiring == "sequential"
        if in_turn:
            x = self.norm_in(x + o) if post else x + o
            if self.cross is not None:
                x = self._across(x, recall, post=post)
        if self.norm_mlp is not None:
            h = x if post else self.norm_mlp(x)
        elif in_turn:
            h = x
        m = self.mlp(h) if side is None or isinstance(self.mlp, Experts) else side.mlp(h, self.mlp)
        if self.norm_after_mlp is not None:
            m = self.norm_after_mlp(m)
        if scale != 1.0:
            m = m * scale
        x = x + m if in_turn else x + o + m
        return self.norm_mlp(x) if post and self.norm_mlp is not None else x

    def _across(self, x: Tensor, recall: Recall | None, *, post: bool) -> Tensor:
        """Add the attention to the rows' sources."""
        assert self.cross is not None
        assert self.norm_cross is not None
        assert recall is not None, "a layer with cross-attention needs sources"
        if post:
            return self.norm_cross(x + self.cross(x, recall))  # type: ignore[no-any-return]
        return x + self.cross(self.norm_cross(x), recall)  # type: ignore[no-any-return]


def _columns(cos: Tensor, sin: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """A layer's part of the rotation tables [..., dim]."""
    if width == cos.shape[-1]:
        return cos, sin
    return cos[..., start : start + width], sin[..., start : start + width]


def attention(
    config: ModelConfig,
    q_BNHE: Tensor,
    k_BKLE: Tensor,
    v_BKLE: Tensor,
    bias: Tensor | None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Grouped-query attention without repeated keys: the G query heads of a kv head are stacked as rows.

    ``bias`` [B, 1 or K, G N, L] is added to the scores; None: no mask. Each of ``sinks_H`` takes part in the softmax of
    a query head like the score of a position whose value is zero. Returns [B, N, H E].
    """
    b, n, h, e = q_BNHE.shape
    kv = k_BKLE.shape[1]
    scale = config.attention_scale if config.attention_scale is not None else e**-0.5
    q = q_BNHE.view(b, n, kv, h // kv, e).permute(0, 2, 3, 1, 4).reshape(b, kv, (h // kv) * n, e)
    if sinks_H is not None:
        scores = (q @ k_BKLE.transpose(-1, -2)).float() * scale
        if bias is not None:
            scores = scores + bias
        sinks = sinks_H.float().view(1, kv, h // kv, 1).expand(b, -1, -1, n).reshape(b, kv, -1, 1)
        o = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1].to(q.dtype) @ v_BKLE
    elif config.attention_softcap is None:
        o = F.scaled_dot_product_attention(q, k_BKLE, v_BKLE, attn_mask=bias, scale=scale)
    else:
        cap = config.attention_softcap
        scores = torch.tanh((q @ k_BKLE.transpose(-1, -2)).float() * (scale / cap)) * cap
        if bias is not None:
            scores = scores + bias
        o = scores.softmax(-1).to(q.dtype) @ v_BKLE
    return o.view(b, kv, h // kv, n, e).permute(0, 3, 1, 2, 4).reshape(b, n, h * e)
