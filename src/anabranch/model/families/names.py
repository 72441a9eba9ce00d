"""The Hugging Face modules of a layer, by ours."""

from __future__ import annotations

from collections.abc import Mapping

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


def _experts(attention: Mapping[str, tuple[str, ...]], router: str, up: str, down: str) -> dict[str, tuple[str, ...]]:
    """A layer of experts, whose modules are named by their numbers."""
    parts = {"mlp.router": router, "mlp.experts.up": up, "mlp.experts.down": down}
    return {**attention, **{part: tuple(names.split()) for part, names in parts.items()}}


_EACH = "mlp.experts.{}."
MIXTRAL = _experts(
    LLAMA,
    "block_sparse_moe.gate",
    "block_sparse_moe.experts.{}.w1 block_sparse_moe.experts.{}.w3",
    "block_sparse_moe.experts.{}.w2",
)
QWEN3_MOE = _experts(QWEN3, "mlp.gate", f"{_EACH}gate_proj {_EACH}up_proj", f"{_EACH}down_proj")
# published with the experts of a layer in one tensor, see ``fused.py``
GPT_OSS = _experts(
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


def _t5(layer: int, **cross: str) -> dict[str, tuple[str, ...]]:
    """A layer of T5, whose MLP has this number."""
    mlp = f"layer.{layer}.DenseReluDense."
    attention = " ".join(f"{_T5_SELF}{name}" for name in "qkv"), f"{_T5_SELF}o"
    norms = "layer.0.layer_norm", f"layer.{layer}.layer_norm"
    return _block(norms[0], *attention, norms[1], f"{mlp}wi_0 {mlp}wi_1", f"{mlp}wo", **cross)


def _crossed(prefix: str, norm: str, query: str, key_value: str, out: str) -> dict[str, str]:
    """The modules of a layer's cross-attention."""
    kv = " ".join(f"{prefix}{name}" for name in key_value.split())
    return {"norm_cross": norm, "cross.q": f"{prefix}{query}", "cross.kv": kv, "cross.out": f"{prefix}{out}"}


T5_ENCODER = _t5(1)
T5 = _t5(2, **_crossed(_T5_CROSS, "layer.1.layer_norm", "q", "k v", "o"))
# OPT's layers are those of BART's encoder
BART = _block(
    *("self_attn_layer_norm", _QKV, "self_attn.out_proj", "final_layer_norm", "fc1", "fc2"),
    **_crossed("encoder_attn.", "encoder_attn_layer_norm", "q_proj", "k_proj v_proj", "out_proj"),
)
