"""The C structs of ``pack.h`` and ``plan.h`` for ctypes; their layouts are compared when the library is loaded."""

from __future__ import annotations

import ctypes
from typing import TypeAlias

__all__ = [
    "LAST",
    "Cross",
    "Ends",
    "Layer",
    "Layers",
    "LowRank",
    "Packed",
    "RaggedBatch",
    "Rider",
    "Screen",
    "Shape",
    "StreamLayer",
    "Table",
    "Taps",
    "layout",
]


class Packed(ctypes.Structure):
    """A packed weight [outputs, width]; ``kind`` is one of ``KINDS``."""

    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_int32) for name in ("outputs", "width", "kind")))


class Screen(ctypes.Structure):
    """A copy of a weight in int8 and its bounds, float32 [outputs in whole blocks]; see ``screen.h``."""

    _fields_ = (("copy", Packed), ("error", ctypes.c_void_p), ("size", ctypes.c_void_p))


class Table(ctypes.Structure):
    """Embeddings [words, width]: row by row, ``packed`` (1) like a weight of the same type, or (2) rows of a GGUF file.

    type  the number of a GGUF file's format (``STORED_TYPES``)
    """

    _fields_ = (("rows", ctypes.c_void_p), *((name, ctypes.c_int32) for name in ("packed", "words", "type")))


class Cross(ctypes.Structure):
    """The weights of a layer's attention to the sources of the rows; without data in q: none."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("norm", "norm_bias", "q_bias", "out_bias")),
        *((name, Packed) for name in ("q", "out")),
    )


class Layer(ctypes.Structure):
    """The weights and the cache of one layer.

    source  the layer in the keys and values of sources
    """

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("norm_in", "norm_mlp", "q_norm", "k_norm")),
        *((name, ctypes.c_void_p) for name in ("after_attention", "after_mlp", "norm_in_bias", "norm_mlp_bias")),
        *((name, ctypes.c_void_p) for name in ("qkv_bias", "out_bias", "up_bias", "down_bias")),
        *((name, Packed) for name in ("qkv", "out", "up", "down", "low", "high")),
        *((name, ctypes.c_int32) for name in ("rope_queries", "rope_keys", "rope_width", "slides")),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("cross", Cross),
        ("source", ctypes.c_int32),
    )


Layers: TypeAlias = ctypes.Array[Layer]


class Shape(ctypes.Structure):
    """Sizes shared by all layers.

    wiring           0: sequential, 1: attention and MLP in parallel, 2: sequential, with norms after the sums
    quantized_cache  1: keys and values are stored in int8 with scales, and strides are in bytes; else in values
    biases           added to scores by the distance from query to key, float32 [heads, 2 distance + 1]; null: none
    """

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("d", "heads", "kv_heads", "e", "inner", "rope_dim")),
        *((name, ctypes.c_int32) for name in ("activation", "gated", "wiring", "layer_norm", "heads_normed")),
        ("quantized_cache", ctypes.c_int32),
        *((name, ctypes.c_float) for name in ("eps", "scale", "softcap", "residual_scale", "embedding_scale")),
        ("biases", ctypes.c_void_p),
        ("distance", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
    )


class RaggedBatch(ctypes.Structure):
    """The nodes of a pass: batch row b has the nodes ``starts[b]`` to ``starts[b + 1]`` - 1, possibly none.

    nodes       total number of nodes
    positions   number of rows of ``cos`` and ``sin``
    whole       1: each node sees all nodes of its batch row
    rotations       the row of ``cos`` and ``sin`` that is position 0 of each batch row; null: 0
    x           the nodes' hidden states; null: the kernels use their own memory
    sizes       positions of the source of each batch row, null: there are none; and the addresses of its keys and
                values [layers, K, size, E]
    """

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("batch", "nodes", "window", "trailing", "positions", "whole")),
        *((name, ctypes.c_void_p) for name in ("x", "cos", "sin", "starts", "lengths", "parents", "rotations")),
        *((name, ctypes.c_void_p) for name in ("sizes", "source_keys", "source_values")),
    )


class Ends(ctypes.Structure):
    """The start of a pass, from tokens, and its end: the last norm, and the tokens that the head chooses.

    prefill  the number of prompt tokens at the start of each batch row; the outputs are without them
    """

    _fields_ = (
        ("embedding", Table),
        ("tokens", ctypes.c_void_p),
        ("places", Table),
        *((name, ctypes.c_void_p) for name in ("norm_embedding", "norm_embedding_bias")),
        *((name, ctypes.c_void_p) for name in ("norm", "norm_bias", "hidden")),
        ("head", Packed),
        ("bias", ctypes.c_void_p),
        ("screen", Screen),
        ("chosen", ctypes.c_void_p),
        ("prefill", ctypes.c_void_p),
    )


class LowRank(ctypes.Structure):
    """A low-rank term x -> (x down') up'; no data: none."""

    _fields_ = (("down", Packed), ("up", Packed))


class StreamLayer(ctypes.Structure):
    """The weights of a layer for streams only: terms of its products, and one beside the MLP or instead of it."""

    _fields_ = (*((name, LowRank) for name in ("qkv", "out", "up", "down", "mlp")), ("replaces", ctypes.c_int32))


class Rider(ctypes.Structure):
    """Streams that ride in a pass, and pruning; see ``rider.h``.

    count   S, the number of streams of each node
    own     1: nodes attend to their own streams
    turns   cosine and sine by which the values of streams are rotated [S, 2]; null: none
    """

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("start", "keep")),
        *((name, ctypes.c_float) for name in ("least", "softcap")),
        *((name, ctypes.c_int32) for name in ("from_main", "positioned", "count", "own")),
        *((name, ctypes.c_void_p) for name in ("turns", "embeddings")),
        ("init", LowRank),
        *((name, Packed) for name in ("inputs", "up")),
        *((name, ctypes.c_void_p) for name in ("hidden", "sides")),
        ("exit", LowRank),
        *((name, ctypes.c_void_p) for name in ("states", "kept", "counts", "scores", "sums")),
    )


class Taps(ctypes.Structure):
    """The rows of nodes before some layers of a pass, ascending: rows [count, stride, D] float32."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("count", "stride")),
        *((name, ctypes.c_void_p) for name in ("layers", "rows")),
    )


# the last member of each struct
LAST: tuple[tuple[type[ctypes.Structure], str], ...] = (
    (Packed, "kind"),
    (Table, "type"),
    (Cross, "out"),
    (Layer, "source"),
    (Shape, "head_stride"),
    (RaggedBatch, "source_values"),
    (Ends, "prefill"),
    (Screen, "size"),
    (LowRank, "up"),
    (StreamLayer, "replaces"),
    (Rider, "sums"),
    (Taps, "rows"),
)


def layout(last: tuple[tuple[type[ctypes.Structure], str], ...]) -> list[int]:
    """The size of each struct and the offset of its last member, as the C side lists them."""
    return [number for struct, name in last for number in (ctypes.sizeof(struct), getattr(struct, name).offset)]
