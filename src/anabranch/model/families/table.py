"""The table of families: how each config is read, and the Hugging Face modules that each of ours is made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from anabranch.model.config import ModelConfig
from anabranch.model.families import configs, encoder_decoder
from anabranch.model.families.parts import Fields

__all__ = ["FAMILIES", "UNSUPPORTED", "Family", "HfConfig", "Layout", "Source"]

HfConfig = Mapping[str, Any]
# How a matrix is stored: as ours, transposed (GPT-2's Conv1D), or q, k, v of head 0, then of head 1, ... (NeoX)
Layout = Literal["rows", "transposed", "by_head"]


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

    ungated  the modules of an MLP without a gate, where the family has both kinds
    tables   other full names of an embedding that encoder and decoder share
    encoder  the modules of the encoder
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
    ungated: tuple[str, ...] = ()
    relative: str = ""
    norm_embedding: str = ""
    tables: tuple[str, ...] = ()
    head_bias: str = ""
    encoder: Family | None = None


# -- the Hugging Face modules of a layer, by ours --------------------------------------------------------
_PARTS = ("norm_in", "qkv", "out", "norm_mlp", "mlp.up", "mlp.down")


def _block(*modules: str, **others: str) -> dict[str, tuple[str, ...]]:
    """The Hugging Face modules of each of ``_PARTS`` and of ``others``; fused ones are separated by spaces."""
    named = {**dict(zip(_PARTS, modules, strict=True)), **others}
    return {part: tuple(names.split()) for part, names in named.items() if names}


_QKV, _OUT = "self_attn.q_proj self_attn.k_proj self_attn.v_proj", "self_attn.o_proj"
_UP, _DOWN = "mlp.gate_proj mlp.up_proj", "mlp.down_proj"
_NORM, _NORM_MLP = "input_layernorm", "post_attention_layernorm"
LLAMA = _block(_NORM, _QKV, _OUT, _NORM_MLP, _UP, _DOWN)
QWEN3 = _block(_NORM, _QKV, _OUT, _NORM_MLP, _UP, _DOWN, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")
PHI = _block(_NORM, _QKV, "self_attn.dense", "", "mlp.fc1", "mlp.fc2")
PHI3 = _block(_NORM, "self_attn.qkv_proj", _OUT, _NORM_MLP, "mlp.gate_up_proj", _DOWN)
OPT = _block("self_attn_layer_norm", _QKV, "self_attn.out_proj", "final_layer_norm", "fc1", "fc2")
GPT2 = _block("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
NEOX = _block(
    *(_NORM, "attention.query_key_value", "attention.dense", _NORM_MLP, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
)
GEMMA2 = _block(
    *(_NORM, _QKV, _OUT, "pre_feedforward_layernorm", _UP, _DOWN),
    norm_after_attention="post_attention_layernorm",
    norm_after_mlp="post_feedforward_layernorm",
)
GEMMA3 = {**GEMMA2, "q_norm": ("self_attn.q_norm",), "k_norm": ("self_attn.k_norm",)}
OLMO = {part: modules for part, modules in GEMMA3.items() if part not in ("norm_in", "norm_mlp")}
GRANITE4 = _block(_NORM, _QKV, _OUT, _NORM_MLP, "shared_mlp.input_linear", "shared_mlp.output_linear")
# the last two in models of images and text
TEXT_PREFIXES = ("model.", "", "model.language_model.", "language_model.model.")
TEXT_HEADS = ("lm_head", "language_model.lm_head")


def _with_experts(
    attention: Mapping[str, tuple[str, ...]], router: str, up: str, down: str
) -> dict[str, tuple[str, ...]]:
    """A layer of experts, whose modules are named by their numbers."""
    parts = {"mlp.router": router, "mlp.experts.up": up, "mlp.experts.down": down}
    return {**attention, **{part: tuple(names.split()) for part, names in parts.items()}}


_EACH = "mlp.experts.{}."
MIXTRAL = _with_experts(
    LLAMA,
    "block_sparse_moe.gate",
    "block_sparse_moe.experts.{}.w1 block_sparse_moe.experts.{}.w3",
    "block_sparse_moe.experts.{}.w2",
)
QWEN3_MOE = _with_experts(QWEN3, "mlp.gate", f"{_EACH}gate_proj {_EACH}up_proj", f"{_EACH}down_proj")
# published with the experts of a layer in one tensor, see ``fused.py``
GPT_OSS = _with_experts(
    {**LLAMA, "sinks": ("self_attn.sinks",)}, "mlp.router", f"{_EACH}gate_proj {_EACH}up_proj", f"{_EACH}down_proj"
)

_DELTA = {
    "qkv": "in_proj_qkv", "gate": "in_proj_z", "rates": "in_proj_b in_proj_a", "out": "out_proj",
    "conv": "conv1d.weight", "bias_dt": "dt_bias", "log_a": "A_log", "scale": "norm.weight",
}  # fmt: skip
# the rows of q_proj are those of queries and of the gate by turns, which ``fused.py`` separates
QWEN3_5 = {
    **QWEN3,
    "qkv": ("self_attn.q_proj.queries", "self_attn.k_proj", "self_attn.v_proj"),
    "gate": ("self_attn.q_proj.gate",),
    **{f"mixer.{part}": tuple(f"linear_attn.{name}" for name in names.split()) for part, names in _DELTA.items()},
}

_T5_SELF, _T5_CROSS = "layer.0.SelfAttention.", "layer.1.EncDecAttention."


def _t5_layer(layer: int, **cross: str) -> dict[str, tuple[str, ...]]:
    """A layer of T5, whose MLP has this number."""
    mlp = f"layer.{layer}.DenseReluDense."
    attention = " ".join(f"{_T5_SELF}{name}" for name in "qkv"), f"{_T5_SELF}o"
    norms = "layer.0.layer_norm", f"layer.{layer}.layer_norm"
    return _block(norms[0], *attention, norms[1], f"{mlp}wi_0 {mlp}wi_1", f"{mlp}wo", **cross)


def _crossed(prefix: str, norm: str, query: str, key_value: str, out: str) -> dict[str, str]:
    """The modules of a layer's cross-attention."""
    kv = " ".join(f"{prefix}{name}" for name in key_value.split())
    return {"norm_cross": norm, "cross.q": f"{prefix}{query}", "cross.kv": kv, "cross.out": f"{prefix}{out}"}


