"""A quantised matrix in the format of its GGUF file.

N outputs (rows), D inputs.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

__all__ = ["FileMatrix"]

# Where the halves of a block's scales and minima are, in bytes.
_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
_INFINITE = 0x7C00  # the exponent of halves that are not finite


@dataclass(frozen=True, eq=False)
class FileMatrix:
    """A weight [N, D] in blocks of one of ggml's types.

    rows   uint8 [N, bytes of a row], usually a part of a mapped file
    order  the row in ``rows`` of each output [N]; None: the same
    """

    kind: GGMLQuantizationType
    rows: NDArray[np.uint8]
    width: int
    order: NDArray[np.int64] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """N and D."""
        return len(self.rows), self.width

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.rows.nbytes

    def stored_rows(self) -> NDArray[np.uint8]:
        """The rows in the order of the outputs [N, bytes of a row]."""
        return np.asarray(self.rows) if self.order is None else np.asarray(self.rows)[self.order]

    def finite(self) -> bool:
        """Whether all scales and minima are finite."""
        size_bytes = GGML_QUANT_SIZES[self.kind][1]
        blocks = np.asarray(self.rows).reshape(-1, size_bytes)
        exponents = (blocks[:, at + 1] & (_INFINITE >> 8) for at in _HALVES.get(self.kind.name, ()))
        return not any(bool((exponent == _INFINITE >> 8).any()) for exponent in exponents)

    def values(self, flat: NDArray[np.int64]) -> NDArray[np.float32]:
        """Some values of the flattened weight [n]: only their blocks are dequantised."""
        size, size_bytes = GGML_QUANT_SIZES[self.kind]
        outputs, columns = np.divmod(flat, self.width)
        where = outputs if self.order is None else self.order[outputs]
        blocks = np.asarray(self.rows).reshape(len(self.rows), -1, size_bytes)[where, columns // size]
        dense = dequantize(blocks.reshape(1, -1), self.kind)  # as one row: gguf takes 16 rows at a time
        return np.asarray(dense.reshape(-1, size)[np.arange(len(flat)), columns % size], np.float32)

    def give_back(self) -> None:
        """Drop the rows' pages from memory if they belong to a mapped file; the next access reads them again."""
        pages = _mapping(self.rows)
        if pages is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        first = self.rows.__array_interface__["data"][0] - np.frombuffer(pages, np.uint8).__array_interface__["data"][0]
        start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE  # pages shared with a neighbour stay
        if first + self.nbytes > start:
            pages.madvise(mmap.MADV_DONTNEED, start, first + self.nbytes - start)


def _mapping(array: Any) -> mmap.mmap | None:
    """The mapping that an array is a part of."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array if isinstance(array, mmap.mmap) else None
