"""Writes toy GGUF files the way llama.cpp's converter would, from Hugging Face models with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ċ Ċ", "h i"]
TOKENS = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ", "hi"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gpt2": gguf.MODEL_ARCH.GPT2,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "olmo3": gguf.MODEL_ARCH.OLMO2,
    "mistral3": gguf.MODEL_ARCH.MISTRAL3,
    "mistral": gguf.MODEL_ARCH.MISTRAL3,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "gptneox": gguf.MODEL_ARCH.GPTNEOX,
    "phi2": gguf.MODEL_ARCH.PHI2,
}
# families with other names than their architecture
FAMILIES = {
    "gemma3": "gemma3_text", "mistral3": "ministral3", "gptneox": "gpt_neox", "phi2": "phi",
    "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss",
}  # fmt: skip
MIXTURES = {
    "qwen3moe": gguf.MODEL_ARCH.QWEN3MOE,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "gpt-oss": gguf.MODEL_ARCH.GPT_OSS,
}
ORIGINAL = 32  # positions before YaRN
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL, "rope_theta": 10_000.0}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
OWN: dict[str, dict[str, Any]] = {
    "smollm3": {"num_hidden_layers": 4},
    "granite": {
        "embedding_multiplier": 3.0, "logits_scaling": 1.75, "residual_multiplier": 0.625, "attention_multiplier": 0.2,
    },
    "olmo3": {
        "num_hidden_layers": 4, "sliding_window": 8,
        "rope_parameters": {"full_attention": {**YARN, "attention_factor": 1.25}, "sliding_attention": PLAIN},
    },
    "mistral3": {
        "rope_parameters": {
            **YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.25,
            "beta_fast": 32.0, "beta_slow": 1.0,
        },
    },
    "gemma3": {
        "num_hidden_layers": 6, "sliding_window": 8, "query_pre_attn_scalar": 16,
        "rope_parameters": {"full_attention": LINEAR, "sliding_attention": {**PLAIN, "rope_theta": 100.0}},
    },
    "gptneox": {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}, "use_parallel_residual": True},
    "phi2": {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
    "qwen3moe": {
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "gpt-oss": {
        "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 8, "attention_bias": True,
        "rope_parameters": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    },
}  # fmt: skip
LAYER_NORMS = ("gptneox", "phi2")


def architecture_of(family: str) -> str:
    """The architecture of a family's files."""
    return {"olmo3": "olmo2", "mistral": "mistral3", "mixtral": "llama"}.get(family, family)


