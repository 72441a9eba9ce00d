"""What every method gives, and what it is given: ``Method`` is an entry of the registry, ``Drafter`` does the work.

A drafter sees rows join, sees their prompts if it asks to, proposes a draft tree for each row at every step, sees the
outcome, and sees rows leave. What it keeps for a row lies in ``Row.state``, keyed by the drafter.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from anabranch.errors import CapabilityError
from anabranch.methods.beliefs import Beliefs
from anabranch.methods.counting import DraftCost, DraftShape
from anabranch.methods.settings import Settings
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder, PassResult, Rider
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree
from anabranch.verify import Rule, Verdict

if TYPE_CHECKING:
    from anabranch.methods.trained import Trained

__all__ = ["Drafter", "Method", "Observation", "Row", "Taps", "Wrapped"]

_ids = itertools.count()


@dataclass(frozen=True)
class Taps:
    """What a drafter needs to see of the target's passes.

    layers  main rows before these layers, in ``PassResult.taps``
    prompt  the passes over the whole prompt of each row, with these layers, through ``Drafter.read``; otherwise that
            is not called for the beginning of a prompt whose keys and values are known from an earlier text
    """

    layers: tuple[int, ...] = ()
    prompt: bool = False


@dataclass(eq=False)
class Row:
    """One sequence of the batch, as a drafter sees it.

    tokens     prompt and committed tokens; the last one is the root of the next draft tree
    max_depth  the deepest draft that is of use in this step: what may still be emitted beside the next token
    beliefs    corrects what drafters believe by what was accepted
    state      what each drafter keeps for this row
    """

    tokens: list[int]
    prompt_length: int
    sampling: SamplingParams
    rule: Rule = "match"
    max_depth: int = 0
    id: int = field(default_factory=lambda: next(_ids))
    beliefs: Beliefs = field(default_factory=Beliefs)
    state: dict[Drafter, Any] = field(default_factory=dict)

    @property
    def root(self) -> int:
        """The last committed token, not yet in the KV cache."""
        return self.tokens[-1]


@dataclass(frozen=True)
class Observation:
    """What one step did for some rows. The cache is committed already; ``rows[i].tokens`` include what was emitted.

    slots     the place of each row in the pass (``result.nodes(slot)``) and in the cache
    trees     what was verified, after pruning
    live      whether the row continues
    planned   the length that the longest row will reach
    budget    the most nodes that the next draft may have; 1: nothing will be drafted, so nothing need be prepared
    """

    result: PassResult
    cache: Cache
    slots: Sequence[int]
    trees: Sequence[DraftTree]
    verdicts: Sequence[Verdict]
    live: Sequence[bool]
    planned: int
    budget: int


class Drafter(ABC):
    """Proposes draft trees. One object serves any number of rows.

    name       for messages
    rules      the verification rules under which its drafts are exact
    max_nodes  the most nodes that one of its trees has, the root included
    adaptive   whether the load decides how many of them are drafted and verified (``anabranch.speculation``); its trees
               then carry ``log_probs``
    needs      what it has to see of the target's passes
    """

    name: str = "drafter"
    rules: tuple[Rule, ...] = ("match",)
    max_nodes: int = 1
    adaptive: bool = False
    needs: Taps = Taps()

    @property
    def margin(self) -> int:
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
                f"the drafter {self.name!r} does not carry the distribution that its drafts were drawn from, so "
                f"rule={rule!r} would not be exact; use rule='match'"
            )

    def join(self, row: Row) -> None:  # noqa: B027 - most need nothing
        """A row joins the batch; its prompt has not been read yet."""

    def read(self, row: Row, result: PassResult, start: int) -> None:  # noqa: B027 - most need nothing
        """See a pass over part of the row's prompt, from token ``start`` on."""

    @abstractmethod
    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        """One tree a row, of at most ``budget`` nodes (root included) and ``row.max_depth`` deep."""

    def observe(self, rows: Sequence[Row], seen: Observation) -> None:  # noqa: B027 - most need nothing
        """See what a step did, and prepare the next draft."""

    def leave(self, row: Row) -> None:
        """A row leaves the batch."""
        row.state.pop(self, None)

    def depth_of(self, budget: int) -> int:
        """How deep a tree of ``budget`` nodes becomes; what preparing the draft costs may depend on it."""
        return budget - 1


class Wrapped(Drafter):
    """Another drafter with something changed: what a subclass does not override is that drafter's own."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.name, self.rules, self.max_nodes = drafter.name, drafter.rules, drafter.max_nodes
        self.adaptive, self.needs = drafter.adaptive, drafter.needs

    @property
    def margin(self) -> int:
        """The drafter's own."""
        return self.drafter.margin

    @property
    def rider(self) -> Rider | None:
        """The drafter's own."""
        return self.drafter.rider

    def check(self, sampling: SamplingParams, rule: Rule) -> None:
        """Ask the drafter."""
        self.drafter.check(sampling, rule)

    def join(self, row: Row) -> None:
        """Pass the row on."""
        self.drafter.join(row)

    def read(self, row: Row, result: PassResult, start: int) -> None:
        """Pass the prompt on."""
        self.drafter.read(row, result, start)

    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        """The drafter's trees."""
        return self.drafter.draft(rows, budget)

    def observe(self, rows: Sequence[Row], seen: Observation) -> None:
        """Pass on what a step did."""
        self.drafter.observe(rows, seen)

    def leave(self, row: Row) -> None:
        """The drafter forgets the row."""
        super().leave(row)
        self.drafter.leave(row)

    def depth_of(self, budget: int) -> int:
        """The drafter's own."""
        return self.drafter.depth_of(budget)


@dataclass(frozen=True, eq=False)
class Method:
    """One entry of the registry: all that the rest of the library needs to know of a method.

    name        as users write it, ``name:setting=value,...``
    summary     one line for --help
    settings    frozen dataclass, a subclass of ``Settings``
    build       (target, settings, module) -> Drafter; ``module`` is the trained one, for the target, or None.
                Raises CapabilityError for what cannot be had there
    trained     its trained module, adapter format and training objective; None: nothing is trained
    candidates  settings that the tuner may try for drafts of at most so many nodes. They differ in size alone: the best
                nodes of what the largest drafts, no deeper than ``Drafter.depth_of``, are what a smaller one drafts
    default     whether "auto" drafts with it, wherever its module (if any) is there
    combines    whether its trees may be merged with another method's
    order       of its sources among those of others, for marks: source -> rank from 1 on, or None if not its own
    counts      what its drafts cost by shape, for figures of cost: label -> (target on the meta device, shape) -> cost
    published   tokens a step and speedup that its paper reports, by target
    """

    name: str
    summary: str
    settings: type[Settings]
    build: Callable[[Decoder, Any, Any], Drafter]
    trained: Trained | None = None
    candidates: Callable[[int], Iterable[Settings]] = lambda nodes: ()
    default: bool = False
    combines: bool = True
    order: Callable[[str], int | None] = lambda source: None
    counts: Mapping[str, Callable[[Decoder, DraftShape], DraftCost]] = field(default_factory=dict)
    published: Mapping[str, tuple[float, float]] = field(default_factory=dict)
