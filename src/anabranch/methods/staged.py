"""Staged speculative decoding (Spector & Re 2023): the draft model's own decoding is drafted for, too.

    inner drafter  guesses what the draft model will draft
    draft model    judges these guesses in one pass and drafts a tree, shaped by probability under a node budget
    target         verifies the tree

The tree is the one that the draft model drafts without the inner drafter; it takes fewer passes of the draft model. The
inner drafter may be a smaller draft model, with an inner drafter of its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from torch import nn

from anabranch.drafting.autoregressive import AutoregressiveDrafter
from anabranch.drafting.drafter import Call, Drafter, Method, Row, sized, tally
from anabranch.drafting.reader import Continuations
from anabranch.drafting.settings import BUDGETS
from anabranch.errors import CapabilityError, InputError
from anabranch.methods import prompt_lookup, suffix
from anabranch.methods.draft_model import entry as draft_model
from anabranch.methods.draft_model.drafter import DraftModelDrafter, DraftModelSettings
from anabranch.methods.draft_model.entry import TRAINED, draft_of
from anabranch.methods.ngram import entry as ngram
from anabranch.methods.rest import entry as rest
from anabranch.methods.spec import Spec, build, parse
from anabranch.model.decoder import Decoder
from anabranch.support.nearest import hint
from anabranch.tree import DraftTree

__all__ = ["METHOD", "Faster", "StagedDrafter", "StagedSettings"]

GUESSES = 4  # of a row in one pass
LAST, AGAIN = 5, 16  # drafts whose times count, and from one draft in the slower way to the next


class Faster:
    """Decides whether drafts are made with guesses: the way that took less time lately, the other one now and then.

    The tree does not depend on guesses, so their time is all that counts: of the inner drafter, and of more rows in a
    pass, which cost little where memory limits it and much where arithmetic does.
    """

    def __init__(self) -> None:
        self._ms: dict[tuple[bool, int], deque[float]] = {}
        self._drafts = 0

    def guess(self, rows: int) -> bool:
        """Return whether the next draft of so many rows is made with guesses."""
        self._drafts += 1
        seen, other = (self._ms.get((way, rows.bit_length()), ()) for way in (True, False))
        if min(len(seen), len(other)) < LAST:
            return len(seen) <= len(other)
        return (median(seen) <= median(other)) != (self._drafts % AGAIN == 0)

    def saw(self, guessed: bool, rows: int, ms: float) -> None:
        """Update with the time of a draft."""
        self._ms.setdefault((guessed, rows.bit_length()), deque(maxlen=LAST)).append(ms)


@dataclass
class _Inside:
    """A row as the inner drafter sees it, and whether that keeps anything for it."""

    row: Row
    keeps: bool


class Guesser:
    """An inner drafter and its view of the rows.

    Its guesses join the passes of the draft model, which computes what follows each of them. A guess that the draft
    model drafts too costs no pass of its own; the tree that is drafted does not depend on the guesses.

    A drafter that keeps nothing for a row is a function of the text, so it drafts after each node whose next tokens
    are wanted. One that indexes or caches the text, which must only grow, drafts after the text alone.

    most  guesses of a row in one pass, at most: each is one more row of that pass
    """

    def __init__(self, drafter: Drafter, most: int) -> None:
        if drafter.needs.rider is not None or drafter.needs.layers or drafter.needs.prompt:
            raise CapabilityError(
                f"the inner drafter {drafter.name!r} needs hidden states of its target; use a model-free one, such as "
                "inner=prompt_lookup"
            )
        self.drafter, self.most = drafter, most
        self._rows: dict[Row, _Inside] = {}

    def join(self, row: Row) -> None:
        """A row joins the batch."""
        inside = Row(row.tokens, row.prompt_length, row.sampling, source=row.source)
        self.drafter.join(inside)
        keeps = self.drafter in inside.state or isinstance(self.drafter, AutoregressiveDrafter)
        self._rows[row] = _Inside(inside, keeps)

    def leave(self, row: Row) -> None:
        """A row leaves the batch."""
        inside = self._rows.pop(row, None)
        if inside is not None:
            self.drafter.leave(inside.row)

    def guesses(self, row: Row, continuations: Continuations, node: int, *, depth: int, words: int) -> list[int]:
        """Guessed descendants of a node of a row's continuations, at most ``depth`` deep, of token ids below ``words``.

        Nodes whose next tokens are known already are left out.
        """
        inside = self._rows[row]
        if (inside.keeps and node > 0) or continuations.depths[node] >= depth:
            return []
        inside.row.tokens = [*row.tokens, *continuations.path(node)] if node else row.tokens
        inside.row.max_depth = depth - continuations.depths[node]
        (tree,) = self.drafter.draft([inside.row], min(self.most + 1, self.drafter.max_nodes))
        for call in inside.row.calls or (Call("inner"),):
            tally(call, [row])
        inside.row.calls.clear()
        at = [node]
        for parent, token in zip(tree.parents[1:].tolist(), tree.tokens[1:].tolist(), strict=True):
            above = at[parent]
            at.append(continuations.child(above, token) if above >= 0 and token < words else -1)
        return [guess for guess in dict.fromkeys(at[1:]) if guess > 0 and guess not in continuations.known]


class StagedDrafter(DraftModelDrafter):
    """A draft model with an inner drafter, whose guesses let one pass of it serve for several.

    guesses  of a row in one pass of the draft model, at most
    faster   decides whether there are any; None: always
    """

    name = "staged"

    def __init__(
        self,
        target: Decoder,
        model: Decoder,
        settings: DraftModelSettings | None = None,
        *,
        inner: Drafter,
        guesses: int = GUESSES,
        faster: Faster | None = None,
    ) -> None:
        super().__init__(target, model, settings)
        self.guesser, self.faster, self._guesses_now = Guesser(inner, guesses), faster, True

    def join(self, row: Row) -> None:
        """The inner drafter sees the row; the draft model reads it with its prompt, or with its first draft."""
        self.guesser.join(row)

    def leave(self, row: Row) -> None:
        """Free the row's slot."""
        super().leave(row)
        self.guesser.leave(row)

    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        """Trees for all rows together, with guesses where these save time."""
        if self.faster is None:
            return super().draft(rows, budget)
        self._guesses_now, began = self.faster.guess(len(rows)), time.perf_counter()
        trees = super().draft(rows, budget)
        if any(tree.size > 1 for tree in trees):
            self.faster.saw(self._guesses_now, len(rows), 1e3 * (time.perf_counter() - began))
        return trees

    def _guesses(self, row: Row, continuations: Continuations, nodes: Sequence[int], depth: int) -> list[int]:
        if not self._guesses_now:
            return []
        guesses = self.guesser.guesses(row, continuations, nodes[0], depth=depth, words=self.words)
        return [node for node in guesses if node not in nodes]


