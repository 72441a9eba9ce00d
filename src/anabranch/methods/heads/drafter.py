"""A drafter with draft heads: after each step the heads read the accepted node's state, and their tokens become a tree.

B rows of the batch, S states that a tree is built from, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from anabranch.drafting.drafter import Call, Drafter, Observation, Row, tally
from anabranch.drafting.head import DrawNoise, RowVocabulary
from anabranch.tree import DraftTree

__all__ = ["HeadDraft", "HeadDrafter", "HeadState"]


class HeadDraft(Protocol):
    """Builds trees from the states of draft heads."""

    call: Call  # all heads
    max_nodes: int
    trees: tuple[str, ...]  # the kinds of trees that it builds

    def row(self) -> RowVocabulary | None:
        """The own tokens of a new row; None if its drafts have the draft vocabulary only."""

    def depth_of(self, budget: int) -> int:
        """The number of heads that a tree of ``budget`` nodes uses."""

    def states(self, hidden_BD: Tensor) -> Tensor:
        """States to build trees from [B, S, D], from the target's after the last norm [B, D]."""

    def build(
        self,
        states_BSD: Tensor,
        roots: list[int],
        rows: Sequence[RowVocabulary] | None = None,
        noise: Sequence[DrawNoise | None] | None = None,
        *,
        budget: int | None = None,
        depths: Sequence[int] | None = None,
    ) -> list[DraftTree]:
        """One tree per row, of at most ``budget`` nodes and a row's ``depths``."""


@dataclass
class HeadState:
    """The state of a row: its own part of the draft vocabulary, and the states [S, D] of its last accepted node."""

    words: RowVocabulary | None
    states_SD: Tensor | None = None


class HeadDrafter(Drafter):
    """Drafts from heads on the target's last hidden state.

    adaptive  whether the number of drafted nodes follows the load
    """

    rules = ("match",)

    def __init__(self, name: str, tree: HeadDraft, *, adaptive: bool = False) -> None:
        self.name, self.tree, self.adaptive = name, tree, adaptive
        self.max_nodes = tree.max_nodes

    def depth_of(self, budget: int) -> int:
        """The number of heads that a tree of ``budget`` nodes uses."""
        return self.tree.depth_of(min(budget, self.max_nodes))

    def join(self, row: Row) -> None:
        """A new row has no states before its first step."""
        row.state[self] = self._fresh()

    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        """Trees from the states of the last step; only the root for rows that have none yet."""
        found = [DraftTree.root(row.root) for row in rows]
        known = [b for b, row in enumerate(rows) if row.max_depth > 0 and self._of(row).states_SD is not None]
        if budget < 2 or not known:
            return found
        asked = [rows[b] for b in known]
        kept = [self._of(row) for row in asked]
        words = [state.words.extend(row.tokens) for row, state in zip(asked, kept, strict=True) if state.words]
        trees = self.tree.build(
            torch.stack([state.states_SD for state in kept if state.states_SD is not None]),
            [row.root for row in asked],
            words or None,
            [DrawNoise.of(row, self.depth_of(budget)) for row in asked],
            budget=budget,
            depths=[row.max_depth for row in asked],
        )
        tally(self.tree.call, asked)
        for b, tree in zip(known, trees, strict=True):
            found[b] = tree
        return found

    def observe(self, rows: Sequence[Row], seen: Observation) -> None:
        """Keep what the heads read of each row's accepted node; not computed if nothing will be drafted."""
        for row in rows:
            self._of(row).states_SD = None
        going = [i for i, live in enumerate(seen.live) if live]
        if seen.budget < 2 or not going:
            return
        result = seen.result
        last = [result.starts_B[seen.slots[i]] + seen.verdicts[i].path[-1] for i in going]
        with torch.inference_mode():
            last_BD = result.hidden_MD[torch.tensor(last, device=result.hidden_MD.device)]
            states_BSD = self.tree.states(self._read_by_heads([rows[i] for i in going], last_BD))
        for i, states_SD in zip(going, states_BSD, strict=True):
            self._of(rows[i]).states_SD = states_SD

    def _read_by_heads(self, rows: Sequence[Row], last_BD: Tensor) -> Tensor:
        """What the heads read for the next draft [B, D]; ``last_BD`` are the target's states of the accepted nodes."""
        return last_BD

    def _fresh(self) -> HeadState:
        """The state of a new row."""
        return HeadState(self.tree.row())

    def _of(self, row: Row) -> HeadState:
        state: HeadState = row.state[self]
        return state
