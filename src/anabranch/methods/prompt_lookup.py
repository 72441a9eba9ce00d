"""Prompt lookup (Saxena 2023): proposes the continuation of the most recent earlier match of the current n-gram.

The draft is what followed the most recent earlier occurrence of the longest n-gram at the end of the text. It needs no
model.

    ... the cat sat on the mat . the cat        "the cat" occurred before: the draft is "sat on the mat ..."

The acceptance probability depends mainly on the length of the match. An accepted token makes the match longer, so the
probability of a draft is a(n) a(n + 1) a(n + 2) ..., where a(n) is the fraction of matches of n tokens whose next token
was right. It is estimated at every position of the completion, whether or not a draft was verified there, so it depends
only on the text and a replay reproduces it.

With ``matches`` above 1 the continuations of several matches are merged into a tree: the longest match first, among
equals the most recent. A continuation that leaves an earlier one is right only where that one is wrong, so its first
own token is believed with what the siblings before it leave over, times its own a(n).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from anabranch.drafting.acceptance import joint_log_probs
from anabranch.drafting.drafter import Drafter, Method, Row, Traits
from anabranch.drafting.matches import LONGEST, MatchRates
from anabranch.drafting.settings import Settings
from anabranch.tree import DraftTree

__all__ = ["METHOD", "LookupSettings", "PromptLookupDrafter"]

WEIGHT = 4.0  # of the prior of a(n), in matches
ADAPTIVE = 10  # tokens of a draft whose length the load decides


class Index:
    """Index of the n-grams of a text by their ends, with the acceptance of matches by length."""

    def __init__(self, ngram: int) -> None:
        self.ngram = ngram
        self.read = 1
        self.last: list[dict[tuple[int, ...], int]] = [{} for _ in range(ngram + 1)]
        self.before: list[list[int | None]] = [[None] for _ in range(ngram + 1)]
        self.rates = MatchRates(WEIGHT)

    def match(self, text: Sequence[int], at: int) -> tuple[int, int] | None:
        """End and length (capped) of the longest match of the tokens before ``at``."""
        return next(self.matches(text, at), None)

    def matches(self, text: Sequence[int], at: int) -> Iterator[tuple[int, int]]:
        """All matches as ``match`` gives them: those of ``ngram`` tokens first, the most recent first."""
        seen: set[int] = set()
        for n in range(min(self.ngram, at), 0, -1):
            end = self.last[n].get(tuple(text[at - n : at]))
            while end is not None:
                if end not in seen:
                    seen.add(end)
                    yield end, self._length(text, at, end, n)
                end = self.before[n][end]

    def _length(self, text: Sequence[int], at: int, end: int, known: int) -> int:
        """Number of equal tokens before ``end`` and ``at`` (capped); at least ``known``."""
        most = min(LONGEST, end)
        if known == self.ngram:
            while known < most and text[end - known - 1] == text[at - known - 1]:
                known += 1
        return min(known, LONGEST)

    def extend(self, text: Sequence[int], prompt_length: int) -> None:
        """Index the new tokens of ``text``, which only grows."""
        for at in range(self.read, len(text)):
            if at >= prompt_length and (match := self.match(text, at)) is not None:
                end, length = match
                self.rates.saw(length, right=text[end] == text[at])
            for n in range(1, self.ngram + 1):
                ngram = tuple(text[at - n : at]) if n <= at else None
                self.before[n].append(None if ngram is None else self.last[n].get(ngram))
                if ngram is not None:
                    self.last[n][ngram] = at
        self.read = max(self.read, len(text))

    def shares(self, length: int, tokens: int) -> list[float]:
        """a(length), a(length + 1), ...: the belief in each of ``tokens`` behind a match, the ones before it given."""
        return [self.rates(length + i) for i in range(tokens)]


@dataclass(frozen=True)
class LookupSettings(Settings):
    """Settings of ``prompt_lookup:...``.

    tokens   maximum number of drafted tokens, or auto: up to 10, depending on the load
    ngram    maximum length of a match
    matches  maximum number of matches whose continuations are merged into a tree; 1: the most recent of the longest
    """

    least = (("ngram", 1), ("matches", 1))
    load = "tokens"
    tokens: str = "10"
    ngram: int = 3
    matches: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_count("tokens", 1)


class PromptLookupDrafter(Drafter):
    """Continues matches with chains or trees."""

    name = "prompt_lookup"
    traits = Traits(free="all", repeats="all")

    def __init__(self, settings: LookupSettings | None = None) -> None:
        self.settings = settings = settings or LookupSettings()
        self.adaptive = settings.adaptive
        self.tokens = ADAPTIVE if settings.adaptive else int(settings.tokens)
        self.max_nodes = self.tokens + 1

    def join(self, row: Row) -> None:
        """Index the row's prompt when it is first drafted for."""
        row.state[self] = Index(self.settings.ngram)

    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        """One chain or tree a row, or the root alone where nothing matches."""
        return [self._draft(row, budget) for row in rows]

    def _draft(self, row: Row, budget: int) -> DraftTree:
        index: Index = row.state[self]
        text = row.context
        index.extend(text, row.given)
        count = min(self.tokens, row.max_depth, budget - 1)
        if count < 1:
            return DraftTree.root(row.root)
        candidates = [
            (text[end : end + count], index.shares(length, count))
            for end, length in islice(index.matches(text, len(text)), self.settings.matches)
        ]
        if not candidates:
            return DraftTree.root(row.root)
        paths, log_probs = [path for path, _ in candidates], joint_log_probs(candidates)
        tree = DraftTree.from_paths(row.root, paths, source=self.name, log_probs=log_probs)
        return tree.truncate(1 + min(self.tokens, budget - 1))


METHOD = Method(
    name="prompt_lookup",
    summary="the continuation of the most recent earlier match of the current n-gram; needs no model",
    settings=LookupSettings,
    variants=("", "tokens=auto", "matches=3"),
    with_source=True,
    build=lambda target, settings, module: PromptLookupDrafter(settings),
    candidates=lambda nodes: (LookupSettings(tokens=str(n)) for n in (2, 3, 6, 10) if n < nodes),
    default=True,
    detached=True,
    labels=("prompt_lookup",),
)
