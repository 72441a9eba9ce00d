"""The cost of a draft of EAGLE: one path of ``gamma`` steps of its head, each followed by the target's output head."""

from __future__ import annotations

from dataclasses import replace

from anabranch.drafting.counting import WEIGHT_BYTES, DraftCost, DraftShape, attention_operations, matrix_weights
from anabranch.methods.eagle.module import EagleConfig, EagleModule
from anabranch.model.decoder import Decoder

__all__ = ["COUNTS"]


def _chain(decoder: Decoder, shape: DraftShape) -> DraftCost:
    """A 2h x h matrix and a decoder layer (Li et al. 2024)."""
    config = decoder.config
    head = EagleModule(replace(config, vocab_size=1), EagleConfig())
    read = matrix_weights(head) + decoder.head.weight.numel()
    cache = 2 * config.num_kv_heads * config.head_dim * shape.context
    operations = 2 * read + attention_operations(config, shape.context)
    return DraftCost(head.num_parameters(), shape.gamma * WEIGHT_BYTES * (read + cache), shape.gamma * operations)


COUNTS = {"eagle": _chain}
