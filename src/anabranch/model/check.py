"""Validation of a Hugging Face ``config.json`` before it is used, and of the resulting ModelConfig.

The type and range of each key that a family reads are given here, so that messages name the key of the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from anabranch.errors import ModelError
from anabranch.model.config import ModelConfig
from anabranch.support.jsonfiles import is_number, is_whole, shown

__all__ = ["check_config", "check_fields", "token_ids"]

ADVICE = "correct the config or fetch the model again"


class _Range(NamedTuple):
    """A number from ``low`` to ``high``; ``whole`` ones are integers, ``optional`` ones may be null."""

    low: float
    high: float
    whole: bool = True
    optional: bool = False

    def holds(self, value: Any) -> bool:
        if value is None:
            return self.optional
        if self.whole:
            return is_whole(value, int(self.low), int(self.high))
        return is_number(value, self.low, self.high)

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        return f"{kind} from {self.low:,} to {self.high:,}" + (" or null" if self.optional else "")


# Upper limits are far above any published model; they prevent allocations for damaged configs.
_WIDTH, _HEADS, _LAYERS = _Range(1, 1 << 20), _Range(1, 1 << 14), _Range(1, 1 << 12)
_POSITIONS = _Range(1, (1 << 31) - 1)
_EPSILON, _SHARE = _Range(1e-30, 1, whole=False), _Range(1e-6, 1, whole=False)
_THETA, _FACTOR = _Range(1.001, 1e15, whole=False), _Range(1e-6, 1e6, whole=False)
_NUMBERS: dict[str, _Range] = {
    "vocab_size": _Range(1, 1 << 24),
    **dict.fromkeys(("hidden_size", "n_embd"), _WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim"), _Range(1, 1 << 24)),
    "n_inner": _Range(1, 1 << 24, optional=True),
    "word_embed_proj_dim": _WIDTH._replace(optional=True),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head"), _HEADS),
    "num_key_value_heads": _HEADS._replace(optional=True),
    "head_dim": _Range(1, 1 << 14, optional=True),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), _POSITIONS),
    **dict.fromkeys(("original_max_position_embeddings", "sliding_window"), _POSITIONS._replace(optional=True)),
    "max_window_layers": _Range(0, 1 << 12),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), _EPSILON),
    "rope_theta": _THETA._replace(optional=True),
    "rotary_emb_base": _THETA._replace(optional=True),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), _SHARE._replace(optional=True)),
    "query_pre_attn_scalar": _Range(1e-6, 1e6, whole=False),
    **dict.fromkeys(
        ("attn_logit_softcapping", "final_logit_softcapping"), _Range(1e-3, 1e6, whole=False, optional=True)
    ),
    "bos_token_id": _Range(-1, 1 << 31, optional=True),
}
# Parameters of the rotary variants.
_STRETCH: dict[str, _Range] = {
    **{key: _NUMBERS[key] for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")},
    "factor": _FACTOR._replace(optional=True),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), _FACTOR),
    **dict.fromkeys(
        ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"),
        _Range(0, 1e6, whole=False, optional=True),
    ),
}
_FLAGS = (
    "tie_word_embeddings", "attention_bias", "mlp_bias", "enable_bias", "use_sliding_window", "use_parallel_residual",
    "do_layer_norm_before", "layer_norm_elementwise_affine", "_remove_final_layer_norm", "qk_layernorm",
    "scale_attn_by_inverse_layer_idx", "add_cross_attention",
)  # fmt: skip
_NAMES = ("model_type", "hidden_act", "hidden_activation", "activation_function")


def check_fields(hf: Mapping[str, Any]) -> None:
    """Check the type and range of all keys that are read. Raises ModelError."""
    _check_numbers(hf, _NUMBERS, "")
    for key in _FLAGS:
        if not isinstance(hf.get(key, False), bool | None):
            raise _wrong(key, hf[key], "true or false")
    for key in _NAMES:
        if not isinstance(hf.get(key, ""), str | None):
            raise _wrong(key, hf[key], "a name")
    kinds = hf.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        raise _wrong("layer_types", kinds, "a list of names")
    for key in ("rope_parameters", "rope_scaling"):
        _check_stretch(key, hf.get(key))


def _check_stretch(key: str, record: Any) -> None:
    if record is None:
        return
    if not isinstance(record, dict):
        raise _wrong(key, record, "an object")
    _check_numbers(record, _STRETCH, f"{key}.")
    for name in ("rope_type", "type"):
        if not isinstance(record.get(name, ""), str):
            raise _wrong(f"{key}.{name}", record[name], "a name")
    for name in ("short_factor", "long_factor"):
        factors = record.get(name, [])
        if not isinstance(factors, list) or not all(is_number(factor, 1e-6, 1e6) for factor in factors):
            raise _wrong(f"{key}.{name}", factors, "a list of positive numbers")
    if not isinstance(record.get("truncate", True), bool):
        raise _wrong(f"{key}.truncate", record["truncate"], "true or false")


def _check_numbers(record: Mapping[str, Any], ranges: Mapping[str, _Range], prefix: str) -> None:
    for key, wanted in ranges.items():
        if key in record and not wanted.holds(record[key]):
            raise _wrong(prefix + key, record[key], str(wanted))


def _wrong(key: str, value: Any, wanted: str, where: str = "the model's config") -> ModelError:
    return ModelError(f"{key} in {where} must be {wanted}, got {shown(value)}; {ADVICE}")


def token_ids(value: Any, key: str, vocab_size: int, where: str = "the model's config") -> tuple[int, ...]:
    """Token ids from a config: one, a list, or null. Raises ModelError for anything else."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(is_whole(token, 0, vocab_size - 1) for token in ids):
        raise _wrong(key, value, f"a token id below {vocab_size} or a list of them", where)
    return tuple(ids)


def check_config(config: ModelConfig) -> None:
    """Check that the sizes are consistent. Raises ModelError."""
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{config.num_heads} heads cannot share {config.num_kv_heads} key/value heads evenly; {ADVICE}"
        )
    turned = config.rope.dim
    if config.position == "rope" and (turned % 2 or not 2 <= turned <= config.head_dim):
        raise ModelError(
            f"the number of rotated channels must be even and at most {config.head_dim}, the width of a head, "
            f"got {turned}; correct head_dim or partial_rotary_factor in the config, or fetch the model again"
        )
    slides = config.sliding_layers
    if slides is not None and len(slides) != config.num_layers:
        raise ModelError(
            f"layer_types in the model's config must name {config.num_layers} layers, got {len(slides)}; {ADVICE}"
        )


def check_known(names: Iterable[str], known: Iterable[str]) -> None:
    """Check that all types of layers are supported. Raises ModelError."""
    if unknown := sorted(set(names) - set(known)):
        raise ModelError(
            f"layer_types in the model's config has {shown(unknown[0])}; supported are {', '.join(sorted(known))}"
        )
