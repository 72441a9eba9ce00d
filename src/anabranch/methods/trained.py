"""What a method with trained weights says of them: how they are stored, built, described and learned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from anabranch.model.config import ModelConfig

__all__ = ["Trained"]


@dataclass(frozen=True)
class Trained:
    """The trained part of a method.

    module      the class of its module
    config      frozen dataclass of its shape, with ``to_dict`` and ``from_dict``; stored in the adapter's folder
    make        (target's config, config, draft vocabulary [Vd] or None) -> module with fresh weights
    """

    module: type[nn.Module]
    config: type[Any]
    make: Callable[[ModelConfig, Any, Tensor | None], nn.Module]
