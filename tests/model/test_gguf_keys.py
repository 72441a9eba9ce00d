"""Every metadata key and tensor of a GGUF file is honoured as its meaning asks, or refused by name."""

from __future__ import annotations

import re
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import (
    ARCHITECTURES,
    LAYER_NORMS,
    LINEAR,
    OWN,
    PLAIN,
    TOKENS,
    architecture_of,
    toy_model,
    write_gguf,
)
from torch import Tensor
from toys import Oracle

from anabranch.errors import FileError, ModelError, ModelWarning
from anabranch.model import gguf_config
from anabranch.model.gguf import _read, read_gguf
from anabranch.model.gguf_config import config_of
from anabranch.model.load import load_target
from anabranch.model.native_backend import NativeBackend
from anabranch.native import library as native
from small import logits_after

IDS = list(range(3, 43))
RMS = ["gemma2", "llama", "phi3", "qwen2", "qwen3"]
SCALED = sorted(set(RMS) - {"phi3"})  # Phi-3 in transformers has no scaling but longrope
THETA = 10_000.0
DIVISORS = np.linspace(1.0, 6.0, 8).astype(np.float32)


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": THETA, **fields}}


def yarn(**fields: Any) -> dict[str, Any]:
    return rope("yarn", factor=4.0, original_max_position_embeddings=32, **fields)


def longrope(short: np.ndarray, long: np.ndarray, **fields: Any) -> dict[str, Any]:
    return rope("longrope", short_factor=short.tolist(), long_factor=long.tolist(), **fields)


