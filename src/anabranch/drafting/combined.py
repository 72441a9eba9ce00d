"""Drafters of several others: their trees are merged, or one of them is chosen for each row.

A merged tree keeps the most probable nodes. A choice is what "auto" is with several trained modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anabranch.drafting.acceptance import best_nodes, merge
from anabranch.drafting.drafter import Drafter, Needs, Observation, ProbingDrafter, Row, Traits
from anabranch.drafting.kept import Family, Kept
from anabranch.errors import CapabilityError, InputError
from anabranch.model.encoder import Source
from anabranch.model.passes import PassResult
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree
from anabranch.verify import Rule

__all__ = ["ChoiceDrafter", "CombinedDrafter", "DrafterGroup"]


class DrafterGroup(Drafter):
    """Drafters that see the same rows, prompts and passes."""

    def __init__(self, parts: Sequence[Drafter]) -> None:
        self.parts, self.needs = tuple(parts), Needs.of(parts)

    def join(self, row: Row) -> None:
        """Every part sees the row."""
        for part in self.parts:
            part.join(row)

    def read(self, row: Row, result: PassResult, start: int) -> None:
        """Every part sees the prompt."""
        for part in self.parts:
            part.read(row, result, start)

    def observe(self, rows: Sequence[Row], seen: Observation) -> None:
        """Every part observes the outcome."""
        for part in self.parts:
            part.observe(rows, seen)

    def recall(self, tokens: Sequence[int], kept: Kept, family: Family) -> None:
        """Every part takes in what is kept of its own."""
        for part in self.parts:
            part.recall(tokens, kept, family)

    def keep(self, row: Row, length: int, kept: Kept, family: Family) -> None:
        """Every part keeps what it has."""
        for part in self.parts:
            part.keep(row, length, kept, family)

    def leave(self, row: Row) -> None:
        """The row leaves every part."""
        super().leave(row)
        for part in self.parts:
            part.leave(row)


class CombinedDrafter(DrafterGroup):
    """Merges the trees of its parts (``FIRST+SECOND``) and truncates the union to its most probable nodes.

    nodes     maximum number of verified nodes, counting the root
    adaptive  whether the number of nodes follows the load, up to ``nodes``; under a load that leaves no time for
              drafting, the parts that are free still propose

    The nodes of a merged tree are not samples from one distribution, so *matching* is the only exact rule.
    """

    rules = ("match",)

    def __init__(self, parts: Sequence[Drafter], *, nodes: int = 32, adaptive: bool = False) -> None:
        if nodes < 2:
            raise InputError(f"nodes must be at least 2 (the root and one draft), got {nodes}")
        riders = [part for part in parts if part.needs.rider is not None]
        if len(riders) > 1:
            names = " and ".join(repr(part.name) for part in riders)
            raise CapabilityError(f"{names} both add rows to the target's pass; combine at most one of them")
        probing = [part for part in parts if part.needs.probes]
        if len(probing) + len(riders) > 1:
            names = " and ".join(repr(part.name) for part in (*riders, *probing))
            raise CapabilityError(
                f"{names} cannot share the target's pass: probes leave no room for rows that ride in it or prune it; "
                "combine one of them, or let streams trail without pruning"
            )
        super().__init__(parts)
        self.adaptive = adaptive
        self._free = tuple(part for part in parts if part.traits.free == "all")
        self.traits = Traits("all" if len(self._free) == len(parts) else "some" if self._free else "none")
        self.name = "+".join(part.name for part in parts)
        self.max_nodes = nodes

    def check(self, sampling: SamplingParams, rule: Rule, source: Source | None = None) -> None:
        """Every part must support *matching*, and read the source."""
        super().check(sampling, rule, source)
        for part in self.parts:
            part.check(sampling, "match", source)

    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        """The merged trees, truncated to the most probable nodes."""
        parts = self.parts
        if budget < 2:
            parts, budget = self._free, self.max_nodes
        if not parts:
            return [DraftTree.root(row.root) for row in rows]
        budget = min(budget, self.max_nodes)
        drafted = zip(*(part.draft(rows, min(budget, part.max_nodes)) for part in parts), strict=True)
        return [
            self._merged(row, dict(zip(parts, trees, strict=True)), budget)
            for row, trees in zip(rows, drafted, strict=True)
        ]

    @staticmethod
    def _merged(row: Row, proposed: Mapping[Drafter, DraftTree], budget: int) -> DraftTree:
        """The best nodes of a row's trees, without lookups of repeats that another part's tree continues already."""
        drafted = {part: tree for part, tree in proposed.items() if tree.size > 1}
        copied = row.sampling.greedy and any(part.traits.repeats == "greedy" for part in drafted)
        trees = [tree for part, tree in drafted.items() if not (copied and part.traits.repeats == "all")]
        if not trees:
            return DraftTree.root(row.root)
        tree = trees[0] if len(trees) == 1 and trees[0].log_probs is not None else merge(trees)
        return best_nodes(tree, row.acceptance(tree), budget) if tree.size > budget else tree

    def probe(self, rows: Sequence[Row]) -> list[DraftTree]:
        """The probes of the one part that has some."""
        return next(part for part in self.parts if isinstance(part, ProbingDrafter)).probe(rows)

    def depth_of(self, budget: int) -> int:
        """The maximum over the parts; free parts prepare nothing."""
        return max((part.depth_of(budget) for part in self.parts if part not in self._free), default=0)


class ChoiceDrafter(Drafter):
    """One of its ``drafters`` drafts for a row, from when it joins until it leaves.

    A row keeps its drafter because some read the whole prompt, and because rows that ride in the target's pass must all
    belong to one drafter. The engine chooses (``Engine.choose_drafter``), and no row has this one.
    """

    name = "auto"

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.drafters = tuple(drafters)
        self.adaptive = any(drafter.adaptive for drafter in drafters)
        self.needs = Needs(positions=max(drafter.margin for drafter in drafters))

    def check(self, sampling: SamplingParams, rule: Rule, source: Source | None = None) -> None:
        """Every drafter must support the request, since any may be chosen."""
        for drafter in self.drafters:
            drafter.check(sampling, rule, source)

    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        """Never called."""
        raise NotImplementedError
