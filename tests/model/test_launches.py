"""The kernels that a decoding step takes on a GPU, and its reads of the device, counted on a ``pretended`` one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import pretended
from anabranch.decoding.engine import Engine, Request
from anabranch.methods import make_drafter
from anabranch.methods.streams.recipes import StreamConfig
from anabranch.model import graphs
from anabranch.model.config import ModelConfig, RopeConfig
from anabranch.model.device.layers import fits
from anabranch.model.weights import build_decoder
from pretended import Work, there
from small import CASES, LLAMA, prompt, randomise, small_adapter

LAYERS = 32
STREAMS = StreamConfig(
    num_streams=5,
    num_stream_layers=12,
    stream_mlp="mlp+adapter",
    adapter_rank=3,
    attention_rank=2,
    mlp_rank=2,
    conditioning="path",
    conditioning_rank=5,
    root_width=7,
)  # the shipped shape, but for its widths
DEEP = replace(LLAMA, num_layers=LAYERS, max_positions=512, rope=RopeConfig(dim=8, max_positions=512))


def steps(
    spec: str, config: ModelConfig = DEEP, streams: StreamConfig = STREAMS, *, context: int = 12, count: int = 2
) -> Work:
    """The work of so many steps once their graphs are captured."""
    decoder = build_decoder(config, device="cpu")
    randomise(decoder, seed=1, scale=0.1)
    with pretended.cuda():
        target = there(decoder)
        adapter = small_adapter(target, streams, torch.arange(12)) if "streams" in spec else None
        engine = Engine(target, make_drafter(spec, target, adapter), capacity=context + 80)
        engine.add(Request(prompt(context), 70))
        for _ in range(6):
            engine.step()
        with pretended.counted() as work:
            for _ in range(count):
                engine.step()
    return work


def test_a_plain_step_takes_five_kernels_a_layer_and_one_read() -> None:
    work = steps("none")
    assert sum(work.kernels.values()) <= 2 * (5 * LAYERS + 12)
    assert work.kernels["product"] == 2 * 3 * LAYERS
    assert work.kernels["heads"] == work.kernels["attend"] == 2 * LAYERS
    assert work.reads == 2
    assert work.launches <= 2 * 3, "a tensor to the device, a graph, and a tensor back"


def test_trees_take_no_more_kernels_than_a_token() -> None:
    work = steps("prompt_lookup:tokens=6", replace(DEEP, num_layers=4))
    assert sum(work.kernels.values()) <= 2 * (5 * 4 + 12)
    assert work.reads == 2


@pytest.mark.thorough
def test_a_step_with_streams_takes_at_most_300_kernels_and_one_read() -> None:
    work = steps("streams:tree=8")
    assert sum(work.kernels.values()) <= 2 * 300
    assert work.kernels["heads"] == work.kernels["attend"] == 2 * (LAYERS + STREAMS.num_stream_layers)
    assert work.reads == 2
    assert work.launches <= 2 * 12


@pytest.mark.parametrize(
    ("case", "placement"),
    [
        pytest.param(case, placement, marks=() if (case, placement) == ("llama", "trail") else pytest.mark.thorough)
        for case in ("llama", "gemma2")
        for placement in ("trail", "ride")
    ],
)
def test_the_context_is_not_copied(case: str, placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "SPAN", 16)
    config = replace(CASES[case], max_positions=512, rope=RopeConfig(dim=8, max_positions=512))
    streams = replace(STREAMS, num_stream_layers=2)
    short, long = (steps(f"streams:tree=8,placement={placement}", config, streams, context=n) for n in (40, 296))
    layer = 2 * 256 * config.num_kv_heads * config.head_dim * 4  # keys and values of the further tokens
    assert long.written - short.written < layer


@pytest.mark.parametrize("case", sorted(CASES))
def test_layers_of_other_kinds_are_not_fused(case: str) -> None:
    decoder = build_decoder(CASES[case], device="cpu")
    assert fits(decoder) == (case not in ("gemma2", "phi"))


def test_packed_layers_are_not_fused() -> None:
    decoder = build_decoder(LLAMA, device="cpu")
    decoder.blocks[1].mlp.up = torch.nn.Sequential(decoder.blocks[1].mlp.up)
    assert not fits(decoder)
