"""``ops.attend`` in Triton. Legend as in ``ops``."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anabranch.model.device.shares import counter, is_last, rows_of_block, shares_of

__all__ = ["attend"]


@triton.jit
def _scores(q, k, scale, cap, HAS_CAP: tl.constexpr):
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if HAS_CAP:
        scores = cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores / cap)))
    return scores


@triton.jit
def _taken(scores, v, most, total, out):
    """Add scored keys to a running softmax."""
    new = tl.maximum(most, tl.max(scores, axis=1))
    base = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp(scores - base[:, None])
    shrink = tl.exp(most - base)
    total = total * shrink + tl.sum(weights, axis=1)
    out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
    return new, total, out


@triton.jit
def _attend(
    q, keys, values, lengths, tree, positions, own_keys, own_values, out, parts, counts,
    R, N, KV, G, k_b, k_h, k_c, v_b, v_h, v_c, ok_b, ok_h, ok_c, ov_b, ov_h, ov_c, window, scale, cap,
    HAS_TREE: tl.constexpr, PER: tl.constexpr, OWN: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    SHARES: tl.constexpr, E: tl.constexpr, PE: tl.constexpr, BM: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    block, pair, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, kv = (pair // KV).to(tl.int64), pair % KV
    index = block * BM + tl.arange(0, BM)  # rows of a kv head: G query heads of each row of the layer
    valid = index < R * G
    row, group = index // G, index % G
    node = row // PER
    e = tl.arange(0, PE)
    in_e = e < E
    at = ((batch * R + row) * (KV * G) + kv * G + group)[:, None] * E + e[None, :]
    q_tile = tl.load(q + at, mask=valid[:, None] & in_e[None, :], other=0.0)
    length = tl.load(lengths + batch).to(tl.int32)
    end = length
    if HAS_TREE:
        end += N
    here = length
    if WINDOW:
        here = tl.load(positions + batch * N + node, mask=valid, other=0)
    most = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    result = tl.zeros((BM, PE), tl.float32)
    each = tl.cdiv(tl.cdiv(end, BL), SHARES) * BL
    for start in range(share * each, tl.minimum(share * each + each, end), BL):
        key = start + tl.arange(0, BL)
        seen = (key[None, :] < length) & valid[:, None]
        text = key
        if HAS_TREE:
            other = key - length
            inside = (other >= 0) & (other < N)
            linked = tl.load(
                tree + (batch * N + node)[:, None] * N + other[None, :], mask=valid[:, None] & inside[None, :], other=0
            )
            seen = seen | (linked != 0)
            if WINDOW:
                text = tl.where(inside, tl.load(positions + batch * N + other, mask=inside, other=0), key)
        if WINDOW:
            seen = seen & (here[:, None] - text[None, :] < window)
        tile = (key < end)[:, None] & in_e[None, :]
        k = tl.load(keys + batch * k_b + kv * k_h + key[:, None] * k_c + e[None, :], mask=tile, other=0.0)
        v = tl.load(values + batch * v_b + kv * v_h + key[:, None] * v_c + e[None, :], mask=tile, other=0.0)
        scores = tl.where(seen, _scores(q_tile, k, scale, cap, HAS_CAP), float("-inf"))
        most, total, result = _taken(scores, v, most, total, result)
    if OWN:
        for own_start in range(0, tl.where(share == SHARES - 1, R, 0), BL):
            near = own_start + tl.arange(0, BL)
            upto = (near[None, :] // PER == node[:, None]) & (near[None, :] <= row[:, None]) & valid[:, None]
            inner = (near < R)[:, None] & in_e[None, :]
            own_k = tl.load(
                own_keys + batch * ok_b + kv * ok_h + near[:, None] * ok_c + e[None, :], mask=inner, other=0.0
            )
            own_v = tl.load(
                own_values + batch * ov_b + kv * ov_h + near[:, None] * ov_c + e[None, :], mask=inner, other=0.0
            )
            own_scores = tl.where(upto, _scores(q_tile, own_k, scale, cap, HAS_CAP), float("-inf"))
            most, total, result = _taken(own_scores, own_v, most, total, result)
    last = True
    if SHARES > 1:
        slot = (pair * tl.num_programs(0) + block) * SHARES
        lines = tl.arange(0, BM)
        wide = PE + 2
        to = parts + (slot + share) * BM * wide + lines * wide
        tl.store(to[:, None] + e[None, :], result)
        tl.store(to + PE, most)
        tl.store(to + PE + 1, total)
        last = is_last(counts + pair * tl.num_programs(0) + block, share, SHARES)
        if last:
            most = tl.full((BM,), float("-inf"), tl.float32)
            total = tl.zeros((BM,), tl.float32)
            result = tl.zeros((BM, PE), tl.float32)
            for each_share in range(SHARES):
                of = parts + (slot + each_share) * BM * wide + lines * wide
                its_most = tl.load(of + PE, cache_modifier=".cg")
                new = tl.maximum(most, its_most)
                base = tl.where(new == float("-inf"), 0.0, new)
                mine, its = tl.exp(most - base), tl.exp(its_most - base)
                total = total * mine + tl.load(of + PE + 1, cache_modifier=".cg") * its
                result = result * mine[:, None] + tl.load(of[:, None] + e[None, :], cache_modifier=".cg") * its[:, None]
                most = new
    if last:
        attended = result / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + at, attended.to(out.dtype.element_ty), mask=valid[:, None] & in_e[None, :])


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
    """``ops.attend``."""
    q = q_BRHE.contiguous()
    b, r, h, e = q.shape
    kv, span = keys_BKLE.shape[1:3]
    per = max(streams, 1)
    out = torch.empty((b, r, h * e), dtype=q.dtype, device=q.device)
    bm, bl = rows_of_block(r * (h // kv)), 64
    blocks = triton.cdiv(r * (h // kv), bm)
    shares = shares_of(b * kv, triton.cdiv(span, bl))  # however many nodes there are, so that sums have one order
    pe = max(16, triton.next_power_of_2(e))
    parts = q
    if shares > 1:
        parts = torch.empty((b * kv * blocks * shares, bm, pe + 2), dtype=torch.float32, device=q.device)
    own_keys = keys_BKLE if own_keys_BKRE is None else own_keys_BKRE
    own_values = values_BKLE if own_values_BKRE is None else own_values_BKRE
    _attend[(blocks, b * kv, shares)](
        q, keys_BKLE, values_BKLE, lengths_B, None if tree_BNN is None else tree_BNN.contiguous(),
        None if positions_BN is None else positions_BN.contiguous(), own_keys, own_values, out, parts,
        counter(q.device), r, r // per, kv, h // kv, *keys_BKLE.stride()[:3], *values_BKLE.stride()[:3],
        *own_keys.stride()[:3], *own_values.stride()[:3], window, scale, cap, HAS_TREE=tree_BNN is not None, PER=per,
        OWN=own_keys_BKRE is not None, WINDOW=bool(window), HAS_CAP=bool(cap), SHARES=shares, E=e, PE=pe, BM=bm,
        BL=bl, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out
