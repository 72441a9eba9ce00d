"""Kept texts, as drafters see them: their own keys and values of a text are kept together with the target's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from anabranch.model.cache import Cache

__all__ = ["Family", "Kept"]


class Family(NamedTuple):
    """Texts that can share keys and values.

    lora       they have one LoRA or none
    rotations  and one set of rotations (``Rope.key``)
    drafts     the fingerprint of the drafter's model that computed them; empty: the target did
    """

    lora: str | None
    rotations: int
    drafts: str = ""


class Kept(Protocol):
    """The kept texts (``decoding.prefixes``)."""

    def find(self, family: Family, tokens: Sequence[int]) -> int:
        """Return how many of the first tokens are kept."""

    def copy(self, family: Family, tokens: Sequence[int], cache: Cache, slot: int) -> int:
        """Write what is kept of ``tokens`` to the beginning of a slot; returns how many tokens."""

    def keep(self, family: Family, tokens: Sequence[int], cache: Cache, slot: int) -> None:
        """Keep the keys and values of the first tokens of a slot, as many as memory suffices for."""
