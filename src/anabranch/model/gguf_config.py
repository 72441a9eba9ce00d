"""The metadata of a GGUF file as a Hugging Face ``config.json`` record.

``ARCHITECTURES`` is the table of what files may contain. Every key of an architecture is honoured, has no effect on
decoding (``_IGNORED``, ``_NEUTRAL``), or is refused if its value would change the output. Keys mean what they mean in
llama.cpp, or in transformers if llama.cpp does not read them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from anabranch.errors import ModelError
from anabranch.model.families import UNSUPPORTED
from anabranch.model.gguf_tokenizer import end_tokens
from anabranch.support.jsonfiles import shown

__all__ = ["ARCHITECTURES", "ATTENTION", "MLP", "Architecture", "config_of"]

Metadata = Mapping[str, Any]
Config = dict[str, Any]

_INSTEAD = "load the model's safetensors folder instead"
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
_PARTLY_ROTATED = _SHAPE | {"attention.layer_norm_epsilon", "rope.freq_base", "rope.dimension_count"}
_EXPERTS = frozenset({"expert_count", "expert_used_count"})
_WINDOWS = frozenset({"attention.sliding_window", "attention.sliding_window_pattern"})
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
    honoured: frozenset[str]

    def get(self, key: str, default: Any = None) -> Any:
        """The value of an honoured key. Raises ModelError if the layers differ in it."""
        assert key in self.honoured, key
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
        why = f" ({UNSUPPORTED[architecture]})" if architecture in UNSUPPORTED else ""
        names = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(f"{path} contains a model of architecture {architecture!r}{why}; supported are {names}")
    if (kind := metadata.get("general.type", "model")) != "model":
        raise ModelError(f"{path} is a GGUF file of the type {shown(kind)}, not a model; give the model's own file")
    known = ARCHITECTURES[architecture]
    keys, ends = _Keys(path, architecture, metadata, known.honoured), end_tokens(metadata)
    config: Config = {
        "architectures": [known.name],
        "model_type": known.family or architecture,
        "vocab_size": _vocabulary(keys, stored),
        # llama.cpp stores the output head only if it differs from the embedding
        "tie_word_embeddings": "output.weight" not in stored,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        **known.fixed,
    }
    config |= known.sizes(keys, stored)
    # only the tensors show which biases a model has; Qwen2 always has those of q, k and v
    biased = {match[1] for name in stored if (match := re.fullmatch(r"blk\.\d+\.(\w+)\.bias", name))}
    if known.sizes is _rms:
        config |= {"attention_bias": bool(biased & ATTENTION)} if known.biased >= ATTENTION else {}
        config |= {"mlp_bias": bool(biased & MLP)} if known.biased >= MLP else {}
    config |= known.own(keys, config)
    _check_others(keys, known, config)
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


def _gpt2(keys: _Keys, stored: Mapping[str, Any]) -> Config:
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


def _parallel(keys: _Keys, stored: Mapping[str, Any]) -> Config:
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
    oss = keys.architecture == "gpt-oss"  # which has no layers without experts
    return {
        "hidden_size": hidden,
        "intermediate_size": keys.need("expert_feed_forward_length" if oss else "feed_forward_length"),
        "num_hidden_layers": keys.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": keys.need("context_length"),
        "rms_norm_eps": _shortest(keys.need("attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope(keys, stored, head_dim=head_dim),
    }


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


# -- settings that only some architectures have --------------------------------------------------------
def _none(keys: _Keys, config: Config) -> Config:
    return {}


def _llama(keys: _Keys, config: Config) -> Config:
    """Llama, or Mixtral, whose files are those of Llama with experts and without biases."""
    if not keys.get("expert_count"):
        if keys.get("expert_used_count"):
            keys.refuse("expert_used_count", "but there are no experts")
        return {}
    for name in ("attention_bias", "mlp_bias"):
        if config.pop(name):
            raise ModelError(f"{keys.path} has experts and biases, which no model has together; {_INSTEAD}")
    own = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None}
    return own | _experts(keys, "num_local_experts")


def _phi3(keys: _Keys, config: Config) -> Config:
    name = "original_max_position_embeddings"
    stated = {name: config["rope_parameters"][name]} if name in config["rope_parameters"] else {}
    return {"sliding_window": keys.get("attention.sliding_window") or None, **stated}  # 0 is none


def _gemma2(keys: _Keys, config: Config) -> Config:
    if (window := keys.get("attention.sliding_window", 4096)) == 0:
        keys.refuse("attention.sliding_window")
    return {
        "sliding_window": window,
        "layer_types": _layer_types(keys, config, 2),
        "attn_logit_softcapping": keys.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.get("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scale(config, 46),
    }


def _query_scale(config: Config, largest: int) -> int:
    """A scale that files lack: hidden size / heads in the 27B, which has ``largest`` layers, head_dim in the others."""
    if config["num_hidden_layers"] == largest:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _layer_types(keys: _Keys, config: Config, usual: int) -> list[str]:
    """The kind of each layer; by default the last of each group of ``usual`` layers has full attention."""
    # a flag for each layer, or the size of the groups
    pattern = keys.metadata.get(f"{keys.architecture}.attention.sliding_window_pattern", usual)
    if isinstance(pattern, list):
        slides = [bool(slide) for slide in pattern]
    else:
        layers = range(min(config["num_hidden_layers"], 1 << 12))
        slides = [not pattern or layer % pattern < pattern - 1 for layer in layers]
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def _gemma3(keys: _Keys, config: Config) -> Config:
    window = keys.need("attention.sliding_window")
    if window == 0:
        keys.refuse("attention.sliding_window")
    sliding = {"rope_type": "default", "rope_theta": float(keys.get("rope.freq_base_swa", 10_000.0))}
    return {
        "sliding_window": window,
        "layer_types": _layer_types(keys, config, 6),
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": sliding},
        "final_logit_softcapping": keys.get("final_logit_softcapping") or None,
        "query_pre_attn_scalar": _query_scale(config, 62),
    }


def _olmo(keys: _Keys, config: Config) -> Config:
    """OLMo 2, or OLMo 3, whose files are OLMo 2's with a window; layers with it have rotations without scaling."""
    rope, window = config["rope_parameters"], keys.get("attention.sliding_window")
    if not window:
        return {}
    sliding = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": _layer_types(keys, config, 4),
        "rope_parameters": {"full_attention": rope, "sliding_attention": sliding},
    }