FOURFOLD = {"rope.scaling.factor": 4.0}
YARN = {**FOURFOLD, "rope.scaling.type": "yarn", "rope.scaling.original_context_length": 32}
LONGROPE = {"rope_factors_short.weight": DIVISORS, "rope_factors_long.weight": 2 * DIVISORS}
NORMED = {"olmo2": {"rms_norm_eps": 0.5}, "gptneox": {"layer_norm_eps": 0.5}, "phi2": {"layer_norm_eps": 0.5}}
# keys (or tensors) of a file, and what transformers' config has for the same model
MEANINGS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    *((each, {"rope.freq_base": 500.0}, {"rope_parameters": {"rope_theta": 500.0}}) for each in RMS),
    *((each, {"rope.scale_linear": 4.0}, rope("linear", factor=4.0)) for each in SCALED),
    *((each, FOURFOLD, rope("linear", factor=4.0)) for each in SCALED),
    *((each, {**FOURFOLD, "rope.scaling.type": "linear"}, rope("linear", factor=4.0)) for each in SCALED),
    *((each, {**FOURFOLD, "rope.scaling.type": "none"}, {}) for each in RMS),
    *((each, YARN, yarn()) for each in SCALED),
    ("llama", {**YARN, "rope.scaling.factor": None, "rope.scale_linear": 4.0}, yarn()),
    ("llama", {**YARN, "rope.scaling.original_context_length": None, "context_length": 32}, yarn()),
    ("llama", {**YARN, "rope.scaling.yarn_beta_fast": 8.0}, yarn(beta_fast=8.0)),
    ("llama", {**YARN, "rope.scaling.yarn_beta_slow": 2.0}, yarn(beta_slow=2.0)),
    ("llama", {**YARN, "rope.scaling.attn_factor": 1.5}, yarn(attention_factor=1.5 * (0.1 * np.log(4) + 1))),
    *((each, {"attention.layer_norm_rms_epsilon": 0.5}, {"rms_norm_eps": 0.5}) for each in RMS),
    ("gpt2", {"attention.layer_norm_epsilon": 0.5}, {"layer_norm_epsilon": 0.5}),
    (
        "llama",
        {"rope_freqs.weight": DIVISORS},
        longrope(DIVISORS, DIVISORS, attention_factor=1.0, original_max_position_embeddings=128),
    ),
    (
        "llama",
        {**LONGROPE, "rope.scaling.type": "longrope", "rope.scaling.original_context_length": 64},
        longrope(DIVISORS, 2 * DIVISORS, attention_factor=1.0, original_max_position_embeddings=64),
    ),
    *(
        (
            "phi3",
            {**LONGROPE, "rope.scaling.original_context_length": original, "rope.scaling.attn_factor": 1.25},
            longrope(DIVISORS, 2 * DIVISORS, attention_factor=1.25)
            | {"original_max_position_embeddings": original},
        )
        for original in (32, 64)
    ),
    ("phi3", {"rope.dimension_count": 8}, rope("default", partial_rotary_factor=0.5)),
    ("phi3", {"attention.sliding_window": 5}, {"sliding_window": 5}),
    ("phi3", {"attention.sliding_window": 0}, {}),
    ("gemma2", {"attention.sliding_window": 5}, {"sliding_window": 5}),
    ("gemma2", {"attention.sliding_window_pattern": 1}, {"layer_types": ["full_attention"] * 2}),
    ("gemma2", {"attention.sliding_window_pattern": 0}, {"layer_types": ["sliding_attention"] * 2}),
    (
        "gemma2",
        {"attention.sliding_window_pattern": [False, True]},
        {"layer_types": ["full_attention", "sliding_attention"]},
    ),
    ("gemma2", {"attn_logit_softcapping": 2.0}, {"attn_logit_softcapping": 2.0}),
    ("gemma2", {"final_logit_softcapping": 2.0}, {"final_logit_softcapping": 2.0}),
    *((each, {"attention.head_count_kv": [2, 2], "feed_forward_length": [96, 96]}, {}) for each in RMS),
    ("llama", {"attention.key_length": 24, "attention.value_length": 24, "rope.dimension_count": 24}, {"head_dim": 24}),
    ("gpt2", {"attention.head_count_kv": 4, "attention.key_length": 16}, {}),
    ("granite", {"attention.scale": 0.5}, {"attention_multiplier": 0.5}),
    ("granite", {"attention.scale": 0.0}, {"attention_multiplier": 0.25}),
    ("granite", {"embedding_scale": 2.0}, {"embedding_multiplier": 2.0}),
    ("granite", {"residual_scale": 0.25}, {"residual_multiplier": 0.25}),
    ("granite", {"logit_scale": 4.0}, {"logits_scaling": 4.0}),
    ("olmo2", {"attention.layer_norm_rms_epsilon": 0.5}, NORMED["olmo2"]),
    ("olmo3", {"attention.sliding_window": 5}, {"sliding_window": 5}),
    (
        "olmo3",
        {"attention.sliding_window_pattern": [False, True, False, True]},
        {"layer_types": ["full_attention", "sliding_attention"] * 2},
    ),
    ("gemma3", {"attention.sliding_window": 5}, {"sliding_window": 5}),
    ("gemma3", {"attention.sliding_window_pattern": 2}, {"layer_types": ["sliding_attention", "full_attention"] * 3}),
    ("gemma3", {"final_logit_softcapping": 2.0}, {"final_logit_softcapping": 2.0}),
    (
        "gemma3",
        {"rope.freq_base_swa": 500.0},
        {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": {**PLAIN, "rope_theta": 500.0}}},
    ),
    (
        "mistral3",
        {"attention.temperature_scale": 1.0},
        {"rope_parameters": {**OWN["mistral3"]["rope_parameters"], "llama_4_scaling_beta": 1.0}},
    ),
    (
        "mistral3",
        {"rope.scaling.yarn_log_multiplier": 0.5},
        {"rope_parameters": {**OWN["mistral3"]["rope_parameters"], "mscale_all_dim": 0.5}},
    ),
    ("gptneox", {"attention.layer_norm_epsilon": 0.5}, NORMED["gptneox"]),
    ("gptneox", {"use_parallel_residual": False}, {"use_parallel_residual": False}),
    (
        "gptneox",
        {"rope.dimension_count": 4},
        {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25}},
    ),
    ("phi2", {"attention.layer_norm_epsilon": 0.5}, NORMED["phi2"]),
    ("phi2", {"rope.dimension_count": 12}, {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.75}}),
)  # fmt: skip


