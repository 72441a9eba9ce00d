"""Weights in the formats of GGUF files, packed for the kernels with the same values (``stored.h``).

A stored weight [N, D] consists of blocks of 32 outputs, each in a format of its own: integers with scales, or floats. A
weight of floats alone is either a "stored" one, multiplied by rows in int8 like the others of its layer, or one of the
kind "floats", multiplied by rows of floats. Its memory holds no addresses, so
that it can be written to a file and used from there.
"""

from __future__ import annotations

import ctypes
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.native.arguments import BLOCK, KINDS, STORED_TYPES, address, require
from anabranch.native.structs import Packed

__all__ = ["FUNCTIONS", "StoredWeights"]

_INT, _LONG, _POINTER, _PACKED = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p, ctypes.POINTER(Packed)
# arguments of the C functions
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "stored_bytes": (_POINTER, _INT, _INT, ctypes.POINTER(_LONG)),
    "start_stored": (_PACKED, _POINTER),
    "check_stored": (_PACKED, _LONG),
    "pack_stored": (_POINTER, _PACKED, _INT, _INT, _INT, _POINTER, _LONG, _POINTER, _INT),
    "unpack_stored": (_PACKED, _POINTER, _INT, _POINTER),
    "raw_rows": (_INT, _POINTER, _LONG, _INT, _POINTER, _INT, _POINTER),
}


class StoredWeights(ABC):
    """The calls of the kernels that pack, check and unpack stored weights."""

    lock: threading.Lock

    @abstractmethod
    def runner(self) -> int:
        """The thread pool; ``lock`` must be held."""

    @abstractmethod
    def allocate(self, size: int) -> Tensor:
        """Memory of ``size`` bytes for a packed weight."""

    @abstractmethod
    def _call(self, name: str, *arguments: object) -> int: ...

    def stored_bytes(self, types: Sequence[int], width: int) -> int:
        """The size of a stored weight, given the format of each block of 32 outputs (``STORED_TYPES``)."""
        kinds, size = _kinds(types), _LONG()
        self._call("stored_bytes", address(kinds), len(kinds), width, ctypes.byref(size))
        return size.value

    def stored(self, types: Sequence[int], outputs: int, width: int, *, kind: str = "stored") -> tuple[Packed, Tensor]:
        """Room for a weight of this kind (``IN_FILE_FORMATS``); the second value is its memory."""
        require(len(types) == -(-outputs // BLOCK), "{} formats for {} outputs", len(types), outputs)
        memory = self.allocate(self.stored_bytes(types, width))
        packed, kinds = Packed(memory.data_ptr(), outputs, width, KINDS[kind]), _kinds(types)
        self._call("start_stored", ctypes.byref(packed), address(kinds))
        return packed, memory

    def adopt(self, memory: Tensor, outputs: int, width: int, *, kind: str = "stored") -> Packed:
        """A weight of this kind in memory that was read from a file. Raises AssertionError if it does not fit."""
        require(memory.is_cpu and memory.dtype == torch.uint8 and memory.is_contiguous(), "memory of another kind")
        require(memory.data_ptr() % 8 == 0, "memory of a stored weight is not aligned")
        packed = Packed(memory.data_ptr(), outputs, width, KINDS[kind])
        self._call("check_stored", ctypes.byref(packed), memory.numel())
        return packed

    def pack_stored(
        self,
        to: Packed,
        first: int,
        kind: int,
        raw: NDArray[np.uint8],
        order: NDArray[np.int64] | None = None,
        *,
        every: int = 1,
    ) -> bool:
        """Pack rows of a file's tensor [rows, bytes of a row] into a stored weight; False if a scale is not finite.

        first  the block that receives the first 32 rows; the next ones go to every ``every``-th block
        kind   the number of the tensor's format, which these blocks have
        order  the rows to pack, in this order; None: all
        """
        require(raw.ndim == 2 and raw.dtype == np.uint8 and raw.flags.c_contiguous, "rows are not bytes")
        require(raw.shape[1] == row_bytes(kind, to.width), "a row has {} bytes", raw.shape[1])
        count = len(raw)
        if order is not None:
            order = np.ascontiguousarray(order, np.int64)
            count = len(order)
            require(count > 0 and order.min() >= 0 and order.max() < len(raw), "a row is not in the tensor")
        with self.lock:
            finite = self._call(
                *("pack_stored", self.runner(), ctypes.byref(to), first, every, kind, address(raw), raw.shape[1]),
                *(None if order is None else address(order), count),
            )
        return bool(finite)

    def unpack_stored(self, packed: Packed, outputs: NDArray[np.int64] | None = None) -> Tensor:
        """Outputs of a stored weight (None: all), exactly: float32 [n, D]."""
        wanted = np.arange(packed.outputs) if outputs is None else np.ascontiguousarray(outputs, np.int64)
        y = torch.empty(len(wanted), packed.width)
        if len(wanted):
            self._call("unpack_stored", ctypes.byref(packed), address(wanted), len(wanted), y.data_ptr())
        return y

    def raw_rows(self, kind: int, raw: NDArray[np.uint8], width: int, rows: NDArray[np.int64]) -> Tensor:
        """Rows of a file's tensor in the format with the number ``kind``, exactly: float32 [n, D]."""
        require(raw.ndim == 2 and raw.dtype == np.uint8 and raw.flags.c_contiguous, "rows are not bytes")
        require(raw.shape[1] == row_bytes(kind, width), "a row has {} bytes", raw.shape[1])
        rows = np.ascontiguousarray(rows, np.int64)
        y = torch.empty(len(rows), width)
        if len(rows):
            self._call("raw_rows", kind, address(raw), len(raw), width, address(rows), len(rows), y.data_ptr())
        return y


# values and bytes of a file's block of each format
_SIZES = {
    "F32": (32, 128), "F16": (32, 64), "BF16": (32, 64),
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
    "IQ4_NL": (32, 18), "IQ4_XS": (256, 136), "MXFP4": (32, 17),
}  # fmt: skip
_SIZE_OF = {number: _SIZES[name] for name, number in STORED_TYPES.items()}


def row_bytes(kind: int, width: int) -> int:
    """Bytes of a file's row of ``width`` values in the format with this number; -1 if there is no such row."""
    values, size = _SIZE_OF.get(kind, (0, 0))
    return width // values * size if values and width % values == 0 else -1


def _kinds(types: Sequence[int]) -> NDArray[np.int32]:
    return np.array(types, np.int32)
