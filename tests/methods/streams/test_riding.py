"""Streams that ride in one pass of the native kernels: what PyTorch computes, and main rows to the bit."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from anabranch.certify import certify
from anabranch.methods import make_drafter
from anabranch.methods.space.module import MaskConfig, MaskModule
from anabranch.methods.streams.adapter import StreamAdapter, StreamLayer, StreamModule
from anabranch.methods.streams.recipes import StreamConfig
from anabranch.methods.streams.rider import StreamRider
from anabranch.model.backends import TorchBackend
from anabranch.model.blocks import Block
from anabranch.model.config import ModelConfig
from anabranch.model.decoder import Decoder
from anabranch.model.pack import pack_decoder
from anabranch.model.passes import PassResult
from anabranch.model.quantize import quantize_decoder
from anabranch.model.weights import build_decoder
from anabranch.native import library as native
from small import CASES, RICH, as_target, prompt, randomise, small_adapter
from toy_passes import LENGTHS, ragged_trees, run_ragged

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no native kernels here: {native.why_not()}")

PAPER = StreamConfig(num_streams=4, num_stream_layers=2, adapter_rank=3, pruning_rank=2)
OWN = {"mode": "shared", "main_attends": "own"}
CONFIGS = {
    "paper": PAPER,
    "rich": RICH,
    "rotation": replace(PAPER, position="rotation", rotation_step=0.1, init_rank=2),
    "own": replace(RICH, root_width=0, **OWN),  # type: ignore[arg-type]
    "own, rotation": replace(PAPER, position="rotation", rotation_step=0.1, **OWN),  # type: ignore[arg-type]
}
QUICK = [("llama", "rich"), ("gemma2", "own"), ("gpt2", "paper"), ("phi", "rich"), ("mistral", "rotation")]


def sized(case: str) -> ModelConfig:
    """A case of ``CASES`` with sizes that the kernels take."""
    model = CASES[case]
    kv_heads = 2 if model.num_kv_heads == model.num_heads else 1
    rope = replace(model.rope, dim=16 if case == "phi" else 32)
    sizes = {"hidden_size": 64, "head_dim": 32, "num_heads": 2, "num_kv_heads": kv_heads, "intermediate_size": 96}
    return replace(model, **sizes, rope=rope)  # type: ignore[arg-type]


def made(
    case: str, config: StreamConfig | MaskConfig, dtype: torch.dtype = torch.float32, quantize: str = "none"
) -> tuple[Decoder, StreamModule]:
    """A packed target and an adapter with random weights."""
    decoder = build_decoder(sized(case), device="cpu")
    randomise(decoder, seed=1, scale=0.15)
    decoder.to(dtype)
    adapter: StreamModule
    if isinstance(config, MaskConfig):
        adapter = MaskModule(decoder.config, config).eval().requires_grad_(False)
    else:
        adapter = small_adapter(decoder, config)
    if quantize != "none":
        quantize_decoder(decoder, quantize)
    assert pack_decoder(decoder)
    assert decoder.backend.kernels is not None
    return decoder, adapter.to(dtype)


def test_weights_are_merged_on_one_of_pytorchs_threads(restored_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads wait for each other after each small operation, for long while another process is busy."""
    target, adapter = made("llama", RICH)
    merge, seen = StreamLayer.merge, set()

    def watched(layer: StreamLayer, block: Block) -> None:
        seen.add(torch.get_num_threads())
        merge(layer, block)

    monkeypatch.setattr(StreamLayer, "merge", watched)
    torch.set_num_threads(2)
    make_drafter("streams", target, adapter)
    assert seen == {1}
    assert torch.get_num_threads() == 2


def in_torch(target: Decoder) -> Decoder:
    """The same weights in PyTorch's layers."""
    plain = copy.copy(target)
    plain.backend = TorchBackend()
    return plain


