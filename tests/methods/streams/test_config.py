from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from anabranch.errors import CapabilityError, InputError
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.draft import StreamDraft, StreamSettings
from anabranch.methods.streams.drafter import StreamDrafter
from anabranch.methods.streams.recipes import StreamConfig
from anabranch.sampling import SamplingParams
from small import LLAMA, RICH, small, small_adapter


def test_more_stream_layers_than_layers() -> None:
    with pytest.raises(InputError, match="only 3 layers"):
        StreamAdapter(LLAMA, StreamConfig(num_stream_layers=4))


def test_a_tree_that_no_machine_holds() -> None:
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
