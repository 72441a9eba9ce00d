"""The supported model families: how their Hugging Face configs are read and how their weights are named.

A family is an entry of a table: a function from ``config.json`` to ``ModelConfig``, and for each of our modules the
Hugging Face modules that it is assembled from. A new family needs only an entry and a parity test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from anabranch.errors import ModelError
from anabranch.model.check import check_config, check_fields, check_known, token_ids
from anabranch.model.config import ModelConfig, RopeConfig
from anabranch.model.rope import ROPE_VARIANTS, check_rope, context_length
from anabranch.support.jsonfiles import shown

__all__ = ["FAMILIES", "Family", "Layout", "Source", "model_config", "weight_source"]

HfConfig = Mapping[str, Any]
Fields = dict[str, Any]  # of a ModelConfig
# How a matrix is stored: as ours, transposed (GPT-2's Conv1D), or q, k, v of head 0, then of head 1, ... (NeoX)
Layout = Literal["rows", "transposed", "by_head"]
_ATTENTION = {"qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "out": ("self_attn.o_proj",)}
_GATED = {"mlp.up": ("mlp.gate_proj", "mlp.up_proj"), "mlp.down": ("mlp.down_proj",)}
_NORMS = {"norm_in": ("input_layernorm",), "norm_mlp": ("post_attention_layernorm",)}
_LLAMA = {**_ATTENTION, **_GATED, **_NORMS}


@dataclass(frozen=True)
class Source:
    """The Hugging Face tensors that one of our parameters is assembled from, concatenated along rows.

    Each tensor has alternative names, the most common one first: some files lack the outer module's prefix.
    """

    tensors: tuple[tuple[str, ...], ...]
    layout: Layout = "rows"


@dataclass(frozen=True)
class Family:
    """An entry of the table. ``block`` maps our modules of a layer to theirs; other fields name the other modules."""

    describe: Callable[[HfConfig], ModelConfig]
    block: Mapping[str, tuple[str, ...]]
    prefixes: tuple[str, ...] = ("model.", "")
    layers: str = "layers"
    embedding: str = "embed_tokens"
    positions: str = ""
    norm: str = "norm"
    heads: tuple[str, ...] = ("lm_head",)
    layouts: Mapping[str, Layout] = field(default_factory=dict)


def model_config(hf: HfConfig) -> ModelConfig:
    """The ModelConfig of a Hugging Face config. Raises ModelError for an unsupported family or option."""
    if hf.get("quantization_config"):
        raise ModelError("the weights are stored quantised; use unquantised safetensors or a GGUF file instead")
    check_fields(hf)
    name = str(hf.get("model_type", "(none)"))
    if name not in FAMILIES:
        raise ModelError(f"the family {shown(name)} is not supported; supported are {', '.join(sorted(FAMILIES))}")
    try:
        config = FAMILIES[name].describe(hf)
    except KeyError as error:
        raise ModelError(f"the config of this {name} model lacks {error.args[0]!r}; fetch it again") from None
    if config.position == "rope":
        config = replace(config, max_positions=context_length(config.rope))
    check_config(config)
    return config


def weight_source(config: ModelConfig, parameter: str) -> Source:
    """The source of a parameter of our decoder, given its name in ``named_parameters``."""
    family = FAMILIES[config.family]
    stem, _, kind = parameter.rpartition(".")
    if stem == "head":
        return Source((tuple(f"{head}.{kind}" for head in family.heads),))
    layout: Layout = "rows"
    if stem.startswith("blocks."):
        _, index, part = stem.split(".", 2)
        modules = tuple(f"{family.layers}.{index}.{module}" for module in family.block[part])
        layout = family.layouts.get(part, "rows")
    else:
        modules = ({"embedding": family.embedding, "positions": family.positions, "norm": family.norm}[stem],)
    return Source(tuple(tuple(f"{p}{module}.{kind}" for p in family.prefixes) for module in modules), layout)


# -- shared by several families --------------------------------------------------------------------
_ACTIVATIONS: dict[str, Literal["silu", "gelu", "gelu_tanh", "relu"]] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu",
    "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip


def _activation(hf: HfConfig, key: str, default: str) -> Literal["silu", "gelu", "gelu_tanh", "relu"]:
    name = hf.get(key) or default
    if name not in _ACTIVATIONS:
        supported = ", ".join(sorted(_ACTIVATIONS))
        raise ModelError(f"the activation {shown(name)} is not supported; supported are {supported}")
    return _ACTIVATIONS[name]


def _refuse(hf: HfConfig, key: str, why: str) -> None:
    """Raise ModelError for an option of a family that the decoder does not support."""
    if hf.get(key):
        raise ModelError(f"{hf['model_type']} models with {key} set are not supported: {why}; use another model")


def _sizes(hf: HfConfig, *, tied: bool, head_dim: int | None = None, inner: str = "intermediate_size") -> Fields:
    """The fields that (nearly) all families have under the same names."""
    heads = hf["num_attention_heads"]
    return {
        "family": hf["model_type"],
        "vocab_size": hf["vocab_size"],
        "hidden_size": hf["hidden_size"],
        "num_layers": hf["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": hf.get("num_key_value_heads") or heads,
        "head_dim": hf.get("head_dim") or head_dim or _head_dim(hf["hidden_size"], heads),
        "intermediate_size": hf[inner],
        "max_positions": hf["max_position_embeddings"],
        "tied_head": tied if (stated := hf.get("tie_word_embeddings")) is None else stated,
        "eos_token_ids": token_ids(hf.get("eos_token_id"), "eos_token_id", hf["vocab_size"]),
        "bos_token_id": hf.get("bos_token_id"),
    }


def _head_dim(width: int, heads: int) -> int:
    if width % heads:
        raise ModelError(
            f"hidden_size {width} in the model's config is not a multiple of its {heads} attention heads, and head_dim "
            "is missing; correct the config or fetch the model again"
        )
    return width // heads


_ROPE_FIELDS = ("type", "rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")


def _rope(hf: HfConfig, head_dim: int, *, rotated: float = 1.0) -> RopeConfig:
    """The rotary config, from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before).

    ``rotated`` is the fraction of a head's channels that are rotated if the config does not specify it.
    """
    given: dict[str, Any] = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    kind = given.get("rope_type", given.get("type", "default"))
    if hf["model_type"] == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # the names in Phi-3's first files
    if kind not in ROPE_VARIANTS:
        supported = ", ".join(sorted(ROPE_VARIANTS))
        raise ModelError(f"the rotary variant {shown(kind)} is not supported; supported are {supported}")
    theta = given.get("rope_theta") or hf.get("rope_theta") or hf.get("rotary_emb_base") or 10_000.0
    share = given.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or hf.get("rotary_pct") or rotated
    longest = hf["max_position_embeddings"]
    original, rereads = hf.get("original_max_position_embeddings"), hf["model_type"] == "phi3"
    if original is None:
        original = 4096 if rereads else given.get("original_max_position_embeddings") or longest
    # parameters with a field of their own are removed, so that old and new files give the same config
    scaling = {"rope_type": kind, **{key: value for key, value in given.items() if key not in _ROPE_FIELDS}}
    dim, stretched = int(head_dim * share), None if kind == "default" else scaling
    rope = RopeConfig(float(theta), dim, stretched, longest, original, rereads)
    check_rope(rope)
    return rope


def _rms(hf: HfConfig, *, tied: bool = False, head_dim: int | None = None) -> Fields:
    """Llama and its descendants: RMSNorm, rotary positions, a gated MLP."""
    fields = _sizes(hf, tied=tied, head_dim=head_dim)
    return {
        **fields,
        "rope": _rope(hf, fields["head_dim"]),
        "norm_eps": hf.get("rms_norm_eps", 1e-5 if hf["model_type"] == "phi3" else 1e-6),
        "activation": _activation(hf, "hidden_act", "silu"),
    }


def _sliding(hf: HfConfig, window: int | None, slides: Callable[[int], bool]) -> Fields:
    """Which layers use sliding-window attention: as listed in the file, or by the family's rule."""
    if window is None:
        return {}
    n, types = hf["num_hidden_layers"], hf.get("layer_types")
    check_known(types or (), ("full_attention", "sliding_attention"))
    layers = tuple(t == "sliding_attention" for t in types) if types else tuple(slides(i) for i in range(n))
    return {"sliding_window": window, "sliding_layers": layers}


