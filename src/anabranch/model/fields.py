"""The fields of ``config.json`` by family: honoured, refused or ignored.

The decoder supports every value of an *honoured* field as transformers does (``check.py`` and ``families`` check
them); the default is that of transformers' config class. A *refused* field is read by transformers but not by the
decoder: it may only have a neutral value. *Ignored* fields do not change the output of a loaded model, among them all
that transformers' modeling of the family never reads. ``tests/model/test_fields.py`` compares these tables with
transformers' config classes and modeling files, so that new fields of later versions are noticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from anabranch.errors import ModelError
from anabranch.support.jsonfiles import shown

__all__ = ["FIELDS", "Fields", "Refused", "family_of", "read_fields", "text_part"]


class Refused(NamedTuple):
    """A field that must have one of the ``neutral`` values if the file has it."""

    neutral: tuple[Any, ...]
    why: str


@dataclass(frozen=True)
class Fields:
    """The fields of a family.

    honoured  defaults of the honoured fields, by transformers' standardised names
    nullable  honoured fields that may be null
    refused   fields that may only have neutral values
    ignored   fields of transformers' config class or modeling file that have no effect
    aliases   other names of honoured fields
    """

    honoured: Mapping[str, Any]
    nullable: frozenset[str]
    refused: Mapping[str, Refused]
    ignored: frozenset[str]
    aliases: Mapping[str, str]


def family_of(hf: Mapping[str, Any]) -> str:
    """The family of a config. transformers reads a Mistral config with ``layer_types`` as Ministral."""
    name = str(hf.get("model_type", "(none)"))
    return "ministral" if name == "mistral" and "layer_types" in hf else name


# Models of images and text: the family of their text part if the file does not name it.
_WITH_IMAGES = {"gemma3": "gemma3_text", "mistral3": "mistral", "qwen3_5": "qwen3_5_text"}


def text_part(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model in a config; the part of a model of images and text, else the config itself.

    Raises ModelError if that part is missing.
    """
    name = hf.get("model_type")
    if not isinstance(name, str) or name not in _WITH_IMAGES:
        return hf
    text = hf.get("text_config")
    if not isinstance(text, Mapping):
        raise ModelError(
            f"text_config in the model's config must be an object, since {name} models have their language model "
            f"there, got {shown(text)}; fetch the model again"
        )
    whole = {key: hf[key] for key in ("quantization_config", "bos_token_id", "eos_token_id") if key in hf}
    tied = {"tie_word_embeddings": hf.get("tie_word_embeddings", True)}
    # transformers' classes of images and text do not cap logits
    return {"model_type": _WITH_IMAGES[name], **whole, **text, **tied, "final_logit_softcapping": None}


