from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from anabranch.errors import AdapterError, CapabilityError, InputError
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.draft import StreamDraft, StreamSettings
from anabranch.methods.streams.drafter import StreamDrafter
from anabranch.methods.streams.recipes import StreamConfig
from anabranch.sampling import SamplingParams
from small import LLAMA, RICH, small, small_adapter


@pytest.mark.parametrize(
    "bad",
    [
        {"num_streams": 0},
        {"num_streams": -1},
        {"num_streams": 1.5},
        {"num_streams": True},
        {"num_stream_layers": 0},
        {"adapter_rank": 0},
        {"attention_rank": -1},
        {"mlp_rank": -1, "stream_mlp": "mlp+adapter"},
        {"mlp_rank": 4},
        {"pruning_rank": -1},
        {"context_top": -1},
        {"stream_mlp": "mlp"},
        {"position": "none"},
        {"conditioning": "child"},
        {"conditioning": "path"},
        {"conditioning_rank": 8},
    ],
)
def test_values_that_mean_nothing_are_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(bad))):
        StreamConfig(**bad)


def test_a_record_gives_back_the_config() -> None:
    assert StreamConfig.from_dict(RICH.to_dict()) == RICH
    with pytest.raises(AdapterError, match="'newer'"):
        StreamConfig.from_dict({**RICH.to_dict(), "newer": 1})
    with pytest.raises(AdapterError, match="num_streams"):
        StreamConfig.from_dict({**RICH.to_dict(), "num_streams": 0})


def test_more_stream_layers_than_layers() -> None:
    with pytest.raises(InputError, match="only 3 layers"):
        StreamAdapter(LLAMA, StreamConfig(num_stream_layers=4))


@pytest.mark.parametrize(
    "bad",
    [{"tree": "bush"}, {"nodes": 1}, {"k": -1}, {"depth": -1}, {"frontier": 0}],
)
def test_tree_options(bad: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(bad))):
        StreamSettings(**bad)


def test_a_tree_that_no_machine_holds() -> None:
    with pytest.raises(InputError, match=r"1,024 nodes"):
        StreamSettings(tree="product", k=8, depth=4)
    deep = small_adapter(small(), StreamConfig(num_streams=12, num_stream_layers=1))
    with pytest.raises(InputError, match=r"1,024 nodes"):
        StreamDraft(small(), deep, StreamSettings(tree="product", k=2))
    with pytest.raises(InputError, match="only 3 streams"):
        StreamDraft(small(), small_adapter(small()), StreamSettings(depth=4))


def test_drafters_say_what_they_cannot_do() -> None:
    target = small()
    bare = small_adapter(target, StreamConfig(num_stream_layers=1, pruning_rank=0))
    with pytest.raises(CapabilityError, match="pruning layer"):
        StreamDrafter(target, bare, StreamSettings(prune=4))
    with pytest.raises(CapabilityError, match="prune_threshold=0"):
        StreamDrafter(target, bare, StreamSettings(prune_threshold=0.1))
    for threshold in (-0.1, 1.0, math.nan):
        with pytest.raises(InputError, match="prune_threshold must be a probability below 1"):
            StreamSettings(prune_threshold=threshold)
    sampled, chain = SamplingParams(temperature=1.0), StreamSettings(tree="chain", prune_threshold=0.1)
    StreamDrafter(target, small_adapter(target), chain).check(sampled, "rejection")
    with pytest.raises(CapabilityError, match="or prune=0 with prune_threshold"):
        StreamDrafter(target, small_adapter(target), replace(chain, prune=3)).check(sampled, "rejection")
    top = small_adapter(target, StreamConfig(num_stream_layers=1, context_top=4))
    with pytest.raises(CapabilityError, match="ride"):
        StreamDrafter(target, top, StreamSettings(placement="trail"))
    for prune in (-1, 1, 2.5):
        with pytest.raises(InputError, match="prune"):
            StreamDrafter(target, small_adapter(target), StreamSettings(prune=prune))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="placement"):
        StreamDrafter(target, small_adapter(target), StreamSettings(placement="fly"))  # type: ignore[arg-type]


def test_the_largest_rotation_of_the_paper_is_the_default() -> None:
    """Epsilon of eq. 8 is at most pi / 2N, N being the context length plus the streams; the adapter stores it."""
    rotated = StreamConfig(num_stream_layers=1, position="rotation")
    adapter = StreamAdapter(LLAMA, rotated)
    assert adapter.config.rotation_step == math.pi / (2 * (LLAMA.max_positions + 4)) == adapter.shape.rotation_step
    assert StreamAdapter(LLAMA, replace(rotated, rotation_step=0.1)).config.rotation_step == 0.1
    assert StreamAdapter(LLAMA, StreamConfig(num_stream_layers=1)).config.rotation_step == 0


def test_a_fresh_adapter_is_the_target_itself() -> None:
    """LoRA's start: all deltas are zero, so only the stream embeddings move a stream's input."""
    adapter = StreamAdapter(LLAMA, RICH)
    x = torch.randn(1, 2, 32)
    assert torch.equal(adapter.early_exit(x), x)
    for layer in adapter.layers:
        for name in ("mlp", "qkv", "out"):
            assert not layer.get_submodule(name)(x).abs().any()  # type: ignore[operator]
