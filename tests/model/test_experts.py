"""Mixtures of experts: routing, what is read, kernels, quantisation, stored forms, drafting."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from toys import CASES, Oracle, tokens, toy_hf

from anabranch.errors import CapabilityError, ModelError
from anabranch.methods import make_drafter
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.tuning import check_weights
from anabranch.model.config import ExpertsConfig, ModelConfig
from anabranch.model.decoder import Decoder
from anabranch.model.experts import Experts
from anabranch.model.families import model_config
from anabranch.model.inputs import Inputs
from anabranch.model.kernel_use import why_not_native
from anabranch.model.native_backend import ExpertsBackend, ProductsBackend
from anabranch.model.pack import pack_decoder, weight_bytes
from anabranch.model.quantize import quantize_decoder
from anabranch.model.weights import build_decoder, fill_decoder
from anabranch.native import library as native
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree
from small import (
    LLAMA,
    RICH,
    decode,
    drawn_lora,
    logits_after,
    logits_of,
    merged_copy,
    new_cache,
    prompt,
    randomise,
    request,
)

EXPERTS = ExpertsConfig(count=8, chosen=2, width=32)
MOE = replace(
    LLAMA, hidden_size=64, head_dim=32, num_heads=2, num_kv_heads=1, intermediate_size=64, experts=EXPERTS, num_layers=3
)
MOE = replace(MOE, rope=replace(LLAMA.rope, dim=32))
OSS = replace(
    MOE,
    experts=replace(EXPERTS, bias=True, clamp=(1.7, 2.0)),
    attention_sinks=True,
    sliding_window=4,
    sliding_layers=(True, False, True),
)
kernels = pytest.mark.skipif(native.library() is None, reason="no native kernels here")


def target(config=MOE, *, dtype: torch.dtype = torch.float32, quantize: str = "none") -> Decoder:
    decoder = build_decoder(config, device="cpu")
    randomise(decoder, seed=3)
    decoder = decoder.to(dtype)
    quantize_decoder(decoder, quantize)
    return decoder


def packed(config=MOE, **options) -> Decoder:
    decoder = target(config, **options)
    assert pack_decoder(decoder)
    return decoder


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, MOE.hidden_size, generator=torch.Generator().manual_seed(1))


def test_equal_scores_choose_the_lowest_indices() -> None:
    experts = Experts(MOE, EXPERTS)
    with torch.no_grad():
        experts.router.weight.zero_()
        experts.router.weight[5] = experts.router.weight[6] = experts.router.weight[2] = 1.0
    chosen, weights = experts.choose(torch.ones(4, MOE.hidden_size))
    assert chosen.tolist() == [[2, 5]] * 4
    assert weights.tolist() == [[0.5, 0.5]] * 4


def test_only_chosen_experts_are_multiplied() -> None:
    """And those once, by the rows that chose them; the order of the rows changes nothing."""
    experts, x = target().blocks[0].mlp, rows(5)
    calls: list[tuple[int, int]] = []
    for index, expert in enumerate(experts.experts):
        expert.register_forward_hook(lambda m, given, y, i=index: calls.append((i, len(given[0]))))
    y = experts(x)
    chosen, _ = experts.choose(x)
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS.count).tolist()
    assert calls == [(index, count) for index, count in enumerate(counts) if count]
    assert 0 < len(calls) < EXPERTS.count
    order = [3, 0, 4, 1, 2]
    torch.testing.assert_close(experts(x[order]), y[order], rtol=0, atol=1e-6)


@kernels
@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_agree_with_pytorch(quantize: str, dtype: torch.dtype) -> None:
    if quantize != "none" and dtype == torch.float32:
        return
    for config, backend in ((MOE, ExpertsBackend), (OSS, ProductsBackend)):
        plain, fast = target(config, dtype=dtype, quantize=quantize), packed(config, dtype=dtype, quantize=quantize)
        assert type(fast.backend) is backend
        feed = Inputs.of_prompt([token % MOE.vocab_size for token in tokens(9)])
        ours = logits_of(fast(feed, new_cache(fast))).float()
        theirs = logits_of(plain(feed, new_cache(plain))).float()
        far = (ours - theirs).abs().mean() / theirs.std()
        assert far < (1e-5 if dtype == torch.float32 else 0.15 if quantize == "none" else 0.3), (config.family, far)


TREE = DraftTree(np.array([4, 5, 6, 7, 8, 9, 10], np.int64), np.array([-1, 0, 0, 1, 1, 2, 4], np.int64))
PATHS = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5], [0, 1, 4, 6]]


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nodes_of_trees_and_rows_of_batches_are_bit_identical_to_paths_alone(dtype: torch.dtype) -> None:
    decoder = packed(dtype=dtype)
    prompts = [prompt(7, 1), prompt(12, 2)]
    cache = new_cache(decoder, rows=2)
    for slot, ids in enumerate(prompts):
        decoder(Inputs.of_prompt(ids), cache, slots=slice(slot, slot + 1))
        cache.commit([range(len(ids))])
    result = decoder(Inputs.of_trees([TREE, DraftTree.chain(11, [12, 13])]), cache)
    for row, paths in enumerate((PATHS, [[0], [0, 1], [0, 1, 2]])):
        for node, path in enumerate(paths):
            words = [int(TREE.tokens[i]) for i in path] if row == 0 else [11, 12, 13][: len(path)]
            alone = new_cache(decoder)
            decoder(Inputs.of_prompt(prompts[row]), alone)
            alone.commit([range(len(prompts[row]))])
            for word in words:
                single = decoder(Inputs.of_trees([DraftTree.root(word)]), alone)
                alone.commit([[0]])
            assert torch.equal(result.logits_MV[result.nodes(row)][node], single.logits_MV[0])


@pytest.mark.parametrize(
    ("config", "temperature"),
    [
        pytest.param(MOE, 1.0, id="experts-1.0"),
        pytest.param(OSS, 0.0, id="gpt-oss-0.0"),
        pytest.param(MOE, 0.0, id="experts-0.0", marks=pytest.mark.thorough),
        pytest.param(OSS, 1.0, id="gpt-oss-1.0", marks=pytest.mark.thorough),
    ],
)
def test_drafts_change_nothing(config: ModelConfig, temperature: float) -> None:
    decoder = packed(config)
    sampling = SamplingParams(temperature=temperature)
    asked = [request(5 + 3 * i, i, 14 + 3 * i, sampling=sampling) for i in range(4)]
    plain, _ = decode(decoder, asked)
    for name, rows in product(("prompt_lookup:tokens=4", "suffix", "lookahead"), (1, 3)):
        drafted, steps = decode(decoder, asked, make_drafter(name, decoder), rows=rows)
        assert drafted == plain
        assert any(step.tree.size > 1 for row in steps for step in row)


@kernels
def test_loras_by_row_run_in_pytorch() -> None:
    decoder = target()
    lora = drawn_lora(decoder.config)
    decoder.add_lora("a", lora)
    assert "run in PyTorch for llama models, which have experts" in why_not_native(decoder)
    pack_decoder(decoder)
    alone = merged_copy(target(), lora)
    assert decode(decoder, [replace(request(9, 1), lora="a")])[0] == decode(alone, [request(9, 1)])[0]
    with pytest.raises(CapabilityError, match=r"LoRAs per request .* in PyTorch only; load the model with"):
        packed().add_lora("a", lora)


def test_bytes_of_the_experts_that_a_row_passes_through_are_counted() -> None:
    decoder, dense = target(), target(MOE.dense())
    outside = weight_bytes(dense) - 3 * sum(p.nbytes for p in dense.blocks[0].mlp.parameters())
    inside = sum(p.nbytes for p in decoder.blocks[0].mlp.experts[0].parameters())
    router = decoder.blocks[0].mlp.router.weight.nbytes
    assert weight_bytes(decoder) == outside + 3 * (EXPERTS.chosen * inside + router)


def test_experts_stored_in_one_tensor_are_those_of_transformers() -> None:
    """As in a live model of transformers, whose module keeps the experts of a layer together."""
    for case in ("qwen3_moe", "mixtral"):
        model = toy_hf(*CASES[case])
        config = model_config(model.config.to_dict())
        fused = model.state_dict()
        assert any(name.endswith("experts.gate_up_proj") for name in fused)
        decoder, _ = fill_decoder(config, fused, dtype=torch.float32, device=torch.device("cpu"))
        ids = tokens(9)
        torch.testing.assert_close(logits_after(decoder, ids), Oracle(model).logits(ids), rtol=0, atol=1e-4)
        wrong = {n: x[:2] if n.endswith("experts.down_proj") else x for n, x in fused.items()}
        with pytest.raises(ModelError, match=r"down_proj has the shape .* but the config requires"):
            fill_decoder(config, wrong, dtype=torch.float32, device=torch.device("cpu"))


def test_what_needs_dense_layers_is_refused_by_name() -> None:
    decoder = packed(dtype=torch.bfloat16)
    with pytest.raises(CapabilityError, match="streams need layers of attention and an MLP"):
        StreamAdapter(MOE, RICH)
    with pytest.raises(CapabilityError, match="quantized_draft"):
        make_drafter("quantized_draft", decoder)
    with pytest.raises(CapabilityError, match="llama models cannot be tuned"):
        check_weights(decoder)


def test_more_experts_than_there_are_is_refused() -> None:
    described = toy_hf(*CASES["mixtral"]).config.to_dict()
    with pytest.raises(ModelError, match="num_experts_per_tok is 9, but there are 4 experts"):
        model_config({**described, "num_experts_per_tok": 9})
