"""Fused operations of a decoding step on a GPU: one kernel each in Triton, and the same mathematics in PyTorch.

A GPU runs the kernels of a step over a few tokens faster than it can start them, so a layer takes five:

    heads       norm, fused projection, norms and rotation of queries and keys, keys and values into the cache
    attend      attention over the cache in place, under the mask of a tree, with streams or without
    product     the output projection and the residual sum
    product     norm, gate and up, activation
    product     down and the residual sum

The operations are ``torch.ops.anabranch.*``. A CPU computes the definitions of this file, and a CUDA device the
functions of ``kernels``. Both round where the layers of ``blocks`` do, up to the rotation and the softmax, which the
kernels compute in float32.

B rows of the batch, M rows of a product, N tree nodes, R rows of a layer, S streams of a node, V vocabulary, D model
width, H query heads, K kv heads, G = H / K, E head width, C positions of a cache, L those that are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.sampling import argmax

__all__ = ["ACTIVATIONS", "NORMS", "implement", "operation", "ops"]

NORMS = ("none", "rms", "rms_plus_one", "layer")  # arguments are indices into these
ACTIVATIONS = ("none", "silu", "gelu", "gelu_tanh", "relu")

_LIBRARY = torch.library.Library("anabranch", "DEF")  # type: ignore[no-untyped-call]
ops: Any = torch.ops.anabranch


def operation(*changed: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Define an operation that a CPU computes by the decorated function, which writes to its arguments ``changed``."""

    def defined(compute: Callable[..., Any]) -> Callable[..., Any]:
        name = compute.__name__
        _LIBRARY.define(name + torch.library.infer_schema(compute, mutates_args=changed))  # type: ignore[no-untyped-call]
        _LIBRARY.impl(name, compute, "CPU")  # type: ignore[no-untyped-call]
        return compute

    return defined


def implement(kernels: Mapping[str, Callable[..., Any]]) -> None:
    """Let CUDA devices compute the operations with these kernels."""
    for name, compute in kernels.items():
        _LIBRARY.impl(name, compute, "CUDA")  # type: ignore[no-untyped-call]


def _normed(x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: int, eps: float) -> Tensor:
    kind = NORMS[norm]
    if kind == "none" or weight is None:
        return x
    if kind == "layer":
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)
    if kind == "rms" and x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    if kind == "rms_plus_one":
        return (y * (1.0 + weight.float())).to(x.dtype)
    return weight * y.to(x.dtype)


def _activated(y: Tensor, activation: int) -> Tensor:
    kind = ACTIVATIONS[activation]
    if kind == "silu":
        return F.silu(y)
    if kind == "relu":
        return F.relu(y)
    return y if kind == "none" else F.gelu(y, approximate="tanh" if kind == "gelu_tanh" else "none")


@operation()
def product(
    x_MD: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    norm: int,
    eps: float,
    activation: int,
    gated: int,
    residual: Tensor | None,
) -> Tensor:
    """``residual + activation(norm(x) weight' + bias)`` [M, outputs].

    gated  the weight has the rows of ``gated`` gates, as many of the values that they multiply, and of outputs without
           a gate; there are ``gated`` fewer outputs than rows. 0: no gates
    """
    y = F.linear(_normed(x_MD, norm_weight, norm_bias, norm, eps), weight, bias)
    if gated:
        gate, up, rest = y.tensor_split((gated, 2 * gated), dim=-1)
        y = _activated(gate, activation) * up
        y = torch.cat((y, _activated(rest, activation)), dim=-1) if rest.shape[-1] else y
    else:
        y = _activated(y, activation)
    return y if residual is None else residual + y


@operation("keys_BKCE", "values_BKCE")
def heads(
    x_BRD: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    norm: int,
    eps: float,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    head_norm: int,
    table: Tensor | None,
    positions_BR: Tensor,
    keys_BKCE: Tensor,
    values_BKCE: Tensor,
    places_BR: Tensor,
) -> Tensor:
    """Queries [B, R, H, E] of rows, whose keys and values are written to ``places_BR`` of ``keys`` and ``values``.

    table  cosines and sines of every position [2, positions, dim] float32, of the first dim channels; None: no rotation
    """
    b, r, _ = x_BRD.shape
    _, kv, _, e = keys_BKCE.shape
    qkv = F.linear(_normed(x_BRD, norm_weight, norm_bias, norm, eps), weight, bias).view(b, r, -1, e)
    h = qkv.shape[2] - 2 * kv
    q, k, v = qkv.tensor_split((h, h + kv), dim=2)
    q, k = _normed(q, q_norm, None, head_norm, eps), _normed(k, k_norm, None, head_norm, eps)
    if table is not None:
        q, k = _rotated(q, table, positions_BR), _rotated(k, table, positions_BR)
    rows_B1 = torch.arange(b)[:, None]
    keys_BKCE[rows_B1, :, places_BR] = k
    values_BKCE[rows_B1, :, places_BR] = v
    return q.contiguous()


def _rotated(x: Tensor, table: Tensor, positions_BR: Tensor) -> Tensor:
    """As ``rope.rotate``, with the rows of a table."""
    cos, sin = table[:, positions_BR][:, :, :, None].to(x.dtype)
    dim = cos.shape[-1]
    left, right = x[..., :dim].chunk(2, dim=-1)
    rotated = x[..., :dim] * cos + torch.cat((-right, left), dim=-1) * sin
    return torch.cat((rotated, x[..., dim:]), dim=-1)


