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
from anabranch.model.check import check_config, check_fields, check_rope_fields, check_share, layer_kinds, token_ids
from anabranch.model.config import ModelConfig, RopeConfig
from anabranch.model.fields import FIELDS, family_of, read_fields
from anabranch.model.rope import ROPE_VARIANTS, check_rope, context_length
from anabranch.support.jsonfiles import shown

__all__ = ["FAMILIES", "Family", "Layout", "Source", "model_config", "module_rows", "weight_source"]

HfConfig = Mapping[str, Any]
Fields = dict[str, Any]  # honoured fields of config.json with their defaults, or fields of a ModelConfig
# How a matrix is stored: as ours, transposed (GPT-2's Conv1D), or q, k, v of head 0, then of head 1, ... (NeoX)
Layout = Literal["rows", "transposed", "by_head"]
_BIAS = ("qkv_bias", "out_bias")


@dataclass(frozen=True)
class Source:
    """The Hugging Face tensors that one of our parameters is assembled from, concatenated along rows.

    Each tensor has alternative names, the most common one first: files may lack or repeat the outer prefix,
    and a tied head may be stored under either name.
    """

    tensors: tuple[tuple[str, ...], ...]
    layout: Layout = "rows"


@dataclass(frozen=True)
class Family:
    """An entry of the table. ``block`` maps our modules of a layer to theirs; other fields name the modules outside."""

    describe: Callable[[Fields], ModelConfig]
    block: Mapping[str, tuple[str, ...]]
    prefixes: tuple[str, ...] = ("model.", "")
    layers: str = "layers"
    embedding: str = "embed_tokens"
    positions: str = ""
    norm: str = "norm"
    heads: tuple[str, ...] = ("lm_head",)
    layouts: Mapping[str, Layout] = field(default_factory=dict)


def model_config(hf: HfConfig, *, family: str | None = None) -> ModelConfig:
    """The ModelConfig of a Hugging Face config. Raises ModelError for an unsupported family or option.

    family  the family; None: the one as which transformers would load the file
    """
    if hf.get("quantization_config"):
        raise ModelError("the weights are stored quantised; use unquantised safetensors or a GGUF file instead")
    name = family_of(hf) if family is None else family
    if name not in FAMILIES:
        raise ModelError(f"the family {shown(name)} is not supported; supported are {', '.join(sorted(FAMILIES))}")
    fields, given = read_fields(hf, name)
    check_fields(given, FIELDS[name].nullable)
    words = fields["vocab_size"]
    if "eos_token_id" not in given and fields["eos_token_id"] not in range(words):
        fields["eos_token_id"] = None  # the family's usual end token, in a smaller vocabulary
    fields["eos_token_id"] = token_ids(fields["eos_token_id"], "eos_token_id", words)
    config = FAMILIES[name].describe({**fields, "family": name})
    if config.position == "rope":
        config = replace(config, max_positions=context_length(config.rope))
    check_config(config)
    return config


def weight_source(config: ModelConfig, parameter: str) -> Source:
    """The source of a parameter of our decoder, given its name in ``named_parameters``."""
    family = FAMILIES[config.family]
    stem, _, kind = parameter.rpartition(".")
    outer = family.prefixes[0].partition(".")[0] + "."
    heads = tuple(f"{prefix}{head}.{kind}" for prefix in ("", outer) for head in family.heads)
    if stem == "head":
        return Source((heads,))
    layout: Layout = "rows"
    if stem.startswith("blocks."):
        _, index, part = stem.split(".", 2)
        modules = tuple(f"{family.layers}.{index}.{module}" for module in family.block[part])
        layout = family.layouts.get(part, "rows")
    else:
        modules = ({"embedding": family.embedding, "positions": family.positions, "norm": family.norm}[stem],)
    prefixes = (*family.prefixes, outer + family.prefixes[0])
    tied = heads if stem == "embedding" and config.tied_head else ()
    return Source(tuple((*(f"{p}{module}.{kind}" for p in prefixes), *tied) for module in modules), layout)


def module_rows(config: ModelConfig, count: int, rows: int) -> list[int]:
    """The rows of each of ``count`` modules that are fused into a layer of ``rows``: q, k and v, or gate and up."""
    if count == 3:
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return [q, kv, kv]
    return [rows // count] * count


# -- shared by several families --------------------------------------------------------------------
_ACTIVATIONS: dict[str, Literal["silu", "gelu", "gelu_tanh", "relu"]] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu",
    "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh",
}  # fmt: skip


