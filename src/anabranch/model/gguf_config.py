"""The metadata of a GGUF file as a Hugging Face ``config.json`` record.

Every key of an architecture is honoured, has no effect on decoding, or is refused if its value would change the output
(the three tables below). Keys mean what they mean in llama.cpp, or in transformers if llama.cpp does not read them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from anabranch.errors import ModelError
from anabranch.model.families import UNSUPPORTED
from anabranch.model.gguf_tokenizer import end_tokens
from anabranch.support.jsonfiles import shown

__all__ = ["ARCHITECTURES", "ATTENTION", "EXPERTS_OF", "HONOURED", "MLP", "PERMUTED", "SHIFTED", "config_of"]

Metadata = Mapping[str, Any]
Config = dict[str, Any]

_INSTEAD = "load the model's safetensors folder instead"
# architecture -> its class in transformers, and settings that are not in the file
ARCHITECTURES: dict[str, tuple[str, Config]] = {
    "llama": ("LlamaForCausalLM", {"hidden_act": "silu"}),
    "qwen2": ("Qwen2ForCausalLM", {"hidden_act": "silu"}),
    "qwen3": ("Qwen3ForCausalLM", {"hidden_act": "silu"}),
    "phi3": ("Phi3ForCausalLM", {"hidden_act": "silu"}),
    "mistral3": ("Ministral3ForCausalLM", {"hidden_act": "silu"}),
    "smollm3": ("SmolLM3ForCausalLM", {"hidden_act": "silu", "no_rope_layer_interval": 4}),
    "granite": ("GraniteForCausalLM", {"hidden_act": "silu"}),
    "olmo2": ("Olmo2ForCausalLM", {"hidden_act": "silu"}),
    "gemma": ("GemmaForCausalLM", {"hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": ("Gemma2ForCausalLM", {"hidden_activation": "gelu_pytorch_tanh"}),
    "gemma3": ("Gemma3ForCausalLM", {"hidden_activation": "gelu_pytorch_tanh"}),
    "gpt2": ("GPT2LMHeadModel", {"activation_function": "gelu_new"}),
    "gptneox": ("GPTNeoXForCausalLM", {"hidden_act": "gelu"}),
    "phi2": ("PhiForCausalLM", {"hidden_act": "gelu_new"}),
    "qwen3moe": ("Qwen3MoeForCausalLM", {"hidden_act": "silu"}),
    "gpt-oss": ("GptOssForCausalLM", {}),
}
# families with other names than their architecture
_FAMILIES = {
    "mistral3": "ministral3", "gemma3": "gemma3_text", "gptneox": "gpt_neox", "phi2": "phi", "qwen3moe": "qwen3_moe",
    "gpt-oss": "gpt_oss",
}  # fmt: skip
EXPERTS_OF = {"qwen3_moe": "num_experts", "mixtral": "num_local_experts", "gpt_oss": "num_local_experts"}
# Families whose files have the rows of q and k in pairs of channels that are rotated together, and those whose files
# have 1 added to the weights of norms.
PERMUTED = frozenset({"llama", "mixtral", "mistral", "ministral3", "smollm3", "granite"})
SHIFTED = frozenset({"gemma", "gemma2", "gemma3_text"})
ATTENTION, MLP = frozenset({"attn_q", "attn_k", "attn_v", "attn_output"}), frozenset({"ffn_gate", "ffn_up", "ffn_down"})

# -- the keys of an architecture, without its name ---------------------------------------------------
_SHAPE = frozenset(
    {
        *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
        *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    }
)
_RMS = _SHAPE | {
    *("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count", "rope.scale_linear"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.attn_factor"),
    *("rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
}
_TURNED = frozenset({"attention.layer_norm_epsilon", "rope.freq_base", "rope.dimension_count"})
_EXPERTS = frozenset({"expert_count", "expert_used_count"})
HONOURED: dict[str, frozenset[str]] = {
    "llama": _RMS | _EXPERTS,
    "qwen2": _RMS,
    "qwen3": _RMS,
    "phi3": _RMS | {"attention.sliding_window"},
    "mistral3": _RMS | {"attention.temperature_scale", "rope.scaling.yarn_log_multiplier"},
    "smollm3": _RMS,
    "granite": _RMS | {"attention.scale", "embedding_scale", "residual_scale", "logit_scale", "rope.scaling.finetuned"},
    "olmo2": _RMS | {"attention.sliding_window", "attention.sliding_window_pattern"},
    "gemma": _RMS,
    "gemma3": _RMS
    | {
        *("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"),
        "final_logit_softcapping",
    },
    "gemma2": _RMS
    | {
        *("attention.sliding_window", "attention.sliding_window_pattern"),
        *("attn_logit_softcapping", "final_logit_softcapping"),
    },
    "gpt2": _SHAPE | {"attention.layer_norm_epsilon"},
    "gptneox": _SHAPE | _TURNED | {"use_parallel_residual"},
    "phi2": _SHAPE | _TURNED,
    "qwen3moe": _RMS | _EXPERTS | {"expert_feed_forward_length", "expert_weights_norm"},
    "gpt-oss": _RMS
    | _EXPERTS
    | {"expert_feed_forward_length", "attention.sliding_window", "attention.sliding_window_pattern"},
}
# facts about training and text embeddings
_IGNORED = frozenset({"rope.scaling.finetuned", "pooling_type"})
# Values with which keys that are not honoured have no effect; with others, and if not listed here, they are refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            *("expert_count", "expert_used_count", "expert_shared_count", "expert_group_count"),
            *("expert_group_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length"),
            *("expert_weights_norm", "expert_gating_func", "interleave_moe_layer_step", "moe_every_n_layers"),
            *("leading_dense_block_count", "nextn_predict_layers", "n_deepstack_layers", "use_parallel_residual"),
            *("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping"),
            *("swiglu_clamp_exp", "swiglu_clamp_shexp", "attention.max_alibi_bias", "attention.clamp_kqv"),
            *("attention.temperature_length", "attention.temperature_scale", "attention.shared_kv_layers"),
            *("attention.q_lora_rank", "attention.kv_lora_rank", "attention.sliding_window"),
            *("rope.dimension_count", "rope.dimension_sections", "rope.scaling.yarn_log_multiplier"),
        ),
        (0,),
    ),
    **dict.fromkeys(
        (
            *("logit_scale", "residual_scale", "embedding_scale", "expert_weights_scale", "rope.scale_linear"),
            *("attention.output_scale", "attention.value_scale", "rope.scaling.factor", "rope.scaling.alpha"),
        ),
        (0, 1),
    ),
    "attention.causal": (True,),
    "attention.scale": (0,),
    "rope.scaling.type": ("none",),
    "rope.scaling.attn_factor": (1,),
    "tensor_data_layout": ("reference",),
}


@dataclass(frozen=True)
class _Keys:
    """The keys of one architecture in a file."""

    path: Path
    architecture: str
    metadata: Metadata

    def get(self, key: str, default: Any = None) -> Any:
        """The value of an honoured key. Raises ModelError if the layers differ in it."""
        assert key in HONOURED[self.architecture], key
        value = self.value(key)
        if isinstance(value, list):
            self.refuse(key, "and layers that differ in it are not supported")
        return default if value is None else value

    def need(self, key: str) -> Any:
        """The value of an honoured key that every file has. Raises KeyError."""
        if (value := self.get(key)) is None:
            raise KeyError(f"{self.architecture}.{key}")
        return value

    def value(self, key: str) -> Any:
        """The value of any key; for a list with one entry per layer the entry, if all are equal."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        if not isinstance(value, list):
            return value
        return value[0] if value and all(entry == value[0] for entry in value) else value

    def factor_key(self) -> str:
        """The key of the factor that stretches positions, which has two names."""
        return "rope.scaling.factor" if self.value("rope.scaling.factor") is not None else "rope.scale_linear"

    def refuse(self, key: str, why: str = "which is not supported") -> NoReturn:
        """Raise ModelError for the value of a key."""
        name = f"{self.architecture}.{key}"
        raise ModelError(f"{self.path} sets {name} to {shown(self.metadata.get(name))}, {why}; {_INSTEAD}")


