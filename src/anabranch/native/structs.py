"""The C structs of ``kernels.cpp`` for ctypes; ``layout()`` is compared with theirs when the library is loaded."""

from __future__ import annotations

import ctypes

__all__ = ["Draft", "Ends", "Entry", "Layer", "Packed", "Shape", "Step", "Table", "layout"]


class Packed(ctypes.Structure):
    """A packed weight [outputs, width]; ``kind`` is one of ``KINDS``."""

    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_int32) for name in ("outputs", "width", "kind")))


class Table(ctypes.Structure):
    """Embeddings [words, width]: row by row, or ``packed`` as a weight of the rows' type is."""

    _fields_ = (("rows", ctypes.c_void_p), ("packed", ctypes.c_int32), ("words", ctypes.c_int32))


class Layer(ctypes.Structure):
    """Weights of one layer and where its cache lies."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("norm_in", "norm_mlp", "q_norm", "k_norm", "qkv_bias", "out_bias")),
        *((name, Packed) for name in ("qkv", "out", "up", "down", "low", "high")),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
    )


class Shape(ctypes.Structure):
    """Sizes that all layers share."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("d", "heads", "kv_heads", "e", "inner", "rope_dim")),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("row_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
    )


class Step(ctypes.Structure):
    """The nodes of one pass: batch row b has the nodes ``starts[b]`` to ``starts[b + 1]`` - 1, perhaps none.

    Without ``x`` their rows are made and kept inside. ``nodes``: of all rows. ``places``: positions that ``cos`` has.
    """

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("batch", "nodes", "window", "trailing", "places")),
        *((name, ctypes.c_void_p) for name in ("x", "cos", "sin", "starts", "lengths", "parents")),
    )


class Ends(ctypes.Structure):
    """How a pass begins, from tokens, and ends, behind the last norm and with the tokens that the head chooses."""

    _fields_ = (
        ("embedding", Table),
        *((name, ctypes.c_void_p) for name in ("tokens", "norm", "hidden")),
        ("head", Packed),
        ("bias", ctypes.c_void_p),
        ("chosen", ctypes.c_void_p),
    )


class Entry(ctypes.Structure):
    """How streams that trail begin: from ``nodes[b]`` of ``main``'s ``rows``, at most ``most`` of them."""

    _fields_ = (
        ("main", ctypes.c_void_p),
        ("nodes", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("most", ctypes.c_int32),
        ("embedding", Table),
        ("emitted", ctypes.c_void_p),
        ("inputs", Packed),
        ("up", Packed),
        *((name, ctypes.c_void_p) for name in ("streams", "hidden", "norm")),
    )


class Draft(ctypes.Structure):
    """How one row's stream states become a tree."""

    _fields_ = (
        ("embedding", Table),
        *((name, Packed) for name in ("token", "state", "carry", "to_state", "head", "own")),
        ("ids", ctypes.c_void_p),
        ("own_ids", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("d", "depth", "best", "nodes", "frontier", "blocks")),
        ("least", ctypes.c_float),
        ("keys", ctypes.c_void_p),
        ("warmth", ctypes.c_float),
        ("trust", ctypes.c_float),
    )


# a member of each struct, near or at its end
_LAST = (
    (Packed, "kind"),
    (Table, "words"),
    (Layer, "values"),
    (Shape, "head_stride"),
    (Step, "parents"),
    (Ends, "chosen"),
    (Entry, "norm"),
    (Draft, "trust"),
)


def layout() -> list[int]:
    """The size of each struct and the offset of one of its last members, as ``LAYOUT`` in ``kernels.cpp``."""
    return [number for struct, last in _LAST for number in (ctypes.sizeof(struct), getattr(struct, last).offset)]