# -- one function per family -----------------------------------------------------------------------
def _llama(hf: HfConfig) -> ModelConfig:
    bias = hf.get("attention_bias", False)
    return ModelConfig(**_rms(hf), qkv_bias=bias, out_bias=bias, mlp_bias=hf.get("mlp_bias", False))


def _mistral(hf: HfConfig) -> ModelConfig:
    return ModelConfig(**_rms(hf), sliding_window=hf.get("sliding_window", 4096))


def _qwen_sliding(hf: HfConfig) -> Fields:
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window", False) else None
    return _sliding(hf, window, lambda layer: layer >= hf.get("max_window_layers", 28))


def _qwen2(hf: HfConfig) -> ModelConfig:
    return ModelConfig(**_rms(hf), **_qwen_sliding(hf), qkv_bias=True)


def _qwen3(hf: HfConfig) -> ModelConfig:
    bias = hf.get("attention_bias", False)
    return ModelConfig(**_rms(hf, head_dim=128), **_qwen_sliding(hf), qk_norm=True, qkv_bias=bias, out_bias=bias)


def _phi(hf: HfConfig) -> ModelConfig:
    _refuse(hf, "qk_layernorm", "no published Phi model normalises queries and keys")
    fields = _sizes(hf, tied=False)
    return ModelConfig(
        **fields,
        rope=_rope(hf, fields["head_dim"], rotated=0.5),
        norm="layer",
        norm_eps=hf.get("layer_norm_eps", 1e-5),
        wiring="parallel",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_bias=True,
        gated_mlp=False,
        activation=_activation(hf, "hidden_act", "gelu_new"),
    )


