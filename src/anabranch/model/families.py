"""The supported model families: how their Hugging Face configs are read and how their weights are named.

A family is an entry of a table: a function from ``config.json`` to ``ModelConfig``, and for each of our modules the
Hugging Face modules that it is assembled from. A new family needs only an entry and a parity test.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from anabranch.errors import ModelError
from anabranch.model.check import check_config, check_fields, check_rope_fields, check_share, layer_kinds, token_ids
from anabranch.model.config import DeltaConfig, ExpertsConfig, ModelConfig, RopeConfig
from anabranch.model.fields import FIELDS, family_of, read_fields, text_part
from anabranch.model.rope import ROPE_VARIANTS, check_rope, context_length
from anabranch.support.jsonfiles import is_whole, shown

__all__ = ["FAMILIES", "UNSUPPORTED", "Family", "Layout", "Source", "model_config", "module_rows", "weight_source"]

HfConfig = Mapping[str, Any]
Fields = dict[str, Any]  # honoured fields of config.json with their defaults, or fields of a ModelConfig
# How a matrix is stored: as ours, transposed (GPT-2's Conv1D), or q, k, v of head 0, then of head 1, ... (NeoX)
Layout = Literal["rows", "transposed", "by_head"]
_BIAS = ("qkv_bias", "out_bias")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)")


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
    """An entry of the table. ``block`` maps our modules of a layer to theirs; other fields name the modules outside.

    In the names of an expert's modules, ``{}`` stands for its number.
    """

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
    hf = text_part(hf)
    if hf.get("quantization_config"):
        raise ModelError("the weights are stored quantised; use unquantised safetensors or a GGUF file instead")
    name = family_of(hf) if family is None else family
    if name not in FAMILIES:
        why = f": {UNSUPPORTED[name]}" if name in UNSUPPORTED else ""
        raise ModelError(f"the family {shown(name)} is not supported{why}; supported are {', '.join(sorted(FAMILIES))}")
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
    if kind not in ("weight", "bias"):  # a tensor of its own
        stem, kind = parameter, ""
    suffix = f".{kind}" if kind else ""
    outer = family.prefixes[0].partition(".")[0] + "."
    heads = tuple(f"{prefix}{head}.{kind}" for prefix in ("", outer) for head in family.heads)
    if stem == "head":
        return Source((heads,))
    layout: Layout = "rows"
    if stem.startswith("blocks."):
        _, index, part = stem.split(".", 2)
        expert = _EXPERT.match(part)
        part, number = (part, "") if expert is None else (f"mlp.experts{part[expert.end() :]}", expert[1])
        modules = tuple(f"{family.layers}.{index}.{module.format(number)}" for module in family.block[part])
        layout = family.layouts.get(part, "rows")
    else:
        modules = ({"embedding": family.embedding, "positions": family.positions, "norm": family.norm}[stem],)
    prefixes = (*family.prefixes, outer + family.prefixes[0])
    tied = heads if stem == "embedding" and config.tied_head else ()
    return Source(tuple((*(f"{p}{module}{suffix}" for p in prefixes), *tied) for module in modules), layout)


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


_FULL, _SLIDES = "full_attention", "sliding_attention"


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


def _ropes(f: Fields, head_dim: int) -> Fields:
    """The rotary configs of a family with ``rope_parameters`` for layers of each kind.

    ``rope_theta`` and ``rope_scaling`` (files before transformers 5) are for the layers without a window.
    """
    given, longer = f["rope_parameters"], f["rope_scaling"]
    records: dict[str, Any] = {} if given is None else dict(given)
    if unknown := [name for name in records if name not in (_FULL, _SLIDES)]:
        raise ModelError(
            f"rope_parameters in the model's config has {shown(unknown[0])}, but {f['family']} models have parameters "
            f"for {_FULL} and {_SLIDES}; correct the config or fetch the model again"
        )
    if longer is not None and given is not None:
        raise ModelError(
            "the model's config has both rope_scaling and rope_parameters; remove one or fetch the model again"
        )
    if longer is not None:
        records[_FULL] = longer
    # transformers uses rope_theta for one kind of layers only
    base = FIELDS[f["family"]].honoured["rope_theta"]
    bases = {_FULL: f["rope_theta"], _SLIDES: f.get("rope_local_base_freq", base)}
    found = {}
    for kind, theta in bases.items():
        record = records.get(kind)
        if not isinstance(record, dict | None):
            raise ModelError(
                f"rope_parameters.{kind} in the model's config must be an object, got {shown(record)}; correct the "
                "config or fetch the model again"
            )
        read = {"rope_parameters": record, "rope_scaling": None, "rope_theta": theta}
        found[kind] = _rope({**f, **read, "original_max_position_embeddings": None}, head_dim)
    scaling = found[_SLIDES].scaling
    if scaling is not None and scaling["rope_type"] in ("dynamic", "longrope"):
        raise ModelError(
            f"rope_parameters.{_SLIDES} in the model's config has the rotary variant {shown(scaling['rope_type'])}, "
            "which is supported for layers without a window only; use another model"
        )
    same = found[_SLIDES] == found[_FULL]
    return {"rope": found[_FULL], "sliding_rope": None if same else found[_SLIDES]}


def _rms(f: Fields) -> Fields:
    """Llama and its descendants: RMSNorm, rotary positions, a gated MLP."""
    fields = _sizes(f)
    by_kind = "original_max_position_embeddings" not in f
    return {
        **fields,
        **(_ropes(f, fields["head_dim"]) if by_kind else {"rope": _rope(f, fields["head_dim"])}),
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


def _uniform(f: Fields, window: int | None = None) -> Fields:
    """The window of a family whose layers are all alike; ``layer_types``, if the file has it, must agree."""
    wanted = _FULL if window is None else _SLIDES
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
    return ModelConfig(**_rms(f), **_qwen_sliding(f), **_biases(f["attention_bias"]), qk_norm="head")


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


def _gemma3(f: Fields) -> ModelConfig:
    every = f["sliding_window_pattern"]  # the last layer of each group of so many has no window
    return ModelConfig(
        **_gemma_fields(f),
        **_sliding(f, f["sliding_window"], lambda layer: (layer + 1) % every > 0),
        qk_norm="head",
        post_norms=True,
        attention_scale=f["query_pre_attn_scalar"] ** -0.5,
        logit_softcap=f["final_logit_softcapping"],
    )


def _smollm3(f: Fields) -> ModelConfig:
    count, rotated, every = f["num_hidden_layers"], f["no_rope_layers"], f["no_rope_layer_interval"]
    if rotated is None:
        rotated = [int((layer + 1) % every > 0) for layer in range(count)]
    if len(rotated) < count or not all(is_whole(entry, 0, 1) for entry in rotated):
        raise ModelError(
            f"no_rope_layers in the model's config must be a list of 0 and 1 for {count} layers, got {shown(rotated)}; "
            "correct the config or fetch the model again"
        )
    layers = tuple(bool(entry) for entry in rotated[:count])
    window = f["sliding_window"]
    slides = f["use_sliding_window"] and window is not None
    return ModelConfig(
        **_rms(f),
        **_sliding(f, window, lambda layer: slides and not layers[layer]),
        **_biases(f["attention_bias"]),
        mlp_bias=f["mlp_bias"],
        rotated_layers=None if all(layers) else layers,
    )


# Ministral 3's positions, if its file states none.
_MINISTRAL3_ROPE = {
    "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def _ministral3(f: Fields) -> ModelConfig:
    key = "rope_scaling" if f["rope_scaling"] else "rope_parameters"
    f[key] = _MINISTRAL3_ROPE if f[key] is None else f[key]
    fields, beta = _rms(f), f[key].get("llama_4_scaling_beta")
    rope: RopeConfig = fields["rope"]
    known = rope.scaling is not None and rope.scaling["rope_type"] in ("yarn", "llama3", "longrope")
    if beta is None or not (known or "original_max_position_embeddings" in f[key]):
        raise ModelError(
            f"{key} in the model's config must have llama_4_scaling_beta and original_max_position_embeddings in a "
            "ministral3 model; correct the config or fetch the model again"
        )
    check_rope_fields({"llama_4_scaling_beta": beta}, key)
    scaling = (float(beta), int(rope.original_max_positions or rope.max_positions))
    return ModelConfig(**fields, **_uniform(f, f["sliding_window"]), query_scaling=scaling if beta else None)


def _olmo_fields(f: Fields) -> Fields:
    """Norms after attention and MLP instead of before, and over all heads of q and of k."""
    biases = _biases(f["attention_bias"])
    return {**_rms(f), **biases, "qk_norm": "all", "pre_norms": False, "post_norms": True}


def _olmo2(f: Fields) -> ModelConfig:
    return ModelConfig(**_olmo_fields(f), **_uniform(f))


def _olmo3(f: Fields) -> ModelConfig:
    sliding = _sliding(f, f["sliding_window"], lambda layer: (layer + 1) % 4 > 0)
    return ModelConfig(**_olmo_fields(f), **sliding)


def _granite_fields(f: Fields) -> Fields:
    return {
        **_rms(f),
        **_uniform(f),
        **_biases(f["attention_bias"]),
        "attention_scale": float(f["attention_multiplier"]),
        "embedding_scale": float(f["embedding_multiplier"]),
        "residual_scale": float(f["residual_multiplier"]),
        "output_scale": 1 / f["logits_scaling"],
    }


def _granite(f: Fields) -> ModelConfig:
    return ModelConfig(**_granite_fields(f), mlp_bias=f["mlp_bias"])


def _granite4(f: Fields) -> ModelConfig:
    if f["num_local_experts"]:
        raise ModelError(
            f"granitemoehybrid models with num_local_experts {f['num_local_experts']} in config.json are not "
            "supported: there are no mixtures of experts; use a dense model"
        )
    if f["layer_types"] is None:
        raise ModelError(
            "granitemoehybrid models without layer_types in config.json have recurrent layers only, which are not "
            "supported; use a dense model"
        )
    if (position := f["position_embedding_type"]) not in (None, "rope"):
        raise ModelError(
            f"position_embedding_type {shown(position)} in the model's config is not supported; supported are null "
            "and rope"
        )
    f["intermediate_size"] = f["shared_intermediate_size"]
    rotated = None if position == "rope" else (False,) * f["num_hidden_layers"]
    return ModelConfig(**_granite_fields(f), rotated_layers=rotated)


def _mixtral(f: Fields) -> ModelConfig:
    experts = ExpertsConfig(f["num_experts"], f["num_experts_per_tok"], f["intermediate_size"])
    return ModelConfig(**_rms(f), **_uniform(f, f["sliding_window"]), experts=experts)


def _qwen3_moe(f: Fields) -> ModelConfig:
    count, step, dense = f["num_hidden_layers"], f["decoder_sparse_step"], f["mlp_only_layers"] or ()
    layers = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(count))
    experts = ExpertsConfig(
        f["num_experts"],
        f["num_experts_per_tok"],
        f["moe_intermediate_size"],
        layers=None if all(layers) else layers,
        normalized=f["norm_topk_prob"],
    )
    window = f["sliding_window"] if f["use_sliding_window"] else None
    return ModelConfig(
        **_rms(f), **_uniform(f, window), **_biases(f["attention_bias"]), qk_norm="head", experts=experts
    )


def _gpt_oss(f: Fields) -> ModelConfig:
    if not f["rope_scaling"] and f["rope_parameters"] is None:
        stretched = {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
        f["rope_parameters"] = {"rope_type": "yarn", "original_max_position_embeddings": 4096, **stretched}
    experts = ExpertsConfig(
        *(f["num_experts"], f["num_experts_per_tok"], f["intermediate_size"]),
        bias=True,
        clamp=(f["swiglu_alpha"], f["swiglu_limit"]),
    )
    return ModelConfig(
        **_rms({**f, "hidden_act": "silu"}),
        **_sliding(f, f["sliding_window"], lambda layer: layer % 2 == 0),
        **_biases(f["attention_bias"]),
        attention_sinks=True,
        experts=experts,
    )


_RECURS = "linear_attention"


def _qwen3_5(f: Fields) -> ModelConfig:
    count, every = f["num_hidden_layers"], f["full_attention_interval"]
    kinds = layer_kinds(f["layer_types"], count, ("full_attention", _RECURS))
    recurrent = tuple((layer + 1) % every > 0 if kinds is None else kinds[layer] == _RECURS for layer in range(count))
    delta = DeltaConfig(
        recurrent,
        *(f["linear_num_key_heads"], f["linear_num_value_heads"]),
        *(f["linear_key_head_dim"], f["linear_value_head_dim"], f["linear_conv_kernel_dim"]),
    )
    return ModelConfig(
        **_rms(f),
        **_biases(f["attention_bias"]),
        norm_plus_one=True,
        qk_norm="head",
        attention_gate=True,
        recurrent=delta if any(recurrent) else None,
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
_GEMMA3 = {**_GEMMA2, "q_norm": ("self_attn.q_norm",), "k_norm": ("self_attn.k_norm",)}
_OLMO = {part: modules for part, modules in _GEMMA3.items() if part not in ("norm_in", "norm_mlp")}
_GRANITE4 = _block(_NORM, _QKV, _OUT, _NORM_MLP, "shared_mlp.input_linear", "shared_mlp.output_linear")
# the last two in models of images and text
_TEXT_PREFIXES = ("model.", "", "model.language_model.", "language_model.model.")
_TEXT_HEADS = ("lm_head", "language_model.lm_head")


def _experts(attention: Mapping[str, tuple[str, ...]], router: str, up: str, down: str) -> dict[str, tuple[str, ...]]:
    """A layer of experts, whose modules are named by their numbers."""
    parts = {"mlp.router": router, "mlp.experts.up": up, "mlp.experts.down": down}
    return {**attention, **{part: tuple(names.split()) for part, names in parts.items()}}


_EACH = "mlp.experts.{}."
_MIXTRAL = _experts(
    _LLAMA,
    "block_sparse_moe.gate",
    "block_sparse_moe.experts.{}.w1 block_sparse_moe.experts.{}.w3",
    "block_sparse_moe.experts.{}.w2",
)
_QWEN3_MOE = _experts(_QWEN3, "mlp.gate", f"{_EACH}gate_proj {_EACH}up_proj", f"{_EACH}down_proj")
# published with the experts of a layer in one tensor, see ``fused.py``
_GPT_OSS = _experts(
    {**_LLAMA, "sinks": ("self_attn.sinks",)}, "mlp.router", f"{_EACH}gate_proj {_EACH}up_proj", f"{_EACH}down_proj"
)

_DELTA = {
    "qkv": "in_proj_qkv", "gate": "in_proj_z", "rates": "in_proj_b in_proj_a", "out": "out_proj",
    "conv": "conv1d.weight", "bias_dt": "dt_bias", "log_a": "A_log", "scale": "norm.weight",
}  # fmt: skip
# the rows of q_proj are those of queries and of the gate by turns, which ``fused.py`` separates
_QWEN3_5 = {
    **_QWEN3,
    "qkv": ("self_attn.q_proj.queries", "self_attn.k_proj", "self_attn.v_proj"),
    "gate": ("self_attn.q_proj.gate",),
    **{f"mixer.{part}": tuple(f"linear_attn.{name}" for name in names.split()) for part, names in _DELTA.items()},
}

FAMILIES: dict[str, Family] = {
    "llama": Family(_llama, _LLAMA),
    "mistral": Family(_mistral, _LLAMA, _TEXT_PREFIXES, heads=_TEXT_HEADS),
    "ministral": Family(_ministral, _LLAMA),
    "qwen2": Family(_qwen2, _LLAMA),
    "qwen3": Family(_qwen3, _QWEN3),
    "qwen3_5_text": Family(_qwen3_5, _QWEN3_5, _TEXT_PREFIXES, heads=_TEXT_HEADS),
    "qwen3_moe": Family(_qwen3_moe, _QWEN3_MOE),
    "mixtral": Family(_mixtral, _MIXTRAL),
    "gpt_oss": Family(_gpt_oss, _GPT_OSS),
    "phi": Family(_phi, _PHI, norm="final_layernorm"),
    "phi3": Family(_mistral, _PHI3),
    "opt": Family(*(_opt, _OPT, ("model.decoder.", "decoder.")), positions="embed_positions", norm="final_layer_norm"),
    "gpt2": Family(
        *(_gpt2, _GPT2, ("transformer.", ""), "h", "wte", "wpe", "ln_f"),
        layouts=dict.fromkeys(("qkv", "out", "mlp.up", "mlp.down"), "transposed"),
    ),
    "gemma": Family(_gemma, _LLAMA),
    "gemma2": Family(_gemma2, _GEMMA2),
    "gemma3_text": Family(_gemma3, _GEMMA3, _TEXT_PREFIXES, heads=_TEXT_HEADS),
    "smollm3": Family(_smollm3, _LLAMA),
    "ministral3": Family(_ministral3, _LLAMA, _TEXT_PREFIXES, heads=_TEXT_HEADS),
    "olmo2": Family(_olmo2, _OLMO),
    "olmo3": Family(_olmo3, _OLMO),
    "granite": Family(_granite, _LLAMA),
    "granitemoehybrid": Family(_granite4, _GRANITE4),
    "gpt_neox": Family(
        *(_gpt_neox, _NEOX, ("gpt_neox.", "")),
        embedding="embed_in",
        norm="final_layer_norm",
        heads=("lm_head", "embed_out"),
        layouts={"qkv": "by_head"},
    ),
}

_EXPERTS = "mixtures of experts of this kind do not run here yet"
_RECURRENT = "layers with a recurrent state, which a rejected draft would have to roll back, do not run here yet"
_IMAGES = "models of images and text do not run here"
# Families that people ask for, by the names of their configs and of GGUF files, and why they are not supported.
UNSUPPORTED: dict[str, str] = {
    **dict.fromkeys(
        (
            *("qwen2_moe", "qwen2moe", "olmoe", "phimoe"),
            *("granitemoe", "deepseek_v2", "deepseek_v3", "deepseek2", "glm4_moe", "glm4moe", "llama4_text"),
            *("ernie4_5_moe", "minimax_m2", "mistral4", "dbrx", "grok"),
        ),
        _EXPERTS,
    ),
    **dict.fromkeys(
        (
            *("qwen3_next", "qwen3next", "qwen35", "qwen3_5_moe_text", "qwen35moe", "lfm2", "lfm2_moe"),
            *("lfm2moe", "granitehybrid", "mamba", "mamba2", "jamba", "bamba", "falcon_h1", "falcon-h1", "nemotron_h"),
            *("recurrent_gemma", "rwkv6", "rwkv7", "zamba2", "olmo_hybrid"),
        ),
        _RECURRENT,
    ),
    **dict.fromkeys(("llama4", "qwen3_5_moe", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3n"), _IMAGES),
}
