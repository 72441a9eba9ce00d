"""One function a family, from the fields of ``config.json`` with their defaults to a ModelConfig."""

from __future__ import annotations

import math

from anabranch.errors import ModelError
from anabranch.model.check import check_rope_fields, layer_kinds
from anabranch.model.config import DeltaConfig, ExpertsConfig, ModelConfig, RopeConfig
from anabranch.model.families import parts
from anabranch.model.families.parts import Fields
from anabranch.support.jsonfiles import is_whole, shown


def llama(f: Fields) -> ModelConfig:
    """Llama 1 to 3, SmolLM, Vicuna and others: RMSNorm, rotary positions, a gated MLP."""
    return ModelConfig(**parts.rms(f), **parts.uniform(f), **parts.biases(f["attention_bias"]), mlp_bias=f["mlp_bias"])


def mistral(f: Fields) -> ModelConfig:
    """Mistral and Phi-3: Llama with a window in all layers or none."""
    return ModelConfig(**parts.rms(f), **parts.uniform(f, f["sliding_window"]))


def ministral(f: Fields) -> ModelConfig:
    """Mistral with a window in some layers."""
    return ModelConfig(**parts.rms(f), **parts.sliding(f, f["sliding_window"], lambda layer: True))


def _qwen_sliding(f: Fields) -> Fields:
    window = f["sliding_window"] if f["use_sliding_window"] else None
    return parts.sliding(f, window, lambda layer: window is not None and layer >= f["max_window_layers"])


def qwen2(f: Fields) -> ModelConfig:
    """Llama with biases of q, k and v."""
    return ModelConfig(**parts.rms(f), **_qwen_sliding(f), qkv_bias=True)


def qwen3(f: Fields) -> ModelConfig:
    """Llama with norms of each head of q and k."""
    return ModelConfig(**parts.rms(f), **_qwen_sliding(f), **parts.biases(f["attention_bias"]), qk_norm="head")


def phi(f: Fields) -> ModelConfig:
    """Phi 1 to 2: attention and MLP in parallel after one LayerNorm."""
    fields = parts.sizes(f)
    return ModelConfig(
        **fields,
        **parts.uniform(f),
        **parts.biases(True, "mlp_bias", "head_bias"),
        rope=parts.rope(f, fields["head_dim"]),
        norm="layer",
        norm_eps=f["layer_norm_eps"],
        wiring="parallel",
        gated_mlp=False,
        activation=parts.activation(f),
    )


def opt(f: Fields) -> ModelConfig:
    """OPT: learned positions, LayerNorm, a plain MLP."""
    if f["word_embed_proj_dim"] not in (None, f["hidden_size"]):
        raise ModelError(
            f"opt models with word_embed_proj_dim {f['word_embed_proj_dim']} are not supported: the embedding must be "
            "as wide as the layers (that of opt-350m is not); use another model"
        )
    return ModelConfig(
        **parts.sizes(f, inner="ffn_dim"),
        **parts.uniform(f),
        **parts.biases(f["enable_bias"], "mlp_bias"),
        position="learned",
        learned_offset=2,
        norm="layer",
        gated_mlp=False,
        activation=parts.activation(f, "activation_function"),
    )


def gpt2(f: Fields) -> ModelConfig:
    """GPT-2: as OPT, with all positions from 0 on."""
    f["n_inner"] = f["n_inner"] or 4 * f["hidden_size"]
    return ModelConfig(
        **parts.sizes(f, inner="n_inner"),
        **parts.uniform(f),
        **parts.biases(True, "mlp_bias"),
        position="learned",
        norm="layer",
        norm_eps=f["layer_norm_epsilon"],
        gated_mlp=False,
        activation=parts.activation(f, "activation_function"),
        attention_scale=None if f["scale_attn_weights"] else 1.0,
    )


def _gemma_fields(f: Fields) -> Fields:
    biases = parts.biases(f["attention_bias"])
    return {**parts.rms(f), **biases, "norm_plus_one": True, "embedding_scale": math.sqrt(f["hidden_size"])}