def written(path: Path, family: str, model: Any, changes: dict[str, Any]) -> Path:
    tensors = {name: value for name, value in changes.items() if name.endswith(".weight")}
    keys = {f"{architecture_of(family)}.{key}": value for key, value in changes.items() if key not in tensors}
    return write_gguf(path / "toy.gguf", family, model, keys=keys, tensors=tensors)


def logits(path: Path) -> Tensor:
    """Our logits for IDS from a file, in float32."""
    return logits_after(load_target(str(path), dtype="float32", device="cpu").decoder, IDS)


@pytest.mark.filterwarnings("ignore:.*rope")
@pytest.mark.parametrize(("family", "changes", "meaning"), MEANINGS)
def test_a_key_means_what_it_does_in_transformers(
    tmp_path: Path, family: str, changes: dict[str, Any], meaning: dict[str, Any]
) -> None:
    model = toy_model(family, **meaning)
    found = logits(written(tmp_path, family, model, changes))
    torch.testing.assert_close(found, Oracle(model).logits(IDS), rtol=1e-4, atol=1e-4)
    if meaning:
        other = (Oracle(toy_model(family)).logits(IDS) - found).abs().max()
        assert float(other) > 0.001, "the case has no effect, so it shows nothing"


def keys_of_llama_cpp() -> list[str]:
    """All keys of architectures that the gguf package knows, and those that it no longer does."""

    def of(group: type) -> list[str]:
        inner = [value for value in vars(group).values() if isinstance(value, type)]
        return [v for v in vars(group).values() if isinstance(v, str)] + [v for each in inner for v in of(each)]

    found = {key.removeprefix("{arch}.") for key in of(gguf.constants.Keys) if key.startswith("{arch}.")}
    return sorted({*found, "rope.scale_linear", "hidden_activation", "attention.value_scale", "invented"})


OTHER_VALUES: dict[str, Any] = {
    "attention.causal": False,
    "rope.dimension_count": 8,
    "rope.dimension_sections": [2, 2, 4, 0],
    "rope.scaling.type": "dynamic",
    "rope.scaling.attn_factor": 1.5,
    "tensor_data_layout": "another",
    "hidden_activation": "relu",
    "vocab_size": 3,
    "attention.head_count": [4, 2],
    "attention.head_count_kv": [2, 1],
    "feed_forward_length": [96, 48],
    "attention.key_length": 8,
    "attention.value_length": 8,
}
# honoured; with other values the tensors do not fit, or another model results
SHAPES = {"block_count", "context_length", "embedding_length"}
# read only beside others, or never
WITHOUT_EFFECT = {"rope.scaling.finetuned", "pooling_type", "rope.scaling.original_context_length"}
WITHOUT_EFFECT |= {"rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"}


@cache
def parsed(family: str) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = write_gguf(Path(folder) / "toy.gguf", family, toy_model(family))
        metadata, stored = _read(path)
    return path, dict(metadata), stored


@pytest.mark.parametrize("family", sorted(set(map(architecture_of, ARCHITECTURES))))
def test_each_key_alone_is_honoured_or_refused_by_name(family: str) -> None:
    path, metadata, stored = parsed(family)
    meant = {key for name, changes, _ in MEANINGS if name == family for key in changes} | SHAPES
    honoured = gguf_config.ARCHITECTURES[family].honoured
    for key in keys_of_llama_cpp():
        if key in WITHOUT_EFFECT:
            continue
        changed = {**metadata, f"{family}.{key}": OTHER_VALUES.get(key, 7)}
        refused = rf"sets {family}\.{re.escape(key)} to .*; load the model's safetensors folder instead"
        if key in meant and (key not in OTHER_VALUES or (family, key) == ("phi3", "rope.dimension_count")):
            assert key in honoured
            continue
        if key in honoured and family not in (*RMS, "gpt2"):
            continue
        with pytest.raises(ModelError, match=refused):
            pytest.fail(f"{key} is ignored: {config_of(path, changed, stored)}")


NEUTRAL: dict[str, Any] = {
    "expert_count": 0,
    "logit_scale": 1.0,
    "residual_scale": 0.0,
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "use_parallel_residual": False,
    "embedding_length_out": 64,
    "vocab_size": len(TOKENS),
    "attention.scale": 0.25,
    "rope.scaling.type": "none",
    "rope.scaling.factor": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.original_context_length": 32,
    "rope.scaling.finetuned": True,
    "rope.scaling.yarn_ext_factor": -1.0,
    "pooling_type": 1,
}


