"""Several drafters at once: their trees merged, and the most probable nodes of the union verified."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.errors import CapabilityError, InputError
from anabranch.methods.base import Drafter, Observation, Row, Taps
from anabranch.methods.beliefs import best_nodes
from anabranch.model.decoder import PassResult, Rider
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree
from anabranch.verify import Rule

__all__ = ["CombinedDrafter"]


class CombinedDrafter(Drafter):
    """Each part proposes; the most probable nodes of the union are verified (``streams+prompt_lookup``).

    nodes     verified at most, the root included
    adaptive  whether the load decides how many, up to ``nodes``

    A merged or cut tree is no sample of any one distribution, so *matching* is the only exact rule.
    """

    rules = ("match",)

    def __init__(self, parts: Sequence[Drafter], *, nodes: int = 32, adaptive: bool = False) -> None:
        if nodes < 2:
            raise InputError(f"nodes must be at least 2 (the root and one draft), got {nodes}")
        riders = [part for part in parts if part.rider is not None]
        if len(riders) > 1:
            names = " and ".join(repr(part.name) for part in riders)
            raise CapabilityError(f"{names} both add rows to the target's pass; combine at most one of them")
        self.parts, self.adaptive = tuple(parts), adaptive
        self.name = "+".join(part.name for part in parts)
        self.max_nodes = nodes
        layers = {layer for part in parts for layer in part.needs.layers}
        self.needs = Taps(tuple(sorted(layers)), any(part.needs.prompt for part in parts))

    @property
    def margin(self) -> int:
        """What the neediest part needs, and the merged tree."""
        return max(self.max_nodes, *(part.margin for part in self.parts))

    @property
    def rider(self) -> Rider | None:
        """The rider of the one part that has one."""
        return next((part.rider for part in self.parts if part.rider is not None), None)

    def check(self, sampling: SamplingParams, rule: Rule) -> None:
        """Each part must be able to serve by *matching*."""
        super().check(sampling, rule)
        for part in self.parts:
            part.check(sampling, "match")

    def join(self, row: Row) -> None:
        """Every part sees the row."""
        for part in self.parts:
            part.join(row)

    def read(self, row: Row, result: PassResult, start: int) -> None:
        """Every part sees the prompt."""
        for part in self.parts:
            part.read(row, result, start)

    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        """Merged trees, cut to the most probable nodes."""
        budget = min(budget, self.max_nodes)
        proposals = [part.draft(rows, min(budget, part.max_nodes)) for part in self.parts]
        found = []
        for row, trees in zip(rows, zip(*proposals, strict=True), strict=True):
            tree = DraftTree.merge(trees)
            found.append(best_nodes(tree, row.beliefs(tree), budget) if tree.size > budget else tree)
        return found

    def observe(self, rows: Sequence[Row], seen: Observation) -> None:
        """Every part sees the merged verdict."""
        for part in self.parts:
            part.observe(rows, seen)

    def leave(self, row: Row) -> None:
        """Every part forgets the row."""
        super().leave(row)
        for part in self.parts:
            part.leave(row)

    def depth_of(self, budget: int) -> int:
        """The deepest part's."""
        return max(part.depth_of(budget) for part in self.parts)
