"""Prompt lookup (Saxena 2023): what followed the last tokens the last time they stood in the text.

The longest n-gram that ends the text and stood in it before is looked up; the tokens behind its most recent
occurrence are the draft. Costs no model at all.

    ... the cat sat on the mat . the cat        "the cat" stood before: the draft is "sat on the mat ..."

How likely it is right depends above all on how long the match is. A token that is confirmed makes the match longer, so
the belief in a draft is a(n) a(n + 1) a(n + 2) ..., where a(n) is the share of matches of n tokens that the text went
on with. That is counted at every position of the answer, whether a draft was verified there or not: the belief is a
function of the text alone, and a replay finds it again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from anabranch.errors import InputError
from anabranch.methods.base import Context, Drafter
from anabranch.tree import DraftTree

__all__ = ["PromptLookupDrafter"]

# Of matches of 1, 2, ... tokens (the last: that many or more) those that the text went on with, on prompts of many
# kinds: what is believed before a text has shown its own, and how many matches that is worth.
PRIOR = (0.2, 0.45, 0.6, 0.7, 0.75, 0.8, 0.8, 0.9)
WEIGHT = 4.0


class _Row:
    """Where each n-gram of a text last ended, and how often a match of each length went on."""

    def __init__(self, ngram: int) -> None:
        self.ngram = ngram
        self.read = 1
        self.last: list[dict[tuple[int, ...], int]] = [{} for _ in range(ngram + 1)]
        self.right = [WEIGHT * share for share in PRIOR]
        self.all = [WEIGHT] * len(PRIOR)

    def match(self, text: Sequence[int], at: int) -> tuple[int, int] | None:
        """Where the longest match of what stands before ``at`` ends, and how long it is, up to the longest counted."""
        for n in range(min(self.ngram, at), 0, -1):
            end = self.last[n].get(tuple(text[at - n : at]))
            if end is not None:
                if n == self.ngram:
                    while n < min(len(PRIOR), end) and text[end - n - 1] == text[at - n - 1]:
                        n += 1
                return end, min(n, len(PRIOR))
        return None

    def extend(self, text: Sequence[int], prompt_length: int) -> None:
        """Take in what ``text``, which only grows, has gained."""
        for at in range(self.read, len(text)):
            if at >= prompt_length and (found := self.match(text, at)) is not None:
                end, length = found
                self.right[length - 1] += text[end] == text[at]
                self.all[length - 1] += 1
            for n in range(1, min(self.ngram, at) + 1):
                self.last[n][tuple(text[at - n : at])] = at
        self.read = max(self.read, len(text))

    def log_probs(self, length: int, tokens: int) -> list[float]:
        """Joint beliefs in each of ``tokens`` drafted behind a match of ``length``."""
        places = [min(length - 1 + i, len(PRIOR) - 1) for i in range(tokens)]
        return list(accumulate(math.log(self.right[place] / self.all[place]) for place in places))


class PromptLookupDrafter(Drafter):
    """Chains of up to ``tokens`` tokens behind the longest match of at most ``ngram`` tokens."""

    name = "prompt_lookup"

    def __init__(self, *, tokens: int = 10, ngram: int = 3) -> None:
        if tokens < 1 or ngram < 1:
            raise InputError(f"prompt_lookup needs tokens and ngram of at least 1, not {tokens} and {ngram}")
        self.tokens, self.ngram = tokens, ngram
        self.max_nodes = tokens + 1
        self._rows: dict[int, _Row] = {}

    def draft(self, contexts: Sequence[Context]) -> list[DraftTree]:
        """One chain a row, or the root alone where nothing matches."""
        return [self._draft(context) for context in contexts]

    def _draft(self, context: Context) -> DraftTree:
        row = self._rows.setdefault(context.key, _Row(self.ngram))
        text = context.tokens
        row.extend(text, context.prompt_length)
        found = row.match(text, len(text))
        if found is None or context.room < 1:
            return DraftTree.root(context.root)
        end, length = found
        chain = text[end : end + min(self.tokens, context.room)]
        return DraftTree.chain(context.root, chain, source=self.name, log_probs=row.log_probs(length, len(chain)))

    def leave(self, context: Context) -> None:
        """Forget the index."""
        self._rows.pop(context.key, None)
