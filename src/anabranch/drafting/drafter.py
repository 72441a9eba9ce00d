"""The interface of methods: ``Method`` is an entry of the registry, ``Drafter`` proposes draft trees.

A drafter is notified when rows join and leave, sees their prompts if it needs to, proposes a draft tree for each row at
every step, and observes the outcome. Its state for a row is in ``Row.state``, keyed by the drafter.
"""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from anabranch.drafting.acceptance import Acceptance
from anabranch.drafting.counting import DraftCost, DraftShape
from anabranch.drafting.kept import Family, Kept
from anabranch.drafting.settings import Settings
from anabranch.errors import CapabilityError
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder
from anabranch.model.encoder import Source
from anabranch.model.inputs import DeviceTrees
from anabranch.model.passes import PassResult, Rider
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree
from anabranch.verify import Rule, Verdict

if TYPE_CHECKING:
    from anabranch.drafting.tables import Tables
    from anabranch.drafting.trained import Trained

__all__ = [
    "Call",
    "DeviceDrafter",
    "Drafter",
    "Kind",
    "Method",
    "Needs",
    "Observation",
    "ProbingDrafter",
    "Row",
    "Traits",
    "altered",
    "sized",
    "tally",
]

# target   the target's own pass over the draft tree
# copy     all layers of a quantised copy of the target
# partial  some of the target's layers (trailing streams), or a layer like them (EAGLE, Hydra++)
# draft    a draft model
# heads    draft heads, or the vocabulary head alone over the states of streams that rode in the target's pass
# inner    a draft of an inner drafter (staged), which reads no weights
Kind: TypeAlias = Literal["target", "copy", "partial", "draft", "heads", "inner"]


class Call(NamedTuple):
    """One pass, as a row counts it: each of the rows that share a pass counts it as one and its bytes in equal parts.

    layers  decoder layers that it runs, out of the ``of`` layers of the target or, if it is one, the draft model
    read    bytes of weights that it reads, that of a vocabulary head that scores tokens included, the KV cache not
    """

    kind: Kind
    layers: int = 0
    of: int = 0
    read: float = 0.0

    @property
    def name(self) -> tuple[Kind, int, int]:
        """Key of the count: kind, layers run, layers in total."""
        return self.kind, self.layers, self.of

    def shared(self, rows: int) -> Call:
        """Each row's share of a pass over this many rows."""
        return self if rows == 1 else self._replace(read=self.read / rows)


_ids = itertools.count()


@dataclass(frozen=True)
class Needs:
    """The needs of a drafter: inputs from the target's passes, and rows that it adds to them.

    layers     the main rows' states before these layers, in ``PassResult.taps``
    prompt     whether those of the whole prompt are needed too, through ``Drafter.read``; that is not called for the
               beginning of a prompt whose keys and values are known from an earlier text, as far as ``recalls`` says
    recalls    counts the first tokens of a new row's prompt that need not be read again, given the row's LoRA; None:
               all, or none where prompts are needed
    rider      adds rows to the passes
    probes     maximum number of nodes of a row's probe (``ProbingDrafter``), not counting the root
    positions  cache positions beyond a row's committed tokens that a step takes even if tree and probe take fewer
    """

    layers: tuple[int, ...] = ()
    prompt: bool = False
    recalls: Callable[[Sequence[int], str | None], int] | None = None
    rider: Rider | None = None
    probes: int = 0
    positions: int = 0

    @staticmethod
    def of(drafters: Sequence[Drafter]) -> Needs:
        """The needs of drafters that see the same passes; at most one of them has a rider or probes."""
        each = [drafter.needs for drafter in drafters]
        return Needs(
            layers=tuple(sorted({layer for needs in each for layer in needs.layers})),
            prompt=any(needs.prompt for needs in each),
            recalls=lambda tokens, lora: min(needs.recalled(tokens, lora) for needs in each),
            rider=next((needs.rider for needs in each if needs.rider is not None), None),
            probes=sum(needs.probes for needs in each),
            positions=max((drafter.margin for drafter in drafters), default=0),
        )

    def recalled(self, tokens: Sequence[int], lora: str | None = None) -> int:
        """Count the tokens at the beginning of a new row's prompt that the drafter need not read again."""
        if self.recalls is not None:
            return self.recalls(tokens, lora)
        return 0 if self.prompt else len(tokens)


