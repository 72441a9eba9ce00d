"""The configs of encoder-decoder families, from the fields of ``config.json``."""

from __future__ import annotations

from dataclasses import replace

from anabranch.errors import ModelError
from anabranch.model.config import EncoderConfig, ModelConfig, RelativeConfig
from anabranch.model.families import parts
from anabranch.model.families.parts import Fields
from anabranch.support.jsonfiles import shown

# T5 has no table of positions; the encoder keeps a bias for each head and two positions, 0.8 GB in T5 base's layers
UNBOUNDED = 4096


def _t5_fields(f: Fields) -> Fields:
    """The layers of T5's encoder and decoder."""
    kind, _, name = f["feed_forward_proj"].rpartition("-")
    if kind not in ("", "gated"):
        raise ModelError(
            f"feed_forward_proj {shown(f['feed_forward_proj'])} in the model's config is not supported; supported are "
            "an activation, and gated- before one"
        )
    f["activation"] = "gelu_new" if f["feed_forward_proj"] == "gated-gelu" else name
    heads = f["num_attention_heads"]
    return {
        **parts.biases(False),
        **parts.uniform(f),
        **{name: f[name] for name in ("family", "vocab_size", "hidden_size", "head_dim")},
        "num_heads": heads,
        "num_kv_heads": heads,
        "intermediate_size": f["d_ff"],
        "max_positions": UNBOUNDED,
        "position": "none",
        "norm_eps": f["layer_norm_epsilon"],
        "gated_mlp": kind == "gated",
        "activation": parts.activation(f, "activation"),
        "attention_scale": 1.0,
    }


def t5(f: Fields) -> ModelConfig:
    """T5, T5 v1.1 and Flan-T5: biases of attention by distance, no biases of products."""
    tied, scaled = f["tie_word_embeddings"], f["scale_decoder_outputs"]
    config = mt5(f)
    # a head that is tied to the embedding takes rows that are scaled; a file of v1.1 states that its head is not
    return replace(config, output_scale=f["hidden_size"] ** -0.5) if (tied if scaled is None else scaled) else config


def mt5(f: Fields) -> ModelConfig:
    """T5 without scaled outputs."""
    fields, deep = _t5_fields(f), f["num_hidden_layers"]
    sizes = f["relative_attention_num_buckets"], f["relative_attention_max_distance"]
    if sizes[0] % 4 or sizes[0] < 4 or sizes[1] <= sizes[0] // 2:
        raise ModelError(
            f"relative_attention_num_buckets {sizes[0]} and relative_attention_max_distance {sizes[1]} in the model's "
            "config do not belong together: the buckets must be a multiple of 4, and the distance more than half of "
            "them; correct the config or fetch the model again"
        )
    encoder = ModelConfig(**fields, num_layers=deep, relative=RelativeConfig(*sizes, both_ways=True))
    return ModelConfig(
        **fields,
        num_layers=deep if f["num_decoder_layers"] is None else f["num_decoder_layers"],
        relative=RelativeConfig(*sizes, both_ways=False),
        encoder=EncoderConfig(encoder, (f["decoder_start_token_id"],)),
        tied_head=True,
        **_ends(f),
    )


def _ends(f: Fields) -> Fields:
    return {"eos_token_ids": f["eos_token_id"], "bos_token_id": f["bos_token_id"]}


def _bart_side(f: Fields, side: str, layers: int, positions: int) -> Fields:
    """The layers of BART's encoder or decoder, which the names of the config's fields begin with."""
    heads = f["num_attention_heads"] if side == "encoder" else f[f"{side}_attention_heads"]
    if f["hidden_size"] % heads:
        raise ModelError(
            f"d_model {f['hidden_size']} in the model's config is not a multiple of its {heads} attention heads; "
            "correct the config or fetch the model again"
        )
    return {
        **parts.biases(True, "mlp_bias"),
        **parts.uniform(f),
        **{name: f[name] for name in ("family", "vocab_size", "hidden_size")},
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": f["hidden_size"] // heads,
        "intermediate_size": f[f"{side}_ffn_dim"],
        "max_positions": positions,
        "norm": "layer",
        "gated_mlp": False,
        "activation": parts.activation(f, "activation_function"),
    }


def _bart(f: Fields, positions: Fields, *, words: int, shared: bool) -> ModelConfig:
    limit = f["max_position_embeddings"]
    scale = f["hidden_size"] ** 0.5 if f["scale_embedding"] else 1.0
    wired = {"wiring": "post", "final_norm": False, "embedding_scale": scale, **positions}
    encoder = ModelConfig(**_bart_side(f, "encoder", f["num_hidden_layers"], limit), **wired)
    decoder = {**_bart_side(f, "decoder", f["decoder_layers"], limit), **wired, "vocab_size": words}
    start = f["decoder_start_token_id"]
    return ModelConfig(
        **decoder,
        encoder=EncoderConfig(encoder, (start,), shared=shared),
        tied_head=f["tie_word_embeddings"],
        head_bias=True,
        **_ends(f),
    )


def bart(f: Fields) -> ModelConfig:
    """BART: norms after each part, learned positions."""
    places = {"position": "learned", "learned_offset": 2, "embedding_norm": True}
    return _bart(f, places, words=f["vocab_size"], shared=True)


def marian(f: Fields) -> ModelConfig:
    """Marian: BART with sinusoidal positions and without a norm of the embedding."""
    shared = f["share_encoder_decoder_embeddings"]
    words = f["vocab_size"] if shared else f["decoder_vocab_size"] or f["vocab_size"]
    return _bart(f, {"position": "sinusoidal"}, words=words, shared=shared)


def whisper(f: Fields) -> ModelConfig:
    """Whisper: norms before each part, an encoder of log-mel features behind two convolutions."""
    encoder = _bart_side(f, "encoder", f["num_hidden_layers"], f["max_source_positions"])
    return ModelConfig(
        **_bart_side(f, "decoder", f["decoder_layers"], f["max_target_positions"]),
        position="learned",
        encoder=EncoderConfig(
            *(ModelConfig(**encoder, position="learned"), (f["decoder_start_token_id"],)), channels=f["num_mel_bins"]
        ),
        tied_head=f["tie_word_embeddings"],
        **_ends(f),
    )
