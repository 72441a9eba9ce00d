"""Trained parameters of design section 4 (ACL table 3), from module shapes on the meta device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.recipes import TRAINING, StreamConfig
from anabranch.model.config import ModelConfig


def model(width: int, **options: int) -> ModelConfig:
    heads = width // 64
    return ModelConfig("llama", 32_000, width, 24, heads, options.get("kv", heads), 64, 4 * width, 4096)


def count(width: int, config: StreamConfig, **options: int) -> int:
    with torch.device("meta"):
        adapter = StreamAdapter(model(width, **options), config)
    assert all(parameter.is_meta for parameter in adapter.parameters())
    return adapter.num_parameters()


def outside_layers(width: int, config: StreamConfig) -> int:
    with torch.device("meta"):
        adapter = StreamAdapter(model(width), config)
    return adapter.num_parameters() - sum(p.numel() for p in adapter.layers.parameters())


@pytest.mark.parametrize(("width", "printed"), [(2048, 4.096e4), (3072, 6.1e4), (4096, 8.19e4)])
def test_stream_embeddings_and_pruning_adapter(width: int, printed: float) -> None:
    # what shared mode trains beside its LoRA: (gamma + 2 * 8) h
    found = outside_layers(width, StreamConfig(num_streams=4, pruning_rank=8))
    assert found == (4 + 2 * 8) * width
    # the printed column is (gamma + 16) h with gamma 4, to the digits printed there
    assert found == pytest.approx(printed, rel=0.01)


@pytest.mark.parametrize("gamma", [1, 4, 8])
@pytest.mark.parametrize("width", [2048, 4096])
def test_shared_mode_as_published(width: int, gamma: int) -> None:
    """(gamma + 16) h beside the terms of the target's layers, which the adapter that is written does not have."""
    config = replace(TRAINING.recipe("paper-shared").config, num_streams=gamma)
    rank, inner, layers = config.lora_rank, 4 * width, 24
    terms = layers * rank * (4 * (width + width) + 2 * (width + inner) + (inner + width))
    assert count(width, config) == (gamma + 16) * width + terms
    assert count(width, replace(config, lora_rank=0)) == (gamma + 16) * width


@pytest.mark.parametrize("layers", [2, 4, 8])
@pytest.mark.parametrize("rank", [8, 16])
def test_lossless_mode_adds_stream_adapters(layers: int, rank: int) -> None:
    config = StreamConfig(num_stream_layers=layers, adapter_rank=rank)
    assert count(2048, config) == (4 + 16) * 2048 + layers * 2 * rank * 2048


def test_options_beyond_the_paper() -> None:
    h, gamma, layers, heads, kv = 512, 3, 2, 8, 2
    base = gamma * h + layers * 2 * 4 * h
    plain = {"num_streams": gamma, "num_stream_layers": layers, "adapter_rank": 4, "pruning_rank": 0}
    assert count(h, StreamConfig(**plain), kv=kv) == base
    assert count(h, StreamConfig(**plain, position="rotation"), kv=kv) == base - gamma * h
    assert count(h, StreamConfig(**plain, init_rank=5), kv=kv) == base + 2 * 5 * h
    packed = heads * 64 + 2 * kv * 64
    deltas = layers * 6 * ((h + packed) + (heads * 64 + h))
    assert count(h, StreamConfig(**plain, attention_rank=6), kv=kv) == base + deltas
    terms = layers * 5 * ((h + 8 * h) + (4 * h + h))  # a gated MLP of width 4 h
    assert count(h, StreamConfig(**plain, stream_mlp="mlp+adapter", mlp_rank=5), kv=kv) == base + terms
    parent = StreamConfig(**plain, conditioning="parent", conditioning_rank=7)
    assert count(h, parent, kv=kv) == base + 2 * h * 7
    path = StreamConfig(**plain, conditioning="path", conditioning_rank=7)
    assert count(h, path, kv=kv) == base + 3 * h * 7 + 7 * 7
