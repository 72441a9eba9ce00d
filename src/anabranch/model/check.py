"""Validation of a Hugging Face ``config.json`` before it is used, and of the resulting ModelConfig.

The types and ranges of honoured fields are checked by the file's names, so that messages name the field in the file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from anabranch.errors import ModelError
from anabranch.model.config import ModelConfig
from anabranch.support.jsonfiles import is_number, is_whole, shown

__all__ = ["check_config", "check_fields", "check_rope_fields", "check_share", "layer_kinds", "token_ids"]

ADVICE = "correct the config or fetch the model again"


class _Range(NamedTuple):
    """A number from ``low`` to ``high``; ``whole`` ones are integers."""

    low: float
    high: float
    whole: bool = True

    def holds(self, value: Any) -> bool:
        if self.whole:
            return is_whole(value, int(self.low), int(self.high))
        return is_number(value, self.low, self.high)

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        return f"{kind} from {self.low:,} to {self.high:,}"


# Upper limits are far above any published model; they prevent huge allocations for damaged configs.
_WIDTH, _HEADS, _LAYERS, _INNER = _Range(1, 1 << 20), _Range(1, 1 << 14), _Range(1, 1 << 12), _Range(1, 1 << 24)
_POSITIONS = _Range(1, (1 << 31) - 1)
_EPSILON, _SHARE = _Range(1e-30, 1, whole=False), _Range(1e-6, 1, whole=False)
_THETA, _FACTOR = _Range(1.001, 1e15, whole=False), _Range(1e-6, 1e6, whole=False)
_NUMBERS: dict[str, _Range] = {
    "vocab_size": _Range(1, 1 << 24),
    **dict.fromkeys(("hidden_size", "n_embd", "word_embed_proj_dim", "d_model"), _WIDTH),
    **dict.fromkeys(("intermediate_size", "shared_intermediate_size", "ffn_dim", "n_inner", "d_ff"), _INNER),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), _INNER),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"), _LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads", "num_heads"), _HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), _HEADS),
    **dict.fromkeys(("head_dim", "d_kv"), _Range(1, 1 << 14)),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), _POSITIONS),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), _Range(1, 1 << 20)),
    "decoder_vocab_size": _Range(1, 1 << 24),
    "decoder_start_token_id": _Range(0, 1 << 24),
    "num_mel_bins": _Range(1, 1 << 12),
    "relative_attention_num_buckets": _Range(1, 1 << 16),
    "relative_attention_max_distance": _Range(2, (1 << 31) - 1),
    "original_max_position_embeddings": _POSITIONS,
    "sliding_window": _Range(2, (1 << 31) - 1),  # transformers' cache does not slide with a window of 1
    "max_window_layers": _Range(0, 1 << 12),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), _EPSILON),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "rope_local_base_freq"), _THETA),
    **dict.fromkeys(
        ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"),
        _Range(1e-6, 1e6, whole=False),
    ),
    **dict.fromkeys(("sliding_window_pattern", "no_rope_layer_interval"), _Range(1, 1 << 12)),
    "num_local_experts": _Range(0, 1 << 16),
    **dict.fromkeys(("num_experts", "num_experts_per_tok"), _Range(1, 1 << 16)),
    "moe_intermediate_size": _Range(1, 1 << 24),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), _HEADS),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), _Range(1, 1 << 14)),
    "linear_conv_kernel_dim": _Range(2, 64),
    "full_attention_interval": _Range(1, 1 << 12),
    "decoder_sparse_step": _Range(1, 1 << 12),
    **dict.fromkeys(("swiglu_alpha", "swiglu_limit"), _Range(1e-6, 1e6, whole=False)),
    "query_pre_attn_scalar": _Range(1e-6, 1e6, whole=False),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), _Range(1e-3, 1e6, whole=False)),
    "bos_token_id": _Range(-1, 1 << 31),
}
_FLAGS = (
    "tie_word_embeddings", "attention_bias", "mlp_bias", "enable_bias", "use_sliding_window", "use_parallel_residual",
    "scale_attn_weights", "norm_topk_prob", "scale_embedding", "share_encoder_decoder_embeddings",
    "scale_decoder_outputs",
)  # fmt: skip
_NAMES = ("hidden_act", "hidden_activation", "activation_function", "position_embedding_type", "feed_forward_proj")
# Parameters of the rotary variants; those of the second group may be null.
_STRETCH: dict[str, _Range] = {
    "rope_theta": _THETA,
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), _FACTOR),
    "llama_4_scaling_beta": _Range(0, 1e3, whole=False),
}
_STRETCH_OR_NULL: dict[str, _Range] = {
    "original_max_position_embeddings": _POSITIONS,
    "factor": _FACTOR,
    **dict.fromkeys(
        ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"), _Range(0, 1e6, whole=False)
    ),
}
_LAYER_KINDS = ("full_attention", "sliding_attention")


def check_fields(given: Mapping[str, Any], nullable: Collection[str]) -> None:
    """Check types and ranges of the honoured fields in a file. Raises ModelError."""
    for key, value in given.items():
        if value is None:
            if key not in nullable:
                raise _wrong(key, value, _wanted(key))
        elif key in _NUMBERS:
            if not _NUMBERS[key].holds(value):
                raise _wrong(key, value, _wanted(key) + (" or null" if key in nullable else ""))
        elif not isinstance(value, _TYPES.get(key, object)):
            raise _wrong(key, value, _wanted(key))


_TYPES: dict[str, type] = {
    **dict.fromkeys(_FLAGS, bool),
    **dict.fromkeys(_NAMES, str),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), dict),
    **dict.fromkeys(("layer_types", "layers_block_type", "no_rope_layers", "mlp_only_layers"), list),
}
_TYPE_NAMES = {bool: "true or false", str: "a name", dict: "an object", list: "a list"}


def _wanted(key: str) -> str:
    return str(_NUMBERS[key]) if key in _NUMBERS else _TYPE_NAMES[_TYPES[key]]


def check_share(key: str, value: Any) -> None:
    """Check the share of a head's channels that is rotated. Raises ModelError."""
    if not _SHARE.holds(value):
        raise _wrong(key, value, str(_SHARE))


