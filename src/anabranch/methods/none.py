"""Plain decoding: the drafter that proposes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.methods.base import Context, Drafter
from anabranch.tree import DraftTree

__all__ = ["NoDrafter"]


class NoDrafter(Drafter):
    """Every step verifies the root alone and emits the target's own next token."""

    name = "none"

    def draft(self, contexts: Sequence[Context]) -> list[DraftTree]:
        """Roots."""
        return [DraftTree.root(context.root) for context in contexts]
