"""Several drafters at once: their trees merged under one node budget, duplicates sharing a node."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.drafters.base import Context, Drafter, Observation
from anabranch.errors import CapabilityError, InputError
from anabranch.model.decoder import Rider
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree
from anabranch.verify import Rule

__all__ = ["CombinedDrafter"]


class CombinedDrafter(Drafter):
    """``streams+prompt_lookup``: each proposes, the ``nodes`` most believed nodes of the union are verified.

    A merged tree is not a sample of any one law, so *follow* is the only exact rule.
    """

    rules = ("follow",)

    def __init__(self, parts: Sequence[Drafter], *, nodes: int = 32) -> None:
        if nodes < 2:
            raise InputError(f"nodes must be at least 2 (the root and one draft), not {nodes}")
        riders = [part for part in parts if part.rider is not None]
        if len(riders) > 1:
            names = " and ".join(repr(part.name) for part in riders)
            raise CapabilityError(f"{names} both ride in the target's pass; combine at most one of them")
        self.parts = tuple(parts)
        self.name = "+".join(part.name for part in parts)
        self.max_nodes = nodes

    @property
    def room(self) -> int:
        """What the neediest part needs, and the merged tree."""
        return max(self.max_nodes, *(part.room for part in self.parts))

    @property
    def rider(self) -> Rider | None:
        """The rider of the one part that has one."""
        return next((part.rider for part in self.parts if part.rider is not None), None)

    def check(self, sampling: SamplingParams, rule: Rule) -> None:
        """Each part must be able to serve by *follow*."""
        super().check(sampling, rule)
        for part in self.parts:
            part.check(sampling, "follow")

    def draft(self, contexts: Sequence[Context]) -> list[DraftTree]:
        """Merged trees."""
        proposals = [part.draft(contexts) for part in self.parts]
        return [DraftTree.merge(trees, self.max_nodes) for trees in zip(*proposals, strict=True)]

    def observe(self, contexts: Sequence[Context], seen: Observation) -> None:
        """Every part learns from the merged verdict."""
        for part in self.parts:
            part.observe(contexts, seen)

    def leave(self, context: Context) -> None:
        """Every part forgets."""
        for part in self.parts:
            part.leave(context)