def check_rope_fields(record: Mapping[str, Any], key: str) -> None:
    """Check types and ranges of a rotary variant's parameters, the config's ``key``. Raises ModelError."""
    for name, value in record.items():
        where = f"{key}.{name}"
        if isinstance(value, dict):
            raise ModelError(
                f"{where} in the model's config has rotary parameters of its own, and only models whose layers all "
                "have the same are supported; use another model"
            )
        if name in _STRETCH and not _STRETCH[name].holds(value):
            raise _wrong(where, value, str(_STRETCH[name]))
        if name in _STRETCH_OR_NULL and not (value is None or _STRETCH_OR_NULL[name].holds(value)):
            raise _wrong(where, value, f"{_STRETCH_OR_NULL[name]} or null")
        if name in ("rope_type", "type") and not isinstance(value, str):
            raise _wrong(where, value, "a name")
        if name in ("short_factor", "long_factor") and not (
            isinstance(value, list) and all(is_number(factor, 1e-6, 1e6) for factor in value)
        ):
            raise _wrong(where, value, "a list of positive numbers")
        if name == "truncate" and not isinstance(value, bool):
            raise _wrong(where, value, "true or false")


def layer_kinds(kinds: list[Any] | None, layers: int, known: Collection[str] = _LAYER_KINDS) -> list[str] | None:
    """The ``layer_types`` of a config by transformers' current names; None if it has none. Raises ModelError."""
    if kinds is None:
        return None
    present = ["full_attention" if kind == "attention" else kind for kind in kinds]
    if unknown := [kind for kind in present if kind not in known]:
        raise ModelError(f"layer_types in the model's config has {shown(unknown[0])}; supported are {', '.join(known)}")
    if len(present) != layers:
        raise ModelError(f"layer_types in the model's config must name {layers} layers, got {len(present)}; {ADVICE}")
    return present


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
    for rope in (config.rope, *([] if config.sliding_rope is None else [config.sliding_rope])):
        turned = rope.dim
        if config.position != "rope" or (turned % 2 == 0 and 2 <= turned <= config.head_dim):
            continue
        raise ModelError(
            f"the number of rotated channels must be even and at most {config.head_dim}, the width of a head, "
            f"got {turned}; correct head_dim or partial_rotary_factor in the config, or fetch the model again"
        )
    experts = config.experts
    if experts is not None and experts.chosen > experts.count:
        raise ModelError(f"num_experts_per_tok is {experts.chosen}, but there are {experts.count} experts; {ADVICE}")
    delta = config.recurrent
    if delta is not None and delta.heads % delta.key_heads:
        raise ModelError(
            f"linear_num_value_heads {delta.heads} in the model's config is not a multiple of linear_num_key_heads "
            f"{delta.key_heads}; {ADVICE}"
        )
    encoder = config.encoder
    if encoder is None:
        return
    if wrong := [token for token in encoder.start if token >= config.vocab_size]:
        raise ModelError(
            f"decoder_start_token_id {wrong[0]} in the model's config is not below vocab_size {config.vocab_size}; "
            f"{ADVICE}"
        )
    if config.position == "sinusoidal" and config.hidden_size % 2:
        raise ModelError(f"d_model {config.hidden_size} in the model's config must be even; {ADVICE}")
