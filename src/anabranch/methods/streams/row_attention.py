"""Multi-stream attention over the many rows of a training pass, with its gradient.

The same as ``attention.stream_attention`` up to rounding. The scores of all rows of a batch take tens of MB, and on a
CPU moving them to and from memory takes longer than the products. So one row of the batch is processed at a time, whose
scores stay in the caches, and only the weights are kept for the gradient.

B rows of the batch, N nodes, S streams, H query heads, K kv heads, G = H / K, R = G S, E head width, L cache length.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.model.config import ModelConfig

__all__ = ["row_attention", "row_mask"]


def row_mask(visible_BNL: Tensor, streams: int, groups: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [B, N, R, L + S]: the main stream that a node attends to, and its streams 1..j for stream j."""
    b, n, _ = visible_BNL.shape
    upto_SS = torch.ones(streams, streams, dtype=torch.bool, device=visible_BNL.device).tril()
    allowed = torch.cat(
        (
            visible_BNL[:, :, None].expand(-1, -1, groups * streams, -1),
            upto_SS.repeat(groups, 1).expand(b, n, -1, -1),
        ),
        dim=-1,
    )
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))


def row_attention(
    model: ModelConfig,
    qkv: tuple[Tensor, Tensor, Tensor],
    keys_BKLE: Tensor,
    values_BKLE: Tensor,
    mask: Tensor,
) -> Tensor:
    """Attention of stream rows: q [B, N S, H, E], k and v [B, N S, K, E]; returns [B, N S, H E].

    ``mask`` is ``row_mask``'s. The keys and values of the main stream get a gradient where they need one: those of a
    frozen target do not.
    """
    scale = model.attention_scale if model.attention_scale is not None else qkv[0].shape[-1] ** -0.5
    found: Tensor = _RowAttention.apply(*qkv, keys_BKLE, values_BKLE, mask, scale)  # type: ignore[no-untyped-call]
    return found


class _RowAttention(torch.autograd.Function):
    """See ``row_attention``."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, keys_BKLE: Tensor, values_BKLE: Tensor, mask: Tensor, scale: float
    ) -> Tensor:
        """Attend, and keep the weights."""
        with torch.autocast(q.device.type, enabled=False):
            b, n, r, length = mask.shape
            kv, e = keys_BKLE.shape[1], q.shape[-1]
            own = length - keys_BKLE.shape[2]
            q_BKNRE = _by_node(q * scale, n, own, kv)
            k_BKNSE, v_BKNSE = _by_node(k, n, own, kv), _by_node(v, n, own, kv)
            near = q_BKNRE @ k_BKNSE.transpose(-1, -2) + mask[:, None, ..., -own:]
            # the columns of a node's own streams, which have other keys in every row, are filled in afterwards
            keys, values = (F.pad(part, (0, 0, 0, own)) for part in (keys_BKLE, values_BKLE))
            weights, out = [], torch.empty_like(q_BKNRE)
            for i in range(b):
                hidden = mask[i].flatten(0, 1).expand(kv, -1, -1)
                scores = torch.baddbmm(hidden, q_BKNRE[i].flatten(1, 2), keys[i].transpose(-1, -2))
                scores[..., -own:] = near[i].flatten(1, 2)
                weights.append(scores.softmax(-1))
                out[i] = (weights[i] @ values[i]).view(kv, n, r, e)
            near = torch.stack([weight[..., -own:] for weight in weights]).view(b, kv, n, r, own)
            out += near @ v_BKNSE
            ctx.save_for_backward(q_BKNRE, k_BKNSE, v_BKNSE, keys, values, near, *weights)
            ctx.scale = scale
            return _by_row(out, own).flatten(2)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        """The gradients of q, k and v, and of the main stream's keys and values if they are needed."""
        q_BKNRE, k_BKNSE, v_BKNSE, keys, values, near, *weights = ctx.saved_tensors
        b, kv, n, r, own = near.shape
        slope = upstream[0].unflatten(-1, (-1, q_BKNRE.shape[-1]))
        slope_BKNRE = _by_node(slope, n, own, kv)
        to_near = slope_BKNRE @ v_BKNSE.transpose(-1, -2)
        to_q, to_scores = torch.empty_like(q_BKNRE), torch.empty_like(near)
        wanted = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
        to_keys, to_values = (torch.empty_like(part[:, :, :-own]) if wanted else None for part in (keys, values))
        for i in range(b):
            to_weight = slope_BKNRE[i].flatten(1, 2) @ values[i].transpose(-1, -2)
            to_weight[..., -own:] = to_near[i].flatten(1, 2)
            change = torch._softmax_backward_data(to_weight, weights[i], -1, near.dtype)
            to_scores[i] = change[..., -own:].view(kv, n, r, own)
            to_q[i] = (change @ keys[i]).view(to_q[i].shape)
            if to_keys is not None and to_values is not None:
                to_keys[i] = change[..., :-own].transpose(-1, -2) @ q_BKNRE[i].flatten(1, 2)
                to_values[i] = weights[i][..., :-own].transpose(-1, -2) @ slope_BKNRE[i].flatten(1, 2)
        to_q += to_scores @ k_BKNSE
        to_k = to_scores.transpose(-1, -2) @ q_BKNRE
        to_v = near.transpose(-1, -2) @ slope_BKNRE
        gradients = (_by_row(to_q, own) * ctx.scale, _by_row(to_k, own), _by_row(to_v, own))
        return (*gradients, to_keys, to_values, None, None)


def _by_node(x: Tensor, nodes: int, streams: int, kv: int) -> Tensor:
    """[B, N S, heads, E] -> [B, K, N, heads / K S, E]."""
    b, _, heads, e = x.shape
    split = x.view(b, nodes, streams, kv, heads // kv, e).permute(0, 3, 1, 4, 2, 5)
    return split.reshape(b, kv, nodes, heads // kv * streams, e)


def _by_row(x: Tensor, streams: int) -> Tensor:
    """[B, K, N, heads / K S, E] -> [B, N S, heads, E]."""
    b, kv, nodes, rows, e = x.shape
    split = x.view(b, kv, nodes, rows // streams, streams, e).permute(0, 2, 4, 1, 3, 5)
    return split.reshape(b, nodes * streams, kv * rows // streams, e)