def _activation(f: Fields, key: str = "hidden_act") -> Literal["silu", "gelu", "gelu_tanh", "relu"]:
    if (name := f[key]) not in _ACTIVATIONS:
        supported = ", ".join(sorted(_ACTIVATIONS))
        raise ModelError(f"{key} {shown(name)} in the model's config is not supported; supported are {supported}")
    return _ACTIVATIONS[name]


def _sizes(f: Fields, *, inner: str = "intermediate_size") -> Fields:
    """The fields of all families. Grouped heads and their width are honoured only if the family has them."""
    heads, first = f["num_attention_heads"], f["bos_token_id"]
    return {
        "family": f["family"],
        "vocab_size": f["vocab_size"],
        "hidden_size": f["hidden_size"],
        "num_layers": f["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": f.get("num_key_value_heads") or heads,
        "head_dim": f.get("head_dim") or _head_dim(f["hidden_size"], heads),
        "intermediate_size": f[inner],
        "max_positions": f["max_position_embeddings"],
        "tied_head": f["tie_word_embeddings"],
        "eos_token_ids": f["eos_token_id"],
        "bos_token_id": first if first is not None and 0 <= first < f["vocab_size"] else None,
    }


def _head_dim(width: int, heads: int) -> int:
    if width % heads:
        raise ModelError(
            f"hidden_size {width} in the model's config is not a multiple of its {heads} attention heads, and head_dim "
            "is missing; correct the config or fetch the model again"
        )
    return width // heads


# The parameters that each rotary variant reads; others are ignored, as in transformers.
_ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor", "factor", "attention_factor"),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
_ROPE_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")


def _rope(f: Fields, head_dim: int, *, theta: str = "rope_theta", share: str = "partial_rotary_factor") -> RopeConfig:
    """The rotary config, from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before).

    ``theta`` and ``share`` are the family's names of the base and of the fraction of a head's channels that are
    rotated; where its default is None, transformers' modeling of the family always rotates all.
    """
    # an older field has priority over the newer one, if a file has both
    key = "rope_scaling" if f["rope_scaling"] else "rope_parameters"
    given: dict[str, Any] = dict(f[key] or {})
    check_rope_fields({name: given[name] for name in ("rope_type", "type") if name in given}, key)
    kind = given.get("rope_type", given.get("type", "default"))
    supported = tuple(sorted(ROPE_VARIANTS))
    if f["family"] == "phi3":
        kind, supported = "longrope" if kind in ("su", "yarn") else kind, ("default", "longrope")
    if kind not in supported:
        raise ModelError(
            f"{key} in the model's config has the rotary variant {shown(kind)}, which is not supported; supported are "
            f"{', '.join(supported)}"
        )
    read: Fields = {name: given[name] for name in (*_ROPE_COMMON, *_ROPE_FIELDS[kind]) if name in given}
    rotated: Any = read.get("partial_rotary_factor", f[share])
    if FIELDS[f["family"]].honoured[share] is None:
        read.pop("partial_rotary_factor", None)
        if kind != "default" and rotated not in (None, 1):
            raise ModelError(
                f"{key} in the model's config scales rotary positions with partial_rotary_factor {shown(rotated)}, but "
                f"{f['family']} models rotate whole heads; correct the config or fetch the model again"
            )
        rotated = 1
    check_share(share, rotated)
    check_rope_fields({**read, **{name: value for name, value in given.items() if isinstance(value, dict)}}, key)
    longest = f["max_position_embeddings"]
    stated = f["original_max_position_embeddings"] or read.get("original_max_position_embeddings") or longest
    scaling = {"rope_type": kind, **{name: read[name] for name in _ROPE_FIELDS[kind] if name in read}}
    rope = RopeConfig(
        theta=float(read["rope_theta"] if "rope_theta" in read else f[theta]),
        dim=int(head_dim * rotated),
        scaling=None if kind == "default" else scaling,
        max_positions=longest,
        original_max_positions=stated,
        rereads=f["family"] == "phi3",
    )
    check_rope(rope)
    return rope


def _rms(f: Fields) -> Fields:
    """Llama and its descendants: RMSNorm, rotary positions, a gated MLP."""
    fields = _sizes(f)
    return {
        **fields,
        "rope": _rope(f, fields["head_dim"]),
        "norm_eps": f["rms_norm_eps"],
        "activation": _activation(f, "hidden_activation" if "hidden_activation" in f else "hidden_act"),
    }


def _sliding(f: Fields, window: int | None, slides: Callable[[int], bool]) -> Fields:
    """The window, and the layers that use it: as listed in the file, or by the family's rule."""
    count = f["num_hidden_layers"]
    kinds = layer_kinds(f["layer_types"], count)
    layers = tuple(slides(i) for i in range(count)) if kinds is None else tuple(kind == _SLIDES for kind in kinds)
    if not any(layers):
        return {}
    if window is None:
        raise ModelError(
            "layer_types in the model's config has sliding layers, but no sliding_window is set; correct the config or "
            "fetch the model again"
        )
    return {"sliding_window": window, "sliding_layers": None if all(layers) else layers}


_SLIDES = "sliding_attention"


def _uniform(f: Fields, window: int | None = None) -> Fields:
    """The window of a family whose layers are all alike; ``layer_types``, if the file has it, must agree."""
    wanted = "full_attention" if window is None else _SLIDES
    for kind in layer_kinds(f["layer_types"], f["num_hidden_layers"]) or ():
        if kind != wanted:
            raise ModelError(
                f"layer_types in the model's config has {shown(kind)}, but all layers of this {f['family']} model use "
                f"{wanted}; correct the config or fetch the model again"
            )
    return {"sliding_window": window}


# -- one function per family -----------------------------------------------------------------------
def _biases(value: bool, *more: str) -> Fields:
    """The same value for the biases of both attention projections and of ``more`` layers."""
    return dict.fromkeys((*_BIAS, *more), value)


def _llama(f: Fields) -> ModelConfig:
    return ModelConfig(**_rms(f), **_uniform(f), **_biases(f["attention_bias"]), mlp_bias=f["mlp_bias"])


def _mistral(f: Fields) -> ModelConfig:
    return ModelConfig(**_rms(f), **_uniform(f, f["sliding_window"]))


def _ministral(f: Fields) -> ModelConfig:
    return ModelConfig(**_rms(f), **_sliding(f, f["sliding_window"], lambda layer: True))


def _qwen_sliding(f: Fields) -> Fields:
    window = f["sliding_window"] if f["use_sliding_window"] else None
    return _sliding(f, window, lambda layer: window is not None and layer >= f["max_window_layers"])


def _qwen2(f: Fields) -> ModelConfig:
    return ModelConfig(**_rms(f), **_qwen_sliding(f), qkv_bias=True)


def _qwen3(f: Fields) -> ModelConfig:
    return ModelConfig(**_rms(f), **_qwen_sliding(f), **_biases(f["attention_bias"]), qk_norm=True)


def _phi(f: Fields) -> ModelConfig:
    fields = _sizes(f)
    return ModelConfig(
        **fields,
        **_uniform(f),
        **_biases(True, "mlp_bias", "head_bias"),
        rope=_rope(f, fields["head_dim"]),
        norm="layer",
        norm_eps=f["layer_norm_eps"],
        wiring="parallel",
        gated_mlp=False,
        activation=_activation(f),
    )


def _opt(f: Fields) -> ModelConfig:
    if f["word_embed_proj_dim"] not in (None, f["hidden_size"]):
        raise ModelError(
            f"opt models with word_embed_proj_dim {f['word_embed_proj_dim']} are not supported: the embedding must be "
            "as wide as the layers (that of opt-350m is not); use another model"
        )
    return ModelConfig(
        **_sizes(f, inner="ffn_dim"),
        **_uniform(f),
        **_biases(f["enable_bias"], "mlp_bias"),
        position="learned",
        learned_offset=2,
        norm="layer",
        gated_mlp=False,
        activation=_activation(f, "activation_function"),
    )


def _gpt2(f: Fields) -> ModelConfig:
    f["n_inner"] = f["n_inner"] or 4 * f["hidden_size"]
    return ModelConfig(
        **_sizes(f, inner="n_inner"),
        **_uniform(f),
        **_biases(True, "mlp_bias"),
        position="learned",
        norm="layer",
        norm_eps=f["layer_norm_epsilon"],
        gated_mlp=False,
        activation=_activation(f, "activation_function"),
        attention_scale=None if f["scale_attn_weights"] else 1.0,
    )


def _gemma_fields(f: Fields) -> Fields:
    biases = _biases(f["attention_bias"])
    return {**_rms(f), **biases, "norm_plus_one": True, "embedding_scale": math.sqrt(f["hidden_size"])}


def _gemma(f: Fields) -> ModelConfig:
    # Gemma's first files have "gelu" for the tanh approximation
    f["hidden_act"] = "gelu_pytorch_tanh" if f["hidden_act"] == "gelu" else f["hidden_act"]
    return ModelConfig(**_gemma_fields(f), **_uniform(f))


def _gemma2(f: Fields) -> ModelConfig:
    return ModelConfig(
        **_gemma_fields(f),
        **_sliding(f, f["sliding_window"], lambda layer: layer % 2 == 0),
        post_norms=True,
        attention_scale=f["query_pre_attn_scalar"] ** -0.5,
        attention_softcap=f["attn_logit_softcapping"],
        logit_softcap=f["final_logit_softcapping"],
    )


def _gpt_neox(f: Fields) -> ModelConfig:
    width = _head_dim(f["hidden_size"], f["num_attention_heads"])
    if f["head_dim"] not in (None, width):
        raise ModelError(
            f"head_dim {f['head_dim']} in the model's config is not hidden_size by heads, {width}, as in all gpt_neox "
            "models; correct the config or fetch the model again"
        )
    return ModelConfig(
        **_sizes(f),
        **_uniform(f),
        **_biases(f["attention_bias"]),
        rope=_rope(f, width, theta="rotary_emb_base", share="rotary_pct"),
        norm="layer",
        norm_eps=f["layer_norm_eps"],
        wiring="parallel_two_norms" if f["use_parallel_residual"] else "sequential",
        mlp_bias=True,
        gated_mlp=False,
        activation=_activation(f),
    )


# -- the modules of a layer ------------------------------------------------------------------------
_PARTS = ("norm_in", "qkv", "out", "norm_mlp", "mlp.up", "mlp.down")


def _block(*modules: str, **others: str) -> dict[str, tuple[str, ...]]:
    """The Hugging Face modules of each of ``_PARTS`` and of ``others``; fused ones are separated by spaces."""
    named = {**dict(zip(_PARTS, modules, strict=True)), **others}
    return {part: tuple(names.split()) for part, names in named.items() if names}


_QKV, _OUT = "self_attn.q_proj self_attn.k_proj self_attn.v_proj", "self_attn.o_proj"
_UP, _DOWN = "mlp.gate_proj mlp.up_proj", "mlp.down_proj"
_NORM, _NORM_MLP = "input_layernorm", "post_attention_layernorm"
_LLAMA = _block(_NORM, _QKV, _OUT, _NORM_MLP, _UP, _DOWN)
_QWEN3 = _block(_NORM, _QKV, _OUT, _NORM_MLP, _UP, _DOWN, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")
_PHI = _block(_NORM, _QKV, "self_attn.dense", "", "mlp.fc1", "mlp.fc2")
_PHI3 = _block(_NORM, "self_attn.qkv_proj", _OUT, _NORM_MLP, "mlp.gate_up_proj", _DOWN)
_OPT = _block("self_attn_layer_norm", _QKV, "self_attn.out_proj", "final_layer_norm", "fc1", "fc2")
_GPT2 = _block("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
_NEOX = _block(
    *(_NORM, "attention.query_key_value", "attention.dense", _NORM_MLP, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
)
_GEMMA2 = _block(
    *(_NORM, _QKV, _OUT, "pre_feedforward_layernorm", _UP, _DOWN),
    norm_after_attention="post_attention_layernorm",
    norm_after_mlp="post_feedforward_layernorm",
)

FAMILIES: dict[str, Family] = {
    "llama": Family(_llama, _LLAMA),
    "mistral": Family(_mistral, _LLAMA),
    "ministral": Family(_ministral, _LLAMA),
    "qwen2": Family(_qwen2, _LLAMA),
    "qwen3": Family(_qwen3, _QWEN3),
    "phi": Family(_phi, _PHI, norm="final_layernorm"),
    "phi3": Family(_mistral, _PHI3),
    "opt": Family(*(_opt, _OPT, ("model.decoder.", "decoder.")), positions="embed_positions", norm="final_layer_norm"),
    "gpt2": Family(
        *(_gpt2, _GPT2, ("transformer.", ""), "h", "wte", "wpe", "ln_f"),
        layouts=dict.fromkeys(("qkv", "out", "mlp.up", "mlp.down"), "transposed"),
    ),
    "gemma": Family(_gemma, _LLAMA),
    "gemma2": Family(_gemma2, _GEMMA2),
    "gpt_neox": Family(
        *(_gpt_neox, _NEOX, ("gpt_neox.", "")),
        embedding="embed_in",
        norm="final_layer_norm",
        heads=("embed_out", "lm_head"),
        layouts={"qkv": "by_head"},
    ),
}