@pytest.mark.parametrize("family", RMS)
def test_neutral_values_are_accepted(family: str) -> None:
    path, metadata, stored = parsed(family)
    expected = config_of(path, metadata, stored)
    neutral = {**NEUTRAL, "rope.freq_base_swa": THETA, "attention.layer_norm_epsilon": expected["rms_norm_eps"]}
    for key, value in neutral.items():
        assert config_of(path, {**metadata, f"{family}.{key}": value}, stored) == expected, key
    if family in ("llama", "qwen2", "qwen3"):
        for window, fits in ((128, True), (127, False)):
            changed = {**metadata, f"{family}.attention.sliding_window": window}
            if fits:
                assert config_of(path, changed, stored) == expected
            else:
                with pytest.raises(ModelError, match=r"attention\.sliding_window"):
                    config_of(path, changed, stored)
    layout = "Meta AI original pth" if family == "llama" else "reference"
    assert config_of(path, {**metadata, f"{family}.tensor_data_layout": layout}, stored) == expected


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama", {**FOURFOLD, "rope.scaling.attn_factor": 1.5}, "rope.scaling.attn_factor"),
        ("llama", {**YARN, "rope.scaling.yarn_attn_factor": 1.0}, "rope.scaling.yarn_attn_factor"),
        ("llama", {**YARN, "rope.scaling.yarn_ext_factor": 0.0}, "rope.scaling.yarn_ext_factor"),
        ("llama", {**YARN, "rope.scaling.yarn_log_multiplier": 0.1}, "rope.scaling.yarn_log_multiplier"),
        ("llama", {**FOURFOLD, "rope_freqs.weight": DIVISORS}, "rope.scaling.factor"),
        ("llama", {"rope.scale_linear": 2.0, "rope_freqs.weight": DIVISORS}, "rope.scale_linear"),
        ("llama", {**YARN, "rope_freqs.weight": DIVISORS}, "rope.scaling.type"),
        ("llama", {"attention.value_length": 8}, "attention.value_length"),
        *(("phi3", {key: 4.0}, key) for key in ("rope.scale_linear", "rope.scaling.factor")),
        ("phi3", YARN, "rope.scaling.type"),
        ("phi3", {"rope.scaling.attn_factor": 1.5}, "rope.scaling.attn_factor"),
        ("gemma2", {"attention.sliding_window": 0}, "attention.sliding_window"),
        *((family, {"rope_freqs.weight": DIVISORS}, "tensor rope_freqs.weight") for family in RMS if family != "llama"),
        *((family, LONGROPE, "tensor rope_factors_short.weight") for family in RMS if family != "phi3"),
        ("phi3", {"rope_factors_long.weight": DIVISORS}, "tensor rope_factors_long.weight"),
        ("gpt2", {"rope_freqs.weight": DIVISORS}, "tensor rope_freqs.weight"),
    ],
)
def test_combinations_that_are_refused(tmp_path: Path, family: str, changes: dict[str, Any], named: str) -> None:
    path = written(tmp_path, family, toy_model(family), changes)
    with pytest.raises(ModelError, match=re.escape(named)):
        read_gguf(path)


