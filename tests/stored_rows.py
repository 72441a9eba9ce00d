"""Rows of GGUF files with arbitrary values in every format."""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from anabranch.native.arguments import FLOATS, STORED_TYPES

# where the halves of a block are: scale, and minimum
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
    "F32": (), "F16": (), "BF16": (),
}  # fmt: skip


def raw_rows(name: str, rows: int, width: int, seed: int = 0, scale: float = 0.01) -> NDArray[np.uint8]:
    """Rows [rows, bytes] in a format, of random bits but for the scales of blocks: about as large as ``scale``."""
    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    random = np.random.default_rng(seed)
    if name in FLOATS:
        made = random.standard_normal((rows, width)) * 0.1
        return np.ascontiguousarray(quantize(made.astype(np.float32), GGMLQuantizationType[name])).view(np.uint8)
    raw = random.integers(0, 256, (rows, width // values, size), dtype=np.uint8)
    for at in HALVES[name]:
        scales = (random.standard_normal(raw.shape[:2]) * scale).astype(np.float16)
        raw[:, :, at : at + 2] = scales.view(np.uint8).reshape(*raw.shape[:2], 2)
    if name == "MXFP4":
        raw[:, :, 0] = random.integers(0, 125, raw.shape[:2])  # powers of two, from the smallest
    return np.ascontiguousarray(raw.reshape(rows, -1))


def values_of(name: str, raw: NDArray[np.uint8]) -> torch.Tensor:
    """The float32 values of rows, by the ``gguf`` package."""
    assert GGMLQuantizationType[name] == STORED_TYPES[name]
    stored = raw.view({"F32": np.float32, "F16": np.float16}.get(name, np.uint8))
    return torch.from_numpy(np.array(dequantize(stored, GGMLQuantizationType[name]), np.float32))
