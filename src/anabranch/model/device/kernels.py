"""The Triton kernels of the operations of ``ops`` by name. Not imported unless Triton is there: ``layers`` asks."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from anabranch.model.device.attention import attend
from anabranch.model.device.drafts import best, condition, level, own_scores, select
from anabranch.model.device.products import heads, product
from anabranch.model.device.trees import ancestry, choose, keep, verify

__all__ = ["KERNELS"]


def _on_its_device(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Launch a kernel where its first argument lies: Triton launches on the current device."""

    @wraps(kernel)
    def launched(first: Tensor, *others: Any) -> Any:
        if first.device.type != "cuda":  # in the interpreter
            return kernel(first, *others)
        with torch.cuda.device(first.device):
            return kernel(first, *others)

    return launched


KERNELS: dict[str, Callable[..., Any]] = {
    kernel.__name__: _on_its_device(kernel)
    for kernel in (
        *(product, heads, attend, choose, ancestry, verify, keep),
        *(condition, own_scores, best, level, select),
    )
}
