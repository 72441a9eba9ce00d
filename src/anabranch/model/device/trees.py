"""The operations over logits, trees and paths in Triton, those before and after the layers. Legend as in ``ops``."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anabranch.model.device.shares import counter, is_last, shares_of

__all__ = ["ancestry", "choose", "keep", "verify"]


@triton.jit
def _choose(
    logits, chosen, values, indices, counts, V, stride, SHARES: tl.constexpr, PS: tl.constexpr, BV: tl.constexpr
):
    row, share = tl.program_id(0), tl.program_id(1)
    each = tl.cdiv(tl.cdiv(V, BV), SHARES) * BV
    most = tl.full((BV,), float("-inf"), tl.float32)
    where = tl.full((BV,), 0, tl.int64) + V
    for start in range(share * each, tl.minimum(share * each + each, V), BV):
        at = start + tl.arange(0, BV)
        x = tl.load(logits + row.to(tl.int64) * stride + at, mask=at < V, other=float("-inf")).to(tl.float32)
        x = tl.where(x != x, float("inf"), x)  # NaN counts as the largest
        more = (x > most) & (at < V)
        most, where = tl.where(more, x, most), tl.where(more, at, where)
    best = tl.max(most, axis=0)
    first = tl.min(tl.where(most == best, where, V), axis=0)
    last = True
    if SHARES > 1:
        tl.store(values + row * SHARES + share, best)
        tl.store(indices + row * SHARES + share, first)
        last = is_last(counts + row, share, SHARES)
        if last:
            shares = tl.arange(0, PS)
            bests = tl.load(
                values + row * SHARES + shares, mask=shares < SHARES, other=float("-inf"), cache_modifier=".cg"
            )
            firsts = tl.load(indices + row * SHARES + shares, mask=shares < SHARES, other=V, cache_modifier=".cg")
            best = tl.max(bests, axis=0)
            first = tl.min(tl.where(bests == best, firsts, V), axis=0)
    if last:
        finite = (best < float("inf")) & (best > float("-inf"))
        tl.store(chosen + row, tl.where(finite, first, -1))


def choose(logits_MV: Tensor) -> Tensor:
    """``ops.choose``."""
    m, v = logits_MV.shape
    chosen = torch.empty(m, dtype=torch.int64, device=logits_MV.device)
    block = min(2048, triton.next_power_of_2(v))
    shares = shares_of(m, 4 * triton.cdiv(v, block))
    values = torch.empty((m, shares), dtype=torch.float32, device=logits_MV.device)
    indices = torch.empty((m, shares), dtype=torch.int64, device=logits_MV.device)
    assert logits_MV.stride(1) == 1
    _choose[(m, shares)](
        logits_MV, chosen, values, indices, counter(logits_MV.device), v, logits_MV.stride(0), SHARES=shares,
        PS=triton.next_power_of_2(shares), BV=block, num_warps=8,
    )  # fmt: skip
    return chosen


@triton.jit
def _ancestry(parents, lengths, positions, seen, N, BN: tl.constexpr, PN: tl.constexpr):
    batch, block = tl.program_id(0), tl.program_id(1)
    node, other = block * BN + tl.arange(0, BN), tl.arange(0, PN)
    here = tl.where(node < N, node, -1)
    above = tl.zeros((BN, PN), tl.int32)
    depth = tl.zeros((BN,), tl.int64) - 1
    while tl.max(here, axis=0) >= 0:
        above += (here[:, None] == other[None, :]).to(tl.int32)
        depth += (here >= 0).to(tl.int64)
        here = tl.load(parents + batch * N + here, mask=here >= 0, other=-1).to(tl.int32)
    tl.store(positions + batch * N + node, depth + tl.load(lengths + batch), mask=node < N)
    kept = (node < N)[:, None] & (other < N)[None, :]
    tl.store(seen + (batch * N + node)[:, None] * N + other[None, :], (above > 0).to(tl.int8), mask=kept)


def ancestry(parents_BN: Tensor, lengths_B: Tensor) -> tuple[Tensor, Tensor]:
    """``ops.ancestry``."""
    b, n = parents_BN.shape
    positions = torch.empty((b, n), dtype=torch.int64, device=parents_BN.device)
    seen = torch.empty((b, n, n), dtype=torch.int8, device=parents_BN.device)
    block = min(16, triton.next_power_of_2(n))
    _ancestry[(b, triton.cdiv(n, block))](
        parents_BN.contiguous(), lengths_B.contiguous(), positions, seen, n, BN=block, PN=triton.next_power_of_2(n)
    )
    return positions, seen.view(torch.bool)


@triton.jit
def _verify(tokens, parents, chosen, verdicts, N, PN: tl.constexpr):
    batch = tl.program_id(0)
    node = tl.arange(0, PN)
    inside = (node < N) & (node > 0)
    token = tl.load(tokens + batch * N + node, mask=inside, other=-2)
    parent = tl.load(parents + batch * N + node, mask=inside, other=-2)
    to = verdicts + batch * (N + 2)
    tl.store(to + 2 + node, tl.where(node == 0, 0, -1).to(tl.int64), mask=node < N)
    tl.debug_barrier()  # the path is written over these
    here = tl.full((), 0, tl.int64)
    wanted = tl.load(chosen + batch * N)
    count = tl.full((), 1, tl.int64)
    step = tl.full((), 0, tl.int64)
    while step < N:
        matches = inside & (parent == here) & (token == wanted)
        # the first of equal siblings, as on the host
        child = tl.min(tl.where(matches, node, PN), axis=0).to(tl.int64)
        hit = child < N
        tl.store(to + 2 + count, child, mask=hit)
        here = tl.where(hit, child, here)
        wanted = tl.load(chosen + batch * N + here)
        count += hit.to(tl.int64)
        step = tl.where(hit, step + 1, N)
    tl.store(to, count)
    tl.store(to + 1, wanted)


def verify(tokens_BN: Tensor, parents_BN: Tensor, chosen_BN: Tensor) -> Tensor:
    """``ops.verify``."""
    b, n = tokens_BN.shape
    verdicts = torch.empty((b, n + 2), dtype=torch.int64, device=tokens_BN.device)
    tokens, parents, chosen = (x.contiguous() for x in (tokens_BN, parents_BN, chosen_BN))
    _verify[(b,)](tokens, parents, chosen, verdicts, n, PN=triton.next_power_of_2(n), num_warps=1)
    return verdicts


@triton.jit
def _keep(
    keys, values, lengths, verdicts, B, KV, P, k_l, k_b, k_h, k_c, v_l, v_b, v_h, v_c, E: tl.constexpr, PE: tl.constexpr
):
    layer, batch, kv = tl.program_id(0) // B, tl.program_id(0) % B, tl.program_id(1)
    e = tl.arange(0, PE)
    start, count = tl.load(lengths + batch), tl.load(verdicts + batch * P)
    key = keys + layer.to(tl.int64) * k_l + batch.to(tl.int64) * k_b + kv * k_h
    value = values + layer.to(tl.int64) * v_l + batch.to(tl.int64) * v_b + kv * v_h
    # nodes ascend and a position is read before it is written: by the same thread, since both rows have one layout
    for place in range(1, count):
        node = tl.load(verdicts + batch * P + 2 + place)
        moved = e < tl.where(node != place, E, 0)
        k = tl.load(key + (start + node) * k_c + e, mask=moved, other=0.0)
        v = tl.load(value + (start + node) * v_c + e, mask=moved, other=0.0)
        tl.store(key + (start + place) * k_c + e, k, mask=moved)
        tl.store(value + (start + place) * v_c + e, v, mask=moved)


def keep(keys: Tensor, values: Tensor, lengths_B: Tensor, verdicts: Tensor) -> None:
    """``ops.keep``."""
    layers, b, kv, _, e = keys.shape
    _keep[(layers * b, kv)](
        keys, values, lengths_B, verdicts, b, kv, verdicts.shape[1], *keys.stride()[:4], *values.stride()[:4], E=e,
        PE=triton.next_power_of_2(e), num_warps=1,
    )  # fmt: skip