def _granite(keys: _Keys, config: Config) -> Config:
    if keys.get("rope.scaling.finetuned", True) is not True:
        keys.refuse("rope.scaling.finetuned", "with which its layers do not rotate positions")
    return {  # 0 is none
        "attention_multiplier": float(keys.get("attention.scale") or config["head_dim"] ** -0.5),
        "embedding_multiplier": float(keys.get("embedding_scale") or 1),
        "residual_multiplier": float(keys.get("residual_scale") or 1),
        "logits_scaling": float(keys.get("logit_scale") or 1),
    }


def _mistral3(keys: _Keys, config: Config) -> Config:
    """Ministral 3, or a Mistral Small 3, whose queries are not scaled by position."""
    log_multiplier, beta = keys.get("rope.scaling.yarn_log_multiplier"), keys.get("attention.temperature_scale")
    scaled = dict(config["rope_parameters"])
    if log_multiplier:
        if scaled["rope_type"] != "yarn":
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


def _qwen3_moe(keys: _Keys, config: Config) -> Config:
    experts = _experts(keys, "num_experts")
    usual = keys.need("feed_forward_length") // experts["num_experts_per_tok"]
    return {
        **experts,
        "moe_intermediate_size": keys.get("expert_feed_forward_length") or usual,
        "norm_topk_prob": bool(keys.get("expert_weights_norm", True)),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gpt_oss(keys: _Keys, config: Config) -> Config:
    rope = config["rope_parameters"]
    if (window := keys.need("attention.sliding_window")) == 0:
        keys.refuse("attention.sliding_window")
    return {
        **_experts(keys, "num_local_experts"),
        "sliding_window": window,
        "layer_types": _layer_types(keys, config, 2),
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
def _check_others(keys: _Keys, architecture: Architecture, config: Config) -> None:
    """Raise ModelError for a key that is unknown or whose value would change the output."""
    neutral, known = _NEUTRAL | _neutral_here(keys, architecture, config), keys.honoured | _IGNORED
    prefix = f"{keys.architecture}."
    for key in (name.removeprefix(prefix) for name in keys.metadata if name.startswith(prefix)):
        if key not in known and not any(_same(keys.value(key), value) for value in neutral.get(key, ())):
            keys.refuse(key)


def _neutral_here(keys: _Keys, architecture: Architecture, config: Config) -> dict[str, tuple[Any, ...]]:
    """The neutral values that depend on the other keys."""
    value, positions = keys.value, keys.need("context_length")
    here: dict[str, tuple[Any, ...]] = {"embedding_length_out": (0, keys.need("embedding_length"))}
    here["hidden_activation"] = tuple(v for v in architecture.fixed.values() if isinstance(v, str))
    if "num_experts_per_tok" in config:
        here["expert_gating_func"] = (0, 1)  # softmax, the only one of these models
        here["expert_weights_norm"] = (True,)
        here["expert_feed_forward_length"] = (0, value("feed_forward_length"))
    window = value("attention.sliding_window")
    if isinstance(window, int) and window >= positions:
        here["attention.sliding_window"] = (window,)
    if architecture.sizes is not _rms:
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
    if architecture.permuted:  # the rows of q and k are in the order that llama.cpp always assumes
        here["tensor_data_layout"] = ("Meta AI original pth",)
    return here


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, float) or isinstance(other, float):
        return isinstance(value, int | float) and math.isclose(value, other, rel_tol=1e-5)
    return bool(value == other)


def _shortest(value: float) -> float:
    """Convert a float32 field to the shortest decimal that rounds to it: 9.999999747378752e-06 -> 1e-05."""
    return float(str(np.float32(value)))


# -- the table -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF files.

    name      its class in transformers
    honoured  the keys that are honoured, without the architecture's name
    fixed     settings that are not in the file
    biased    the modules that may have a bias, by their GGUF names
    family    the ``model_type``; empty: the architecture's name
    permuted  the rows of q and k are in pairs of channels that are rotated together
    shifted   1 was added to the weights of norms
    sizes     the sizes and positions, from the keys and the tensors
    own       settings that only this architecture has, from the keys and the config so far
    """

    name: str
    honoured: frozenset[str]
    fixed: Config = field(default_factory=lambda: {"hidden_act": "silu"})
    biased: frozenset[str] = frozenset()
    family: str = ""
    permuted: bool = False
    shifted: bool = False
    sizes: Callable[[_Keys, Mapping[str, Any]], Config] = _rms
    own: Callable[[_Keys, Config], Config] = _none


_LAYER_NORM = frozenset({"attn_norm", "attn_output", "ffn_norm", "ffn_up", "ffn_down", "output_norm"})
_GELU = "gelu_pytorch_tanh"
_SCALES = {"attention.scale", "embedding_scale", "residual_scale", "logit_scale", "rope.scaling.finetuned"}
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", _RMS | _EXPERTS, biased=ATTENTION | MLP, permuted=True, own=_llama),
    "qwen2": Architecture("Qwen2ForCausalLM", _RMS, biased=ATTENTION - {"attn_output"}),
    "qwen3": Architecture("Qwen3ForCausalLM", _RMS, biased=ATTENTION),
    "phi3": Architecture("Phi3ForCausalLM", _RMS | {"attention.sliding_window"}, own=_phi3),
    "mistral3": Architecture(
        "Ministral3ForCausalLM",
        _RMS | {"attention.temperature_scale", "rope.scaling.yarn_log_multiplier"},
        family="ministral3",
        permuted=True,
        own=_mistral3,
    ),
    "smollm3": Architecture(
        *("SmolLM3ForCausalLM", _RMS, {"hidden_act": "silu", "no_rope_layer_interval": 4}, ATTENTION | MLP),
        permuted=True,
    ),
    "granite": Architecture("GraniteForCausalLM", _RMS | _SCALES, biased=ATTENTION | MLP, permuted=True, own=_granite),
    "olmo2": Architecture("Olmo2ForCausalLM", _RMS | _WINDOWS, biased=ATTENTION, own=_olmo),
    "gemma": Architecture("GemmaForCausalLM", _RMS, {"hidden_act": _GELU}, ATTENTION, shifted=True),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        _RMS | _WINDOWS | {"attn_logit_softcapping", "final_logit_softcapping"},
        *({"hidden_activation": _GELU}, ATTENTION),
        shifted=True,
        own=_gemma2,
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        _RMS | _WINDOWS | {"rope.freq_base_swa", "final_logit_softcapping"},
        *({"hidden_activation": _GELU}, ATTENTION, "gemma3_text"),
        shifted=True,
        own=_gemma3,
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        _SHAPE | {"attention.layer_norm_epsilon"},
        *({"activation_function": "gelu_new"}, _LAYER_NORM | {"attn_qkv"}),
        sizes=_gpt2,
    ),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM",
        _PARTLY_ROTATED | {"use_parallel_residual"},
        *({"hidden_act": "gelu"}, _LAYER_NORM | {"attn_qkv"}, "gpt_neox"),
        sizes=_parallel,
    ),
    "phi2": Architecture(
        *("PhiForCausalLM", _PARTLY_ROTATED, {"hidden_act": "gelu_new"}),
        *(_LAYER_NORM | ATTENTION | {"output"}, "phi"),
        sizes=_parallel,
    ),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        _RMS | _EXPERTS | {"expert_feed_forward_length", "expert_weights_norm"},
        biased=ATTENTION,
        family="qwen3_moe",
        own=_qwen3_moe,
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        _RMS | _EXPERTS | _WINDOWS | {"expert_feed_forward_length"},
        *({}, ATTENTION | {"ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"}, "gpt_oss"),
        own=_gpt_oss,
    ),
}
