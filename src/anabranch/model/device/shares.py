"""Programs of a Triton kernel that share a block of its work.

Where a product or an attention has too few blocks to fill a GPU, several programs share one and leave partial sums; the
one that comes last adds them in order and finishes. So results do not depend on which one that is, and a step needs no
second launch.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["COUNTS", "counter", "is_last", "rows_of_block", "shares_of"]

COUNTS = 1 << 16  # shared blocks of one kernel at most
FILL = 132  # programs that fill a GPU: an H100 or H200 has as many processors
_counts: dict[torch.device, Tensor] = {}


def counter(device: torch.device) -> Tensor:
    """Zeros that the programs of a kernel count in; kernels of one stream follow one another."""
    if device not in _counts:
        _counts[device] = torch.zeros(COUNTS, dtype=torch.int32, device=device)
    return _counts[device]


def shares_of(blocks: int, steps: int) -> int:
    """The number of programs that share a block, if there are so many, of so many steps each."""
    shares = 1
    while shares < 16 and blocks * shares < FILL and steps >= 4 * shares:
        shares *= 2
    return shares


@triton.jit
def is_last(count, share, SHARES: tl.constexpr):
    """True if this program is the last of those that share a block; all of them have stored their parts by then."""
    tl.debug_barrier()  # all threads of this program have stored
    before = tl.atomic_add(count, 1, sem="acq_rel")
    last = before == SHARES - 1
    if last:
        tl.store(count, 0)
    tl.debug_barrier()
    return last


def rows_of_block(m: int) -> int:
    """Rows that a program computes, if there are ``m``: tensor cores multiply at least 16."""
    return 16 if m <= 16 else 32 if m <= 32 else 64
