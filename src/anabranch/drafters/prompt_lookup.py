"""Prompt lookup (Saxena 2023): what followed the last tokens the last time they stood in the text.

The longest n-gram that ends the text and stood in it before is looked up; the tokens behind its most recent
occurrence are the draft. Costs no model at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from anabranch.drafters.base import Context, Drafter, Observation
from anabranch.errors import InputError
from anabranch.tree import DraftTree

__all__ = ["PromptLookupDrafter"]


class _Row:
    """Where each n-gram of a text last ended, and how often drafts by its length were right."""

    def __init__(self, ngram: int) -> None:
        self.seen = 0
        self.last: list[dict[tuple[int, ...], int]] = [{} for _ in range(ngram + 1)]
        # right and wrong first tokens by n-gram length; the start is a guess: longer matches are safer
        self.right = [1.0 + n for n in range(ngram + 1)]
        self.wrong = [2.0] * (ngram + 1)
        self.matched = 0


class PromptLookupDrafter(Drafter):
    """Chains of up to ``tokens`` tokens behind the longest match of at most ``ngram`` tokens.

    The belief in a draft, which decides its place when trees are merged, is the share of earlier drafts of the same
    n-gram length in this text that began right.
    """

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
        # index every n-gram that ends before the last token; the text only grows
        for after in range(max(1, row.seen), len(text)):
            for n in range(1, min(self.ngram, after) + 1):
                row.last[n][tuple(text[after - n : after])] = after
        row.seen = max(row.seen, len(text))
        row.matched = 0
        for n in range(min(self.ngram, len(text)), 0, -1):
            end = row.last[n].get(tuple(text[-n:]))
            if end is not None:
                found = text[end : end + min(self.tokens, context.room)]
                if not found:
                    break
                row.matched = n
                belief = math.log(row.right[n] / (row.right[n] + row.wrong[n]))
                joint = [belief * (i + 1) for i in range(len(found))]
                return DraftTree.chain(context.root, found, source=self.name, log_probs=joint)
        return DraftTree.root(context.root)

    def observe(self, contexts: Sequence[Context], seen: Observation) -> None:
        """Count whether the draft began right."""
        for context, tree, verdict in zip(contexts, seen.trees, seen.verdicts, strict=True):
            row = self._rows.get(context.key)
            if row is None or not row.matched:
                continue
            first = [child for child in tree.children(0) if tree.sources[child] == self.name]
            if first:
                right = len(verdict.path) > 1 and verdict.path[1] in first
                counts = row.right if right else row.wrong
                counts[row.matched] += 1

    def leave(self, context: Context) -> None:
        """Forget the index."""
        self._rows.pop(context.key, None)
