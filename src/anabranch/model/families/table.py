"""The table of families, and those that are not supported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from anabranch.model.config import ModelConfig
from anabranch.model.families import configs, encoder_decoder, names
from anabranch.model.families.kinds import Family, Fields

__all__ = ["FAMILIES", "UNSUPPORTED"]


def _t5(describe: Callable[[Fields], ModelConfig]) -> Family:
    """T5 and mT5."""
    decoder = Family(
        *(describe, names.T5, ("decoder.",), "block"),
        norm="final_layer_norm",
        relative="block.0.layer.0.SelfAttention.relative_attention_bias",
        ungated=("layer.2.DenseReluDense.wi",),
        tables=("shared.weight", "encoder.embed_tokens.weight"),
    )
    ungated = ("layer.1.DenseReluDense.wi",)
    encoder = replace(decoder, block=names.T5_ENCODER, prefixes=("encoder.",), ungated=ungated, tables=())
    return replace(decoder, encoder=encoder)


def _bart(describe: Callable[[Fields], ModelConfig], **modules: Any) -> Family:
    """BART, Marian and Whisper."""
    decoder = Family(describe, names.BART, ("model.decoder.", "decoder."), **modules)
    encoder = replace(decoder, block=names.OPT, prefixes=("model.encoder.", "encoder."), tables=())
    return replace(decoder, encoder=encoder)


_TABLES = "model.shared.weight", "shared.weight", "model.encoder.embed_tokens.weight"


FAMILIES: dict[str, Family] = {
    "llama": Family(configs.llama, names.LLAMA),
    "mistral": Family(configs.mistral, names.LLAMA, names.TEXT_PREFIXES, heads=names.TEXT_HEADS),
    "ministral": Family(configs.ministral, names.LLAMA),
    "qwen2": Family(configs.qwen2, names.LLAMA),
    "qwen3": Family(configs.qwen3, names.QWEN3),
    "qwen3_5_text": Family(configs.qwen3_5, names.QWEN3_5, names.TEXT_PREFIXES, heads=names.TEXT_HEADS),
    "qwen3_moe": Family(configs.qwen3_moe, names.QWEN3_MOE),
    "mixtral": Family(configs.mixtral, names.MIXTRAL),
    "gpt_oss": Family(configs.gpt_oss, names.GPT_OSS),
    "phi": Family(configs.phi, names.PHI, norm="final_layernorm"),
    "phi3": Family(configs.mistral, names.PHI3),
    "opt": Family(
        *(configs.opt, names.OPT, ("model.decoder.", "decoder.")), positions="embed_positions", norm="final_layer_norm"
    ),
    "gpt2": Family(
        *(configs.gpt2, names.GPT2, ("transformer.", ""), "h", "wte", "wpe", "ln_f"),
        layouts=dict.fromkeys(("qkv", "out", "mlp.up", "mlp.down"), "transposed"),
    ),
    "gemma": Family(configs.gemma, names.LLAMA),
    "gemma2": Family(configs.gemma2, names.GEMMA2),
    "gemma3_text": Family(configs.gemma3, names.GEMMA3, names.TEXT_PREFIXES, heads=names.TEXT_HEADS),
    "smollm3": Family(configs.smollm3, names.LLAMA),
    "ministral3": Family(configs.ministral3, names.LLAMA, names.TEXT_PREFIXES, heads=names.TEXT_HEADS),
    "olmo2": Family(configs.olmo2, names.OLMO),
    "olmo3": Family(configs.olmo3, names.OLMO),
    "granite": Family(configs.granite, names.LLAMA),
    "granitemoehybrid": Family(configs.granite4, names.GRANITE4),
    "gpt_neox": Family(
        *(configs.gpt_neox, names.NEOX, ("gpt_neox.", "")),
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
