"""Shape, loss weights and options that trainings of draft heads share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from anabranch.learning.recipe import COMMON, LossWeights, Option, Shape

__all__ = ["MOST_HEADS", "OPTIONS", "HeadConfig", "LossOptions"]

MOST_HEADS, MOST_LAYERS = 16, 16


@dataclass(frozen=True)
class HeadConfig(Shape):
    """The shape of draft heads.

    num_heads   tokens drafted beyond the next one
    num_layers  residual blocks of a head
    head        "shared": all heads are scored by the target's own head; "own": each has one of its own, which is
                trained (the papers)
    """

    ranges: ClassVar[Mapping[str, tuple[int, int]]] = {"num_heads": (1, MOST_HEADS), "num_layers": (1, MOST_LAYERS)}
    num_heads: int = 4
    num_layers: int = 1
    head: Literal["shared", "own"] = "shared"


@dataclass(frozen=True)
class LossOptions(LossWeights):
    """Weights of the loss.

    decay  the weight of head k is decay ** (k - 1)
    soft   share of the target's own distribution in the training target (distillation); the rest is the token
    """

    decay: float = 0.8
    soft: float = 0.5


OPTIONS: dict[str, Option] = {
    "num_heads": Option(int, "tokens drafted beyond the next one", "config"),
    "num_layers": Option(int, "residual blocks of a head", "config"),
    "head": Option(str, "vocabulary heads: shared (the target's) or own (one for each head)", "config"),
    "soft": Option(float, "share of the target's distribution in the loss (distillation)", "loss"),
    "decay": Option(float, "weight of head k is decay ** (k - 1)", "loss"),
    **COMMON,
}