@dataclass(eq=False)
class Row:
    """One sequence of the batch, as a drafter sees it.

    tokens     prompt and committed tokens; the last one is the root of the next draft tree
    source     the input of the encoder that the row's tokens are about; None in a decoder-only model
    lora       the name of the LoRA that the target decodes it with; None: the target as it is
    max_depth  maximum useful depth of a draft in this step: the tokens that may still be emitted besides the next one
    acceptance    corrects the drafters' probabilities by what was accepted
    state      each drafter's state for this row
    calls      the forward passes that drafters ran for it in this step (``tally``)
    """

    tokens: list[int]
    prompt_length: int
    sampling: SamplingParams
    rule: Rule = "match"
    max_depth: int = 0
    id: int = field(default_factory=lambda: next(_ids))
    acceptance: Acceptance = field(default_factory=Acceptance)
    state: dict[Drafter, Any] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    source: Source | None = None
    lora: str | None = None

    @property
    def context(self) -> Sequence[int]:
        """The text that drafts may repeat: the tokens, after those of the source if there is one."""
        return self.tokens if self.source is None else [*self.source.tokens, *self.tokens]

    @property
    def given(self) -> int:
        """Number of tokens of ``context`` before the first new one."""
        return self.prompt_length + (0 if self.source is None else len(self.source.tokens))

    @property
    def root(self) -> int:
        """The last committed token, not yet in the KV cache."""
        return self.tokens[-1]


def tally(call: Call, rows: Sequence[Row]) -> None:
    """Report a forward pass that a drafter ran for ``rows``; statistics count it for each of them."""
    shared = call.shared(len(rows))
    for row in rows:
        row.calls.append(shared)


class Observation(NamedTuple):
    """The outcome of a step. The cache is already committed, and ``rows[i].tokens`` include the emitted tokens.

    slots     the index of each row in the pass (``result.nodes(slot)``) and in the cache
    trees     the verified trees, after pruning
    live      whether each row continues
    budget    maximum number of nodes of the next draft; 1: nothing will be drafted, so nothing needs to be prepared
    probed    for each row, the target's own token after each node of its probe (``ProbingDrafter``), without the root
    """

    result: PassResult
    cache: Cache
    slots: Sequence[int]
    trees: Sequence[DraftTree]
    verdicts: Sequence[Verdict]
    live: Sequence[bool]
    budget: int
    probed: Sequence[NDArray[np.int64]] = ()


@dataclass(frozen=True)
class Traits:
    """Properties of a drafter that the controller and combinations read.

    free     "all": its drafts take almost no time and need no preparation; "some": those of some of its parts do, and
             with a budget of 1 node these alone draft, up to ``max_nodes``
    repeats  the rows whose drafts include what followed earlier matches in their own text
    """

    free: Literal["none", "some", "all"] = "none"
    repeats: Literal["none", "greedy", "all"] = "none"


class Drafter(ABC):
    """Proposes draft trees. One object serves any number of rows. It reports every pass that it runs (``tally``).

    name       for messages
    rules      the verification rules for which its drafts are exact
    max_nodes  maximum number of nodes of its trees, counting the root
    adaptive   whether the number of drafted and verified nodes follows the load (``control.controller``); its trees
               then have ``log_probs``
    traits     how it drafts, for the controller and for combinations
    needs      what it needs of the target's passes, and adds to them
    spec       the specification that it was built from; empty if it was not
    """

    name: str = "drafter"
    rules: tuple[Rule, ...] = ("match",)
    max_nodes: int = 1
    adaptive: bool = False
    traits: Traits = Traits()
    needs: Needs = Needs()
    spec: str = ""

    @property
    def margin(self) -> int:
        """Cache positions that a step needs beyond a row's committed tokens."""
        return max(self.max_nodes + self.needs.probes, self.needs.positions)

    def check(self, sampling: SamplingParams, rule: Rule, source: Source | None = None) -> None:
        """Raise CapabilityError if this drafter cannot serve such a request, InputError for a source it cannot read."""
        if rule not in self.rules:
            raise CapabilityError(
                f"the drafter {self.name!r} does not provide the distribution that its drafts were sampled from, so "
                f"rule={rule!r} would not be exact; use rule='match'"
            )

    def join(self, row: Row) -> None:  # noqa: B027 - most need nothing
        """A row joins the batch; its prompt has not been processed yet."""

    def read(self, row: Row, result: PassResult, start: int) -> None:  # noqa: B027 - most need nothing
        """Called after each pass over part of the row's prompt, from token ``start`` on."""

    @abstractmethod
    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        """One tree per row: at most ``budget`` nodes (counting the root), no deeper than ``row.max_depth``."""

    def observe(self, rows: Sequence[Row], seen: Observation) -> None:  # noqa: B027 - most need nothing
        """Observe the outcome of a step, and prepare the next draft."""

    def recall(self, tokens: Sequence[int], kept: Kept, family: Family) -> None:  # noqa: B027 - most need nothing
        """Take in the drafter's own kept keys and values of the beginning of a prompt, before its row joins.

        ``needs.recalls`` counts their tokens. ``family`` is that of the target's keys and values.
        """

    def keep(self, row: Row, length: int, kept: Kept, family: Family) -> None:  # noqa: B027 - most need nothing
        """Keep the drafter's own keys and values of the first ``length`` tokens of a row that is about to leave."""

    def leave(self, row: Row) -> None:
        """A row leaves the batch."""
        row.state.pop(self, None)

    def depth_of(self, budget: int) -> int:
        """The maximum depth of a tree of ``budget`` nodes, which may affect the cost of preparing the draft."""
        return budget - 1


