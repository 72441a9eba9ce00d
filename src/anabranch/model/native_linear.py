"""Linear layers over weights packed for the native kernels.

M rows, D inputs, N outputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from anabranch.model.network import Network
from anabranch.model.quantize import GROUP, QuantizedWeight
from anabranch.native import library as native
from anabranch.native import structs
from anabranch.native.arguments import BLOCK, IN_FILE_FORMATS, KINDS

__all__ = [
    "HeadTable",
    "Held",
    "NativeLinear",
    "RowTable",
    "Screen",
    "SelectedOutputs",
    "StoredWeight",
    "table_of",
]

MIN_SCREENED = 4096  # outputs from which a screen makes ``choose`` faster
MAX_NORM = 1e12  # of a screened output: sums of larger ones may overflow
NORM_ROUNDING = 1.001  # upper bound of a norm over its computed value
SUM_ROUNDING = (
    4 * 2.0**-24
)  # of a float32 sum in any order: at most this share of both norms for each of the D products
OUTPUTS_AT_ONCE = 256


class Screen:
    """An int8 copy of a weight [N, D], to choose greedy tokens exactly in half the time (``screen.h``).

    bounds  of the norm of each output's error in the copy, and of the output itself in the copy [N, in whole blocks]
    """

    def __init__(self, kernels: native.Library, weight: Tensor) -> None:
        values = torch.empty(weight.shape, dtype=torch.uint8)
        scale, error, size = torch.empty(3, len(weight))
        for first in range(0, len(weight), OUTPUTS_AT_ONCE):
            part = slice(first, first + OUTPUTS_AT_ONCE)
            w = weight[part].detach().float()
            made = QuantizedWeight.of(w, "int8")
            copy = made.dense()
            values[part], scale[part] = made.values, made.scale
            size[part] = NORM_ROUNDING * copy.norm(dim=1)
            error[part] = NORM_ROUNDING * (w - copy).norm(dim=1) + SUM_ROUNDING * w.shape[1] * size[part]
        more = -len(weight) % BLOCK
        self.bounds = F.pad(error, (0, more)), F.pad(size, (0, more))
        packed, self._memory = kernels.pack("int8", values, scale)
        self.bounded = bool(self.bounds[1].max() <= MAX_NORM)  # false if a norm is NaN
        self.native = structs.Screen(packed, *(bound.data_ptr() for bound in self.bounds))

    @staticmethod
    def of(kernels: native.Library, weight: Tensor, bias: Tensor | None) -> Screen | None:
        """The screen of a weight; None if the kernels do not take one, or it would not be faster."""
        if bias is not None or len(weight) < MIN_SCREENED or weight.shape[1] % GROUP:
            return None
        made = Screen(kernels, weight)
        return made if made.bounded else None

    @property
    def nbytes(self) -> int:
        """The minimum of bytes read to choose a token."""
        return self._memory.nbytes


class StoredWeight(NamedTuple):
    """A weight packed in the formats of its GGUF file (``native.library``), and the memory that it points to."""

    packed: structs.Packed
    memory: Tensor


class Held:
    """What structs point to: it lives as long as this object."""

    def __init__(self) -> None:
        self._kept: list[object] = []

    def keep(self, each: object) -> None:
        """Keep an object whose memory a struct has the address of."""
        self._kept.append(each)

    def pointer(self, tensor: Tensor | None) -> int | None:
        """The address of a float32 copy; None for None."""
        if tensor is None:
            return None
        kept = tensor.detach().float().contiguous()
        self.keep(kept)
        return int(kept.data_ptr())

    def packed(self, linear: NativeLinear | None) -> structs.Packed:
        """The weights of a linear layer; none for None."""
        if linear is None:
            return structs.Packed()
        self.keep(linear)
        return linear.packed

    def addresses(self, each: Sequence[ctypes.Structure]) -> int:
        """The address of an array of structs of one type."""
        made = (type(each[0]) * len(each))(*each)
        self.keep(made)
        return ctypes.addressof(made)


class NativeLinear(nn.Module):
    """``nn.Linear`` over a packed weight, for inference; batch-invariant.

    weight   bf16 or float32 [N, D], or quantised, or packed as it is stored (with ``gated``: interleaved already);
             inputs and outputs have its type, or bf16 if it is quantised
    wide     return float32 (logits) instead
    keep     an unpacked copy to keep as well, if ``rows`` cannot be read from the packed weight
    screen   also keep an int8 copy of an unquantised weight, which makes ``choose`` faster
    gated    interleave the two halves of the outputs, gate and up, block by block, so that they are read together
    compact  store a bf16 weight in four bits a value if that loses nothing (``QuantizedWeight.exact``): the kernels
             expand it in the caches, and products are the same to the bit

    bf16 weights are packed in pairs of inputs: an odd D is padded with a zero.
    """

    def __init__(
        self,
        weight: Tensor | QuantizedWeight | StoredWeight,
        bias: Tensor | None,
        *,
        keep: Tensor | None = None,
        wide: bool = False,
        gated: bool = False,
        screen: bool = False,
        compact: bool = False,
    ) -> None:
        super().__init__()
        kernels = native.library()
        assert kernels is not None, native.why_not()
        self.kernels, self.wide, self.gated, self.weight = kernels, wide, gated, keep
        self.kind: str  # one of KINDS
        self.screen = Screen.of(kernels, weight, bias) if screen and isinstance(weight, Tensor) else None
        exact = QuantizedWeight.exact(weight) if compact and isinstance(weight, Tensor) else None
        stored = weight if exact is None else exact
        if isinstance(stored, StoredWeight):
            self.packed, self._memory = stored
            self.kind, self.dtype = IN_FILE_FORMATS[self.packed.kind == KINDS["floats"]], torch.bfloat16
        elif isinstance(stored, QuantizedWeight):
            q = stored.outputs(self._interleave) if gated else stored
            self.kind, self.dtype = q.kind if exact is None else "compact", torch.bfloat16
            self.packed, self._memory = kernels.pack(self.kind, q.values, q.scale, q.least)
        else:
            self.kind, self.dtype = str(stored.dtype).removeprefix("torch."), stored.dtype
            more = -stored.shape[1] % (4 // stored.dtype.itemsize)
            whole = F.pad(stored.detach(), (0, more)) if more else stored
            self.packed, self._memory = kernels.pack(self.kind, self._interleave(whole) if gated else whole)
        self.in_features = _width(weight)
        self.out_features = self.packed.outputs
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        offset = None if bias is None else bias.detach().float().contiguous()
        self.offset = self._interleave(offset) if gated and offset is not None else offset

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        return self._memory.nbytes

    @staticmethod
    def _interleave(y: Tensor, *, back: bool = False) -> Tensor:
        """Interleave blocks of the first half and of the second of axis 0, or undo that (``back``)."""
        shape = (-1, 2, BLOCK) if back else (2, -1, BLOCK)
        return y.view(*shape, *y.shape[1:]).transpose(0, 1).reshape(y.shape)

    @property
    def quantized(self) -> bool:
        """True if its rows are rounded to int8."""
        return self.kind in ("int8", "int4", "stored")

    @property
    def of_rows(self) -> str:
        """The kind of the rows that the weight multiplies: bfloat16 for compact and "floats", else the weight's own."""
        return "bfloat16" if self.kind in ("compact", "floats") else self.kind

    def as_int4(self) -> NativeLinear:
        """The weight in int4, for rows in int8; of a compact weight the stored values, in the same memory."""
        if self.kind != "compact":
            return NativeLinear(QuantizedWeight.of(self.dense(), "int4"), self.bias, gated=self.gated)
        same = copy(self)
        same.kind = "int4"
        same.packed = structs.Packed(self.packed.data, *(self.packed.outputs, self.packed.width), KINDS["int4"])
        return same

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        y = self.kernels.linear(self._padded(x), self.packed, self.offset)
        if self.gated:
            y = self._interleave(y.T.contiguous(), back=True).T
        y = y.reshape(*x.shape[:-1], self.out_features)
        return y if self.wide else y.to(self.dtype)

    def choose(self, x: Tensor) -> Tensor:
        """The first index of the largest output of each row [..., in]: int64 [...]."""
        screen = None if self.screen is None else self.screen.native
        return self.kernels.choose(self._padded(x), self.packed, self.offset, screen).view(x.shape[:-1])

    def _padded(self, x: Tensor) -> Tensor:
        """Rows [..., in] as the kernels read them: [M, packed width]."""
        rows = x.reshape(-1, self.in_features).to(self.dtype)
        more = self.packed.width - self.in_features
        return F.pad(rows, (0, more)) if more else rows

    def rows(self, outputs: Tensor) -> Tensor:
        """Rows of the unpacked weight for some outputs [...]: [..., in]."""
        if self.weight is not None:
            return self.weight[outputs]
        if self.kind in IN_FILE_FORMATS:
            rows = self.kernels.unpack_stored(self.packed, outputs.flatten().numpy())
            return rows.to(self.dtype).view(*outputs.shape, self.in_features)
        return self._blocks()[outputs // BLOCK, :, outputs % BLOCK].flatten(-2)[..., : self.in_features]

    def _blocks(self) -> Tensor:
        """A packed weight that is not quantised [blocks, packed width / together, BLOCK, together]."""
        together = 4 // self.dtype.itemsize
        return self._memory.view(self.dtype).view(-1, self.packed.width // together, BLOCK, together)

    def dense(self) -> Tensor:
        """The unpacked (and dequantised) weight [out, in], rounded to the inputs' type."""
        if self.kind in IN_FILE_FORMATS:
            y = self.kernels.unpack_stored(self.packed).to(self.dtype)
        elif self.kind in ("int8", "int4", "compact"):
            # each column of the unit matrix is exact in int8, so its product is the weight's column
            unit = torch.eye(self.in_features, dtype=self.dtype)
            y = self.kernels.linear(unit, self.packed, None).T.to(self.dtype)
        else:
            y = self._blocks().permute(0, 2, 1, 3).reshape(-1, self.packed.width)
            y = y[: self.out_features, : self.in_features].contiguous()
        return self._interleave(y, back=True) if self.gated else y


class SelectedOutputs(NativeLinear):
    """A growing selection of outputs of a packed weight, for drafts, in the weight's format; bf16 weights' in int8."""

    def __init__(self, source: NativeLinear, packed: structs.Packed) -> None:
        nn.Module.__init__(self)
        self._source, self._from = [source], packed  # in a list, so that it is not a submodule
        self.kernels, self.wide, self.gated = source.kernels, source.wide, False
        self.dtype, self.in_features, self.out_features = source.dtype, source.in_features, 0
        self.kind = source.kind if packed is source.packed else "int8"
        self.weight = self.screen = self.bias = self.offset = None
        self._room, self._memory = self.kernels.room(packed, BLOCK)
        self.packed = structs.Packed(None, 0, packed.width, packed.kind)

    @staticmethod
    def of(source: nn.Module) -> SelectedOutputs | None:
        """An empty selection; None unless the weight is float32, int8 or stored, or has a screen, and has no bias.

        All blocks of a stored weight have one format: it is a head.
        """
        if not isinstance(source, NativeLinear) or source.offset is not None:
            return None
        if source.kind in ("float32", "int8", "stored"):
            return SelectedOutputs(source, source.packed)
        return None if source.screen is None else SelectedOutputs(source, source.screen.native.copy)

    def add(self, outputs: NDArray[np.int64]) -> None:
        """Append these outputs [n] of the weight."""
        first, count = self.out_features, self.out_features + len(outputs)
        if count > self._room.outputs:
            room, memory = self.kernels.room(self._from, max(count, 2 * self._room.outputs))
            self.kernels.copy_outputs(self._room, np.arange(first), room, 0)
            self._room, self._memory = room, memory
        self.kernels.copy_outputs(self._from, outputs, self._room, first)
        self.packed = structs.Packed(self._room.data, count, self._room.width, self._room.kind)
        self.out_features = count


class HeadTable(nn.Module):
    """The embedding of a target that is tied to its packed head."""

    def __init__(self, head: NativeLinear) -> None:
        super().__init__()
        self.head = head

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [...] -> [..., D]."""
        return self.head.rows(tokens)


class RowTable(nn.Module):
    """An embedding in the format of its GGUF file, looked up by row: its values are exact, float32.

    rows  uint8 [words, bytes of a row], in the format with the number ``kind`` (``STORED_TYPES``)
    """

    def __init__(self, kernels: native.Library, kind: int, rows: Tensor, width: int) -> None:
        super().__init__()
        self.kernels, self.kind, self.rows, self.width = kernels, kind, rows, width

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [...] -> [..., D]."""
        rows = self.kernels.raw_rows(self.kind, self.rows.numpy(), self.width, tokens.flatten().numpy())
        return rows.view(*tokens.shape, self.width)


def table_of(target: Network) -> structs.Table:
    """A target's embedding for the kernels; the target must outlive their calls."""
    if isinstance(target.embedding, HeadTable):
        packed = target.embedding.head.packed
        return structs.Table(rows=packed.data, packed=1, words=packed.outputs)
    if isinstance(target.embedding, RowTable):
        rows = target.embedding.rows
        return structs.Table(rows=rows.data_ptr(), packed=2, words=len(rows), type=target.embedding.kind)
    weight = target.embedding.weight
    assert weight.is_contiguous()
    return structs.Table(rows=weight.data_ptr(), packed=0, words=len(weight))


def _width(weight: Tensor | QuantizedWeight | StoredWeight) -> int:
    if isinstance(weight, StoredWeight):
        return int(weight.packed.width)
    return (weight.values if isinstance(weight, QuantizedWeight) else weight).shape[1]