def _phi3(hf: HfConfig) -> ModelConfig:
    return ModelConfig(**_rms(hf), sliding_window=hf.get("sliding_window"))


def _opt(hf: HfConfig) -> ModelConfig:
    if not hf.get("do_layer_norm_before", True):
        raise ModelError("OPT with post-norm blocks (opt-350m) is not supported; use opt-125m or opt-1.3b")
    if hf.get("word_embed_proj_dim") not in (None, hf["hidden_size"]):
        raise ModelError("OPT with projected embeddings (opt-350m) is not supported; use opt-125m or opt-1.3b")
    _refuse(hf, "_remove_final_layer_norm", "the decoder always has a final norm")
    if not hf.get("layer_norm_elementwise_affine", True):
        raise ModelError("OPT with norms without weights is not supported; no published OPT model has them")
    bias = hf.get("enable_bias", True)
    return ModelConfig(
        **_sizes(hf, tied=True, inner="ffn_dim"),
        position="learned",
        learned_offset=2,
        norm="layer",
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        gated_mlp=False,
        activation=_activation(hf, "activation_function", "relu"),
    )


def _gpt2(hf: HfConfig) -> ModelConfig:
    _refuse(hf, "scale_attn_by_inverse_layer_idx", "the attention scale must be the same in all layers")
    _refuse(hf, "add_cross_attention", "there is no encoder")
    theirs = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    }
    # a GPT-2 file may have either name
    alike = {**hf, **{ours: hf[name] for ours, name in theirs.items() if name in hf}}
    alike["intermediate_size"] = hf.get("n_inner") or 4 * alike["hidden_size"]
    return ModelConfig(
        **_sizes(alike, tied=True),
        position="learned",
        norm="layer",
        norm_eps=hf.get("layer_norm_epsilon", 1e-5),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        gated_mlp=False,
        activation=_activation(hf, "activation_function", "gelu_new"),
        attention_scale=None if hf.get("scale_attn_weights", True) else 1.0,
    )


def _gemma_fields(hf: HfConfig) -> Fields:
    _refuse(hf, "use_bidirectional_attention", "decoding needs a causal model")
    # Gemma's first files have "gelu" for the tanh approximation
    named = hf.get("hidden_activation") or hf.get("hidden_act")
    activation = _ACTIVATIONS["gelu_new"] if named in (None, "gelu") else _activation({"a": named}, "a", "gelu_new")
    bias = hf.get("attention_bias", False)
    return {
        **_rms({**hf, "hidden_act": None}, tied=True, head_dim=256),
        "activation": activation,
        "qkv_bias": bias,
        "out_bias": bias,
        "norm_plus_one": True,
        "embedding_scale": math.sqrt(hf["hidden_size"]),
    }


def _gemma(hf: HfConfig) -> ModelConfig:
    return ModelConfig(**_gemma_fields(hf))