@dataclass(frozen=True)
class StagedSettings(DraftModelSettings):
    """Settings of ``staged:...``: those of ``draft_model``, and the inner drafter.

    inner    its specification, with ; between settings: inner=prompt_lookup:tokens=4;ngram=2. draft_model or staged put
             a second, smaller draft model inside, and staged a drafter inside that
    guesses  of the inner drafter in one pass of the draft model, at most; none where drafts are faster without
    """

    least = (("guesses", 1),)
    inner: str = "prompt_lookup"
    guesses: int = GUESSES

    def __post_init__(self) -> None:
        super().__post_init__()
        known = [method.name for method in _inner()]
        if (name := self.inner.partition(":")[0].strip()) not in known:
            raise InputError(f"inner must be one of {', '.join(known)}, got {name!r}{hint(name, known)}")
        _ = self.guesser

    @property
    def guesser(self) -> Spec:
        """The specification of the inner drafter."""
        return parse(self.inner.replace(";", ","), _inner())


def _inner() -> tuple[Method, ...]:
    """The methods that may guess a draft model's tokens."""
    return prompt_lookup.METHOD, suffix.METHOD, ngram.METHOD, rest.METHOD, draft_model.METHOD, METHOD


def _build(target: Decoder, settings: StagedSettings, module: nn.Module | None) -> Drafter:
    model = draft_of(target, settings, "staged", module)
    inner = build(settings.guesser, model, [])
    return StagedDrafter(target, model, settings, inner=inner, guesses=settings.guesses, faster=Faster())


METHOD = Method(
    name="staged",
    summary="a draft model whose own tokens are drafted for in turn; needs the same",
    settings=StagedSettings,
    with_source=True,
    build=_build,
    reads=TRAINED,
    variants=("", "tree=auto", "tree=chain", "tree=iid", "tree=without"),
    candidates=sized(StagedSettings, BUDGETS),
)
