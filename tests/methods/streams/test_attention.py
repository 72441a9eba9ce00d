"""Multi-stream attention against a loop over single rows (ACL eq. 2), eq. 8, and top-p context (appendix H.1)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from anabranch.methods.streams.attention import stream_attention, stream_bias, stream_positions
from anabranch.methods.streams.recipes import StreamConfig
from anabranch.model.config import ModelConfig
from small import CASES, LLAMA

B, N, L = 2, 3, 7
THREE = StreamConfig(num_streams=3, num_stream_layers=1)


def inputs(model: ModelConfig, gamma: int = 3) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor, Tensor, Tensor]:
    """Random q, k, v of stream rows, keys and values of the main stream, what is visible of it, main queries."""
    torch.manual_seed(0)
    h, kv, e = model.num_heads, model.num_kv_heads, model.head_dim
    qkv = torch.randn(B, N * gamma, h, e), torch.randn(B, N * gamma, kv, e), torch.randn(B, N * gamma, kv, e)
    visible = torch.rand(B, N, L) < 0.6
    visible[:, :, 0] = True
    return qkv, torch.randn(B, kv, L, e), torch.randn(B, kv, L, e), visible, torch.randn(B, N, h, e)


def naive(
    model: ModelConfig,
    config: StreamConfig,
    qkv: tuple[Tensor, Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    allowed: Tensor,
) -> Tensor:
    """Row by row and head by head; ``allowed`` [B, N, K, L] may differ by kv head."""
    q, k, v = qkv
    gamma, e, group = config.num_streams, model.head_dim, model.num_heads // model.num_kv_heads
    scale = model.attention_scale or e**-0.5
    out = torch.zeros(B, N * gamma, model.num_heads, e)
    for b in range(B):
        for n in range(N):
            for j in range(gamma):
                for head in range(model.num_heads):
                    kv = head // group
                    seen = [(keys[b, kv, t], values[b, kv, t]) for t in range(L) if allowed[b, n, kv, t]]
                    for own in range(j + 1):  # streams 1..j of the same node, itself included
                        value = v[b, n * gamma + own, kv]
                        if config.position == "rotation":
                            angle = torch.tensor(config.rotation_step * (own + 1))
                            left, right = value[: e // 2], value[e // 2 :]
                            turned = torch.complex(left, right) * torch.polar(torch.tensor(1.0), angle)
                            value = torch.cat((turned.real, turned.imag))
                        seen.append((k[b, n * gamma + own, kv], value))
                    scores = torch.stack([q[b, n * gamma + j, head] @ key * scale for key, _ in seen])
                    if (cap := model.attention_softcap) is not None:
                        scores = torch.tanh(scores / cap) * cap
                    weights = scores.softmax(0)
                    out[b, n * gamma + j, head] = sum(w * value for w, (_, value) in zip(weights, seen, strict=True))
    return out.flatten(2)


@pytest.mark.parametrize("case", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("position", ["embedding", "rotation"])
def test_streams_see_the_main_stream_and_the_streams_below_them(case: str, position: str) -> None:
    model = CASES[case]
    config = replace(THREE, position=position, rotation_step=0.2)
    qkv, keys, values, visible, _ = inputs(model)
    wanted = naive(model, config, qkv, keys, values, visible[:, :, None].expand(-1, -1, model.num_kv_heads, -1))
    assert torch.allclose(stream_attention(model, config, qkv, keys, values, visible), wanted, atol=1e-5)
    bias = stream_bias(model, config, visible, torch.float32)
    assert bias is not None
    fused = stream_attention(model, config, qkv, keys, values, visible, bias=bias)
    assert torch.allclose(fused, wanted, atol=1e-5)


def test_no_stream_looks_up() -> None:
    """Changing stream 3's key and value leaves streams 1 and 2 as they are, and other nodes too."""
    qkv, keys, values, visible, _ = inputs(LLAMA)
    before = stream_attention(LLAMA, THREE, qkv, keys, values, visible).view(B, N, 3, -1)
    qkv[1][:, 2] += 1.0  # node 0, stream 3
    qkv[2][:, 2] += 1.0
    after = stream_attention(LLAMA, THREE, qkv, keys, values, visible).view(B, N, 3, -1)
    changed = (before != after).any(-1).any(0)
    assert changed.tolist() == [[False, False, True], [False] * 3, [False] * 3]


def test_value_rotation_turns_stream_values_alone() -> None:
    """Eq. 8: stream n's values by the angle epsilon n; the main stream's stay, and a step of 0 is no rotation."""
    qkv, keys, values, visible, _ = inputs(LLAMA)
    still = stream_attention(LLAMA, THREE, qkv, keys, values, visible)
    for step, moved in ((0.0, False), (0.3, True)):
        config = replace(THREE, position="rotation", rotation_step=step)
        turned = stream_attention(LLAMA, config, qkv, keys, values, visible)
        assert torch.allclose(turned, still, atol=1e-6) is not moved
        silent = (qkv[0], qkv[1], torch.zeros_like(qkv[2]))
        alone = stream_attention(LLAMA, config, silent, keys, values, visible)
        assert torch.equal(alone, stream_attention(LLAMA, THREE, silent, keys, values, visible))


@pytest.mark.parametrize("case", ["llama", "gemma2"])
def test_a_context_of_everything_is_full_attention(case: str) -> None:
    model = CASES[case]
    qkv, keys, values, visible, main_q = inputs(model)
    full = stream_attention(model, THREE, qkv, keys, values, visible)
    for top in (L, L + 5):
        config = replace(THREE, context_top=top)
        assert torch.allclose(stream_attention(model, config, qkv, keys, values, visible, main_q), full, atol=1e-6)


@pytest.mark.parametrize("top", [1, 3, 6])
def test_top_context_is_what_the_main_row_weighs_most(top: int) -> None:
    model, config = LLAMA, replace(THREE, context_top=top)
    qkv, keys, values, visible, main_q = inputs(model)
    group, scale = model.num_heads // model.num_kv_heads, model.head_dim**-0.5
    allowed = torch.zeros(B, N, model.num_kv_heads, L, dtype=torch.bool)
    for b in range(B):
        for n in range(N):
            for kv in range(model.num_kv_heads):
                weight = torch.zeros(L)
                for head in range(kv * group, (kv + 1) * group):
                    scores = keys[b, kv] @ main_q[b, n, head] * scale
                    weight += scores.masked_fill(~visible[b, n], float("-inf")).softmax(0)
                allowed[b, n, kv, weight.topk(top).indices] = True
    allowed &= visible[:, :, None]
    wanted = naive(model, config, qkv, keys, values, allowed)
    assert torch.allclose(stream_attention(model, config, qkv, keys, values, visible, main_q), wanted, atol=1e-5)


def test_stream_j_of_t_sits_at_t_plus_j() -> None:
    assert stream_positions(torch.tensor([[5, 6], [0, 3]]), 2).tolist() == [[6, 7, 7, 8], [1, 2, 4, 5]]
