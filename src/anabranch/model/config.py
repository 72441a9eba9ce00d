"""The architecture of a target: a frozen record that the decoder is built from.

``families`` derives it from a Hugging Face ``config.json``; nothing else in the package refers to a family by name.

Some models need an adapter to be complete, since their main rows attend to its rows (``Decoder.rider``): their
config.json, or the adapter_config.json of the LoRA that makes one, names the adapter's method under ``NEEDS``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

__all__ = [
    *("NEEDS", "DeltaConfig", "EncoderConfig", "ExpertsConfig", "ModelConfig", "RelativeConfig", "RopeConfig"),
    *("Rotation", "needed"),
]

NEEDS = "anabranch_needs"


def needed(record: Mapping[str, Any]) -> str:
    """The method whose adapter a model or LoRA with this config needs; empty: none."""
    method = record.get(NEEDS, "")
    return method if isinstance(method, str) else ""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions (Su et al. 2021) and their variants for long contexts.

    dim                     rotated channels of a head
    scaling                 the Hugging Face ``rope_parameters`` of a variant (linear, dynamic, llama3, yarn, longrope)
    max_positions           the context length in the config
    original_max_positions  the context length before it was extended; None: ``max_positions``
    rereads                 read a text again as a whole when it outgrows the original length
    stated                  inverse frequencies and the factor of cos and sin, which override the variant's
    """

    theta: float = 10_000.0
    dim: int = 64
    scaling: dict[str, Any] | None = None
    max_positions: int = 2048
    original_max_positions: int | None = None
    rereads: bool = False
    stated: tuple[tuple[float, ...], float] | None = None


@dataclass(frozen=True)
class RelativeConfig:
    """A learned bias for each head and bucket of distances (Raffel et al. 2020, T5), shared by all layers.

    buckets     half of them, of each direction's, are for one distance each; the others are logarithmic
    distance    from which on all distances are in the last bucket
    both_ways   later positions have buckets of their own: in an encoder
    """

    buckets: int
    distance: int
    both_ways: bool


class Rotation(NamedTuple):
    """The columns of the rotation tables (``rope.Rope``) for q and for k: ``width`` from each of these on."""

    queries: int
    keys: int
    width: int


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of the MLP (``experts.py``).

    count       experts of a layer
    chosen      experts that a row passes through
    width       channels inside an expert
    layers      layers with experts; None: all of them
    normalized  the weights of a row's experts add up to 1; otherwise those of all experts do
    bias        router and experts have biases
    clamp       alpha and limit of the clamped activation of gpt-oss; None: that of the model
    """

    count: int
    chosen: int
    width: int
    layers: tuple[bool, ...] | None = None
    normalized: bool = True
    bias: bool = False
    clamp: tuple[float, float] | None = None


@dataclass(frozen=True)
class DeltaConfig:
    """Layers with a recurrent state in place of attention: gated DeltaNet (``recurrent.py``).

    layers      True for the layers that have it
    key_heads   heads of queries and keys; each serves heads / key_heads value heads
    heads       value heads
    key_dim, value_dim  channels of a head
    width       tokens that the convolution sees
    """

    layers: tuple[bool, ...]
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    width: int

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of a target's decoder, or of an encoder. Sizes are in channels, heads or tokens.

    ``max_positions`` is the context length, after scaling if rotary positions are scaled.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    # position: "rope" rotates q and k; "learned" adds a table to the embeddings, "sinusoidal" sines and cosines
    position: Literal["rope", "learned", "sinusoidal", "none"] = "rope"
    rope: RopeConfig = field(default_factory=RopeConfig)
    # of the layers with a sliding window; None: as in the others
    sliding_rope: RopeConfig | None = None
    # layers that rotate q and k; None: all of them
    rotated_layers: tuple[bool, ...] | None = None
    # beta and L: the query at position p is multiplied by 1 + beta ln(1 + floor(p / L)), as in Llama 4
    query_scaling: tuple[float, int] | None = None
    learned_offset: int = 0
    relative: RelativeConfig | None = None
    # norms
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    norm_plus_one: bool = False
    # "head": each head of q and k is normalised, "all": all heads together
    qk_norm: Literal["none", "head", "all"] = "none"
    pre_norms: bool = True
    post_norms: bool = False
    embedding_norm: bool = False
    final_norm: bool = True
    # wiring: "sequential"; "parallel" (one norm feeds attention and MLP); "parallel_two_norms"; "post" (sequential,
    # where each norm follows the sum instead of preceding its part)
    wiring: Literal["sequential", "parallel", "parallel_two_norms", "post"] = "sequential"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    gated_mlp: bool = True
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    # attention
    attention_scale: float | None = None
    attention_softcap: float | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] | None = None
    # a learned score per head that takes part in the softmax (gpt-oss)
    attention_sinks: bool = False
    # the output of attention is multiplied by a sigmoid of the layer's input
    attention_gate: bool = False
    experts: ExpertsConfig | None = None
    recurrent: DeltaConfig | None = None
    # beside the decoder, whose layers attend to its output; None: a decoder-only model
    encoder: EncoderConfig | None = None
    # scales of the embedding, of what a block adds to the rows, and of the rows after the last norm
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    output_scale: float = 1.0
    # output head
    logit_softcap: float | None = None
    tied_head: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def is_sliding(self, layer: int) -> bool:
        """True if a layer attends only to the last ``sliding_window`` positions."""
        if self.sliding_window is None:
            return False
        return self.sliding_layers is None or self.sliding_layers[layer]

    def rotations(self, layer: int) -> Rotation | None:
        """The part of the rotation tables for a layer's q and k; None: they are not rotated."""
        if self.position != "rope" or not (self.rotated_layers is None or self.rotated_layers[layer]):
            return None
        width, start = self.rope.dim, 0
        if self.sliding_rope is not None and self.is_sliding(layer):
            width, start = self.sliding_rope.dim, width
        if self.query_scaling is None:
            return Rotation(start, start, width)
        tables = self.rope.dim + (0 if self.sliding_rope is None else self.sliding_rope.dim)
        return Rotation(tables + start, start, width)

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """The experts of a layer; None: it has an MLP."""
        if self.experts is None or (self.experts.layers is not None and not self.experts.layers[layer]):
            return None
        return self.experts

    def dense(self) -> ModelConfig:
        """The config of a layer of a drafter's own: like the target's, but with an MLP and plain attention."""
        plain: dict[str, Any] = dict.fromkeys(("experts", "recurrent", "encoder"))
        return replace(self, **plain, attention_sinks=False, attention_gate=False)

    def is_recurrent(self, layer: int) -> bool:
        """True if a layer has a recurrent state instead of keys and values."""
        return self.recurrent is not None and self.recurrent.layers[layer]

    @property
    def kv_layers(self) -> list[int]:
        """The layers that have keys and values."""
        return [layer for layer in range(self.num_layers) if not self.is_recurrent(layer)]


@dataclass(frozen=True)
class EncoderConfig:
    """An encoder beside the decoder (``encoder.py``).

    layers    its layers, of which every position sees all others; ``max_positions`` limits a source
    start     the decoder tokens that a text begins with, unless the request has others
    channels  of the features that it reads instead of tokens, two frames a position (Whisper); 0: it reads tokens
    shared    its embedding is the decoder's
    """

    layers: ModelConfig
    start: tuple[int, ...]
    channels: int = 0
    shared: bool = True
