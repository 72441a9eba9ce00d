"""Decoding by forward passes, for examples: what each pass emitted, by whom, and what it rejected."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from anabranch.decoding.engine import Step
from anabranch.tree import DraftTree

__all__ = ["Pass", "passes_of"]


@dataclass(frozen=True)
class Pass:
    """One forward pass.

    tokens    emitted, in order
    sources   what proposed each of them; "target" for the target's own
    rejected  draft tokens that would have followed the accepted ones: each the drafter's first choice
    """

    tokens: tuple[int, ...]
    sources: tuple[str, ...]
    rejected: tuple[int, ...] = ()

    def to_list(self) -> list[Any]:
        """As JSON values, for the journal."""
        return [self.tokens, self.sources, self.rejected]

    @staticmethod
    def from_list(record: Any) -> Pass:
        """The inverse of ``to_list``."""
        tokens, sources, rejected = map(tuple, record)
        return Pass(tokens, sources, rejected)


def passes_of(steps: Iterable[Step]) -> list[Pass]:
    """The passes of a sequence."""
    return [
        Pass(step.tokens, step.sources, () if step.finish else _first_choices(step.tree, step.verdict.path[-1]))
        for step in steps
    ]


def _first_choices(tree: DraftTree, node: int) -> tuple[int, ...]:
    """The tokens from a node on, always to the first child."""
    choices = []
    while children := tree.children(node):
        node = children[0]
        choices.append(int(tree.tokens[node]))
    return tuple(choices)
