"""Keys and values in int8: the tests of the kernels again, and what the stored values are."""

from __future__ import annotations

import math

import pytest
import test_kernels
import torch
from test_kernels import BASE, CACHED, CASES, cache, decoder, model_of, packed, prompt_and_tree, tokens

import anabranch
from anabranch.api import Model
from anabranch.capabilities import StandIn
from anabranch.control.profiles import Situation
from anabranch.errors import CapabilityError, InputError
from anabranch.loading import LoadConfig, load
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder
from anabranch.model.inputs import Inputs
from small import logits_of
from toy_text import ToyFolders

pytestmark = test_kernels.needs_kernels

FORMS = [form + CACHED for form in ("bfloat16", "float32", "int8")]
WIDTHS = ["llama", "wide heads", "three vectors a head", "very wide heads", "sliding window (mistral)"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", WIDTHS)
def test_a_tree_is_its_paths_to_the_bit(name: str, form: str) -> None:
    test_kernels.test_a_tree_is_its_paths_to_the_bit(name=name, form=form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["llama", "sliding window (mistral)"])
def test_passes_are_those_of_their_parts_to_the_bit(name: str, form: str) -> None:
    test_kernels.test_a_ragged_pass_is_its_rows_to_the_bit(name=name, form=form)
    test_kernels.test_a_pass_for_keys_and_values_leaves_those_of_a_whole_one(150, name, form)
    test_kernels.test_prompt_tokens_in_the_pass_of_a_step_change_nothing((3, 0, 20), name, form)


@pytest.mark.parametrize("form", FORMS)
def test_streams_of_some_rows_trail_to_the_bit(form: str) -> None:
    test_kernels.test_streams_of_some_rows_trail_to_the_bit({"root_width": 32}, form)


def test_threads_change_nothing(restored_threads: int) -> None:
    test_kernels.test_threads_change_nothing(FORMS[0], restored_threads)


@pytest.mark.parametrize(
    ("name", "rows", "form"),
    [("llama", 3, FORMS[0]), pytest.param("sliding window (mistral)", 1, FORMS[2], marks=pytest.mark.thorough)],
)
def test_speculation_gives_the_same_tokens(name: str, rows: int, form: str) -> None:
    test_kernels.test_speculation_gives_the_same_tokens(name, rows, form)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_rounded_keys_and_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels agree with PyTorch where its cache is given the rounded ones; that rounding changes little."""
    plain, ours = prompt_and_tree(model_of(name, "float32")), prompt_and_tree(model_of(name, "float32" + CACHED))
    half = prompt_and_tree(model_of(name, "bfloat16" + CACHED))
    append = Cache.append

    def rounded(x: torch.Tensor) -> torch.Tensor:
        groups = x.unflatten(-1, (-1, 32))
        scale = groups.abs().amax(-1, keepdim=True) / 127
        return ((groups / scale).round() * scale).flatten(-2)

    monkeypatch.setattr(Cache, "append", lambda self, layer, k, v: append(self, layer, rounded(k), rounded(v)))
    truth = prompt_and_tree(decoder(CASES[name], torch.float32))
    assert 0.001 * plain.std() < (truth - plain).abs().mean() < 0.04 * plain.std()
    assert (ours - truth).abs().mean() < 0.1 * (truth - plain).abs().mean()  # a value may be rounded the other way
    assert (half.float() - truth).abs().mean() < 0.04 * plain.std()


@pytest.mark.parametrize("name", WIDTHS)
def test_stored_values_are_rounded_by_groups_of_32(name: str) -> None:
    """The first layer reads no cache before it writes its keys, so these are those of a plain cache, rounded."""
    found: list[Cache] = []
    for form in ("float32", "float32" + CACHED):
        model = model_of(name, form)
        found.append(memory := cache(model))
        model(Inputs.of_prompt(tokens(50)), memory, need="keys")
        memory.commit([range(50)])
    plain, quantized = found
    e = plain.config.head_dim
    assert quantized.keys.dtype == torch.uint8
    assert quantized.token_bytes * 32 == plain.token_bytes * 9
    assert quantized.nbytes * 32 == plain.nbytes * 9
    for exact, stored, kept in zip(
        *(memory.of_rows(0, slice(0, 1), 50) for memory in found), (quantized.keys, quantized.values), strict=True
    ):
        groups = exact.unflatten(-1, (-1, 32))
        scale = groups.abs().amax(-1, keepdim=True) / 127
        assert ((stored - exact).unflatten(-1, (-1, 32)).abs() <= 0.501 * scale).all()
        assert torch.equal(kept[0, 0, :, :50, e:].contiguous().view(torch.float32), scale[0, ..., 0])
        assert kept[0, 0, :, :50, :e].view(torch.int8).abs().amax() == 127


def with_key_bias(value: float) -> Decoder:
    """A model with a cache in int8 whose keys and values come from one bias, in one channel of one head."""
    model = decoder(CASES["biases (qwen2)"], torch.float32)
    model.blocks[0].qkv.bias[-1] = value
    assert test_kernels.pack_decoder(model)
    model.quantize_cache()
    return model


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_stay_visible(value: float) -> None:
    model = with_key_bias(value)
    memory = cache(model)
    logits = logits_of(model(Inputs.of_prompt(tokens(5)), memory))
    assert logits.isnan().all()
    _, values = memory.of_rows(0, slice(0, 1), 5)
    assert values[0, -1, :5].isnan().all()
    assert values[0, 0, :5].isfinite().all()


def test_zeros_are_stored_as_zeros() -> None:
    model = decoder(BASE, torch.float32)
    model.blocks[0].qkv.weight[-BASE.head_dim :] = 0
    assert test_kernels.pack_decoder(model)
    model.quantize_cache()
    memory = cache(model)
    assert logits_of(model(Inputs.of_prompt(tokens(5)), memory)).isfinite().all()
    _, values = memory.of_rows(0, slice(0, 1), 5)
    assert not values[0, -1, :5].any()
    assert values[0, 0, :5].any()


def test_rows_move_between_slots_and_capacities() -> None:
    model = packed(BASE, FORMS[0])
    memory = model.new_cache(3, 64)
    for slot in range(3):
        memory.add_row()
        model(Inputs.of_prompt(tokens(20, slot)), memory, slots=slice(slot, slot + 1), need="keys")
        memory.commit([range(20)])
    wanted = memory.of_rows(1, 2, 20)
    memory.fork(2, 0, 20)
    assert all(map(torch.equal, memory.of_rows(1, 0, 20), wanted))
    grown = memory.resized(4, 128)
    assert grown.quantized
    assert all(map(torch.equal, grown.of_rows(1, 2, 20), wanted))
    kept = memory.taken(2, 0, 20)
    grown.put(3, 0, *kept)
    assert all(map(torch.equal, grown.of_rows(1, 3, 20), wanted))


def test_without_the_kernels_the_cache_is_refused() -> None:
    with pytest.raises(CapabilityError, match=r"kv='int8' .* only the native kernels on a CPU"):
        decoder(BASE).quantize_cache()


def test_a_loaded_model_names_it() -> None:
    plain, quantized = (StandIn.of("cpu", "bfloat16", kv=kv).target for kv in ("auto", "int8"))
    assert ["kv='int8'" in repr(Model(target)) for target in (plain, quantized)] == [False, True]
    assert quantized.decoder.token_bytes * 16 == plain.decoder.token_bytes * 9
    assert quantized.decoder.new_cache(1, 8).quantized
    assert Situation.of(plain) != Situation.of(quantized)


def test_who_is_refused(toys: ToyFolders) -> None:
    assert anabranch.supports("streams", kv="int8", dtype="bfloat16", device="cpu")
    with pytest.raises(InputError, match="kv must be one of auto, int8, got 'q8'"):
        anabranch.load(toys.model, kv="q8")
    with pytest.raises(CapabilityError, match="only the native kernels on a CPU"):  # heads of 8 channels
        anabranch.load(toys.model, dtype="bfloat16", device="cpu", kv="int8")
    with pytest.raises(CapabilityError, match="leave kv out"):
        load(LoadConfig(str(toys.model), kv="int8"), pack=False)