T5_ENCODER = _t5_layer(1)
T5 = _t5_layer(2, **_crossed(_T5_CROSS, "layer.1.layer_norm", "q", "k v", "o"))
# OPT's layers are those of BART's encoder
BART = _block(
    *("self_attn_layer_norm", _QKV, "self_attn.out_proj", "final_layer_norm", "fc1", "fc2"),
    **_crossed("encoder_attn.", "encoder_attn_layer_norm", "q_proj", "k_proj v_proj", "out_proj"),
)


# -- the families ----------------------------------------------------------------------------------------
def _t5(describe: Callable[[Fields], ModelConfig]) -> Family:
    """T5 and mT5."""
    decoder = Family(
        *(describe, T5, ("decoder.",), "block"),
        norm="final_layer_norm",
        relative="block.0.layer.0.SelfAttention.relative_attention_bias",
        ungated=("layer.2.DenseReluDense.wi",),
        tables=("shared.weight", "encoder.embed_tokens.weight"),
    )
    ungated = ("layer.1.DenseReluDense.wi",)
    encoder = replace(decoder, block=T5_ENCODER, prefixes=("encoder.",), ungated=ungated, tables=())
    return replace(decoder, encoder=encoder)


def _bart(describe: Callable[[Fields], ModelConfig], **modules: Any) -> Family:
    """BART, Marian and Whisper."""
    decoder = Family(describe, BART, ("model.decoder.", "decoder."), **modules)
    encoder = replace(decoder, block=OPT, prefixes=("model.encoder.", "encoder."), tables=())
    return replace(decoder, encoder=encoder)


_TABLES = "model.shared.weight", "shared.weight", "model.encoder.embed_tokens.weight"


FAMILIES: dict[str, Family] = {
    "llama": Family(configs.llama, LLAMA),
    "mistral": Family(configs.mistral, LLAMA, TEXT_PREFIXES, heads=TEXT_HEADS),
    "ministral": Family(configs.ministral, LLAMA),
    "qwen2": Family(configs.qwen2, LLAMA),
    "qwen3": Family(configs.qwen3, QWEN3),
    "qwen3_5_text": Family(configs.qwen3_5, QWEN3_5, TEXT_PREFIXES, heads=TEXT_HEADS),
    "qwen3_moe": Family(configs.qwen3_moe, QWEN3_MOE),
    "mixtral": Family(configs.mixtral, MIXTRAL),
    "gpt_oss": Family(configs.gpt_oss, GPT_OSS),
    "phi": Family(configs.phi, PHI, norm="final_layernorm"),
    "phi3": Family(configs.mistral, PHI3),
    "opt": Family(
        *(configs.opt, OPT, ("model.decoder.", "decoder.")), positions="embed_positions", norm="final_layer_norm"
    ),
    "gpt2": Family(
        *(configs.gpt2, GPT2, ("transformer.", ""), "h", "wte", "wpe", "ln_f"),
        layouts=dict.fromkeys(("qkv", "out", "mlp.up", "mlp.down"), "transposed"),
    ),
    "gemma": Family(configs.gemma, LLAMA),
    "gemma2": Family(configs.gemma2, GEMMA2),
    "gemma3_text": Family(configs.gemma3, GEMMA3, TEXT_PREFIXES, heads=TEXT_HEADS),
    "smollm3": Family(configs.smollm3, LLAMA),
    "ministral3": Family(configs.ministral3, LLAMA, TEXT_PREFIXES, heads=TEXT_HEADS),
    "olmo2": Family(configs.olmo2, OLMO),
    "olmo3": Family(configs.olmo3, OLMO),
    "granite": Family(configs.granite, LLAMA),
    "granitemoehybrid": Family(configs.granite4, GRANITE4),
    "gpt_neox": Family(
        *(configs.gpt_neox, NEOX, ("gpt_neox.", "")),
        embedding="embed_in",
        norm="final_layer_norm",
        heads=("lm_head", "embed_out"),
        layouts={"qkv": "by_head"},
    ),
    "t5": _t5(encoder_decoder.t5),
    "mt5": _t5(encoder_decoder.mt5),
    "bart": _bart(
        encoder_decoder.bart,
        positions="embed_positions",
        norm_embedding="layernorm_embedding",
        tables=_TABLES,
        head_bias="final_logits_bias",
    ),
    "marian": _bart(encoder_decoder.marian, tables=_TABLES, head_bias="final_logits_bias"),
    "whisper": _bart(encoder_decoder.whisper, positions="embed_positions", norm="layer_norm", heads=("proj_out",)),
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
