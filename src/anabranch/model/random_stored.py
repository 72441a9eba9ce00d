"""Decoders in the format of a quantised GGUF file whose weights mean nothing, for timing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from anabranch.errors import CapabilityError, InputError
from anabranch.model.as_stored import NotStoredError, fill_as_stored
from anabranch.model.config import ModelConfig
from anabranch.model.decoder import Decoder
from anabranch.model.families import module_rows, weight_source
from anabranch.model.matrix import Matrix, random_blocks
from anabranch.model.stored import LazyTensors
from anabranch.model.weights import build_decoder
from anabranch.native.arguments import STORED_TYPES
from anabranch.support.nearest import hint

__all__ = ["random_stored_decoder"]


def random_stored_decoder(config: ModelConfig, kind: str) -> Decoder:
    """A packed decoder all of whose matrices are random blocks of one format, such as "Q4_K".

    Raises InputError for an unknown format, CapabilityError for shapes that the kernels cannot multiply in it, and
    DeviceError if the weights do not fit in memory.
    """
    formats = [name for name in STORED_TYPES if name != "MXFP4"]  # random exponents overflow
    if kind not in formats:
        raise InputError(f"there is no stored format {kind!r}{hint(kind, formats)}; formats are {', '.join(formats)}")
    number = GGMLQuantizationType[kind]
    size, _ = GGML_QUANT_SIZES[number]
    shapes: dict[str, tuple[int, ...]] = {}
    for parameter, value in build_decoder(config).named_parameters():
        names = [names[0] for names in weight_source(config, parameter).tensors]
        for name, rows in zip(names, module_rows(config, len(names), value.shape[0]), strict=True):
            shapes[name] = (rows, *value.shape[1:])
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    if narrow := [name for name, shape in matrices.items() if shape[1] % size]:
        raise CapabilityError(
            f"{narrow[0]} has {matrices[narrow[0]][1]} columns, which do not divide into blocks of {kind} ({size} "
            "values); choose a format with blocks of 32 values, such as Q4_0"
        )
    # all matrices are views of the same blocks: drawing billions of values takes minutes
    blocks = random_blocks(number, max(map(prod, matrices.values())) // size)
    stored = {
        name: Matrix(number, (rows, width), partial(blocks[: rows * (width // size)].reshape, rows, -1))
        for name, (rows, width) in matrices.items()
    }
    loaders: dict[str, Callable[[], Tensor]] = {name: partial(torch.ones, shape) for name, shape in shapes.items()}
    try:
        decoder, _ = fill_as_stored(config, LazyTensors(loaders), stored, (), keep=False)
    except NotStoredError as error:
        raise CapabilityError(
            f"a model of this shape cannot be decoded in {kind}: {error}; leave out the format"
        ) from error
    return decoder
