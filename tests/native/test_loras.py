"""LoRAs by row on the native kernels: as in PyTorch, and to the bit whatever shares the pass."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import test_kernels
import torch
from test_kernels import CASES, FORMS, cache, decoder, packed, tokens

from anabranch.methods import make_drafter
from anabranch.model.decoder import Decoder
from anabranch.model.inputs import Inputs
from anabranch.model.pack import pack_decoder
from anabranch.tree import DraftTree
from small import decode, drawn_lora, merged_copy, request, rows_of, same_tree

pytestmark = test_kernels.needs_kernels

CHOSEN = ["a", None, "b", "b", "a"]  # of the rows of a pass: neighbours with the same, and others


def with_loras(model: Decoder) -> Decoder:
    """Add a LoRA of all modules, and one of some."""
    model.add_lora("a", drawn_lora(model.config, seed=5))
    model.add_lora(
        "b", drawn_lora(model.config, "c_attn" if "gpt" in model.config.family else "o_proj", rank=40, seed=6)
    )
    return model


def logits(model: Decoder, chosen: list[str | None]) -> torch.Tensor:
    """The logits of trees of several sizes after prompts [B, N, V], a row for each LoRA."""
    memory = cache(model, rows=len(chosen))
    sizes = [3 + 7 * row for row in range(len(chosen))]
    for row, lora in enumerate(chosen):
        model(Inputs.of_prompt(tokens(30 + row, row)), memory, slots=slice(row, row + 1), loras=[lora])
        memory.commit([range(30 + row)])
    trees = [DraftTree(np.array(tokens(n, n)), np.array([-1, *(i // 2 for i in range(n - 1))])) for n in sizes]
    result = model(Inputs.of_trees(trees), memory, loras=chosen)
    return rows_of(result.logits_MV, result)


@pytest.mark.parametrize("name", CASES)
def test_float32_agrees_with_pytorch(name: str) -> None:
    plain = with_loras(decoder(CASES[name], torch.float32))
    ours = copy.deepcopy(plain)
    assert pack_decoder(ours)
    assert ours.backend.kernels is not None
    torch.testing.assert_close(logits(ours, CHOSEN), logits(plain, CHOSEN), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["llama", "biases (qwen2)"])
def test_rows_are_those_of_a_pass_of_their_own_to_the_bit(name: str, form: str) -> None:
    model = with_loras(packed(CASES[name], form))
    together = logits(model, CHOSEN)
    untuned = logits(packed(CASES[name], form), [None] * len(CHOSEN))
    for row, lora in enumerate(CHOSEN):
        size = 3 + 7 * row
        others = [lora if each == row else None for each in range(len(CHOSEN))]
        assert torch.equal(together[row, :size], logits(model, others)[row, :size])
        assert torch.equal(together[row, :size], untuned[row, :size]) == (lora is None)


@pytest.mark.parametrize("form", ["bfloat16", "int4"])
@pytest.mark.parametrize("drafter", ["prompt_lookup", "streams:placement=trail"])
def test_speculation_gives_the_same_tokens(drafter: str, form: str) -> None:
    model = with_loras(packed(CASES["llama"], form))
    asked = [replace(request(5 + 3 * n % 7, n, 12 + n), lora=lora) for n, lora in enumerate([*CHOSEN, None, "a"])]
    plain, _ = decode(model, asked)
    modules = (test_kernels.adapter_for(model),) if drafter.startswith("streams") else ()
    found, steps = decode(model, asked, make_drafter(drafter, model, *modules), rows=4)
    assert found == plain
    assert any(step.tree.size > 1 for row in steps for step in row)
    assert len(set(map(tuple, plain))) == len(plain)


def test_the_tokens_are_those_of_merged_models() -> None:
    plain = decoder(CASES["llama"], torch.float32)
    loras = {"a": drawn_lora(plain.config, seed=5), "b": drawn_lora(plain.config, "o_proj", rank=40, seed=6)}
    model = with_loras(copy.deepcopy(plain))
    assert pack_decoder(model)
    for lora, terms in loras.items():
        found, _ = decode(model, [replace(request(9, 1, 20), lora=lora)])
        assert found == decode(merged_copy(plain, terms), [request(9, 1, 20)])[0]


@pytest.mark.parametrize("shape", [{}, {"root_width": 32}, {"stream_mlp": "adapter"}])
def test_drafts_are_those_of_merged_models(shape: dict[str, object]) -> None:
    """Streams that trail a row have the terms of its LoRA, as if they were in the weights."""
    plain = decoder(CASES["llama"], torch.float32)
    loras = {"a": drawn_lora(plain.config, seed=5), "b": drawn_lora(plain.config, "o_proj", rank=40, seed=6)}
    model = with_loras(copy.deepcopy(plain))
    assert pack_decoder(model)
    drafter = make_drafter("streams:placement=trail", model, test_kernels.adapter_for(model, **shape))
    _, together = decode(model, [replace(request(9, 1, 20), lora=lora) for lora in loras], drafter, rows=2)
    for found, terms in zip(together, loras.values(), strict=True):
        merged = merged_copy(plain, terms)
        assert pack_decoder(merged)
        drafter = make_drafter("streams:placement=trail", merged, test_kernels.adapter_for(merged, **shape))
        _, (wanted,) = decode(merged, [request(9, 1, 20)], drafter)
        assert any(step.tree.size > 1 for step in wanted)
        for step, other in zip(found, wanted, strict=True):
            same_tree(step.tree, other.tree)


def test_a_lora_may_come_later_and_be_replaced() -> None:
    model = with_loras(packed(CASES["llama"], "bfloat16"))
    before = logits(model, CHOSEN)
    model.add_lora("a", drawn_lora(model.config, seed=7))
    after = logits(model, CHOSEN)
    same = [torch.equal(old, new) for old, new in zip(before, after, strict=True)]
    assert same == [lora != "a" for lora in CHOSEN]


def test_terms_that_do_not_fit_are_refused() -> None:
    model = with_loras(packed(CASES["llama"], "bfloat16"))
    wrong = packed(replace(CASES["llama"], intermediate_size=96), "bfloat16")
    wrong.add_lora("a", drawn_lora(wrong.config))
    model.loras = wrong.loras
    with pytest.raises(AssertionError, match="a packed weight has the wrong size"):
        logits(model, ["a"])
