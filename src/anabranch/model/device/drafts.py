"""``draft_ops`` in Triton. Legend as there."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anabranch.model.device.shares import rows_of_block

__all__ = ["best", "condition", "level", "own_scores", "select"]


@triton.jit
def _condition(
    embedding, tokens, states, carried, parents, out, F, FA, D, Z, level, first, e_stride, t_stride, s_b, s_s,
    p_stride, eps, PATH: tl.constexpr, CARRIED: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    batch, node = row // F, row % F
    token = tl.load(tokens + batch * t_stride + node).to(tl.int64)
    wide = D
    if PATH:
        wide = 2 * D + Z
    squares = tl.zeros((BD,), tl.float32)
    for start in range(0, D, BD):
        d = start + tl.arange(0, BD)
        x = tl.load(embedding + token * e_stride + d, mask=d < D, other=0.0).to(tl.float32)
        squares += x * x
    factor = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / D + eps)
    kind = out.dtype.element_ty
    for start in range(0, D, BD):
        d = start + tl.arange(0, BD)
        x = tl.load(embedding + token * e_stride + d, mask=d < D, other=0.0).to(tl.float32)
        tl.store(out + row * wide + d, (x * factor).to(kind), mask=d < D)
        if PATH:
            s = tl.load(states + batch * s_b + level * s_s + d, mask=d < D, other=0.0)
            tl.store(out + row * wide + D + d, s, mask=d < D)
    if PATH:
        above = tl.load(parents + batch * p_stride + node) - first
        for start in range(0, Z, BD):
            z = start + tl.arange(0, BD)
            kept = tl.zeros((BD,), tl.float32).to(kind)
            if CARRIED:
                kept = tl.load(carried + (batch * FA + above) * Z + z, mask=z < Z, other=0.0)
            tl.store(out + row * wide + 2 * D + z, kept, mask=z < Z)


def condition(
    embedding: Tensor,
    tokens_BF: Tensor,
    states_BSD: Tensor,
    level: int,
    path: bool,
    carried: Tensor | None,
    parents_BF: Tensor,
    first: int,
    width: int,
) -> Tensor:
    """``draft_ops.condition``."""
    (b, f), d = tokens_BF.shape, embedding.shape[1]
    out = torch.empty((b * f, 2 * d + width if path else d), dtype=states_BSD.dtype, device=states_BSD.device)
    _condition[(b * f,)](
        embedding, tokens_BF, states_BSD, carried, parents_BF, out, f, 0 if carried is None else len(carried) // b, d,
        width, level, first, embedding.stride(0), tokens_BF.stride(0), *states_BSD.stride()[:2], parents_BF.stride(0),
        torch.finfo(out.dtype).eps, PATH=path, CARRIED=carried is not None, BD=min(1024, triton.next_power_of_2(d)),
    )  # fmt: skip
    return out


@triton.jit
def _own_scores(
    states, head, ids, counts, out, F, X, D, w_stride, BF: tl.constexpr, BX: tl.constexpr, BK: tl.constexpr
):
    batch, tile = tl.program_id(0), tl.program_id(1)
    node, place = tl.arange(0, BF), tile * BX + tl.arange(0, BX)
    used = place < tl.load(counts + batch)
    token = tl.load(ids + batch * X + place, mask=used & (place < X), other=0).to(tl.int64)
    scores = tl.zeros((BF, BX), tl.float32)
    for start in range(0, D, BK):
        k = start + tl.arange(0, BK)
        inside = (node < F)[:, None] & (k < D)[None, :]
        s = tl.load(states + (batch * F + node)[:, None] * D + k[None, :], mask=inside, other=0.0)
        w = tl.load(head + token[None, :] * w_stride + k[:, None], mask=used[None, :] & (k < D)[:, None], other=0.0)
        scores = tl.dot(s, w, scores, input_precision="ieee")
    scores = tl.where(used[None, :], scores, float("-inf"))
    kept = (node < F)[:, None] & (place < X)[None, :]
    tl.store(out + (batch * F + node)[:, None] * X + place[None, :], scores.to(out.dtype.element_ty), mask=kept)


def own_scores(states_MD: Tensor, head: Tensor, ids_BX: Tensor, counts_B: Tensor) -> Tensor:
    """``draft_ops.own_scores``."""
    (m, d), (b, x) = states_MD.shape, ids_BX.shape
    out = torch.empty((m, x), dtype=states_MD.dtype, device=states_MD.device)
    assert m // b <= 64, "a frontier is one block of rows"
    _own_scores[(b, triton.cdiv(x, 32))](
        states_MD, head, ids_BX.contiguous(), counts_B, out, m // b, x, d, head.stride(0), BF=rows_of_block(m // b),
        BX=32, BK=64,
    )  # fmt: skip
    return out


@triton.jit
def _best(
    scores, own, vocabulary, own_ids, log_probs, tokens, V, X, PER, K: tl.constexpr, PK: tl.constexpr, PA: tl.constexpr
):
    row = tl.program_id(0)
    batch = row // PER
    at = tl.arange(0, PA)
    z = tl.load(scores + row * V + at, mask=at < V, other=float("-inf")).to(tl.float32)
    more = (at >= V) & (at < V + X)
    z = tl.where(more, tl.load(own + row * X + at - V, mask=more, other=float("-inf")).to(tl.float32), z)
    wrong = tl.max(((z != z) | (z == float("inf"))).to(tl.int32), axis=0)
    most = tl.max(tl.where(z != z, float("-inf"), z), axis=0)
    base = tl.where((wrong > 0) | (most == float("-inf")), 0.0, most)
    total = base + tl.log(tl.sum(tl.exp(tl.where(z != z, float("-inf"), z) - base), axis=0))
    slots = tl.arange(0, PK)
    values = tl.full((PK,), float("-inf"), tl.float32)
    places = tl.zeros((PK,), tl.int32)
    for place in range(K):
        top = tl.max(z, axis=0)
        where = tl.min(tl.where(z == top, at, PA), axis=0)
        where = tl.where(where < V + X, where, place)  # nothing is left but scores of -inf
        values = tl.where(slots == place, top - total, values)
        places = tl.where(slots == place, where, places)
        z = tl.where(at == where, float("-inf"), z)
    values = tl.where((wrong > 0) | (values != values), float("-inf"), values)
    of_own = places >= V
    ids = tl.load(vocabulary + places, mask=places < V, other=0)
    ids = tl.where(of_own, tl.load(own_ids + batch * X + places - V, mask=of_own, other=0), ids)
    ids = tl.where(values > float("-inf"), ids, 0)
    tl.store(log_probs + row * K + slots, values, mask=slots < K)
    tl.store(tokens + row * K + slots, ids, mask=slots < K)


def best(scores_MV: Tensor, own_MX: Tensor, vocabulary_V: Tensor, own_ids_BX: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """``draft_ops.best``."""
    (m, v), (b, x) = scores_MV.shape, own_ids_BX.shape
    log_probs = torch.empty((m, k), dtype=torch.float32, device=scores_MV.device)
    tokens = torch.empty((m, k), dtype=torch.int64, device=scores_MV.device)
    _best[(m,)](
        scores_MV, own_MX, vocabulary_V, own_ids_BX.contiguous(), log_probs, tokens, v, x, m // b, K=k,
        PK=triton.next_power_of_2(k), PA=triton.next_power_of_2(v + x), num_warps=8,
    )  # fmt: skip
    return log_probs, tokens


@triton.jit
def _level(
    log_probs, tokens, table_tokens, table_joint, table_parents, FK, K, stride, above, start,
    MOST: tl.constexpr, ROOT: tl.constexpr, PC: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0)
    at = tl.arange(0, PC)
    joint = tl.load(log_probs + batch * FK + at, mask=at < FK, other=float("-inf"))
    if not ROOT:
        joint += tl.load(table_joint + batch * stride + above + at // K, mask=at < FK, other=0.0)
    free = at < FK
    for place in range(MOST):
        top = tl.max(tl.where(free, joint, float("-inf")), axis=0)
        where = tl.min(tl.where(free & (joint == top), at, PC), axis=0)
        to = batch * stride + start + place
        tl.store(table_joint + to, top)
        tl.store(table_tokens + to, tl.load(tokens + batch * FK + where))
        if ROOT:
            tl.store(table_parents + to, tl.full((), -1, tl.int64))
        else:
            tl.store(table_parents + to, (above + where // K).to(tl.int64))
        free = free & (at != where)


def level(
    log_probs_Mk: Tensor,
    tokens_Mk: Tensor,
    frontier: int,
    above: int,
    start: int,
    most: int,
    table_tokens: Tensor,
    table_joint: Tensor,
    table_parents: Tensor,
) -> None:
    """``draft_ops.level``."""
    k = log_probs_Mk.shape[1]
    _level[(len(table_tokens),)](
        log_probs_Mk, tokens_Mk, table_tokens, table_joint, table_parents, frontier * k, k, table_tokens.stride(0),
        max(above, 0), start, MOST=most, ROOT=above < 0, PC=triton.next_power_of_2(frontier * k), num_warps=1,
    )  # fmt: skip


@triton.jit
def _select(
    tokens, joint, parents, roots, lengths, out, B, T, stride, WIDTH, floor,
    NODES: tl.constexpr, PW: tl.constexpr, PT: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0)
    at, slots = tl.arange(0, PT), tl.arange(0, PW)
    values = tl.load(joint + batch * stride + at, mask=at < T, other=float("-inf"))
    place = tl.full((PT,), -1, tl.int32)  # of each candidate in the tree
    found_tokens = tl.where(slots == 0, tl.load(roots + batch), 0).to(tl.int64)
    found_parents = tl.full((PW,), -1, tl.int64)
    found_joint = tl.zeros((PW,), tl.float32)
    for node in range(1, NODES):
        top = tl.max(values, axis=0)
        where = tl.min(tl.where(values == top, at, PT), axis=0)
        taken = (top >= floor) & (top > float("-inf"))
        mine = (slots == node) & (top + slots * 0.0 >= floor) & (top + slots * 0.0 > float("-inf"))
        parent = tl.load(parents + batch * stride + where, mask=taken, other=-1)
        above = tl.where(parent < 0, 0, tl.max(tl.where(at == parent, place, -1), axis=0))
        token = tl.load(tokens + batch * stride + where, mask=taken, other=0)
        found_tokens = tl.where(mine, token, found_tokens)
        found_parents = tl.where(mine, above.to(tl.int64), found_parents)
        found_joint = tl.where(mine, top, found_joint)
        place = tl.where(at == where, node, place)
        values = tl.where(at == where, float("-inf"), values)
    kept = slots < WIDTH
    wide = B * WIDTH
    tl.store(out + batch * WIDTH + slots, found_tokens, mask=kept)
    tl.store(out + wide + batch * WIDTH + slots, found_parents, mask=kept)
    tl.store(out + 2 * wide + batch, tl.load(lengths + batch))
    bits = found_joint.to(tl.int32, bitcast=True).to(tl.int64)
    tl.store(out + 2 * wide + B + batch * WIDTH + slots, bits, mask=kept)


def select(
    tokens_BT: Tensor,
    joint_BT: Tensor,
    parents_BT: Tensor,
    roots_B: Tensor,
    lengths_B: Tensor,
    nodes: int,
    width: int,
    floor: float,
) -> Tensor:
    """``draft_ops.select``."""
    b, t = tokens_BT.shape
    out = torch.empty(3 * b * width + b, dtype=torch.int64, device=tokens_BT.device)
    _select[(b,)](
        tokens_BT, joint_BT, parents_BT, roots_B.contiguous(), lengths_B.contiguous(), out, b, t, tokens_BT.stride(0),
        width, max(floor, -3e38), NODES=min(nodes, t + 1), PW=triton.next_power_of_2(width),
        PT=triton.next_power_of_2(t), num_warps=1,
    )  # fmt: skip
    return out