def config_of(path: Path, metadata: Metadata, stored: Mapping[str, Any]) -> Config:
    """The ``config.json`` record of a file with these tensors.

    Raises ModelError for an unsupported architecture or a key that would change the output, KeyError for a missing key.
    """
    architecture = str(metadata.get("general.architecture"))
    if architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        why = f" ({UNSUPPORTED[architecture]})" if architecture in UNSUPPORTED else ""
        raise ModelError(f"{path} contains a model of architecture {architecture!r}{why}; supported are {known}")
    if (kind := metadata.get("general.type", "model")) != "model":
        raise ModelError(f"{path} is a GGUF file of the type {shown(kind)}, not a model; give the model's own file")
    keys = _Keys(path, architecture, metadata)
    name, fixed = ARCHITECTURES[architecture]
    ends = end_tokens(metadata)
    config: Config = {
        "architectures": [name],
        "model_type": _FAMILIES.get(architecture, architecture),
        "vocab_size": _vocabulary(keys, stored),
        # llama.cpp stores the output head only if it differs from the embedding
        "tie_word_embeddings": "output.weight" not in stored,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        **fixed,
    }
    if architecture == "gpt2":
        config |= _gpt2(keys)
    elif architecture in ("gptneox", "phi2"):
        config |= _parallel(keys)
    else:
        config |= _rms(keys, stored)
    _check_others(keys, config)
    return config


