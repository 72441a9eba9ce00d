"""Several drafters of which one is chosen for each row: what "auto" is with several trained modules."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.drafting.drafter import Drafter, Wrapped
from anabranch.sampling import SamplingParams
from anabranch.verify import Rule

__all__ = ["ChoiceDrafter"]


class ChoiceDrafter(Wrapped):
    """One of ``arms`` drafts for a row, from when it joins until it leaves.

    A row keeps its drafter because some read the whole prompt, and because rows that ride in the target's pass must all
    belong to one drafter. The engine chooses (``Engine.arm``), so it never calls this object to draft; where it is used
    without an engine, the first arm drafts.
    """

    def __init__(self, arms: Sequence[Drafter]) -> None:
        super().__init__(arms[0])
        self.name, self.arms = "auto", tuple(arms)
        self.adaptive = any(arm.adaptive for arm in arms)

    @property
    def margin(self) -> int:
        """The largest margin of an arm."""
        return max(arm.margin for arm in self.arms)

    def check(self, sampling: SamplingParams, rule: Rule) -> None:
        """Every arm must support the request, since any may be chosen."""
        for arm in self.arms:
            arm.check(sampling, rule)