def gemma(f: Fields) -> ModelConfig:
    """Gemma 1: Llama with scaled embeddings and 1 + weight in its norms."""
    # Gemma's first files have "gelu" for the tanh approximation
    f["hidden_act"] = "gelu_pytorch_tanh" if f["hidden_act"] == "gelu" else f["hidden_act"]
    return ModelConfig(**_gemma_fields(f), **parts.uniform(f))


def gemma2(f: Fields) -> ModelConfig:
    """Gemma 2: norms after attention and MLP too, soft caps, a window in every second layer."""
    return ModelConfig(
        **_gemma_fields(f),
        **parts.sliding(f, f["sliding_window"], lambda layer: layer % 2 == 0),
        post_norms=True,
        attention_scale=f["query_pre_attn_scalar"] ** -0.5,
        attention_softcap=f["attn_logit_softcapping"],
        logit_softcap=f["final_logit_softcapping"],
    )


def gemma3(f: Fields) -> ModelConfig:
    """Gemma 3: as Gemma 2, with norms of heads instead of the cap of attention."""
    every = f["sliding_window_pattern"]  # the last layer of each group of so many has no window
    return ModelConfig(
        **_gemma_fields(f),
        **parts.sliding(f, f["sliding_window"], lambda layer: (layer + 1) % every > 0),
        qk_norm="head",
        post_norms=True,
        attention_scale=f["query_pre_attn_scalar"] ** -0.5,
        logit_softcap=f["final_logit_softcapping"],
    )


def smollm3(f: Fields) -> ModelConfig:
    """SmolLM3: Llama, of which every fourth layer has no rotations."""
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
        **parts.rms(f),
        **parts.sliding(f, window, lambda layer: slides and not layers[layer]),
        **parts.biases(f["attention_bias"]),
        mlp_bias=f["mlp_bias"],
        rotated_layers=None if all(layers) else layers,
    )


# Ministral 3's positions, if its file states none.
_MINISTRAL3_ROPE = {
    "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def ministral3(f: Fields) -> ModelConfig:
    """Ministral 3: Llama, with queries that are scaled by position."""
    key = "rope_scaling" if f["rope_scaling"] else "rope_parameters"
    f[key] = _MINISTRAL3_ROPE if f[key] is None else f[key]
    fields, beta = parts.rms(f), f[key].get("llama_4_scaling_beta")
    rope: RopeConfig = fields["rope"]
    known = rope.scaling is not None and rope.scaling["rope_type"] in ("yarn", "llama3", "longrope")
    if beta is None or not (known or "original_max_position_embeddings" in f[key]):
        raise ModelError(
            f"{key} in the model's config must have llama_4_scaling_beta and original_max_position_embeddings in a "
            "ministral3 model; correct the config or fetch the model again"
        )
    check_rope_fields({"llama_4_scaling_beta": beta}, key)
    scaling = (float(beta), int(rope.original_max_positions or rope.max_positions))
    return ModelConfig(**fields, **parts.uniform(f, f["sliding_window"]), query_scaling=scaling if beta else None)


def _olmo_fields(f: Fields) -> Fields:
    """Norms after attention and MLP instead of before, and over all heads of q and of k."""
    biases = parts.biases(f["attention_bias"])
    return {**parts.rms(f), **biases, "qk_norm": "all", "pre_norms": False, "post_norms": True}


def olmo2(f: Fields) -> ModelConfig:
    """OLMo 2: norms after attention and MLP only, and of all heads of q and of k."""
    return ModelConfig(**_olmo_fields(f), **parts.uniform(f))


def olmo3(f: Fields) -> ModelConfig:
    """OLMo 3: OLMo 2 with a window in three of four layers."""
    sliding = parts.sliding(f, f["sliding_window"], lambda layer: (layer + 1) % 4 > 0)
    return ModelConfig(**_olmo_fields(f), **sliding)


def _granite_fields(f: Fields) -> Fields:
    return {
        **parts.rms(f),
        **parts.uniform(f),
        **parts.biases(f["attention_bias"]),
        "attention_scale": float(f["attention_multiplier"]),
        "embedding_scale": float(f["embedding_multiplier"]),
        "residual_scale": float(f["residual_multiplier"]),
        "output_scale": 1 / f["logits_scaling"],
    }


def granite(f: Fields) -> ModelConfig:
    """Granite 3: Llama with scales of embeddings, residuals, scores and logits."""
    return ModelConfig(**_granite_fields(f), mlp_bias=f["mlp_bias"])


def granite4(f: Fields) -> ModelConfig:
    """Granite 4, of which the dense models without recurrent layers are supported."""
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


def mixtral(f: Fields) -> ModelConfig:
    """Mistral with experts."""
    experts = ExpertsConfig(f["num_experts"], f["num_experts_per_tok"], f["intermediate_size"])
    return ModelConfig(**parts.rms(f), **parts.uniform(f, f["sliding_window"]), experts=experts)


def qwen3_moe(f: Fields) -> ModelConfig:
    """Qwen3 with experts in some layers or all."""
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
        **parts.rms(f), **parts.uniform(f, window), **parts.biases(f["attention_bias"]), qk_norm="head", experts=experts
    )


