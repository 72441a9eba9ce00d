"""Toy models of every family: random weights large enough that a wrong wire shows, small enough for milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anabranch.model.load import Target

VOCABULARY = 97
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "initializer_range": 0.2,
}
_GROUPED: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2, "intermediate_size": 96}
_GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}
_ENDS = {key: _SIZES[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "initializer_range")}
_NEOX = {**_SIZES, "intermediate_size": 96}
_OPT: dict[str, Any] = {
    **{key: value for key, value in _SIZES.items() if key != "initializer_range"},
    "ffn_dim": 96,
    "init_std": 0.2,
    "dropout": 0.0,
}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 1.7,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.2,
}
_GRANITE4: dict[str, Any] = {
    **_GROUPED,
    **_MULTIPLIERS,
    "shared_intermediate_size": 96,
    "num_local_experts": 0,
    "layer_types": ["attention"] * 3,
}

# name -> (Hugging Face model_type, its config)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _GROUPED),
    "llama-biased-tied": (
        "llama",
        {**_GROUPED, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 24},
    ),
    "mistral": ("mistral", {**_GROUPED, "sliding_window": None}),
    "mistral-sliding": ("mistral", {**_GROUPED, "sliding_window": 5}),
    "qwen2": ("qwen2", _GROUPED),
    "qwen2-sliding": (
        "qwen2",
        {**_GROUPED, "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "qwen3": ("qwen3", {**_GROUPED, "head_dim": 32}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            **_GROUPED,
            "head_dim": 32,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_5": (
        "qwen3_5_text",
        {
            **{key: value for key, value in _GROUPED.items() if key != "pad_token_id"},
            "initializer_range": 0.1,
            "head_dim": 32,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_conv_kernel_dim": 3,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    ),
    "mixtral": ("mixtral", {**_GROUPED, "num_local_experts": 4}),
    "gpt_oss": (
        "gpt_oss",
        {**_GROUPED, "head_dim": 16, "sliding_window": 5, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "phi": ("phi", {**_GROUPED, "hidden_act": "gelu_new"}),
    "phi3": ("phi3", _GROUPED),
    "opt": ("opt", _OPT),
    "gpt2": ("gpt2", {**_ENDS, **_GPT2}),
    "gemma": ("gemma", {**_GROUPED, "head_dim": 24}),
    "gemma2": (
        "gemma2",
        {
            **_GROUPED,
            "num_hidden_layers": 4,
            "head_dim": 24,
            "sliding_window": 5,
            "query_pre_attn_scalar": 20,
            # caps low enough that they bend the toy's scores
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            **_GROUPED,
            "num_hidden_layers": 4,
            "head_dim": 24,
            "sliding_window": 5,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 20,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "smollm3": ("smollm3", {**_GROUPED, "no_rope_layer_interval": 2}),
    "smollm3-sliding": (
        "smollm3",
        {**_GROUPED, "use_sliding_window": True, "sliding_window": 5, "no_rope_layers": [1, 0, 1], "mlp_bias": True},
    ),
    "ministral3": (
        "ministral3",
        {
            **_GROUPED,
            "head_dim": 24,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 8,  # queries of later positions are scaled
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "olmo2": ("olmo2", _GROUPED),
    "olmo3": (
        "olmo3",
        {
            **_GROUPED,
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 10_000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "granite": ("granite", {**_GROUPED, **_MULTIPLIERS, "mlp_bias": True}),
    "granitemoehybrid": ("granitemoehybrid", {**_GRANITE4, "position_embedding_type": "rope"}),
    "granitemoehybrid-nope": ("granitemoehybrid", _GRANITE4),
    "phi3-partial": ("phi3", {**_GROUPED, "partial_rotary_factor": 0.75}),  # Phi-4-mini
    "gpt_neox": ("gpt_neox", _NEOX),
    "gpt_neox-sequential": ("gpt_neox", {**_NEOX, "use_parallel_residual": False, "hidden_act": "gelu_new"}),
}


def toy_hf(model_type: str, config: dict[str, Any], *, seed: int = 0) -> Any:
    """A transformers model with random weights, biases and norms included."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    described = AutoConfig.for_model(model_type, **config)
    model = AutoModelForCausalLM.from_config(described, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def save_toy(model: Any, folder: Path, **options: Any) -> Path:
    """Write a model and a tokenizer of words w0, w1, ... to ``folder``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model.save_pretrained(folder, **options)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", bos_token="w1").save_pretrained(folder)
    return folder


def tokens(count: int, *, seed: int = 1) -> list[int]:
    """Random token ids."""
    return torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass(frozen=True)
class Oracle:
    """Logits of transformers."""

    model: Any

    def logits(self, ids: list[int]) -> Tensor:
        """Logits [N, V] of a sequence, computed in one forward without a cache."""
        with torch.no_grad():
            logits: Tensor = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        return logits


# a function that makes our decoder and transformers' model of a case, with the same weights
ToyMaker = Callable[[str], tuple[Target, Oracle]]