@operation()
def attend(
    q_BRHE: Tensor,
    keys_BKLE: Tensor,
    values_BKLE: Tensor,
    lengths_B: Tensor,
    tree_BNN: Tensor | None,
    positions_BN: Tensor | None,
    own_keys_BKRE: Tensor | None,
    own_values_BKRE: Tensor | None,
    streams: int,
    window: int,
    scale: float,
    cap: float,
) -> Tensor:
    """Attention [B, R, H E] of rows over the positions of a cache, which are not copied.

    Node n sees the ``lengths_B`` committed positions and, of the nodes that follow these in the cache, those that
    ``tree_BNN`` has; in both cases only the last ``window`` of the text (0: all).

    tree_BNN         None: none of the nodes, which are one for each row of the batch and lie in the cache already
    positions_BN     of the nodes in the text; needed for a window
    own_keys_BKRE    keys and values of stream rows, S for each node: the rows are these, and stream j of a node sees
                     what the node sees and its streams up to j. None: the rows are the nodes
    cap              soft cap of the scores; 0: none
    """
    b, r, h, e = q_BRHE.shape
    kv, length = keys_BKLE.shape[1:3]
    per = max(streams, 1)
    n, g = r // per, h // kv
    keys = torch.arange(length)
    relative_BL = keys - lengths_B[:, None]
    visible_BNL = (relative_BL < 0)[:, None].expand(b, n, length)
    text_BL = keys.expand(b, length)
    if tree_BNN is not None:
        inside = (relative_BL >= 0) & (relative_BL < n)
        node_BL = relative_BL.clamp(0, n - 1)
        visible_BNL = visible_BNL | (tree_BNN.gather(2, node_BL[:, None].expand(b, n, length)) & inside[:, None])
        if window:
            assert positions_BN is not None
            text_BL = torch.where(relative_BL < 0, text_BL, positions_BN.gather(1, node_BL))
    if window:
        assert positions_BN is not None
        visible_BNL = visible_BNL & (positions_BN[:, :, None] - text_BL[:, None] < window)
    visible = visible_BNL.repeat_interleave(per, dim=1)
    q = (q_BRHE.float() * scale).view(b, r, kv, g, e).permute(0, 2, 3, 1, 4).reshape(b, kv, g * r, e).to(q_BRHE.dtype)
    scores = (q @ keys_BKLE.transpose(-1, -2)).float().view(b, kv, g, r, length)
    scores = _capped(scores, cap).masked_fill(~visible[:, None, None], float("-inf"))
    if own_keys_BKRE is not None:
        near = _capped((q @ own_keys_BKRE.transpose(-1, -2)).float().view(b, kv, g, r, r), cap)
        rows = torch.arange(r)
        upto = (rows[:, None] // per == rows // per) & (rows[:, None] >= rows)
        scores = torch.cat((scores, near.masked_fill(~upto, float("-inf"))), dim=-1)
    weights = scores.softmax(-1).to(q.dtype).view(b, kv, g * r, -1)
    out = weights[..., :length] @ values_BKLE
    if own_values_BKRE is not None:
        out = out + weights[..., length:] @ own_values_BKRE
    return out.view(b, kv, g, r, e).permute(0, 3, 1, 2, 4).reshape(b, r, h * e)


def _capped(scores: Tensor, cap: float) -> Tensor:
    return torch.tanh(scores / cap) * cap if cap else scores


@operation()
def choose(logits_MV: Tensor) -> Tensor:
    """The first index of the largest logit [M]; -1 where it is not finite."""
    return argmax(logits_MV)


@operation()
def ancestry(parents_BN: Tensor, lengths_B: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of nodes in the text [B, N], and what each sees of its tree [B, N, N]: its ancestors and itself.

    ``parents_BN`` are indices in the row that precede their children; -1: none.
    """
    b, n = parents_BN.shape
    seen_BNN = torch.eye(n, dtype=torch.bool).repeat(b, 1, 1)
    for node in range(1, n):
        above_B = parents_BN[:, node]
        seen_BNN[:, node] |= seen_BNN[torch.arange(b), above_B] & (above_B >= 0)[:, None]
    return seen_BNN.sum(-1) - 1 + lengths_B[:, None], seen_BNN


@operation()
def verify(tokens_BN: Tensor, parents_BN: Tensor, chosen_BN: Tensor) -> Tensor:
    """The accepted path of each tree [B, 2 + N]: its nodes' count, the target's token after it, its nodes and -1.

    The same as ``verify.match``; ``chosen_BN`` are the target's own tokens after each node.
    """
    out = torch.full((len(tokens_BN), tokens_BN.shape[1] + 2), -1)
    rows = zip(tokens_BN.tolist(), parents_BN.tolist(), chosen_BN.tolist(), strict=True)
    for verdict, (tokens, parents, chosen) in zip(out, rows, strict=True):
        path = [0]
        for node in range(1, len(tokens)):
            if parents[node] == path[-1] and tokens[node] == chosen[path[-1]]:
                path.append(node)
        verdict[: len(path) + 2] = torch.tensor([len(path), chosen[path[-1]], *path])
    return out


@operation("keys", "values")
def keep(keys: Tensor, values: Tensor, lengths_B: Tensor, verdicts: Tensor) -> None:
    """Move keys and values [layers, B, K, C, E] of accepted paths to the position after the committed tokens."""
    for b, (length, (count, _, *path)) in enumerate(zip(lengths_B.tolist(), verdicts.tolist(), strict=True)):
        index = torch.tensor(path[:count]) + length
        for held in (keys, values):
            held[:, b, :, length : length + count] = held[:, b, :, index]