@runtime_checkable
class ProbingDrafter(Protocol):
    """A drafter with ``needs.probes``: extra nodes in the pass, whose tokens are observed but never emitted."""

    def probe(self, rows: Sequence[Row]) -> list[DraftTree]:
        """A tree below each row's root, no deeper than ``row.max_depth``.

        Called after ``draft``, unless nothing was to be drafted; ``observe`` gets the target's own token after each of
        its nodes (``Observation.probed``).
        """


@runtime_checkable
class DeviceDrafter(Protocol):
    """A drafter whose trees a GPU can grow, for a pass that verifies them there."""

    def draft_on_device(self, rows: Sequence[Row], budget: int, lengths: Sequence[int]) -> DeviceTrees | None:
        """The trees of greedy rows, with the tokens of each row in the cache (``lengths``); None: call ``draft``."""


D = TypeVar("D", bound=Drafter)


def altered(drafter: D, **members: Any) -> D:
    """A copy of a drafter with some members replaced; it has rows of its own and shares everything else."""
    made = copy.copy(drafter)
    made.__dict__.update(members)
    return made


def sized(settings: Callable[..., Settings], budgets: Sequence[int]) -> Callable[[int], Iterable[Settings]]:
    """``Method.candidates`` that differ in ``nodes``, one of the ``budgets``."""
    return lambda nodes: (settings(nodes=budget) for budget in budgets if budget <= nodes)


@dataclass(frozen=True, eq=False)
class Method:
    """An entry of the registry: everything that the rest of the library needs to know about a method.

    name        as in specifications, ``name:setting=value,...``
    summary     one line for --help
    settings    frozen dataclass, a subclass of ``Settings``
    build       (target, settings, module) -> Drafter; ``module`` is the module trained for the target, or None.
                Raises CapabilityError for unsupported combinations
    trained     its trained module, adapter format and training objective; None: nothing is trained
    reads       the trained part of another method, whose module it drafts with too; None: it needs none
    tables      the memory-mapped arrays that it drafts from, built from text; None: it has none
    candidates  settings for the tuner to try, for drafts of at most this many nodes. They must differ only in size: a
                smaller draft is the best nodes of the largest one, up to ``Drafter.depth_of``
    variants    settings that support different things, as text; a row each in the table of capabilities
    with_source whether it drafts for encoder-decoder targets too
    default     whether it is measured where no method is named and, if nothing is trained for it, part of everything
                that "auto" may choose; methods with a trained module are choices wherever it is loaded
    combines    whether its trees can be merged with those of other methods
    detached    whether its drafts follow from the text alone, so that it can also draft for another engine's target
    pairs       builds one drafter of this method and another one, by the other's name, where its drafts go on with the
                other's instead of being merged with them: (target, own settings, the other's settings, its module)
    labels      of the sources of its nodes, which a depth may follow ("stream 2"), in the order of legends
    counts      the costs of its drafts, for figures: label -> (target on the meta device, shape) -> cost
    published   tokens per step and speedup reported in its paper, by target
    """

    name: str
    summary: str
    settings: type[Settings]
    build: Callable[[Decoder, Any, Any], Drafter]
    trained: Trained | None = None
    reads: Trained | None = None
    tables: Tables | None = None
    candidates: Callable[[int], Iterable[Settings]] = lambda nodes: ()
    variants: tuple[str, ...] = ("",)
    with_source: bool = False
    default: bool = False
    combines: bool = True
    detached: bool = False
    pairs: Mapping[str, Callable[[Decoder, Any, Any, Any], Drafter]] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    counts: Mapping[str, Callable[[Decoder, DraftShape], DraftCost]] = field(default_factory=dict)
    published: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def order(self, source: str) -> tuple[int, int] | None:
        """The place of a source in legends: that of its label, and its depth; None for sources of other methods."""
        for place, label in enumerate(self.labels):
            depth = source.removeprefix(label)
            if source.startswith(label) and (not depth or depth.strip().isdigit()):
                return place, int(depth or 0)
        return None
