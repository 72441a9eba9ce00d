"""A copy of the head in int8, with which the kernels find greedy tokens, exactly, in half the time (``screen.h``).

N outputs, D inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.model.quantize import GROUP, QuantizedWeight
from anabranch.native import library as native

__all__ = ["Screen"]

SMALLEST = 4096  # outputs that are worth a screen
LARGEST_NORM = 1e12  # of an output with bounds
ROOM = 1.001  # for the rounding of norms
# of sums in float32, whichever the order: at most so much for each of the D products, as a share of both norms
ROUNDING = 4 * 2.0**-24
AT_ONCE = 256


class Screen:
    """The packed copy of a weight [N, D] and what bounds its errors; see ``native.Screen``.

    bounds  of the norms of what the copy lacks of each output, and of the copy's own [N, padded to whole blocks]
    """

    def __init__(self, kernels: native.Library, weight: Tensor) -> None:
        values = torch.empty(weight.shape, dtype=torch.uint8)
        scale, error, size = torch.empty(3, len(weight))
        for first in range(0, len(weight), AT_ONCE):
            here = slice(first, first + AT_ONCE)
            w = weight[here].detach().float()
            made = QuantizedWeight.of(w, "int8")
            copy = made.dense()
            values[here], scale[here] = made.values, made.scale
            size[here] = ROOM * copy.norm(dim=1)
            error[here] = ROOM * (w - copy).norm(dim=1) + ROUNDING * w.shape[1] * size[here]
        more = -len(weight) % native.BLOCK
        self.bounds = F.pad(error, (0, more)), F.pad(size, (0, more))
        packed, self._memory = kernels.pack("int8", values, scale)
        self.bounded = bool(self.bounds[1].max() <= LARGEST_NORM)  # false where a norm is NaN
        self.native = native.Screen(packed, *(bound.data_ptr() for bound in self.bounds))

    @staticmethod
    def of(kernels: native.Library, weight: Tensor, bias: Tensor | None) -> Screen | None:
        """None where the kernels take no screen of this weight, or it would not pay."""
        if bias is not None or len(weight) < SMALLEST or weight.shape[1] % GROUP:
            return None
        made = Screen(kernels, weight)
        return made if made.bounded else None

    @property
    def nbytes(self) -> int:
        """Bytes that finding a token reads at least."""
        return self._memory.nbytes