def read_fields(hf: Mapping[str, Any], family: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """All honoured fields of a config, and the subset that the file has, under the file's names.

    Raises ModelError for a refused field.
    """
    table = FIELDS[family]
    for name, (neutral, why) in table.refused.items():
        if name in hf and hf[name] not in neutral:
            raise ModelError(
                f"{family} models with {name} {shown(hf[name])} in config.json are not supported: {why}; "
                "use another model"
            )
    aliases = {alias: name for alias, name in table.aliases.items() if alias in hf}
    own = [name for name in table.honoured if name in hf]
    # as in transformers, the standardised name has priority over the family's own
    values = {name: hf[alias] for alias, name in aliases.items()} | {name: hf[name] for name in own}
    return {**table.honoured, **values}, {name: hf[name] for name in (*aliases, *own)}


# -- shared by several families --------------------------------------------------------------------
_CACHE = "transformers limits its cache by it, but not the attention over a prompt"
_TEXT = "only models of text alone are read"
_EVERYWHERE: dict[str, Refused] = {
    "is_causal": Refused((True,), "decoding needs a causal model"),
    "is_encoder_decoder": Refused((False, None), "there is no encoder"),
    "per_layer_config": Refused((None, {}), "all layers must have the same shape"),
    "kv_sharing_modes": Refused((None,), "each layer must have keys and values of its own"),
    "attention_chunk_size": Refused((None,), _CACHE),
    **dict.fromkeys(("text_config", "decoder", "generator"), Refused((None,), _TEXT)),
}
_BOTH_WAYS = {"use_bidirectional_attention": Refused((None, False), "decoding needs a causal model")}
_IGNORED = (
    "_attn_implementation architectures attention_dropout chunk_size_feed_forward dtype id2label initializer_range "
    "label2id num_labels output_hidden_states pad_token_id problem_type return_dict transformers_version use_cache"
)
_NULLABLE = (
    "bos_token_id eos_token_id layer_types rope_parameters rope_scaling partial_rotary_factor rotary_pct "
    "original_max_position_embeddings"
)


def _table(
    *fields: Mapping[str, Any],
    nullable: str = "",
    ignored: str = "",
    refused: Mapping[str, Refused] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> Fields:
    """The table of a family: its honoured ``fields``, and those of all families; names are space-separated."""
    honoured: dict[str, Any] = {"layer_types": None}
    for some in fields:
        honoured.update(some)
    never = {**_EVERYWHERE, **(refused or {})}
    if "sliding_window" not in honoured:
        never["sliding_window"] = Refused((None,), _CACHE)
    may_be_null = set(honoured) & set(f"{_NULLABLE} {nullable}".split())
    if honoured.get("original_max_position_embeddings") is not None:  # declared by the family's config class
        may_be_null.remove("original_max_position_embeddings")
    return Fields(honoured, frozenset(may_be_null), never, frozenset(f"{_IGNORED} {ignored}".split()), aliases or {})


_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")


def _sizes(*values: int, ends: tuple[int | None, int | None] = (1, 2), tied: bool = False) -> dict[str, Any]:
    """The fields of all families: the values of ``_SIZES``; ``ends`` are the tokens that begin and end a text."""
    first, last = ends
    sizes = dict(zip(_SIZES, values, strict=True))
    return {**sizes, "bos_token_id": first, "eos_token_id": last, "tie_word_embeddings": tied}


def _rope(*, theta: str = "rope_theta", share: str = "partial_rotary_factor", rotated: float | None = None) -> Any:
    """Rotary positions; ``rotated`` is the share of a head's channels, None: all."""
    nothing = dict.fromkeys(("rope_parameters", "rope_scaling", "original_max_position_embeddings"))
    return {**nothing, theta: 10_000.0, share: rotated}


def _ropes_by_kind(theta: float) -> Any:
    """Rotary positions with one record for layers with a sliding window and one for the others."""
    return {"rope_parameters": None, "rope_scaling": None, "rope_theta": theta, "partial_rotary_factor": None}


def _gated(inner: int, *, kv_heads: int | None = None, head_dim: int | None = None, eps: float = 1e-6) -> Any:
    """RMSNorm, grouped heads and a gated MLP."""
    heads = {"num_key_value_heads": kv_heads, "head_dim": head_dim}
    return {**heads, "intermediate_size": inner, "hidden_act": "silu", "rms_norm_eps": eps}


# -- one table per family --------------------------------------------------------------------------
_HEADS = "head_dim num_key_value_heads"
_MISTRAL = (_sizes(32_000, 4096, 32, 32, 131_072), _gated(14_336, kv_heads=8), _rope(), {"sliding_window": 4096})
_QWEN = (
    _sizes(151_936, 4096, 32, 32, 32_768, ends=(None, None)),
    _gated(22_016, kv_heads=32),
    _rope(),
    {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
)
_GELU = "gelu_pytorch_tanh"
_OLMO = (_sizes(50_304, 4096, 32, 32, 2048, ends=(None, 50_279)), _gated(11_008, eps=1e-5), {"attention_bias": False})
_GRANITE = (
    _sizes(32_000, 4096, 32, 32, 2048),
    _rope(),
    {"num_key_value_heads": None, "head_dim": None, "hidden_act": "silu", "rms_norm_eps": 1e-6},
    {"attention_bias": False},
    dict.fromkeys(("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"), 1.0),
)
_ROUTER = "output_router_logits router_aux_loss_coef"
# -- encoder-decoder models
_PAIR = {"is_encoder_decoder": Refused((True,), "the model has an encoder")}
_NO_PAIR = "classifier_dropout is_decoder encoder_layerdrop decoder_layerdrop dropout activation_dropout init_std"


def _ended(words: int, width: int, layers: int, heads: int, *, ends: tuple[int | None, int | None], start: int) -> Any:
    """The fields of encoder-decoder families; ``start`` begins a text."""
    sizes = {"vocab_size": words, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    tokens = {"bos_token_id": ends[0], "eos_token_id": ends[1], "decoder_start_token_id": start}
    return {**sizes, **tokens, "tie_word_embeddings": True}


def _t5(words: int, inner: int, layers: int, heads: int, forward: str, more: Mapping[str, Any]) -> Fields:
    return _table(
        _ended(words, 512, layers, heads, ends=(None, 1), start=0),
        {"head_dim": 64, "d_ff": inner, "num_decoder_layers": None, "layer_norm_epsilon": 1e-6},
        {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "feed_forward_proj": forward},
        more,
        nullable="num_decoder_layers",
        ignored="classifier_dropout dense_act_fn dropout_rate initializer_factor is_decoder is_gated_act",
        refused=_PAIR,
        aliases={
            "d_model": "hidden_size",
            "num_layers": "num_hidden_layers",
            "num_heads": "num_attention_heads",
            "d_kv": "head_dim",
        },
    )


def _bart(
    sizes: Mapping[str, Any],
    inner: int,
    *more: Mapping[str, Any],
    nullable: str = "",
    ignored: str = "",
    refused: Mapping[str, Refused] | None = None,
) -> Fields:
    layers, heads = sizes["num_hidden_layers"], sizes["num_attention_heads"]
    return _table(
        sizes,
        {"decoder_layers": layers, "decoder_attention_heads": heads, "activation_function": "gelu"},
        {"encoder_ffn_dim": inner, "decoder_ffn_dim": inner},
        *more,
        nullable=nullable,
        ignored=f"{_NO_PAIR} forced_eos_token_id {ignored}",
        refused={**_PAIR, **(refused or {})},
        aliases={
            "d_model": "hidden_size",
            "encoder_layers": "num_hidden_layers",
            "encoder_attention_heads": "num_attention_heads",
        },
    )


FIELDS: dict[str, Fields] = {
    "llama": _table(
        _sizes(32_000, 4096, 32, 32, 2048),
        _gated(11_008),
        _rope(),
        {"attention_bias": False, "mlp_bias": False},
        nullable=_HEADS,
        ignored="pretraining_tp",
    ),
    "mistral": _table(*_MISTRAL, nullable="head_dim sliding_window"),
    # transformers needs the window even if no layer slides
    "ministral": _table(*_MISTRAL, nullable="head_dim"),
    "qwen2": _table(*_QWEN, nullable="num_key_value_heads sliding_window"),
    "qwen3": _table(
        *_QWEN,
        {"head_dim": 128, "attention_bias": False},
        nullable="num_key_value_heads sliding_window",
    ),
    "qwen3_5_text": _table(
        _sizes(248_320, 4096, 32, 16, 32_768, ends=(None, None)),
        _gated(12_288, kv_heads=4, head_dim=256),
        _rope(rotated=0.25),
        {"attention_bias": False, "full_attention_interval": 4, "linear_conv_kernel_dim": 4},
        {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
        {"linear_num_key_heads": 16, "linear_num_value_heads": 32},
    ),
    "qwen3_moe": _table(
        _sizes(151_936, 2048, 24, 32, 32_768, ends=(None, None)),
        _gated(6144, kv_heads=4),
        _rope(),
        {"use_sliding_window": False, "sliding_window": 4096, "attention_bias": False},
        {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False},
        {"decoder_sparse_step": 1, "mlp_only_layers": None},
        nullable="sliding_window mlp_only_layers",
        ignored=_ROUTER,
        aliases={"num_local_experts": "num_experts"},
    ),
    "mixtral": _table(
        _sizes(32_000, 4096, 32, 32, 131_072),
        _gated(14_336, kv_heads=8, eps=1e-5),
        {**_rope(), "rope_theta": 1e6},
        {"sliding_window": None, "num_experts": 8, "num_experts_per_tok": 2},
        nullable="head_dim num_key_value_heads sliding_window",
        ignored=f"{_ROUTER} router_jitter_noise",
        aliases={"num_local_experts": "num_experts"},
    ),
    "gpt_oss": _table(
        _sizes(201_088, 2880, 36, 64, 131_072, ends=(None, None)),
        {"num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "rms_norm_eps": 1e-5},
        {**_rope(), "rope_theta": 150_000.0},
        {"attention_bias": True, "sliding_window": 128, "num_experts": 128, "num_experts_per_tok": 4},
        {"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        nullable="sliding_window",
        ignored=f"{_ROUTER} hidden_act",
        aliases={"num_local_experts": "num_experts"},
    ),
    "phi": _table(
        _sizes(51_200, 2048, 24, 32, 2048),
        _rope(rotated=0.5),
        {"intermediate_size": 8192, "num_key_value_heads": None, "head_dim": None},
        {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5},
        nullable="num_key_value_heads",
        ignored="embd_pdrop resid_pdrop",
        refused={"qk_layernorm": Refused((False,), "no published Phi model normalises queries and keys")},
    ),
    "phi3": _table(
        _sizes(32_064, 3072, 32, 32, 4096, ends=(1, 32_000)),
        _gated(8192, eps=1e-5),
        _rope(rotated=1.0),
        {"original_max_position_embeddings": 4096, "sliding_window": None},
        nullable="num_key_value_heads sliding_window",
        ignored="embd_pdrop resid_pdrop",
    ),
    "opt": _table(
        _sizes(50_272, 768, 12, 12, 2048, ends=(2, 2), tied=True),
        {"ffn_dim": 3072, "word_embed_proj_dim": None, "activation_function": "relu", "enable_bias": True},
        nullable="word_embed_proj_dim",
        ignored="dropout init_std layerdrop",
        refused={
            "do_layer_norm_before": Refused((True,), "the norm must be first in a block (opt-350m has it last)"),
            "_remove_final_layer_norm": Refused((False,), "the decoder always has a final norm"),
            "layer_norm_elementwise_affine": Refused((True,), "norms must have weights"),
        },
    ),
    "gpt2": _table(
        _sizes(50_257, 768, 12, 12, 1024, ends=(50_256, 50_256), tied=True),
        {"n_inner": None, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True},
        nullable="n_inner",
        # reorder_and_upcast_attn: the same scores, computed in float32
        ignored="attn_pdrop classifier_dropout embd_pdrop hidden_dropout reorder_and_upcast_attn resid_pdrop "
        "summary_activation summary_first_dropout summary_last_dropout summary_proj_to_labels summary_type "
        "summary_use_proj",
        refused={
            "scale_attn_by_inverse_layer_idx": Refused((False,), "the attention scale must be the same in all layers"),
            "add_cross_attention": Refused((False,), "there is no encoder"),
        },
        aliases={
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_positions": "max_position_embeddings",
        },
    ),
    "gemma": _table(
        _sizes(256_000, 3072, 28, 16, 8192, ends=(2, 1), tied=True),
        _gated(24_576, kv_heads=16, head_dim=256),
        _rope(),
        {"hidden_act": _GELU, "attention_bias": False},
        refused=_BOTH_WAYS,
    ),
    "gemma2": _table(
        _sizes(256_000, 2304, 26, 8, 8192, ends=(2, 1), tied=True),
        _rope(),
        {"intermediate_size": 9216, "num_key_value_heads": 4, "head_dim": 256, "attention_bias": False},
        {"hidden_activation": _GELU, "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256, "sliding_window": 4096},
        {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        nullable="attn_logit_softcapping final_logit_softcapping",
        refused=_BOTH_WAYS,
    ),
    "gpt_neox": _table(
        _sizes(50_432, 6144, 44, 64, 2048, ends=(0, 2)),
        _rope(theta="rotary_emb_base", share="rotary_pct", rotated=0.25),
        {"intermediate_size": 24_576, "head_dim": None, "hidden_act": "gelu", "layer_norm_eps": 1e-5},
        {"use_parallel_residual": True, "attention_bias": True},
        nullable="head_dim",
        ignored="classifier_dropout hidden_dropout is_decoder",
    ),
    "gemma3_text": _table(
        _sizes(262_208, 2304, 26, 8, 131_072, ends=(2, 1), tied=True),
        _ropes_by_kind(1_000_000.0),
        {"rope_local_base_freq": 10_000.0, "sliding_window_pattern": 6},
        {"intermediate_size": 9216, "num_key_value_heads": 4, "head_dim": 256, "attention_bias": False},
        {"hidden_activation": _GELU, "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256, "sliding_window": 4096},
        {"final_logit_softcapping": None},
        nullable="final_logit_softcapping sliding_window",
        # attn_logit_softcapping: Gemma 3 has none, and transformers does not apply it
        ignored="attn_logit_softcapping",
        refused=_BOTH_WAYS,
    ),
    "smollm3": _table(
        _sizes(128_256, 2048, 36, 16, 32_768, ends=(128_000, 128_001), tied=True),
        _gated(11_008, kv_heads=4),
        {**_rope(), "rope_theta": 2_000_000.0},
        {"attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "sliding_window": None},
        {"no_rope_layers": None, "no_rope_layer_interval": 4},
        nullable="num_key_value_heads sliding_window no_rope_layers",
    ),
    # transformers needs the factor of queries, in rope_parameters
    "ministral3": _table(
        _sizes(131_072, 4096, 34, 32, 262_144),
        _gated(14_336, kv_heads=8, head_dim=128, eps=1e-5),
        _rope(),
        {"sliding_window": None},
        nullable=f"{_HEADS} sliding_window",
    ),
    "olmo2": _table(*_OLMO, _rope(), nullable="num_key_value_heads"),
    "olmo3": _table(*_OLMO, _ropes_by_kind(500_000.0), {"sliding_window": 4096}, nullable="num_key_value_heads"),
    "granite": _table(*_GRANITE, {"intermediate_size": 11_008, "mlp_bias": False}, nullable="num_key_value_heads"),
    # Granite 4: the dense models of a class that also has experts and recurrent layers
    "granitemoehybrid": _table(
        *_GRANITE,
        {"shared_intermediate_size": 1024, "position_embedding_type": None, "num_local_experts": 8},
        nullable="num_key_value_heads position_embedding_type",
        ignored="intermediate_size num_experts_per_tok output_router_logits router_aux_loss_coef mamba_n_heads "
        "mamba_n_groups mamba_d_state mamba_d_head mamba_d_conv mamba_expand mamba_chunk_size mamba_conv_bias "
        "mamba_proj_bias time_step_limit",
        refused={"layers_block_type": Refused((), "layers must be named in layer_types")},
    ),
    "t5": _t5(32_128, 2048, 6, 8, "relu", {"scale_decoder_outputs": None}),
    "mt5": _t5(250_112, 1024, 8, 6, "gated-gelu", {}),
    "bart": _bart(
        *(_ended(50_265, 1024, 12, 16, ends=(0, 2), start=2), 4096),
        {"max_position_embeddings": 1024, "scale_embedding": False},
        ignored="num_labels",
    ),
    "marian": _bart(
        *(_ended(58_101, 1024, 12, 16, ends=(None, 0), start=58_100), 4096),
        {"max_position_embeddings": 1024, "scale_embedding": False},
        {"decoder_vocab_size": None, "share_encoder_decoder_embeddings": True},
        nullable="decoder_vocab_size",
    ),
    "whisper": _bart(
        *(_ended(51_865, 384, 4, 6, ends=(50_256, 50_256), start=50_257), 1536),
        {"max_source_positions": 1500, "max_target_positions": 448, "num_mel_bins": 80},
        ignored="apply_spec_augment begin_suppress_tokens classifier_proj_size mask_feature_length "
        "mask_feature_min_masks mask_feature_prob mask_time_length mask_time_min_masks mask_time_prob "
        "median_filter_width scale_embedding suppress_tokens use_weighted_layer_sum",
        refused={"num_key_value_heads": Refused((None,), "keys and values have as many heads as queries")},
    ),
}