def gpt_oss(f: Fields) -> ModelConfig:
    """gpt-oss: experts with biases and a clamped activation, sinks, a window in every second layer."""
    if not f["rope_scaling"] and f["rope_parameters"] is None:
        stretched = {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
        f["rope_parameters"] = {"rope_type": "yarn", "original_max_position_embeddings": 4096, **stretched}
    experts = ExpertsConfig(
        *(f["num_experts"], f["num_experts_per_tok"], f["intermediate_size"]),
        bias=True,
        clamp=(f["swiglu_alpha"], f["swiglu_limit"]),
    )
    return ModelConfig(
        **parts.rms({**f, "hidden_act": "silu"}),
        **parts.sliding(f, f["sliding_window"], lambda layer: layer % 2 == 0),
        **parts.biases(f["attention_bias"]),
        attention_sinks=True,
        experts=experts,
    )


_RECURS = "linear_attention"


def qwen3_5(f: Fields) -> ModelConfig:
    """Qwen3.5: gated DeltaNet in three of four layers, and gated attention in the others."""
    count, every = f["num_hidden_layers"], f["full_attention_interval"]
    kinds = layer_kinds(f["layer_types"], count, ("full_attention", _RECURS))
    recurrent = tuple((layer + 1) % every > 0 if kinds is None else kinds[layer] == _RECURS for layer in range(count))
    delta = DeltaConfig(
        recurrent,
        *(f["linear_num_key_heads"], f["linear_num_value_heads"]),
        *(f["linear_key_head_dim"], f["linear_value_head_dim"], f["linear_conv_kernel_dim"]),
    )
    return ModelConfig(
        **parts.rms(f),
        **parts.biases(f["attention_bias"]),
        norm_plus_one=True,
        qk_norm="head",
        attention_gate=True,
        recurrent=delta if any(recurrent) else None,
    )


def gpt_neox(f: Fields) -> ModelConfig:
    """GPT-NeoX and Pythia: LayerNorm, attention and MLP in parallel after norms of their own, or in sequence."""
    width = parts.head_dim(f["hidden_size"], f["num_attention_heads"])
    if f["head_dim"] not in (None, width):
        raise ModelError(
            f"head_dim {f['head_dim']} in the model's config is not hidden_size by heads, {width}, as in all gpt_neox "
            "models; correct the config or fetch the model again"
        )
    return ModelConfig(
        **parts.sizes(f),
        **parts.uniform(f),
        **parts.biases(f["attention_bias"]),
        rope=parts.rope(f, width, theta="rotary_emb_base", share="rotary_pct"),
        norm="layer",
        norm_eps=f["layer_norm_eps"],
        wiring="parallel_two_norms" if f["use_parallel_residual"] else "sequential",
        mlp_bias=True,
        gated_mlp=False,
        activation=parts.activation(f),
    )
