"""Several drafters of which one is chosen for each row: what "auto" is with several trained modules."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.drafting.drafter import Drafter, Needs, Row
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree
from anabranch.verify import Rule

__all__ = ["ChoiceDrafter"]


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

    def check(self, sampling: SamplingParams, rule: Rule) -> None:
        """Every drafter must support the request, since any may be chosen."""
        for drafter in self.drafters:
            drafter.check(sampling, rule)

    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        """Never called."""
        raise NotImplementedError
