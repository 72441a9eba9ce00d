"""The size of draft heads in words, and the counted cost of their drafts."""

from __future__ import annotations

from torch import nn

from anabranch.drafting.counting import WEIGHT_BYTES, DraftCost, matrix_weights, parameters
from anabranch.methods.heads.recipes import HeadConfig

__all__ = ["described", "read_once"]


def described(config: HeadConfig, read: str = "") -> str:
    """The size of heads in a few words; ``read`` says what they read besides the target's state."""
    scored = "scored by the target's head" if config.head == "shared" else "with vocabulary heads of their own"
    blocks = "1 residual block" if config.num_layers == 1 else f"{config.num_layers} residual blocks"
    return f"{config.num_heads} heads of {blocks}{read}, {scored}"


def read_once(heads: nn.Module) -> DraftCost:
    """The cost of heads that are read once per draft."""
    read = matrix_weights(heads)
    return DraftCost(parameters(heads), WEIGHT_BYTES * read, 2 * read)
