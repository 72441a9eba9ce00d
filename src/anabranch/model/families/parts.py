"""Parts of a ModelConfig that several families share, from the fields of ``config.json``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from anabranch.errors import ModelError
from anabranch.model.check import check_rope_fields, check_share, layer_kinds
from anabranch.model.config import RopeConfig
from anabranch.model.fields import FIELDS
from anabranch.model.rope import ROPE_VARIANTS, check_rope
from anabranch.support.jsonfiles import shown

__all__ = ["Fields", "activation", "biases", "head_dim", "rms", "rope", "ropes", "sizes", "sliding", "uniform"]

Fields = dict[str, Any]  # honoured fields of config.json with their defaults, or fields of a ModelConfig
_BIAS = ("qkv_bias", "out_bias")

_ACTIVATIONS: dict[str, Literal["silu", "gelu", "gelu_tanh", "relu"]] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu",
    "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh",
}  # fmt: skip


def activation(f: Fields, key: str = "hidden_act") -> Literal["silu", "gelu", "gelu_tanh", "relu"]:
    """Our name of the activation in a field. Raises ModelError for an unknown one."""
    if (name := f[key]) not in _ACTIVATIONS:
        supported = ", ".join(sorted(_ACTIVATIONS))
        raise ModelError(f"{key} {shown(name)} in the model's config is not supported; supported are {supported}")
    return _ACTIVATIONS[name]


def sizes(f: Fields, *, inner: str = "intermediate_size") -> Fields:
    """The fields of all families. Grouped heads and their width are honoured only if the family has them."""
    heads, first = f["num_attention_heads"], f["bos_token_id"]
    return {
        "family": f["family"],
        "vocab_size": f["vocab_size"],
        "hidden_size": f["hidden_size"],
        "num_layers": f["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": f.get("num_key_value_heads") or heads,
        "head_dim": f.get("head_dim") or head_dim(f["hidden_size"], heads),
        "intermediate_size": f[inner],
        "max_positions": f["max_position_embeddings"],
        "tied_head": f["tie_word_embeddings"],
        "eos_token_ids": f["eos_token_id"],
        "bos_token_id": first if first is not None and 0 <= first < f["vocab_size"] else None,
    }


def head_dim(width: int, heads: int) -> int:
    """The usual width of a head. Raises ModelError if the heads do not divide the model\'s width."""
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


def rope(f: Fields, head_dim: int, *, theta: str = "rope_theta", share: str = "partial_rotary_factor") -> RopeConfig:
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


def ropes(f: Fields, head_dim: int) -> Fields:
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
    by_kind = {}
    for kind, theta in bases.items():
        record = records.get(kind)
        if not isinstance(record, dict | None):
            raise ModelError(
                f"rope_parameters.{kind} in the model's config must be an object, got {shown(record)}; correct the "
                "config or fetch the model again"
            )
        read = {"rope_parameters": record, "rope_scaling": None, "rope_theta": theta}
        by_kind[kind] = rope({**f, **read, "original_max_position_embeddings": None}, head_dim)
    scaling = by_kind[_SLIDES].scaling
    if scaling is not None and scaling["rope_type"] in ("dynamic", "longrope"):
        raise ModelError(
            f"rope_parameters.{_SLIDES} in the model's config has the rotary variant {shown(scaling['rope_type'])}, "
            "which is supported for layers without a window only; use another model"
        )
    same = by_kind[_SLIDES] == by_kind[_FULL]
    return {"rope": by_kind[_FULL], "sliding_rope": None if same else by_kind[_SLIDES]}


def rms(f: Fields) -> Fields:
    """Llama and its descendants: RMSNorm, rotary positions, a gated MLP."""
    fields = sizes(f)
    by_kind = "original_max_position_embeddings" not in f
    return {
        **fields,
        **(ropes(f, fields["head_dim"]) if by_kind else {"rope": rope(f, fields["head_dim"])}),
        "norm_eps": f["rms_norm_eps"],
        "activation": activation(f, "hidden_activation" if "hidden_activation" in f else "hidden_act"),
    }


def sliding(f: Fields, window: int | None, slides: Callable[[int], bool]) -> Fields:
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


def uniform(f: Fields, window: int | None = None) -> Fields:
    """The window of a family whose layers are all alike; ``layer_types``, if the file has it, must agree."""
    wanted = _FULL if window is None else _SLIDES
    for kind in layer_kinds(f["layer_types"], f["num_hidden_layers"]) or ():
        if kind != wanted:
            raise ModelError(
                f"layer_types in the model's config has {shown(kind)}, but all layers of this {f['family']} model use "
                f"{wanted}; correct the config or fetch the model again"
            )
    return {"sliding_window": window}


def biases(value: bool, *more: str) -> Fields:
    """The same value for the biases of both attention projections and of ``more`` layers."""
    return dict.fromkeys((*_BIAS, *more), value)
