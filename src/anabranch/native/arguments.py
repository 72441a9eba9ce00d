"""Checks of arguments of the C functions. They also run under ``python -O``, since they protect memory."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.native.structs import Packed

__all__ = [
    "BLOCK",
    "FLOATS",
    "IN_FILE_FORMATS",
    "KINDS",
    "STORED_TYPES",
    "address",
    "filled",
    "packable",
    "require",
    "row_bytes",
    "row_kind",
    "rows_for",
    "scores",
]

BLOCK = 32  # outputs of a packed block
# of packed weights
KINDS = {"bfloat16": 0, "float32": 1, "int8": 2, "int4": 3, "compact": 4, "stored": 5, "floats": 6}
# Kinds of weights in the formats of a GGUF file: multiplied by rows in int8; and floats alone, multiplied by floats.
IN_FILE_FORMATS = ("stored", "floats")
# The formats of stored weights by their names in GGUF files, and their numbers there (``stored.h``).
STORED_TYPES = {
    "F32": 0, "F16": 1, "BF16": 30,
    "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14,
    "IQ4_NL": 20, "IQ4_XS": 23, "MXFP4": 39,
}  # fmt: skip
FLOATS = frozenset({"F32", "F16", "BF16"})
# values and bytes of a file's block of each format
_SIZES = {
    "F32": (32, 128), "F16": (32, 64), "BF16": (32, 64),
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
    "IQ4_NL": (32, 18), "IQ4_XS": (256, 136), "MXFP4": (32, 17),
}  # fmt: skip
_SIZE_OF = {number: _SIZES[name] for name, number in STORED_TYPES.items()}


def require(holds: bool, what: str, *values: object) -> None:
    """Raise AssertionError unless ``holds``.

    ``values`` are for the braces of ``what``, which is formatted only for an error: these checks run in every step.
    """
    if not holds:
        raise AssertionError(what.format(*values))


def address(array: NDArray[Any]) -> int:
    """The address of an array.

    ``array.ctypes`` runs Python code, which takes several times as long, more so from cold caches.
    """
    if array.size == 0 or not (array.flags.writeable and array.flags.c_contiguous):
        return int(array.ctypes.data)
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data))


def packable(kind: str, weight: Tensor, scale: Tensor | None, least: Tensor | None) -> None:
    """Check a weight to pack and, if it is quantised, its scales; see ``Library.pack``."""
    require(kind in KINDS and kind not in IN_FILE_FORMATS, "a weight of kind {} cannot be packed from values", kind)
    require(weight.dim() == 2 and weight.numel() > 0, "a weight to pack has the shape {}", weight.shape)
    outputs, width = weight.shape
    plain = kind in ("bfloat16", "float32")
    require(weight.dtype == (getattr(torch, kind) if plain else torch.uint8), "{} is not {}", weight.dtype, kind)
    require(width % {"bfloat16": 2, "float32": 1}.get(kind, BLOCK) == 0, "{} of width {} cannot be packed", kind, width)
    groups = (outputs, width // BLOCK)
    for given, wanted in (
        (scale, None if plain else ((outputs,), torch.float32) if kind == "int8" else (groups, torch.float16)),
        (least, (groups, torch.float16) if kind in ("int4", "compact") else None),
    ):
        fits = given is None if wanted is None else given is not None and (tuple(given.shape), given.dtype) == wanted
        require(fits, "scales of {} weights must be {}", kind, wanted)


def row_kind(x: Tensor) -> int:
    """The kind of unquantised rows: one of ``KINDS``."""
    kind = KINDS.get(str(x.dtype).removeprefix("torch."))
    require(kind in (0, 1), "rows must be bfloat16 or float32, got {}", x.dtype)
    return kind or 0


def rows_for(packed: Packed, x_MD: Tensor, bias_N: Tensor | None) -> tuple[Tensor, int | None]:
    """Contiguous rows for a packed weight, and the address of its bias."""
    kind = row_kind(x_MD)
    require(x_MD.is_cpu and x_MD.dim() == 2, "rows must be [M, D] on the CPU, got {} on {}", x_MD.shape, x_MD.device)
    require(x_MD.shape[1] == packed.width, "rows of width {} for a weight of width {}", x_MD.shape[1], packed.width)
    suits = (
        KINDS["int8"],
        KINDS["int4"],
        KINDS["stored"],
        KINDS["floats"],
        kind,
        *((KINDS["compact"],) if x_MD.dtype == torch.bfloat16 else ()),
    )
    require(packed.kind in suits, "rows of {} for a weight of kind {}", x_MD.dtype, packed.kind)
    if bias_N is None:
        return x_MD.contiguous(), None
    filled(bias_N, packed.outputs, torch.float32)
    return x_MD.contiguous(), bias_N.data_ptr()


def scores(z_MN: Tensor) -> Tensor:
    """Contiguous float32 scores [M, N]."""
    require(z_MN.dtype == torch.float32 and z_MN.is_cpu, "scores must be float32 on the CPU, got {}", z_MN.dtype)
    require(z_MN.dim() == 2 and z_MN.shape[1] > 0, "scores must be [M, N], got {}", z_MN.shape)
    return z_MN.contiguous()


def filled(x: Tensor, count: int, dtype: torch.dtype) -> None:
    """Check that ``x`` is contiguous memory of ``count`` values of a type."""
    fits = x.is_cpu and x.is_contiguous() and x.dtype == dtype and x.numel() == count
    require(fits, "expected {} contiguous values of {}, got {} of {}", count, dtype, x.shape, x.dtype)


def row_bytes(kind: int, width: int) -> int:
    """Bytes of a file's row of ``width`` values in the format with this number; -1 if there is no such row."""
    values, size = _SIZE_OF.get(kind, (0, 0))
    return width // values * size if values and width % values == 0 else -1
