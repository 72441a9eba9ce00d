"""The seam between the loop and the methods: a drafter sees contexts and returns draft trees.

Everything a method needs beyond the text it gets back from the loop in ``observe``, or by riding in the target's pass.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from anabranch.errors import CapabilityError
from anabranch.model.cache import Cache
from anabranch.model.decoder import PassResult, Rider
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree
from anabranch.verify import Rule, Verdict

__all__ = ["Context", "Drafter", "Observation", "Wrapped"]

_keys = itertools.count()


@dataclass(eq=False)
class Context:
    """One row as a drafter sees it. ``tokens`` are prompt and committed tokens; the last one is the root.

    ``room`` is the deepest draft that is of use in this step; ``key`` names the row for as long as it lives.
    """

    tokens: list[int]
    prompt_length: int
    sampling: SamplingParams
    rule: Rule = "match"
    room: int = 0
    key: int = field(default_factory=lambda: next(_keys))

    @property
    def root(self) -> int:
        """The last committed token, not yet in the cache."""
        return self.tokens[-1]


@dataclass(frozen=True)
class Observation:
    """What a step tells the drafter: the pass, the trees that were verified (after pruning), and the verdicts.

    The cache is committed already; its row b is ``contexts[b]``, whose tokens include what was just emitted.
    ``live[b]`` says whether the row goes on.
    """

    output: PassResult
    cache: Cache
    trees: Sequence[DraftTree]
    verdicts: Sequence[Verdict]
    live: Sequence[bool]
    planned: int


class Drafter(ABC):
    """Proposes draft trees. One object serves all rows of an engine."""

    name: str = "drafter"
    rules: tuple[Rule, ...] = ("match",)
    max_nodes: int = 1

    @property
    def room(self) -> int:
        """Cache positions that a step needs behind a row's committed tokens."""
        return self.max_nodes

    @property
    def rider(self) -> Rider | None:
        """What travels in the target's pass, if anything."""
        return None

    def check(self, sampling: SamplingParams, rule: Rule) -> None:
        """Raise CapabilityError if this drafter cannot serve such a request."""
        if rule not in self.rules:
            raise CapabilityError(
                f"the drafter {self.name!r} does not carry the law its drafts were drawn from, so the rule "
                f"{rule!r} would not be exact; use rule='match'"
            )

    @abstractmethod
    def draft(self, contexts: Sequence[Context]) -> list[DraftTree]:
        """One tree a row, at most ``max_nodes`` nodes and ``context.room`` deep."""

    def observe(self, contexts: Sequence[Context], seen: Observation) -> None:  # noqa: B027 - most need nothing
        """Learn from a step."""

    def leave(self, context: Context) -> None:  # noqa: B027 - most keep nothing
        """Forget a row that is done."""


class Wrapped(Drafter):
    """Another drafter with something changed: what a subclass does not override is that drafter's own."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.name, self.rules, self.max_nodes = drafter.name, drafter.rules, drafter.max_nodes

    @property
    def room(self) -> int:
        """The drafter's own."""
        return self.drafter.room

    @property
    def rider(self) -> Rider | None:
        """The drafter's own."""
        return self.drafter.rider

    def check(self, sampling: SamplingParams, rule: Rule) -> None:
        """What the drafter says."""
        self.drafter.check(sampling, rule)

    def draft(self, contexts: Sequence[Context]) -> list[DraftTree]:
        """The drafter's trees."""
        return self.drafter.draft(contexts)

    def observe(self, contexts: Sequence[Context], seen: Observation) -> None:
        """Hand on what a step tells."""
        self.drafter.observe(contexts, seen)

    def leave(self, context: Context) -> None:
        """The drafter forgets."""
        self.drafter.leave(context)
