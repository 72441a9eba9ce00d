"""Plain decoding: the drafter that proposes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anabranch.drafting.drafter import Drafter, Method, Row
from anabranch.drafting.settings import Settings
from anabranch.tree import DraftTree

__all__ = ["METHOD", "NoDrafter"]


class NoDrafter(Drafter):
    """Plain decoding: every step verifies only the root and emits the target's own next token.

    Where nothing is drafted, both rules sample from the target.
    """

    name = "none"
    rules = ("match", "rejection")

    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        """Trees of the root only."""
        return DraftTree.roots([row.root for row in rows])


@dataclass(frozen=True)
class NoSettings(Settings):
    """Plain decoding has no settings."""


METHOD = Method(
    name="none",
    summary="plain decoding: nothing is drafted",
    settings=NoSettings,
    with_source=True,
    build=lambda target, settings, module: NoDrafter(),
    combines=False,
)
