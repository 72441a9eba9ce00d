"""``ops.product`` and ``ops.heads`` in Triton. Legend as in ``ops``."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anabranch.model.device.shares import COUNTS, counter, is_last, rows_of_block, shares_of

__all__ = ["heads", "product"]


@triton.jit
def _activate(y, ACTIVATION: tl.constexpr):
    if ACTIVATION == 1:
        y = y / (1.0 + tl.exp(-y))
    elif ACTIVATION == 2:
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    elif ACTIVATION == 3:
        inner = 0.7978845608028654 * (y + 0.044715 * y * y * y)
        y = y * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner)))
    elif ACTIVATION == 4:
        y = tl.maximum(y, 0.0)
    return y


@triton.jit
def _statistics(x, rows, M, D, x_stride, eps, NORM: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """Mean and factor of the norm of each row."""
    mean = tl.zeros((BM,), tl.float32)
    factor = tl.full((BM,), 1.0, tl.float32)
    if NORM > 0:
        squares = tl.zeros((BM,), tl.float32)
        for start in range(0, D, BK):
            k = start + tl.arange(0, BK)
            part = tl.load(
                x + rows[:, None] * x_stride + k[None, :], mask=(rows[:, None] < M) & (k[None, :] < D), other=0.0
            ).to(tl.float32)
            squares += tl.sum(part * part, axis=1)
            if NORM == 3:
                mean += tl.sum(part, axis=1)
        if NORM == 3:
            mean = mean / D
            factor = 1.0 / tl.sqrt(squares / D - mean * mean + eps)
        else:
            factor = 1.0 / tl.sqrt(squares / D + eps)
    return mean, factor


@triton.jit
def _normed(part, mean, factor, norm_weight, norm_bias, k, D, NORM: tl.constexpr):
    """A tile of normalised rows [BM, BK], in the type of ``part``."""
    y = part
    if NORM == 1:
        weight = tl.load(norm_weight + k, mask=k < D, other=0.0).to(tl.float32)
        y = ((part.to(tl.float32) * factor[:, None]).to(part.dtype).to(tl.float32) * weight[None, :]).to(part.dtype)
    elif NORM == 2:
        weight = tl.load(norm_weight + k, mask=k < D, other=0.0).to(tl.float32)
        y = (part.to(tl.float32) * factor[:, None] * (1.0 + weight)[None, :]).to(part.dtype)
    elif NORM == 3:
        weight = tl.load(norm_weight + k, mask=k < D, other=0.0).to(tl.float32)
        bias = tl.load(norm_bias + k, mask=k < D, other=0.0).to(tl.float32)
        y = ((part.to(tl.float32) - mean[:, None]) * factor[:, None] * weight[None, :] + bias[None, :]).to(part.dtype)
    return y


@triton.jit
def _weights(weight, rows, k, used, D, w_stride):
    """A tile of a weight, transposed [BK, BN]: of rows where ``used``."""
    return tl.load(
        weight + rows[None, :].to(tl.int64) * w_stride + k[:, None], mask=used[None, :] & (k[:, None] < D), other=0.0
    )


@triton.jit
def _product(
    x, weight, bias, norm_weight, norm_bias, residual, out, parts, counts, M, D, OUT, GATED, x_stride, w_stride,
    r_stride, eps, NORM: tl.constexpr, ACTIVATION: tl.constexpr, HAS_GATE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, SHARES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    tile, share, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, cols = block * BM + tl.arange(0, BM), tile * BN + tl.arange(0, BN)
    used = cols < OUT
    gates = cols < GATED
    first = tl.where(gates | (GATED == 0), cols, cols + GATED)  # outputs without a gate lie behind gates and values
    mean, factor = _statistics(x, rows, M, D, x_stride, eps, NORM, BM, BK)
    y = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    each = tl.cdiv(tl.cdiv(D, BK), SHARES) * BK
    for start in range(share * each, tl.minimum(share * each + each, D), BK):
        k = start + tl.arange(0, BK)
        part = tl.load(
            x + rows[:, None] * x_stride + k[None, :], mask=(rows[:, None] < M) & (k[None, :] < D), other=0.0
        )
        h = _normed(part, mean, factor, norm_weight, norm_bias, k, D, NORM)
        y = tl.dot(h, _weights(weight, first, k, used, D, w_stride), y, input_precision="ieee")
        if HAS_GATE:
            up = tl.dot(h, _weights(weight, cols + GATED, k, gates, D, w_stride), up, input_precision="ieee")
    last = True
    if SHARES > 1:
        places = (block * BM + tl.arange(0, BM))[:, None] * OUT + cols[None, :]
        kept = (rows[:, None] < M) & used[None, :]
        tl.store(parts + share * M * OUT + places, y, mask=kept)
        if HAS_GATE:
            tl.store(parts + (SHARES + share) * M * OUT + places, up, mask=kept)
        last = is_last(counts + block * tl.num_programs(0) + tile, share, SHARES)
        if last:
            y = tl.zeros((BM, BN), tl.float32)
            up = tl.zeros((BM, BN), tl.float32)
            for other in range(SHARES):
                y += tl.load(parts + other * M * OUT + places, mask=kept, other=0.0, cache_modifier=".cg")
                if HAS_GATE:
                    up += tl.load(
                        parts + (SHARES + other) * M * OUT + places, mask=kept, other=0.0, cache_modifier=".cg"
                    )
    if last:
        kind = out.dtype.element_ty
        if HAS_BIAS:
            y += tl.load(bias + first, mask=used, other=0.0).to(tl.float32)[None, :]
            if HAS_GATE:
                up += tl.load(bias + cols + GATED, mask=gates, other=0.0).to(tl.float32)[None, :]
        y = _activate(y.to(kind).to(tl.float32), ACTIVATION)
        if HAS_GATE:
            y = tl.where(gates[None, :], y.to(kind).to(tl.float32) * up.to(kind).to(tl.float32), y)
        to = rows[:, None] * OUT + cols[None, :]
        mask = (rows[:, None] < M) & used[None, :]
        if HAS_RESIDUAL:
            of = residual + rows[:, None] * r_stride + cols[None, :]
            y = y.to(kind).to(tl.float32) + tl.load(of, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + to, y.to(kind), mask=mask)


def product(
    x: Tensor,
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
    """``ops.product``."""
    m, d = x.shape
    outputs = weight.shape[0] - gated
    x = x if x.stride(1) == 1 else x.contiguous()
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    out = torch.empty((m, outputs), dtype=x.dtype, device=x.device)
    bm, bn, bk = rows_of_block(m), 32, 128 if x.element_size() == 2 else 64
    tiles, blocks = triton.cdiv(outputs, bn), triton.cdiv(m, bm)
    shares = shares_of(tiles * blocks, triton.cdiv(d, bk))
    assert tiles * blocks <= COUNTS or shares == 1
    parts = x
    if shares > 1:
        parts = torch.empty((shares * (2 if gated else 1), m, outputs), dtype=torch.float32, device=x.device)
    norm = 0 if norm_weight is None else norm
    _product[(tiles, shares, blocks)](
        x, weight, bias, norm_weight, norm_bias, residual, out, parts, counter(x.device), m, d, outputs, gated,
        x.stride(0), weight.stride(0), 0 if residual is None else residual.stride(0), eps,
        NORM=norm, ACTIVATION=activation, HAS_GATE=bool(gated),
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, SHARES=shares, BM=bm, BN=bn, BK=bk,
        num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


@triton.jit
def _heads(
    x, weight, bias, norm_weight, norm_bias, q_norm, k_norm, table, positions, keys, values, places, q, parts, counts,
    R, M, D, HEADS, KV, table_stride, x_stride, w_stride, k_b, k_h, k_c, v_b, v_h, v_c, eps,
    NORM: tl.constexpr, HEAD_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, ROTATE: tl.constexpr, E: tl.constexpr,
    HALF: tl.constexpr, PH: tl.constexpr, REST: tl.constexpr, PR: tl.constexpr, SHARES: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    head, share, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = block * BM + tl.arange(0, BM)
    half, rest = tl.arange(0, PH), tl.arange(0, PR)
    in_half, in_rest = half < HALF, rest < REST
    left_row, right_row, rest_row = head * E + half, head * E + HALF + half, head * E + 2 * HALF + rest
    mean, factor = _statistics(x, rows, M, D, x_stride, eps, NORM, BM, BK)
    left = tl.zeros((BM, PH), tl.float32)
    right = tl.zeros((BM, PH), tl.float32)
    other = tl.zeros((BM, PR), tl.float32)
    each = tl.cdiv(tl.cdiv(D, BK), SHARES) * BK
    for start in range(share * each, tl.minimum(share * each + each, D), BK):
        k = start + tl.arange(0, BK)
        part = tl.load(
            x + rows[:, None] * x_stride + k[None, :], mask=(rows[:, None] < M) & (k[None, :] < D), other=0.0
        )
        h = _normed(part, mean, factor, norm_weight, norm_bias, k, D, NORM)
        left = tl.dot(h, _weights(weight, left_row, k, in_half, D, w_stride), left, input_precision="ieee")
        right = tl.dot(h, _weights(weight, right_row, k, in_half, D, w_stride), right, input_precision="ieee")
        if REST > 0:
            other = tl.dot(h, _weights(weight, rest_row, k, in_rest, D, w_stride), other, input_precision="ieee")
    last = True
    if SHARES > 1:
        wide = tl.num_programs(0) * E
        at = parts + share * M * wide + rows[:, None] * wide
        valid = rows[:, None] < M
        tl.store(at + left_row[None, :], left, mask=valid & in_half[None, :])
        tl.store(at + right_row[None, :], right, mask=valid & in_half[None, :])
        if REST > 0:
            tl.store(at + rest_row[None, :], other, mask=valid & in_rest[None, :])
        last = is_last(counts + block * tl.num_programs(0) + head, share, SHARES)
        if last:
            left = tl.zeros((BM, PH), tl.float32)
            right = tl.zeros((BM, PH), tl.float32)
            other = tl.zeros((BM, PR), tl.float32)
            for each_share in range(SHARES):
                at = parts + each_share * M * wide + rows[:, None] * wide
                left += tl.load(at + left_row[None, :], mask=valid & in_half[None, :], other=0.0, cache_modifier=".cg")
                right += tl.load(
                    at + right_row[None, :], mask=valid & in_half[None, :], other=0.0, cache_modifier=".cg"
                )
                if REST > 0:
                    other += tl.load(
                        at + rest_row[None, :], mask=valid & in_rest[None, :], other=0.0, cache_modifier=".cg"
                    )
    if last:
        kind = q.dtype.element_ty
        if HAS_BIAS:
            left += tl.load(bias + left_row, mask=in_half, other=0.0).to(tl.float32)[None, :]
            right += tl.load(bias + right_row, mask=in_half, other=0.0).to(tl.float32)[None, :]
            if REST > 0:
                other += tl.load(bias + rest_row, mask=in_rest, other=0.0).to(tl.float32)[None, :]
        left = left.to(kind).to(tl.float32)
        right = right.to(kind).to(tl.float32)
        other = other.to(kind).to(tl.float32)
        is_value = head >= HEADS + KV
        if HEAD_NORM > 0:
            squares = tl.sum(left * left, axis=1) + tl.sum(right * right, axis=1)
            if REST > 0:
                squares += tl.sum(other * other, axis=1)
            size = tl.where(is_value, 1.0, 1.0 / tl.sqrt(squares / E + eps))[:, None]
            weights = q_norm if head < HEADS else k_norm
            first = tl.load(weights + half, mask=in_half, other=0.0).to(tl.float32)
            second = tl.load(weights + HALF + half, mask=in_half, other=0.0).to(tl.float32)
            third = tl.load(weights + 2 * HALF + rest, mask=in_rest, other=0.0).to(tl.float32)
            if HEAD_NORM == 2:
                first, second, third = 1.0 + first, 1.0 + second, 1.0 + third
            left = left * size * tl.where(is_value, 1.0, first)[None, :]
            right = right * size * tl.where(is_value, 1.0, second)[None, :]
            other = other * size * tl.where(is_value, 1.0, third)[None, :]
        if ROTATE:
            turned = (rows[:, None] < M) & (half < tl.where(head < HEADS + KV, HALF, 0))[None, :]
            position = tl.load(positions + rows, mask=rows < M, other=0)
            angle = table + position[:, None] * (2 * HALF) + half[None, :]
            cos = tl.load(angle, mask=turned, other=1.0)
            sin = tl.load(angle + table_stride, mask=turned, other=0.0)
            cos_right = tl.load(angle + HALF, mask=turned, other=1.0)
            sin_right = tl.load(angle + table_stride + HALF, mask=turned, other=0.0)
            was = left
            left = left * cos - right * sin
            right = right * cos_right + was * sin_right
        batch, place = (rows // R).to(tl.int64), tl.load(places + rows, mask=rows < M, other=0)
        if head < HEADS:
            to = q + (rows * HEADS + head)[:, None] * E
        elif head < HEADS + KV:
            to = keys + (batch * k_b + (head - HEADS) * k_h + place * k_c)[:, None]
        else:
            to = values + (batch * v_b + (head - HEADS - KV) * v_h + place * v_c)[:, None]
        valid = rows[:, None] < M
        tl.store(to + half[None, :], left.to(kind), mask=valid & in_half[None, :])
        tl.store(to + HALF + half[None, :], right.to(kind), mask=valid & in_half[None, :])
        if REST > 0:
            tl.store(to + 2 * HALF + rest[None, :], other.to(kind), mask=valid & in_rest[None, :])


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
    """``ops.heads``."""
    b, r, d = x_BRD.shape
    _, kv, _, e = keys_BKCE.shape
    every = weight.shape[0] // e
    h, m = every - 2 * kv, b * r
    x = x_BRD.reshape(m, d)
    q = torch.empty((b, r, h, e), dtype=x.dtype, device=x.device)
    half = e // 2 if table is None else table.shape[2] // 2
    rest = e - 2 * half
    bm, bk = rows_of_block(m), 128 if x.element_size() == 2 else 64
    blocks = triton.cdiv(m, bm)
    shares = shares_of(every * blocks, triton.cdiv(d, bk))
    parts = torch.empty((shares, m, every * e), dtype=torch.float32, device=x.device) if shares > 1 else x
    assert keys_BKCE.stride(3) == values_BKCE.stride(3) == 1
    _heads[(every, shares, blocks)](
        x, weight, bias, norm_weight, norm_bias, q_norm, k_norm, table, positions_BR.contiguous(), keys_BKCE,
        values_BKCE, places_BR.contiguous(), q, parts, counter(x.device), r, m, d, h, kv,
        0 if table is None else table.stride(0), x.stride(0), weight.stride(0), *keys_BKCE.stride()[:3],
        *values_BKCE.stride()[:3], eps, NORM=0 if norm_weight is None else norm,
        HEAD_NORM=0 if q_norm is None else head_norm, HAS_BIAS=bias is not None, ROTATE=table is not None, E=e,
        HALF=half, PH=max(16, triton.next_power_of_2(half)), REST=rest, PR=max(16, triton.next_power_of_2(rest)),
        SHARES=shares, BM=bm, BK=bk, num_warps=4, num_stages=3,
    )  # fmt: skip
    return q