def _vocabulary(keys: _Keys, stored: Mapping[str, Any]) -> int:
    """The number of rows of the embedding, which the tokens must have too."""
    count = len(keys.metadata["tokenizer.ggml.tokens"])
    rows = int(stored["token_embd.weight"].shape[-1]) if "token_embd.weight" in stored else count
    if keys.get("vocab_size", rows) != rows:
        keys.refuse("vocab_size", f"but its embedding has {rows} rows")
    if count != rows:
        raise ModelError(
            f"{keys.path} has {count} entries in tokenizer.ggml.tokens, but its embedding has {rows} rows; {_INSTEAD}"
        )
    return rows


def _gpt2(keys: _Keys) -> Config:
    hidden, heads = keys.need("embedding_length"), keys.need("attention.head_count")
    for key, same in (
        ("attention.head_count_kv", heads),
        ("attention.key_length", hidden // heads),
        ("attention.value_length", hidden // heads),
    ):
        if keys.get(key, same) != same:
            keys.refuse(key)
    return {
        "n_layer": keys.need("block_count"),
        "n_positions": keys.need("context_length"),
        "n_embd": hidden,
        "n_inner": keys.get("feed_forward_length"),
        "n_head": heads,
        "layer_norm_epsilon": _shortest(keys.need("attention.layer_norm_epsilon")),
    }


def _parallel(keys: _Keys) -> Config:
    """GPT-NeoX and Phi: LayerNorm, and rotations of a part of each head."""
    hidden, heads = keys.need("embedding_length"), keys.need("attention.head_count")
    width, neox = hidden // heads, keys.architecture == "gptneox"
    kv_heads = keys.get("attention.head_count_kv", heads)
    same = [("attention.key_length", width), ("attention.value_length", width)]
    for key, value in [*same, *([("attention.head_count_kv", heads)] if neox else [])]:
        if keys.get(key, value) != value:
            keys.refuse(key)
    if not 0 < (rotated := keys.get("rope.dimension_count", width)) <= width:
        keys.refuse("rope.dimension_count", f"but heads have {width} channels")
    theta, share = float(keys.get("rope.freq_base", 10_000.0)), _share(rotated, width)
    rope = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": share}
    own = {"use_parallel_residual": bool(keys.get("use_parallel_residual", True))} if neox else {}
    return {
        "num_hidden_layers": keys.need("block_count"),
        "max_position_embeddings": keys.need("context_length"),
        "hidden_size": hidden,
        "intermediate_size": keys.need("feed_forward_length"),
        "num_attention_heads": heads,
        **({} if neox else {"num_key_value_heads": kv_heads}),
        "layer_norm_eps": _shortest(keys.need("attention.layer_norm_epsilon")),
        "rope_parameters": rope,
        **own,
    }


def _share(rotated: int, head_dim: int) -> float:
    """The share of a head's channels that are rotated; transformers rounds the product down, not to one too few."""
    share = rotated / head_dim
    return share if int(head_dim * share) == rotated else math.nextafter(share, 1)


def _rms(keys: _Keys, stored: Mapping[str, Any]) -> Config:
    """Llama and its descendants."""
    hidden, heads = keys.need("embedding_length"), keys.need("attention.head_count")
    kv_heads = keys.get("attention.head_count_kv", heads)
    head_dim = _head_dim(keys, stored, heads, kv_heads, usual=hidden // heads)
    layers, positions = keys.need("block_count"), keys.need("context_length")
    rope = _rope(keys, stored, head_dim=head_dim)
    oss = keys.architecture == "gpt-oss"  # which has no layers without experts
    config: Config = {
        "hidden_size": hidden,
        "intermediate_size": keys.need("expert_feed_forward_length" if oss else "feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": positions,
        "rms_norm_eps": _shortest(keys.need("attention.layer_norm_rms_epsilon")),
        "rope_parameters": rope,
    }
    if keys.architecture not in {"qwen2", "phi3", "mistral3"}:
        # only the tensors show which biases a model has; Qwen2 always has those of q, k and v
        biased = {match[1] for name in stored if (match := re.fullmatch(r"blk\.\d+\.(\w+)\.bias", name))}
        config["attention_bias"] = bool(biased & ATTENTION)
        if keys.architecture in {"llama", "smollm3", "granite"}:
            config["mlp_bias"] = bool(biased & MLP)
    if keys.architecture == "phi3":
        config["sliding_window"] = keys.get("attention.sliding_window") or None  # 0 is none
        if "original_max_position_embeddings" in rope:
            config["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    sizes = {"hidden": hidden, "heads": heads, "head_dim": head_dim, "layers": layers}
    if keys.architecture == "gemma2":
        config |= _gemma2(keys, **sizes)
    elif keys.architecture == "gemma3":
        config |= _gemma3(keys, rope, **sizes)
    elif keys.architecture == "olmo2":
        config |= _olmo3(keys, rope, layers=layers)
    elif keys.architecture == "granite":
        config |= _granite(keys, head_dim=head_dim)
    elif keys.architecture == "mistral3":
        config |= _mistral3(keys, rope)
    elif keys.architecture == "qwen3moe":
        config |= _qwen3_moe(keys)
    elif keys.architecture == "gpt-oss":
        config |= _gpt_oss(keys, rope, layers=layers)
    elif keys.architecture == "llama" and keys.get("expert_count"):
        return _mixtral(keys, config)
    elif keys.architecture == "llama" and keys.get("expert_used_count"):
        keys.refuse("expert_used_count", "but there are no experts")
    return config


def _head_dim(keys: _Keys, stored: Mapping[str, Any], heads: int, kv_heads: int, *, usual: int) -> int:
    """The width of a head, which keys and values share. Raises ModelError if they or the tensors differ."""
    fused, head_dim = stored.get("blk.0.attn_qkv.weight"), None
    for key, leaf in (("attention.key_length", "attn_k"), ("attention.value_length", "attn_v")):
        if (width := keys.get(key)) is None:
            continue
        rows = kv_heads if fused is None else heads + 2 * kv_heads
        weight = stored.get(f"blk.0.{leaf}.weight") if fused is None else fused
        if width != (head_dim or width) or (weight is not None and int(weight.shape[-1]) != width * rows):
            keys.refuse(key, "which is not the width of this file's keys and values")
        head_dim = width
    return head_dim or usual


def _gemma2(keys: _Keys, *, hidden: int, heads: int, head_dim: int, layers: int) -> Config:
    if (window := keys.get("attention.sliding_window", 4096)) == 0:
        keys.refuse("attention.sliding_window")
    return {
        "sliding_window": window,
        "layer_types": _layer_types(keys, 2, layers=layers),
        "attn_logit_softcapping": keys.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.get("final_logit_softcapping", 30.0),
        # not stored in the file: the 27B (46 layers) scales by hidden size / heads, the others by head_dim
        "query_pre_attn_scalar": hidden // heads if layers == 46 else head_dim,
    }


def _layer_types(keys: _Keys, usual: int, *, layers: int) -> list[str]:
    """The kind of each layer; by default the last of each group of ``usual`` layers has full attention."""
    # a flag for each layer, or the size of the groups
    pattern = keys.metadata.get(f"{keys.architecture}.attention.sliding_window_pattern", usual)
    if isinstance(pattern, list):
        slides = [bool(slide) for slide in pattern]
    else:
        slides = [not pattern or layer % pattern < pattern - 1 for layer in range(min(layers, 1 << 12))]
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def _gemma3(keys: _Keys, rope: Config, *, hidden: int, heads: int, head_dim: int, layers: int) -> Config:
    window = keys.need("attention.sliding_window")
    if window == 0:
        keys.refuse("attention.sliding_window")
    sliding = {"rope_type": "default", "rope_theta": float(keys.get("rope.freq_base_swa", 10_000.0))}
    return {
        "sliding_window": window,
        "layer_types": _layer_types(keys, 6, layers=layers),
        "rope_parameters": {"full_attention": rope, "sliding_attention": sliding},
        "final_logit_softcapping": keys.get("final_logit_softcapping") or None,
        # not stored in the file: the 27B (62 layers) scales by hidden size / heads, the others by head_dim
        "query_pre_attn_scalar": hidden // heads if layers == 62 else head_dim,
    }


def _olmo3(keys: _Keys, rope: Config, *, layers: int) -> Config:
    """OLMo 3, whose files are those of OLMo 2 with a window; layers with it have rotations without scaling."""
    window = keys.get("attention.sliding_window")
    if not window:
        return {}
    sliding = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": _layer_types(keys, 4, layers=layers),
        "rope_parameters": {"full_attention": rope, "sliding_attention": sliding},
    }


def _granite(keys: _Keys, *, head_dim: int) -> Config:
    if keys.get("rope.scaling.finetuned", True) is not True:
        keys.refuse("rope.scaling.finetuned", "with which its layers do not rotate positions")
    return {  # 0 is none
        "attention_multiplier": float(keys.get("attention.scale") or head_dim**-0.5),
        "embedding_multiplier": float(keys.get("embedding_scale") or 1),
        "residual_multiplier": float(keys.get("residual_scale") or 1),
        "logits_scaling": float(keys.get("logit_scale") or 1),
    }


def _mistral3(keys: _Keys, rope: Config) -> Config:
    """Ministral 3, or a Mistral Small 3, whose queries are not scaled by position."""
    log_multiplier, beta = keys.get("rope.scaling.yarn_log_multiplier"), keys.get("attention.temperature_scale")
    scaled = dict(rope)
    if log_multiplier:
        if rope["rope_type"] != "yarn":
            keys.refuse("rope.scaling.yarn_log_multiplier", "without YaRN")
        scaled |= {"mscale": 1.0, "mscale_all_dim": _shortest(log_multiplier)}
    if not beta:
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None} | {
            "rope_parameters": scaled
        }
    original = keys.get("rope.scaling.original_context_length")
    if not original:
        keys.refuse("attention.temperature_scale", "without rope.scaling.original_context_length")
    scaled |= {"llama_4_scaling_beta": _shortest(beta), "original_max_position_embeddings": original}
    return {"rope_parameters": scaled, "sliding_window": None}


def _experts(keys: _Keys, name: str) -> Config:
    """The number of experts, which has a ``name`` in each family, and of those that a token passes through."""
    count, used = keys.need("expert_count"), keys.get("expert_used_count")
    if not used:
        keys.refuse("expert_count", "but not how many of them a token passes through")
    if not 0 < used <= count:
        keys.refuse("expert_used_count", f"but there are {count} experts")
    return {name: count, "num_experts_per_tok": used}


def _qwen3_moe(keys: _Keys) -> Config:
    experts = _experts(keys, EXPERTS_OF["qwen3_moe"])
    usual = keys.need("feed_forward_length") // experts["num_experts_per_tok"]
    return {
        **experts,
        "moe_intermediate_size": keys.get("expert_feed_forward_length") or usual,
        "norm_topk_prob": bool(keys.get("expert_weights_norm", True)),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _mixtral(keys: _Keys, config: Config) -> Config:
    """Mixtral, whose files are those of Llama with experts."""
    same = {name: value for name, value in config.items() if name not in ("attention_bias", "mlp_bias")}
    own = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None}
    return same | own | _experts(keys, EXPERTS_OF["mixtral"])


def _gpt_oss(keys: _Keys, rope: Config, *, layers: int) -> Config:
    if (window := keys.need("attention.sliding_window")) == 0:
        keys.refuse("attention.sliding_window")
    return {
        **_experts(keys, EXPERTS_OF["gpt_oss"]),
        "sliding_window": window,
        "layer_types": _layer_types(keys, 2, layers=layers),
        # the model's own frequencies are between whole channels; those of llama.cpp are not
        "rope_parameters": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
    }


# -- rotary positions --------------------------------------------------------------------------------
def _rope(keys: _Keys, stored: Mapping[str, Any], *, head_dim: int) -> Config:
    """The Hugging Face ``rope_parameters``. Raises ModelError for a variant that cannot be recovered from the file."""
    rope: Config = {"rope_type": "default", "rope_theta": float(keys.get("rope.freq_base", 10_000.0))}
    if (rotated := keys.get("rope.dimension_count", head_dim)) != head_dim:
        if keys.architecture != "phi3" or not 0 < rotated < head_dim:
            keys.refuse("rope.dimension_count", f"but heads have {head_dim} channels, all of which must be rotated")
        rope["partial_rotary_factor"] = _share(rotated, head_dim)
    # linear is llama.cpp's default, with a factor under one of two names
    kind = keys.get("rope.scaling.type", "linear")
    factor = float(keys.get(keys.factor_key()) or 1)
    attention = float(keys.get("rope.scaling.attn_factor", 1.0))
    original = keys.get("rope.scaling.original_context_length", keys.need("context_length"))
    if kind not in ("none", "linear", "yarn", "longrope"):
        keys.refuse("rope.scaling.type")
    tables = {name: _table(stored, name) for name in ("rope_freqs", "rope_factors_short", "rope_factors_long")}
    if any(table is not None for table in tables.values()):
        return rope | _tabulated(keys, tables, rope, kind=kind, factor=factor, attention=attention, rotated=rotated)
    if keys.architecture == "phi3" and kind == "yarn":
        keys.refuse("rope.scaling.type", "with which no model of this architecture exists")
    if kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        rope |= {
            name: float(keys.get(f"rope.scaling.yarn_{name}"))
            for name in ("beta_fast", "beta_slow")
            if keys.get(f"rope.scaling.yarn_{name}") is not None
        }
        if attention != 1:  # multiplies YaRN's own factor; llama.cpp's converter writes OLMo 3's whole factor
            own = 1.0 if keys.architecture == "olmo2" else _yarn_attention(factor)
            rope["attention_factor"] = attention * own
        return rope
    if attention != 1:
        keys.refuse("rope.scaling.attn_factor")
    if kind == "none" or factor == 1:
        return rope
    if keys.architecture == "phi3" or kind == "longrope":
        keys.refuse(keys.factor_key())
    return rope | {"rope_type": "linear", "factor": factor}


def _yarn_attention(factor: float) -> float:
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def _table(stored: Mapping[str, Any], name: str) -> np.ndarray[Any, Any] | None:
    """One divisor for each frequency, or None."""
    tensor = stored.get(f"{name}.weight")
    return None if tensor is None else np.asarray(tensor.data, dtype=np.float64)


def _tabulated(
    keys: _Keys,
    tables: Mapping[str, np.ndarray[Any, Any] | None],
    rope: Config,
    *,
    kind: str,
    factor: float,
    attention: float,
    rotated: int,
) -> Config:
    """The parameters of frequencies divided by a table: one for all lengths, or one each for short and long texts."""
    name = next(name for name, table in tables.items() if table is not None)
    divisors, short, long = tables.values()
    longrope = keys.architecture == "phi3" or (keys.architecture == "llama" and kind == "longrope")
    if longrope:
        complete = divisors is None and short is not None and long is not None
    else:
        complete = keys.architecture == "llama" and short is None and long is None
    if not complete:
        raise ModelError(f"{keys.path} has the tensor {name}.weight, which is not supported in this file; {_INSTEAD}")
    if kind not in ("none", "linear", "longrope"):
        keys.refuse("rope.scaling.type", f"together with the tensor {name}.weight")
    if factor != 1 and kind != "none":
        keys.refuse(keys.factor_key(), f"together with the tensor {name}.weight")
    if divisors is None:
        assert short is not None
        assert long is not None
        original = keys.get("rope.scaling.original_context_length", keys.need("context_length"))
    elif attention != 1:
        keys.refuse("rope.scaling.attn_factor", f"together with the tensor {name}.weight")
    elif (llama3 := _llama3(divisors, rope["rope_theta"], rotated)) is not None:
        return llama3
    else:  # any other table: longrope with the same one at every length
        short, long, original = divisors, divisors, keys.need("context_length")
    return {
        "rope_type": "longrope",
        "short_factor": short.tolist(),
        "long_factor": long.tolist(),
        "attention_factor": attention,
        "original_max_position_embeddings": original,
    }


def _llama3(divisors: np.ndarray[Any, Any], theta: float, head_dim: int) -> Config | None:
    """Llama 3's ``rope_parameters`` if these are its divisors (E/2,), which are all that a GGUF file stores."""
    factor, low, high, original = float(divisors.max()), 1.0, 4.0, 8192
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    # 1 above the high frequency, `factor` below the low one, interpolated in the frequency between them
    expected = 1 / ((1 - smooth) / factor + smooth)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


# -- the keys that are not honoured ------------------------------------------------------------------
def _check_others(keys: _Keys, config: Config) -> None:
    """Raise ModelError for a key that is unknown or whose value would change the output."""
    neutral = _NEUTRAL | _neutral_here(keys, config)
    known: Set[str] = HONOURED[keys.architecture] | _IGNORED
    prefix = f"{keys.architecture}."
    for key in (name.removeprefix(prefix) for name in keys.metadata if name.startswith(prefix)):
        if key not in known and not any(_same(keys.value(key), value) for value in neutral.get(key, ())):
            keys.refuse(key)


def _neutral_here(keys: _Keys, config: Config) -> dict[str, tuple[Any, ...]]:
    """The neutral values that depend on the other keys."""
    value, positions = keys.value, keys.need("context_length")
    here: dict[str, tuple[Any, ...]] = {"embedding_length_out": (0, keys.need("embedding_length"))}
    here["hidden_activation"] = tuple(v for v in ARCHITECTURES[keys.architecture][1].values() if isinstance(v, str))
    if config["model_type"] in EXPERTS_OF:
        here["expert_gating_func"] = (0, 1)  # softmax, the only one of these models
        here["expert_weights_norm"] = (True,)
        here["expert_feed_forward_length"] = (0, value("feed_forward_length"))
    window = value("attention.sliding_window")
    if isinstance(window, int) and window >= positions:
        here["attention.sliding_window"] = (window,)
    if keys.architecture in ("gpt2", "gptneox", "phi2"):
        eps = config["layer_norm_epsilon" if keys.architecture == "gpt2" else "layer_norm_eps"]
        return here | {"attention.layer_norm_rms_epsilon": (eps,)}
    yarn = value("rope.scaling.type") == "yarn"
    rope = config["rope_parameters"].get("full_attention", config["rope_parameters"])
    here |= {
        "attention.layer_norm_epsilon": (config["rms_norm_eps"],),
        "attention.scale": (0, (config.get("query_pre_attn_scalar") or config["head_dim"]) ** -0.5),
        "rope.freq_base_swa": (rope["rope_theta"],),
        "rope.scaling.yarn_ext_factor": (-1, 1) if yarn else (-1, 0),
        # llama.cpp multiplies YaRN's own factor by it, transformers replaces it
        "rope.scaling.yarn_attn_factor": (_yarn_attention(rope["factor"]) if yarn else 1,),
    }
    if config["model_type"] in PERMUTED:  # the rows of q and k are in the order that llama.cpp always assumes
        here["tensor_data_layout"] = ("Meta AI original pth",)
    return here


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, float) or isinstance(other, float):
        return isinstance(value, int | float) and math.isclose(value, other, rel_tol=1e-5)
    return bool(value == other)


def _shortest(value: float) -> float:
    """Convert a float32 field to the shortest decimal that rounds to it: 9.999999747378752e-06 -> 1e-05."""
    return float(str(np.float32(value)))