def _gemma2(hf: HfConfig) -> ModelConfig:
    return ModelConfig(
        **_gemma_fields(hf),
        **_sliding(hf, hf.get("sliding_window", 4096), lambda layer: layer % 2 == 0),
        post_norms=True,
        attention_scale=hf.get("query_pre_attn_scalar", 256) ** -0.5,
        attention_softcap=hf.get("attn_logit_softcapping", 50.0),
        logit_softcap=hf.get("final_logit_softcapping", 30.0),
    )


def _gpt_neox(hf: HfConfig) -> ModelConfig:
    fields = _sizes(hf, tied=False)
    bias = hf.get("attention_bias", True)
    return ModelConfig(
        **fields,
        rope=_rope(hf, fields["head_dim"], rotated=0.25),
        norm="layer",
        norm_eps=hf.get("layer_norm_eps", 1e-5),
        wiring="parallel_two_norms" if hf.get("use_parallel_residual", True) else "sequential",
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=True,
        gated_mlp=False,
        activation=_activation(hf, "hidden_act", "gelu"),
    )


_PHI_BLOCK = {
    "norm_in": ("input_layernorm",),
    "qkv": _ATTENTION["qkv"],
    "out": ("self_attn.dense",),
    "mlp.up": ("mlp.fc1",),
    "mlp.down": ("mlp.fc2",),
}
_PHI3_BLOCK = {**_LLAMA, "qkv": ("self_attn.qkv_proj",), "mlp.up": ("mlp.gate_up_proj",)}
_QWEN3_BLOCK = {**_LLAMA, "q_norm": ("self_attn.q_norm",), "k_norm": ("self_attn.k_norm",)}
_GEMMA2_BLOCK = {
    **_LLAMA,
    "norm_after_attention": ("post_attention_layernorm",),
    "norm_mlp": ("pre_feedforward_layernorm",),
    "norm_after_mlp": ("post_feedforward_layernorm",),
}
_OPT_BLOCK = {
    "norm_in": ("self_attn_layer_norm",),
    "qkv": _ATTENTION["qkv"],
    "out": ("self_attn.out_proj",),
    "norm_mlp": ("final_layer_norm",),
    "mlp.up": ("fc1",),
    "mlp.down": ("fc2",),
}
_GPT2_BLOCK = {
    "norm_in": ("ln_1",),
    "qkv": ("attn.c_attn",),
    "out": ("attn.c_proj",),
    "norm_mlp": ("ln_2",),
    "mlp.up": ("mlp.c_fc",),
    "mlp.down": ("mlp.c_proj",),
}
_NEOX_BLOCK = {
    **_NORMS,
    "qkv": ("attention.query_key_value",),
    "out": ("attention.dense",),
    "mlp.up": ("mlp.dense_h_to_4h",),
    "mlp.down": ("mlp.dense_4h_to_h",),
}

FAMILIES: dict[str, Family] = {
    "llama": Family(_llama, _LLAMA),
    "mistral": Family(_mistral, _LLAMA),
    "qwen2": Family(_qwen2, _LLAMA),
    "qwen3": Family(_qwen3, _QWEN3_BLOCK),
    "phi": Family(_phi, _PHI_BLOCK, norm="final_layernorm"),
    "phi3": Family(_phi3, _PHI3_BLOCK),
    "opt": Family(
        _opt,
        _OPT_BLOCK,
        prefixes=("model.decoder.", "decoder."),
        positions="embed_positions",
        norm="final_layer_norm",
    ),
    "gpt2": Family(
        _gpt2,
        _GPT2_BLOCK,
        prefixes=("transformer.", ""),
        layers="h",
        embedding="wte",
        positions="wpe",
        norm="ln_f",
        layouts={"qkv": "transposed", "out": "transposed", "mlp.up": "transposed", "mlp.down": "transposed"},
    ),
    "gemma": Family(_gemma, _LLAMA),
    "gemma2": Family(_gemma2, _GEMMA2_BLOCK),
    "gpt_neox": Family(
        _gpt_neox,
        _NEOX_BLOCK,
        prefixes=("gpt_neox.", ""),
        embedding="embed_in",
        norm="final_layer_norm",
        heads=("embed_out", "lm_head"),
        layouts={"qkv": "by_head"},
    ),
}