def same(mine: PassResult, theirs: PassResult) -> None:
    """All outputs agree up to rounding."""
    for b in range(3):
        if theirs.kept is not None:
            assert mine.kept is not None
            assert mine.kept[b].tolist() == theirs.kept[b].tolist()
        real = mine.counts_B[b]
        assert real == theirs.counts_B[b]
        at, other = mine.nodes(b), slice(theirs.starts_B[b], theirs.starts_B[b] + real)
        assert torch.allclose(mine.hidden_MD[at], theirs.hidden_MD[other], atol=2e-4)
        for layer, rows in mine.taps.items():
            assert torch.allclose(rows[at], theirs.taps[layer][other], atol=2e-4)
        if theirs.riding_MSD is not None:
            assert mine.riding_MSD is not None
            assert torch.allclose(mine.riding_MSD[at], theirs.riding_MSD[other], atol=5e-4)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(case, name, marks=() if (case, name) in QUICK else pytest.mark.thorough)
        for case in sorted(CASES)
        for name in CONFIGS
    ],
)
def test_one_call_computes_what_pytorch_does(case: str, name: str) -> None:
    target, adapter = made(case, CONFIGS[name])
    plain = in_torch(target)
    taps = adapter.start, adapter.start + 1
    for keep, threshold, ride in ((0, 0.0, True), (3, 0.0, True), (3, 0.0, False), (0, 0.04, True), (2, 0.02, True)):
        mine, cache = run_ragged(target, StreamRider(target, adapter, ride=ride, prune=keep, threshold=threshold), taps)
        theirs, other = run_ragged(plain, StreamRider(plain, adapter, ride=ride, prune=keep, threshold=threshold), taps)
        same(mine, theirs)
        paths = [(0, 1, 4), (0,), (0, 2, 3)]
        if mine.kept is not None:
            trees_left = [tree.select(nodes) for tree, nodes in zip(ragged_trees(), mine.kept, strict=True)]
            paths = [tree.path_to(tree.size - 1) for tree in trees_left]
        for each in (cache, other):
            each.commit(paths)
        for b, length in enumerate(cache.lengths):
            assert length == other.lengths[b]
            for one, two in ((cache.keys, other.keys), (cache.values, other.values)):
                assert torch.allclose(one[:, b, :, :length], two[:, b, :, :length], atol=2e-4)


def test_masks_ride_through_all_layers() -> None:
    for case in ("llama", "gpt2"):
        target, module = made(case, MaskConfig(3))
        plain = in_torch(target)
        mine, theirs = (run_ragged(each, StreamRider(each, module, ride=True))[0] for each in (target, plain))
        same(mine, theirs)


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
@pytest.mark.parametrize("name", ["paper", "rich", "rotation"])
def test_main_rows_are_those_of_a_pass_without_streams_to_the_bit(name: str, quantize: str) -> None:
    target, adapter = made("llama", CONFIGS[name], torch.bfloat16, quantize)
    plain, bare = run_ragged(target, None, (1,))
    ridden, cache = run_ragged(target, StreamRider(target, adapter, ride=True), (1,))
    assert torch.equal(ridden.hidden_MD, plain.hidden_MD)
    assert torch.equal(ridden.taps[1], plain.taps[1])
    for b, (length, tree) in enumerate(zip(LENGTHS, ragged_trees(), strict=True)):
        end = length + tree.size
        assert torch.equal(cache.keys[:, b, :, :end], bare.keys[:, b, :, :end])
        assert torch.equal(cache.values[:, b, :, :end], bare.values[:, b, :, :end])
    pruned, _ = run_ragged(target, StreamRider(target, adapter, ride=True, prune=3))
    assert pruned.kept is not None
    for b, kept in enumerate(pruned.kept):
        assert torch.equal(pruned.hidden_MD[pruned.nodes(b)], plain.hidden_MD[plain.nodes(b)][torch.from_numpy(kept)])


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_streams_of_quantised_targets_are_near(quantize: str) -> None:
    """PyTorch multiplies the terms by rows in bf16, the kernels by rows in int8 where the weights are quantised."""
    target, adapter = made("llama", RICH, torch.bfloat16, quantize)
    plain = in_torch(target)
    mine, _ = run_ragged(target, StreamRider(target, adapter, ride=True))
    theirs, _ = run_ragged(plain, StreamRider(plain, adapter, ride=True))
    assert mine.riding_MSD is not None
    assert theirs.riding_MSD is not None
    for b in range(3):
        other = theirs.riding_MSD[theirs.starts_B[b] : theirs.starts_B[b] + mine.counts_B[b]]
        one, two = mine.riding_MSD[mine.nodes(b)].float(), other.float()
        assert (one - two).norm() < 0.1 * two.norm()


@pytest.mark.parametrize("spec", ["streams:placement=ride", "streams:tree=product,k=2,placement=ride,prune=5"])
def test_decoded_texts_are_plain_decodings(spec: str) -> None:
    target, adapter = made("llama", RICH, torch.bfloat16)
    assert isinstance(adapter, StreamAdapter)
    found = certify(
        as_target(target), [adapter], spec, [prompt(n, seed=n) for n in (5, 9, 3)], max_new_tokens=16, rows=2
    )
    assert [each.verdict for each in found] == ["equal"] * 3