@pytest.mark.parametrize("kind", ["adapter", "mmproj", "imatrix"])
def test_files_of_other_types_are_refused(kind: str) -> None:
    path, metadata, stored = parsed("llama")
    with pytest.raises(ModelError, match=f"of the type '{kind}', not a model"):
        config_of(path, {**metadata, "general.type": kind}, stored)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *product(("llama", "qwen2", "phi3", "gpt2"), ("blk.1.attn_q_norm.weight", "output.bias", "token_types.weight")),
        *product(("llama", "phi3"), ("blk.0.attn_norm.bias", "blk.0.ffn_gate_inp.weight", "blk.0.ffn_gate.3.weight")),
        *product(("qwen2", "qwen3", "gemma2"), ("blk.0.ffn_up.bias", "blk.0.attn_sinks.weight")),
        ("qwen2", "blk.0.attn_output.bias"),
        ("llama", "blk.1.attn_sub_norm.weight"),
        ("llama", "blk.1.attn_q.scale"),
        ("llama", "position_embd.weight"),
        ("phi3", "blk.0.attn_qkv.bias"),
    ],
)
def test_a_tensor_that_llama_cpp_uses_is_refused_by_name(tmp_path: Path, family: str, name: str) -> None:
    model = toy_model(family)
    path = write_gguf(tmp_path / "toy.gguf", family, model, tensors={name: np.ones(64, dtype=np.float32)})
    with pytest.raises(ModelError, match=f"has the tensor {re.escape(name)}, and {family} models with it"):
        read_gguf(path)


