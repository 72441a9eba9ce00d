"""A matrix in a format of GGUF files: floats, or quantised.

N outputs (rows), D inputs.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

__all__ = ["Matrix", "forget_made", "formats_of", "random_blocks"]

# Where the halves of a block's scales and minima are, in bytes.
_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
# The bits of floats, and their exponent if they are not finite.
_FLOATS = {"F32": (np.uint32, 0x7F800000), "F16": (np.uint16, 0x7C00), "BF16": (np.uint16, 0x7F80)}
_INFINITE = 0x7C  # the exponent of halves that are not finite, in their second byte
AT_ONCE = 1 << 24  # bytes of rows that are in memory at a time
_SCALE = 1 / 4096  # of random blocks: their values are of the order of a trained model's


@dataclass(frozen=True, eq=False)
class Matrix:
    """A weight [N, D] in one of ggml's types.

    shape  N and D
    make   its rows, uint8 [N, bytes of a row]: a part of a mapped file, or converted from another format
    order  the row of each output [N]; None: the same
    """

    kind: GGMLQuantizationType
    shape: tuple[int, int]
    make: Callable[[], NDArray[np.uint8]]
    order: NDArray[np.int64] | None = None

    @property
    def width(self) -> int:
        """D."""
        return self.shape[1]

    @property
    def rows(self) -> NDArray[np.uint8]:
        """The rows; those of the last matrices are kept until ``forget_made``."""
        return _made(self)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        size, size_bytes = GGML_QUANT_SIZES[self.kind]
        return self.shape[0] * (self.width // int(size)) * int(size_bytes)

    def pieces(self, order: NDArray[np.int64] | None = None, multiple: int = 1) -> Iterator[NDArray[np.uint8]]:
        """The rows of outputs [n, bytes of a row], some at a time; their pages are given back after use.

        order     the rows, in this order; None: as ``order`` of the matrix says
        multiple  of which each n is one, but for the last
        """
        order, rows = self.order if order is None else order, np.asarray(self.rows)
        count = len(rows) if order is None else len(order)
        size = max(1, AT_ONCE // max(1, rows.shape[1]) // multiple) * multiple
        for first in range(0, count, size):
            part = slice(first, first + size)
            yield rows[part] if order is None else rows[order[part]]
            if order is None:
                _give_back(rows[part])
        _give_back(rows)

    def finite(self) -> bool:
        """True if all values are finite, or all scales and minima."""
        places, floats = _HALVES.get(self.kind.name, ()), _FLOATS.get(self.kind.name)
        for rows in self.pieces():
            if floats is not None:
                bits, exponent = rows.view(floats[0]), floats[1]
                if bool(((bits & exponent) == exponent).any()):
                    return False
                continue
            blocks = rows.reshape(-1, GGML_QUANT_SIZES[self.kind][1])
            if any(bool(((blocks[:, at + 1] & _INFINITE) == _INFINITE).any()) for at in places):
                return False
        return True

    def values(self, flat: NDArray[np.int64]) -> NDArray[np.float32]:
        """Some values of the flattened weight [n]: only their blocks are dequantised."""
        size, size_bytes = GGML_QUANT_SIZES[self.kind]
        outputs, columns = np.divmod(flat, self.width)
        where, rows = outputs if self.order is None else self.order[outputs], np.asarray(self.rows)
        blocks = rows.reshape(len(rows), -1, size_bytes)[where, columns // size]
        _give_back(rows)
        dense = dequantize(blocks.reshape(1, -1), self.kind)  # as one row: gguf takes 16 rows at a time
        return np.asarray(dense.reshape(-1, size)[np.arange(len(flat)), columns % size], np.float32)


@lru_cache(maxsize=3)  # the parts of a weight that the decoder fuses are sampled, then packed
def _made(matrix: Matrix) -> NDArray[np.uint8]:
    return matrix.make()


def forget_made() -> None:
    """Free the rows of matrices that were converted."""
    _made.cache_clear()


def formats_of(matrices: Mapping[str, Matrix]) -> tuple[str, ...]:
    """The names of the formats of some matrices, that of the most bytes first."""
    sizes: Counter[str] = Counter()
    for matrix in matrices.values():
        sizes[matrix.kind.name] += matrix.nbytes
    return tuple(name for name, _ in sizes.most_common())


def random_blocks(kind: GGMLQuantizationType, count: int) -> NDArray[np.uint8]:
    """Arbitrary blocks of a type with finite scales [count, bytes of a block], for timing.

    Raises KeyError for types whose scales are not halves.
    """
    blocks = np.random.default_rng(0).integers(256, size=(count, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    for at in _HALVES[kind.name]:
        blocks[:, at : at + 2] = np.frombuffer(np.float16(_SCALE).tobytes(), np.uint8)
    return blocks


def _mapping(array: Any) -> mmap.mmap | None:
    """The mapping that an array is a part of."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array if isinstance(array, mmap.mmap) else None


def _give_back(rows: NDArray[np.uint8]) -> None:
    """Drop the pages of rows of a mapped file from memory; the next access reads them again."""
    pages = _mapping(rows)
    if pages is None or not hasattr(mmap, "MADV_DONTNEED"):
        return
    begin = np.frombuffer(pages, np.uint8).__array_interface__["data"][0]
    start = rows.__array_interface__["data"][0] - begin
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    pages.madvise(mmap.MADV_DONTNEED, first, start + rows.nbytes - first)
