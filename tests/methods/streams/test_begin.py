"""Initial weights of streams whose adapters take the MLP's place."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from anabranch.learning.examples import Example
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.begin import mlp_rows, reproduce_mlps, start_streams
from anabranch.methods.streams.recipes import StreamConfig
from anabranch.model.kernel_use import native_for, why_not_native
from anabranch.model.pack import pack_decoder
from anabranch.model.weights import build_decoder
from small import WIDE, prompt, randomise, small

LITERAL = StreamConfig(num_streams=3, num_stream_layers=2, adapter_rank=8)
EXAMPLES = [Example(tuple(prompt(3, n)), tuple(prompt(20, 40 + n))) for n in range(12)]


def missed(config: StreamConfig, case: str) -> list[float]:
    """The share of what MLPs add that the adapters do not reproduce, by layer."""
    target = small(case)
    adapter = StreamAdapter(target.config, config)
    reproduce_mlps(target, adapter, EXAMPLES)
    shares = []
    for index, (x_MD, y_MD) in mlp_rows(target, adapter, EXAMPLES).items():
        assert x_MD.shape == y_MD.shape == (sum(len(each.answer_ids) + 1 for each in EXAMPLES), 32)
        term = adapter.layer(index).mlp
        assert term is not None
        with torch.no_grad():
            shares.append(float((y_MD - term(x_MD)).square().sum() / y_MD.square().sum()))
    return shares


@pytest.mark.parametrize("case", ["llama", "gemma2", "gpt2", "phi"])
def test_adapters_in_the_mlps_place_reproduce_it(case: str) -> None:
    """At zero they would miss all of it; a higher rank misses less."""
    narrow, wide = missed(replace(LITERAL, adapter_rank=4), case), missed(replace(LITERAL, adapter_rank=24), case)
    assert len(narrow) == 2
    assert all(more < less < 0.9 for more, less in zip(wide, narrow, strict=True))


def test_a_packed_target_gives_the_same_rows() -> None:
    target, packed = (build_decoder(WIDE, device="cpu") for _ in range(2))
    for decoder in (target, packed):
        randomise(decoder, seed=1)
    if not native_for(packed):
        pytest.skip(why_not_native(packed))
    assert pack_decoder(packed)
    adapter = StreamAdapter(target.config, LITERAL)
    found, wanted = (mlp_rows(target, adapter, EXAMPLES, runner) for runner in (packed, target))
    for pair, expected in zip(found.values(), wanted.values(), strict=True):
        torch.testing.assert_close(pair, expected, rtol=1e-3, atol=1e-3)


def test_the_start_of_a_training() -> None:
    """It is the same with any number of threads, and weights learn in proportion to their size."""
    target, threads = small(), torch.get_num_threads()
    found = []
    for count in (1, 2):
        torch.set_num_threads(count)
        torch.manual_seed(0)
        adapter = StreamAdapter(target.config, LITERAL)
        start_streams(target, adapter, EXAMPLES, target)
        assert torch.get_num_threads() == count
        found.append(adapter)
    torch.set_num_threads(threads)
    first, second = (adapter.state_dict() for adapter in found)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert set(found[0].rates()) == {"embeddings", "layers.0.mlp.up", "layers.1.mlp.up"}
    assert all(rate >= 1 and math.log2(rate) % 1 == 0 for rate in found[0].rates().values())
    kept = StreamAdapter(target.config, replace(LITERAL, stream_mlp="mlp+adapter"))
    start_streams(target, kept, EXAMPLES, target)
    assert set(kept.rates()) == {"embeddings"}
    assert not any(layer.mlp.up.any() for layer in kept.layers)  # type: ignore[operator,union-attr]
