"""Prompt lookup (Saxena 2023): proposes the continuation of the most recent earlier match of the current n-gram.

The draft is what followed the most recent earlier occurrence of the longest n-gram at the end of the text. It needs no
model.

    ... the cat sat on the mat . the cat        "the cat" occurred before: the draft is "sat on the mat ..."

The acceptance probability depends mainly on the length of the match. An accepted token makes the match longer, so the
probability of a draft is a(n) a(n + 1) a(n + 2) ..., where a(n) is the fraction of matches of n tokens whose next token
was right. It is estimated at every position of the completion, whether or not a draft was verified there, so it depends
only on the text and a replay reproduces it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from anabranch.errors import InputError
from anabranch.methods.base import Drafter, Method, Row
from anabranch.methods.settings import Settings
from anabranch.tree import DraftTree

__all__ = ["METHOD", "LookupSettings", "PromptLookupDrafter"]

# The prior of a(n), measured on prompts of many kinds, for matches of 1, 2, ... tokens (the last: that many or more),
# and its weight in matches.
PRIOR = (0.2, 0.45, 0.6, 0.7, 0.75, 0.8, 0.8, 0.9)
WEIGHT = 4.0


class Index:
    """Where each n-gram of a text last ended, and how often matches of each length predicted the next token."""

    def __init__(self, ngram: int) -> None:
        self.ngram = ngram
        self.read = 1
        self.last: list[dict[tuple[int, ...], int]] = [{} for _ in range(ngram + 1)]
        self.right = [WEIGHT * share for share in PRIOR]
        self.all = [WEIGHT] * len(PRIOR)

    def match(self, text: Sequence[int], at: int) -> tuple[int, int] | None:
        """The end and the length of the longest earlier match of the text before ``at``, up to the longest counted."""
        for n in range(min(self.ngram, at), 0, -1):
            end = self.last[n].get(tuple(text[at - n : at]))
            if end is not None:
                if n == self.ngram:
                    while n < min(len(PRIOR), end) and text[end - n - 1] == text[at - n - 1]:
                        n += 1
                return end, min(n, len(PRIOR))
        return None

    def extend(self, text: Sequence[int], prompt_length: int) -> None:
        """Index the new tokens of ``text``, which only grows."""
        for at in range(self.read, len(text)):
            if at >= prompt_length and (found := self.match(text, at)) is not None:
                end, length = found
                self.right[length - 1] += text[end] == text[at]
                self.all[length - 1] += 1
            for n in range(1, min(self.ngram, at) + 1):
                self.last[n][tuple(text[at - n : at])] = at
        self.read = max(self.read, len(text))

    def log_probs(self, length: int, tokens: int) -> list[float]:
        """Joint log probabilities of ``tokens`` tokens drafted after a match of ``length``."""
        places = [min(length - 1 + i, len(PRIOR) - 1) for i in range(tokens)]
        return list(accumulate(math.log(self.right[place] / self.all[place]) for place in places))


class PromptLookupDrafter(Drafter):
    """Chains of up to ``tokens`` tokens that continue the longest match of at most ``ngram`` tokens."""

    name = "prompt_lookup"
    free = True

    def __init__(self, *, tokens: int = 10, ngram: int = 3, adaptive: bool = False) -> None:
        if tokens < 1 or ngram < 1:
            raise InputError(f"prompt_lookup needs tokens and ngram of at least 1, got {tokens} and {ngram}")
        self.tokens, self.ngram, self.adaptive = tokens, ngram, adaptive
        self.max_nodes = tokens + 1

    def join(self, row: Row) -> None:
        """Index the row's prompt when it is first drafted for."""
        row.state[self] = Index(self.ngram)

    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        """One chain per row, or only the root if nothing matches."""
        return [self._draft(row, budget) for row in rows]

    def _draft(self, row: Row, budget: int) -> DraftTree:
        index: Index = row.state[self]
        text = row.tokens
        index.extend(text, row.prompt_length)
        found = index.match(text, len(text))
        count = min(self.tokens, row.max_depth, budget - 1)
        if found is None or count < 1:
            return DraftTree.root(row.root)
        end, length = found
        chain = text[end : end + count]
        return DraftTree.chain(row.root, chain, source=self.name, log_probs=index.log_probs(length, len(chain)))


@dataclass(frozen=True)
class LookupSettings(Settings):
    """Settings of ``prompt_lookup:...``.

    tokens  maximum number of drafted tokens, or auto: up to 10, depending on the load
    ngram   maximum length of a match
    """

    tokens: str = "10"
    ngram: int = 3

    def __post_init__(self) -> None:
        if self.tokens != "auto" and not (self.tokens.isdigit() and int(self.tokens) >= 1):
            raise InputError(f"tokens must be a whole number of at least 1, or auto, got {self.tokens!r}")
        if self.ngram < 1:
            raise InputError(f"ngram must be at least 1, got {self.ngram}")

    @classmethod
    def under_load(cls) -> LookupSettings:
        """``tokens=auto``."""
        return cls(tokens="auto")

    @property
    def adaptive(self) -> bool:
        """Whether ``tokens=auto``."""
        return self.tokens == "auto"


def _build(target: object, settings: LookupSettings, module: object) -> Drafter:
    tokens = 10 if settings.adaptive else int(settings.tokens)
    return PromptLookupDrafter(tokens=tokens, ngram=settings.ngram, adaptive=settings.adaptive)


METHOD = Method(
    name="prompt_lookup",
    summary="the continuation of the most recent earlier match of the current n-gram; needs no model",
    settings=LookupSettings,
    build=_build,
    candidates=lambda nodes: (LookupSettings(tokens=str(n)) for n in (2, 3, 6, 10) if n < nodes),
    default=True,
    order=lambda source: 1 if source == "prompt_lookup" else None,
)
