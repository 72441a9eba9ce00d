"""One drafter or several at once: their trees merged, and of the union the nodes verified that pay for themselves."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.costs import StepCosts
from anabranch.errors import CapabilityError
from anabranch.methods.base import Context, Drafter, Observation
from anabranch.methods.beliefs import Width
from anabranch.model.decoder import Rider
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree
from anabranch.verify import Rule

__all__ = ["CombinedDrafter"]


class CombinedDrafter(Drafter):
    """``streams+prompt_lookup``, ``streams:tree=auto``: each part proposes, the best nodes of the union are verified.

    nodes  verified at most, the root included
    costs  of steps by width: as many of the nodes as pay for themselves, see ``width``; None: always ``nodes``

    What is merged or cut is not a sample of any one law, so *matching* is the only exact rule.
    """

    rules = ("match",)

    def __init__(self, parts: Sequence[Drafter], *, nodes: int = 32, costs: StepCosts | None = None) -> None:
        self.width = Width(nodes, costs)
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
        """Each part must be able to serve by *matching*."""
        super().check(sampling, rule)
        for part in self.parts:
            part.check(sampling, "match")

    def draft(self, contexts: Sequence[Context]) -> list[DraftTree]:
        """Merged trees, cut to one width."""
        proposals = [part.draft(contexts) for part in self.parts]
        whole = [DraftTree.merge(trees) for trees in zip(*proposals, strict=True)]
        return self.width([context.key for context in contexts], whole)

    def observe(self, contexts: Sequence[Context], seen: Observation) -> None:
        """Every part learns from the merged verdict."""
        for part in self.parts:
            part.observe(contexts, seen)
        for context, tree, verdict in zip(contexts, seen.trees, seen.verdicts, strict=True):
            self.width.learn(context.key, tree, verdict.path)

    def leave(self, context: Context) -> None:
        """Every part forgets."""
        for part in self.parts:
            part.leave(context)
        self.width.forget(context.key)
