"""Multi-stream attention (MSA), for any set of nodes, riding in the target's pass or trailing it.

Stream j of node n attends to the main stream up to n (cached context, ancestors, n itself) and to streams 1..j of n
(ACL eq. 2). In shared mode the main row of n may attend to streams 1..gamma of n as well (eq. 3). Stream keys and
values come from the target's own projections and are never stored.

B rows of the batch, N nodes, S streams, H query heads, K kv heads, G = H / K, R = G S, E head width, L cache length,
T = top.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.methods.streams.recipes import StreamConfig
from anabranch.model.blocks import attention
from anabranch.model.config import ModelConfig
from anabranch.model.relative import relative_bias

__all__ = [
    "distance_bias",
    "main_attention",
    "row_attention",
    "row_mask",
    "stream_attention",
    "stream_bias",
    "stream_positions",
    "stream_values",
]

# Up to this many stream rows attend in one fused call over context and all stream keys. Beyond it (hundreds of nodes in
# training), the masked keys of other nodes' streams would cost more than a separate product.
FUSED_ROWS = 160


def stream_positions(positions_BN: Tensor, num_streams: int) -> Tensor:
    """Positions of stream rows [B, N S]: stream j of a node at position t has position t + j."""
    offsets = torch.arange(1, num_streams + 1, device=positions_BN.device)
    return (positions_BN[:, :, None] + offsets).flatten(1)


def stream_values(config: StreamConfig, v_BRKE: Tensor) -> Tensor:
    """The values of stream rows [B, N S, K, E] as rows attend to them: rotated, where that tells streams apart.

    Channel pairs of stream n's values are rotated by the angle ``rotation_step`` * n (ACL eq. 8).
    """
    if config.position != "rotation":
        return v_BRKE
    b, _, kv, e = v_BRKE.shape
    v_BNSKE = v_BRKE.reshape(b, -1, config.num_streams, kv, e)
    angle = torch.arange(1, config.num_streams + 1, device=v_BRKE.device, dtype=torch.float32) * config.rotation_step
    cos, sin = (turn.to(v_BRKE.dtype)[:, None, None] for turn in (angle.cos(), angle.sin()))
    left, right = v_BNSKE.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1).flatten(1, 2)


def main_attention(
    model: ModelConfig,
    config: StreamConfig,
    q_BNHE: Tensor,
    keys_BKLE: Tensor,
    values_BKLE: Tensor,
    streams: tuple[Tensor, Tensor],
    visible_BNL: Tensor,
) -> Tensor:
    """Attention of main rows in shared mode (ACL eq. 3); returns [B, N, H E].

    Each node attends to what it sees of the main stream (``keys_BKLE``, ``values_BKLE``, ``visible_BNL``) and to the
    keys and values ``streams`` [B, N S, K, E] of its own streams, not to those of other nodes: a node's result is the
    same in a tree as alone.
    """
    (k, v), (b, n, h, e) = streams, q_BNHE.shape
    kv, s, length = k.shape[2], config.num_streams, keys_BKLE.shape[2]
    g = h // kv
    scale = model.attention_scale if model.attention_scale is not None else e**-0.5
    q_BKGNE = (q_BNHE * scale).view(b, n, kv, g, e).permute(0, 2, 3, 1, 4)
    v_BNSKE = stream_values(config, v).view(b, n, s, kv, e)
    main = (q_BKGNE.reshape(b, kv, g * n, e) @ keys_BKLE.transpose(-1, -2)).view(b, kv, g, n, length)
    own = torch.einsum("bkgne,bnske->bkgns", q_BKGNE, k.view(b, n, s, kv, e))
    scores = torch.cat((main, own), dim=-1).float()
    if model.attention_softcap is not None:
        scores = torch.tanh(scores / model.attention_softcap) * model.attention_softcap
    seen = F.pad(visible_BNL, (0, s), value=True)[:, None, None]
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).to(q_BNHE.dtype)
    out = (weights[..., :length].reshape(b, kv, g * n, length) @ values_BKLE).view(b, kv, g, n, e)
    out = out + torch.einsum("bkgns,bnske->bkgne", weights[..., length:], v_BNSKE)
    return out.permute(0, 3, 1, 2, 4).reshape(b, n, h * e)


def stream_bias(model: ModelConfig, config: StreamConfig, visible_BNL: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Additive mask [B, 1, G N S, L + N S] of the fused call, computed once per pass; None if it is not used."""
    b, n, length = visible_BNL.shape
    s = config.num_streams
    if n * s > FUSED_ROWS or 0 < config.context_top < length:
        return None
    same = torch.eye(n, dtype=torch.bool, device=visible_BNL.device)[:, None, :, None]
    upto = torch.ones(s, s, dtype=torch.bool, device=visible_BNL.device).tril()[None, :, None, :]
    own = (same & upto).reshape(n * s, n * s).expand(b, -1, -1)
    allowed = torch.cat((visible_BNL.repeat_interleave(s, dim=1), own), dim=2)
    bias = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))
    return bias[:, None].repeat(1, 1, model.num_heads // model.num_kv_heads, 1)


def distance_bias(
    table: nn.Module | None, model: ModelConfig, streams: int, positions_BN: Tensor, length: int
) -> Tensor | None:
    """The bias of trailing streams by distance [B, K, G, N, S, L + S]; None for a target without such biases.

    Keys are those of the text, at ``length`` positions from 0 on, and the streams of the node itself. ``positions_BN``
    are those of the nodes.
    """
    if table is None or model.relative is None:
        return None
    (b, n), kv = positions_BN.shape, model.num_kv_heads
    own_BNS = stream_positions(positions_BN, streams).view(b, n, streams)
    keys = torch.arange(length, device=positions_BN.device).expand(b, n, -1)
    keys_MX = torch.cat((keys, own_BNS), dim=-1).flatten(0, 1)
    bias_MHSX = relative_bias(table, model.relative, own_BNS.flatten(0, 1), keys_MX)
    return bias_MHSX.view(b, n, kv, -1, *bias_MHSX.shape[2:]).permute(0, 2, 3, 1, 4, 5)


def stream_attention(
    model: ModelConfig,
    config: StreamConfig,
    qkv: tuple[Tensor, Tensor, Tensor],
    keys_BKLE: Tensor,
    values_BKLE: Tensor,
    visible_BNL: Tensor,
    main_q_BNHE: Tensor | None = None,
    bias: Tensor | None = None,
    distances: Tensor | None = None,
) -> Tensor:
    """Attention of stream rows: q [B, N S, H, E], k and v [B, N S, K, E]; returns [B, N S, H E].

    ``keys_BKLE`` and ``values_BKLE`` are those of the main stream, including this step's nodes; ``visible_BNL`` is the
    mask of what each node attends to. ``main_q_BNHE`` are the main rows' queries, needed if ``config.context_top``.
    With ``bias`` from ``stream_bias``, the same is computed in one fused call. ``distances`` are those of
    ``distance_bias``, without ``bias`` and ``context_top``.
    """
    q, k, v = qkv
    b, rows, h, e = q.shape
    s = config.num_streams
    n, kv = rows // s, k.shape[2]
    g = h // kv
    if bias is not None:
        keys = torch.cat((keys_BKLE, k.transpose(1, 2)), dim=2)
        values = torch.cat((values_BKLE, stream_values(config, v).transpose(1, 2)), dim=2)
        return attention(model, q, keys, values, bias)
    scale = model.attention_scale if model.attention_scale is not None else e**-0.5
    q_BKGNSE = (q * scale).view(b, n, s, kv, g, e).permute(0, 3, 4, 1, 2, 5)
    k_BKNSE = k.view(b, n, s, kv, e).permute(0, 3, 1, 2, 4)
    v_BKNSE = stream_values(config, v).view(b, n, s, kv, e).permute(0, 3, 1, 2, 4)

    own = torch.einsum("bkgnse,bknte->bkgnst", q_BKGNSE, k_BKNSE)
    length = keys_BKLE.shape[2]
    top = config.context_top if 0 < config.context_top < length and main_q_BNHE is not None else 0
    if top:
        # the paper's approximation: only the positions with the largest weights for the node's main row, per kv head
        assert main_q_BNHE is not None
        main_q = main_q_BNHE.view(b, n, kv, g, e).permute(0, 2, 3, 1, 4)
        seen = (main_q * scale @ keys_BKLE[:, :, None].transpose(-1, -2)).float()
        seen = seen.masked_fill(~visible_BNL[:, None, None], float("-inf")).softmax(-1).sum(2)
        best_BKNT = seen.topk(top, dim=-1).indices
        flat = best_BKNT.flatten(2)[..., None].expand(-1, -1, -1, e)
        keys = keys_BKLE.gather(2, flat).view(b, kv, n, top, e)
        values = values_BKLE.gather(2, flat).view(b, kv, n, top, e)
        visible = visible_BNL[:, None].expand(-1, kv, -1, -1).gather(3, best_BKNT)[:, :, None, :, None, :]
        main = torch.einsum("bkgnse,bknte->bkgnst", q_BKGNSE, keys)
    else:
        main = (q_BKGNSE.reshape(b, kv, g * n * s, e) @ keys_BKLE.transpose(-1, -2)).view(b, kv, g, n, s, length)
        visible = visible_BNL[:, None, None, :, None, :]
    scores = torch.cat((main, own), dim=-1)
    if model.attention_softcap is not None:
        scores = torch.tanh(scores / model.attention_softcap) * model.attention_softcap
    scores = scores if distances is None else scores + distances
    # one additive mask: the main stream visible to the node, then streams 1..j
    cut = main.shape[-1]
    bias = torch.full((*visible.shape[:-2], s, cut + s), float("-inf"), dtype=scores.dtype, device=q.device)
    bias[..., :cut].masked_fill_(visible, 0.0)
    bias[..., cut:] = bias[..., cut:].triu(1)
    weights = (scores + bias).softmax(-1, dtype=torch.float32).to(q.dtype)
    weights_main, weights_own = weights[..., :cut], weights[..., cut:]
    if top:
        out = torch.einsum("bkgnst,bknte->bkgnse", weights_main, values)
    else:
        flat_weights = weights_main.reshape(b, kv, g * n * s, length)
        out = (flat_weights @ values_BKLE).view(b, kv, g, n, s, e)
    out = out + torch.einsum("bkgnst,bknte->bkgnse", weights_own, v_BKNSE)
    return out.permute(0, 3, 4, 1, 2, 5).reshape(b, rows, h * e)


# -- the many rows of a training pass -------------------------------------------------------------------
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
    """As ``stream_attention`` up to rounding, with its gradient.

    The scores of all rows of a batch take tens of MB, and on a CPU moving them to and from memory takes longer than the
    products. So one row of the batch is processed at a time, whose scores stay in the caches, and only the weights are
    kept for the gradient.

    ``mask`` is ``row_mask``'s. The keys and values of the main stream get a gradient where they need one: those of a
    frozen target do not.
    """
    scale = model.attention_scale if model.attention_scale is not None else qkv[0].shape[-1] ** -0.5
    attended: Tensor = _RowAttention.apply(*qkv, keys_BKLE, values_BKLE, mask, scale)  # type: ignore[no-untyped-call]
    return attended


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
