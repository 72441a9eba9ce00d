"""The Triton kernels of the operations of ``ops`` by name. Not imported unless Triton is there: ``layers`` asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anabranch.model.device.attention import attend
from anabranch.model.device.drafts import best, condition, level, own_scores, select
from anabranch.model.device.products import heads, product
from anabranch.model.device.trees import ancestry, choose, keep, verify

__all__ = ["KERNELS"]

KERNELS: dict[str, Callable[..., Any]] = {
    kernel.__name__: kernel
    for kernel in (
        *(product, heads, attend, choose, ancestry, verify, keep),
        *(condition, own_scores, best, level, select),
    )
}
