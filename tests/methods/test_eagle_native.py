"""EAGLE's head on the native kernels: what PyTorch computes, and decoding with it is exact."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from anabranch.methods.eagle.drafter import EagleDrafter, EagleSettings
from anabranch.methods.eagle.layer import EagleLayer, NativeEagleLayer
from anabranch.methods.eagle.module import EagleConfig, EagleModule
from anabranch.model.decoder import Decoder
from anabranch.model.inputs import Inputs
from anabranch.model.pack import pack_decoder
from anabranch.model.quantize import quantize_decoder
from anabranch.model.weights import build_decoder
from anabranch.native import library as native
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree
from small import WIDE, decode, randomise, request

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no native kernels here: {native.why_not()}")

CASES = {
    "llama": WIDE,
    "mistral": replace(WIDE, family="mistral", sliding_window=6),
    "qwen3": replace(WIDE, family="qwen3", qk_norm="head", qkv_bias=True, tied_head=True),
}
CONFIGS = {
    "eagle": EagleConfig(),
    "taps": EagleConfig(taps="0/2"),
    "published": EagleConfig(embedding_norm=False, input_norm=False, bias=True),
}


def target(case: str, form: str) -> Decoder:
    """A target on the kernels, its weights in float32, bfloat16 or int4."""
    model = build_decoder(CASES[case], device="cpu")
    randomise(model, seed=1)
    model = model.to(torch.float32 if form == "float32" else torch.bfloat16)
    if form == "int4":
        quantize_decoder(model, "int4")
    assert pack_decoder(model)
    assert model.backend.kernels is not None
    return model


def head(model: Decoder, config: EagleConfig) -> EagleModule:
    torch.manual_seed(0)
    module = EagleModule(model.config, config)
    randomise(module.block, seed=5, scale=0.1)
    if module.fc.bias is not None:
        torch.nn.init.normal_(module.fc.bias)
    return module.to(model.dtype).eval().requires_grad_(False)


@pytest.mark.parametrize(("case", "config"), [("llama", "taps"), ("mistral", "eagle"), ("qwen3", "published")])
@pytest.mark.parametrize(("form", "most"), [("float32", 1e-4), ("bfloat16", 0.1)])
@torch.inference_mode()
def test_the_kernels_compute_what_pytorch_does(case: str, config: str, form: str, most: float) -> None:
    """A chain of text, then trees of rows of different widths, one of which takes no part."""
    model = target(case, form)
    module = head(model, CONFIGS[config])
    native, plain = NativeEagleLayer(model, module), EagleLayer(model, copy.deepcopy(module).float())
    caches = [layer.new_cache(3, 64) for layer in (native, plain)]
    assert caches[1].dtype == torch.float32
    tree = DraftTree(*(torch.tensor(x).numpy() for x in ([3, 5, 7, 9, 4], [-1, 0, 0, 1, 2])))
    trees = Inputs(torch.tensor([*tree.tokens, 6, 8]).numpy(), torch.tensor([*tree.parents, -1, 0]).numpy(), (5, 0, 2))
    for cache in caches:
        for _ in range(3):
            cache.add_row()
    steps = [(Inputs.of_prompt([4, 5, 6, 7, 8, 9, 10, 11, 12]), slice(slot, slot + 1)) for slot in range(3)]
    for number, (inputs, slots) in enumerate([*steps, (trees, slice(0, 3))]):
        torch.manual_seed(number)
        features = torch.randn(len(inputs.tokens_M), 64).to(model.dtype)
        mine = native.run(inputs, features, caches[0], slots).float()
        theirs = plain.run(inputs, features.float(), caches[1], slots)
        assert float((mine - theirs).abs().max()) < most * float(theirs.abs().max())
        for cache in caches:
            cache.commit([range(count) for count in inputs.counts_B])


@pytest.mark.parametrize(
    ("config", "form"), [("eagle", "float32"), ("taps", "bfloat16"), ("published", "int4"), ("eagle", "int4")]
)
def test_decoding_is_exact(config: str, form: str) -> None:
    model = target("llama", form)
    module = head(model, CONFIGS[config])
    for sampling in (SamplingParams(), SamplingParams(temperature=0.9)):
        asked = [request(2 + 5 * n, n, 14, sampling=replace(sampling, seed=n)) for n in range(4)]
        wanted, _ = decode(model, asked)
        for settings in (EagleSettings(nodes=8, depth=4, k=4), EagleSettings("static")):
            drafter = EagleDrafter(model, module, settings)
            assert isinstance(drafter.layer, NativeEagleLayer)
            found, steps = decode(model, asked, drafter, rows=3)
            assert found == wanted
            assert any(step.tree.size > 1 for row in steps for step in row)