def test_other_tensors_and_settings_are_named_in_one_warning(tmp_path: Path) -> None:
    model = toy_model("llama")
    extra = {name: np.ones(64, dtype=np.float32) for name in ("blk.0.invented.weight", "blk.2.attn_norm.weight", "x")}
    keys = {"general.sampling.temp": 0.3, "tokenizer.ggml.invented": 1, "tokenizer.ggml.mask_token_id": 1}
    path = write_gguf(tmp_path / "toy.gguf", "llama", model, tensors=extra, keys=keys)
    with pytest.warns(ModelWarning, match="has .*not used here") as caught:
        found = logits(path)
    assert len(caught) == 1
    for name in (*extra, "general.sampling.temp", "tokenizer.ggml.invented"):
        assert name in str(caught[0].message)
    assert "mask_token_id" not in str(caught[0].message)
    torch.testing.assert_close(found, Oracle(model).logits(IDS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("leaves", [("attn_q",), ("attn_output",), ("attn_k", "ffn_down")])
def test_biases_of_some_modules(tmp_path: Path, family: str, leaves: tuple[str, ...]) -> None:
    if family != "llama":
        leaves = tuple(leaf for leaf in leaves if leaf.startswith("attn"))
    model = toy_model(family, attention_bias=True, **({"mlp_bias": True} if family == "llama" else {}))
    theirs = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_output": "o_proj", "ffn_down": "down_proj"}
    kept = [f"{theirs[leaf]}.bias" for leaf in leaves]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("proj.bias") and not (name.endswith(tuple(kept)) and ".1." in name):
                parameter.zero_()
    path = write_gguf(tmp_path / "whole.gguf", family, model)
    _, stored = _read(path)
    names = [name for name, tensor in stored.items() if name.endswith(".bias") and not np.asarray(tensor.data).any()]
    assert names
    less = toy_model(family)  # the same file without these biases
    less.load_state_dict(model.state_dict(), strict=False)
    biases = {name: np.array(t.data) for name, t in stored.items() if name.endswith(".bias") and name not in names}
    found = logits(write_gguf(tmp_path / "less.gguf", family, less, tensors=biases))
    torch.testing.assert_close(found, Oracle(model).logits(IDS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_of_its_own(tmp_path: Path, family: str, tied: bool) -> None:
    model = toy_model(family, tie_word_embeddings=tied)
    found = logits(write_gguf(tmp_path / "toy.gguf", family, model))
    torch.testing.assert_close(found, Oracle(model).logits(IDS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("stored", "quantize", "expected"),
    [
        ("F32", False, torch.float32),
        ("F16", False, torch.float16),
        ("BF16", False, torch.bfloat16),
        ("F32", True, torch.bfloat16),  # most weights are quantised
    ],
)
def test_auto_is_as_stored(tmp_path: Path, stored: str, quantize: bool, expected: torch.dtype) -> None:
    path = write_gguf(tmp_path / "toy.gguf", "llama", toy_model("llama"), stored=stored, quantize=quantize)
    assert read_gguf(path).config["dtype"] == str(expected).removeprefix("torch.")
    target = load_target(str(path), device="cpu")  # the kernels do not take the toy's heads, so nothing is stored
    assert (target.decoder.dtype, target.quantize) == (expected, "none")
    assert load_target(str(path), dtype="float32", device="cpu").fingerprint == target.fingerprint


def test_all_parts_of_a_split_file_are_read(tmp_path: Path) -> None:
    model = toy_model("llama")
    first = write_gguf(tmp_path / "toy.gguf", "llama", model, parts=3)
    parts = sorted(tmp_path.iterdir())
    assert (len(parts), first.name) == (3, "toy-00001-of-00003.gguf")
    for path in parts:
        torch.testing.assert_close(logits(path), Oracle(model).logits(IDS), rtol=1e-4, atol=1e-4)
    other = first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(FileError, match="is one of 3 parts of a split file; give all parts their names"):
        read_gguf(other)
    with pytest.raises(FileError, match=r"there is no GGUF file at .*toy-00001-of-00003"):
        read_gguf(parts[1])
    other.rename(first)
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(FileError, match=r"00003-of-00003\.gguf is not part 3 of toy-00001"):
        read_gguf(first)
    parts[2].unlink()
    with pytest.raises(FileError, match=r"there is no GGUF file at .*toy-00003-of-00003"):
        read_gguf(first)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("granite", "rope.scaling.finetuned", False),
        ("gemma3", "attention.sliding_window", 0),
        ("gptneox", "attention.head_count_kv", 2),
        ("gptneox", "rope.dimension_count", 32),
        ("phi2", "attention.key_length", 8),
        ("mistral3", "rope.scaling.yarn_log_multiplier", 0.5),
    ],
)
def test_values_that_a_later_family_does_not_have(family: str, key: str, value: object) -> None:
    path, metadata, stored = parsed(family)
    changed = {**metadata, f"{family}.{key}": value}
    if family == "mistral3":
        changed["mistral3.rope.scaling.type"] = "linear"
    with pytest.raises(ModelError, match=re.escape(f"{family}.{key}")):
        config_of(path, changed, stored)


def test_a_mistral_small_3_is_a_mistral(tmp_path: Path) -> None:
    """Its files have the architecture of Ministral 3, without the scale of queries."""
    model = toy_model("mistral", sliding_window=None)
    path = write_gguf(tmp_path / "toy.gguf", "mistral", model)
    assert read_gguf(path).config["model_type"] == "mistral"
    torch.testing.assert_close(logits(path), Oracle(model).logits(IDS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["qwen35", "lfm2", "granitehybrid", "olmoe", "mamba"])
def test_architectures_that_are_not_supported_are_named(architecture: str) -> None:
    path, metadata, stored = parsed("llama")
    with pytest.raises(ModelError, match=rf"of architecture '{architecture}' \(.* not run here"):
        config_of(path, {**metadata, "general.architecture": architecture}, stored)


@pytest.mark.skipif(native.library() is None, reason=f"no native kernels here: {native.why_not()}")
@pytest.mark.parametrize("family", sorted(set(ARCHITECTURES) - {"gpt2", "llama", "mistral", "phi3", "qwen2"}))
def test_files_of_all_families_are_decoded_as_stored(tmp_path: Path, family: str) -> None:
    """Packed blocks with the file's values on the native kernels: the dequantised weights' logits, but for rounding."""
    wide = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 128}
    own = {"query_pre_attn_scalar": 32} if family.startswith("gemma") and family != "gemma" else {}
    model = toy_model(family, **wide, **own)
    turned = 16 if family in LAYER_NORMS else 32
    widths = {"attention.key_length": 32, "attention.value_length": 32} if family in ("gemma2", "gemma3") else {}
    keys = {
        f"{architecture_of(family)}.{key}": value for key, value in {"rope.dimension_count": turned, **widths}.items()
    }
    path = write_gguf(tmp_path / "toy.gguf", family, model, quantize=True, stored="Q8_0", keys=keys)
    packed, plain = (load_target(str(path), device="cpu", quantize=kind).decoder for kind in ("auto", "none"))
    assert isinstance(packed.backend, NativeBackend)
    assert packed.blocks[0].qkv.kind == "stored"
    wanted = logits_after(plain, IDS).float()
    found = logits_after(packed, IDS).float()
    assert (found - wanted).abs().mean() < 0.05 * wanted.std()