def toy_model(family: str, **overrides: Any) -> Any:
    """A Hugging Face model of two layers, width 64, 4 heads and 2 kv heads, with random norms and biases too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
    }
    if family == "gpt2":
        sizes = {"n_embd": 64, "n_inner": 96, "n_layer": 2, "n_head": 4, "n_positions": 128}
    if family == "gemma2":
        sizes |= {"query_pre_attn_scalar": 16, "sliding_window": 8}
    sizes |= OWN.get(family, {})
    if family == "phi3":
        sizes |= {"tie_word_embeddings": False}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = AutoConfig.for_model(
        FAMILIES.get(family, family), vocab_size=len(TOKENS), **{**sizes, **ends, **overrides}
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def write_gguf(
    path: Path,
    family: str,
    model: Any,
    *,
    pre: str = "smollm",
    quantize: bool = False,
    stored: str = "F32",
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    raw: Mapping[str, tuple[str, np.ndarray]] | None = None,
    parts: int = 1,
) -> Path:
    """Write ``model`` to ``path`` and return the path of the (first) file.

    quantize  store block matrices as Q8_0, and others as ``stored``: F32, F16 or BF16
    keys      further metadata, or other values; None leaves a key out
    tensors   further tensors, or other values
    raw       tensors as they are stored instead: their type, and rows of bytes
    parts     split the file into about so many
    """
    config = model.config
    weights = model.state_dict()
    architecture = architecture_of(family)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=-(-len(weights) // parts) if parts > 1 else 0)
    layers = config.num_hidden_layers
    writer.add_block_count(layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if family == "gpt2":
        writer.add_feed_forward_length(config.n_inner)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    elif family in LAYER_NORMS:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_rope_dimension_count(int(16 * config.rope_parameters["partial_rotary_factor"]))
        if family == "gptneox":
            writer.add_parallel_residual(config.use_parallel_residual)
        else:
            writer.add_head_count_kv(config.num_key_value_heads)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_dimension_count(config.head_dim if family in MIXTURES else 16)
        rope = config.rope_parameters.get("full_attention", config.rope_parameters)
        writer.add_rope_freq_base(rope["rope_theta"])
        _add_own(writer, family, config, rope)
    if family == "gemma2":
        writer.add_key_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    _add_tokenizer(writer, pre)
    for key, value in (keys or {}).items():
        _set_key(writer, key, value)
    names = gguf.get_tensor_name_map({**ARCHITECTURES, **MIXTURES}[family], layers)
    found = dict(tensors or {})
    for name, values in weights.items():
        if ".experts." in name:
            found |= _experts(name, values.numpy(), family)
            continue
        if name in ("lm_head.weight", "embed_out.weight") and config.tie_word_embeddings:
            continue
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        theirs = "output.weight" if name == "lm_head.weight" else theirs  # also in Gemma 2, whose head is tied
        assert theirs is not None, name
        theirs += ".weight" if theirs.endswith("attn_sinks") else ""
        found.setdefault(theirs, _as_converter_would(theirs, values.numpy(), family, config))
    if (parameters := getattr(config, "rope_parameters", None)) and parameters.get("rope_type") == "llama3":
        found["rope_freqs.weight"] = llama3_divisors(config)
    for name, values in found.items():
        if raw and name in raw:
            kind, rows = raw[name]
            writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType[kind])
            continue
        plain = "ffn_gate_inp" in name or name.endswith(".bias")  # as llama.cpp's converter does
        kind = "Q8_0" if quantize and name.startswith("blk") else stored
        _add_tensor(writer, name, values, "F32" if plain else kind)
    finish(writer)
    return path if parts == 1 else sorted(path.parent.glob(f"{path.stem}-*-of-*.gguf"))[0]


def _experts(name: str, values: np.ndarray, family: str) -> dict[str, np.ndarray]:
    """The tensors of all experts of a layer: gpt-oss transposes them, and has gate and up by turns."""
    oss, kind = family == "gpt-oss", "bias" if name.endswith("_bias") else "weight"
    values = values.swapaxes(1, 2) if oss and kind == "weight" else values
    stem = f"blk.{name.split('.')[2]}.ffn_"
    if "down_proj" in name:
        return {f"{stem}down_exps.{kind}": values}
    gate, up = (values[:, ::2], values[:, 1::2]) if oss else np.split(values, 2, axis=1)
    return {f"{stem}gate_exps.{kind}": gate, f"{stem}up_exps.{kind}": up}


def finish(writer: gguf.GGUFWriter) -> None:
    """Write what a writer was given."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_own(writer: gguf.GGUFWriter, family: str, config: Any, rope: Mapping[str, Any]) -> None:
    """The keys that a family has besides those of Llama."""
    if family == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if family in MIXTURES:
        writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if family in ("qwen3moe", "gpt-oss"):
        own = "moe_intermediate_size" if family == "qwen3moe" else "intermediate_size"
        writer.add_expert_feed_forward_length(getattr(config, own))
    if family in ("olmo3", "gemma3", "gpt-oss"):
        writer.add_sliding_window(config.sliding_window)
    if family == "olmo3":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if family == "gemma3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if family in ("olmo3", "mistral3", "gpt-oss"):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if family == "olmo3":
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])
    if family == "mistral3":
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _set_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    writer.kv_data[0].pop(key, None)
    kinds = {bool: "BOOL", int: "INT32", float: "FLOAT32", str: "STRING", list: "ARRAY"}
    if value is not None:
        writer.add_key_value(key, value, gguf.GGUFValueType[kinds[type(value)]])


def llama3_divisors(config: Any) -> np.ndarray:
    """The (E/2,) divisors of Llama 3's frequencies, by transformers' own formula."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(0, 16, 2) / 16)
    return (plain / scaled).numpy().astype(np.float32)


def _add_tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)


def _as_converter_would(stored: str, values: np.ndarray, family: str, config: Any) -> np.ndarray:
    if family == "gptneox" and ".attn_qkv." in stored:
        by_head = values.reshape(config.num_attention_heads, 3, -1, *values.shape[1:])
        return by_head.swapaxes(0, 1).reshape(values.shape)
    if family in ("llama", "mixtral", "mistral", "mistral3", "smollm3", "granite") and (
        ".attn_q." in stored or ".attn_k." in stored
    ):
        heads = config.num_attention_heads if ".attn_q." in stored else config.num_key_value_heads
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        return halves.swapaxes(1, 2).reshape(values.shape)
    if family in ("gemma", "gemma2", "gemma3") and "norm" in stored:
        return values + np.float32(1)
    if family == "gpt2" and stored.startswith("blk") and stored.endswith("weight") and values.ndim == 2:
        return values.T
    return values


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
    values = np.ascontiguousarray(values)
    if kind == "F32" or values.ndim < 2:  # as llama.cpp's converter does
        writer.add_tensor(name, values)
    else:
        stored = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(values, stored), raw_dtype=stored)
