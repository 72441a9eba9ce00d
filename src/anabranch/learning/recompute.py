"""Gradient checkpointing: keep a layer's input only, and compute the layer again for its gradient.

A pass with gradients keeps every layer's activations until the backward pass. Inside ``recomputing`` it keeps one
tensor a layer, and the activations of one layer at a time, for one more forward pass through each layer. The second
computation repeats the first, so losses and gradients are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = ["recomputing", "through"]

_RECOMPUTES: ContextVar[bool] = ContextVar("recomputes", default=False)


@contextmanager
def recomputing(on: bool) -> Iterator[None]:
    """Compute layers that run inside the block with ``through`` again for their gradients, if ``on``."""
    before = _RECOMPUTES.set(on)
    try:
        yield
    finally:
        _RECOMPUTES.reset(before)


def through(layer: Callable[[Tensor], Any], x: Tensor) -> Any:
    """``layer(x)``, a tensor or a tuple of tensors; the layer must have no effects, since it may run twice."""
    if not (_RECOMPUTES.get() and torch.is_grad_enabled()):
        return layer(x)
    return checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)  # no layer draws random numbers
