"""A drafter with draft heads: after each step the heads read the accepted node's state, and their tokens become a tree.

B rows of the batch, S states that a tree is built from, D model width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from anabranch.drafting.drafter import Call, Drafter, Observation, Row, tally
from anabranch.drafting.head import DrawNoise, RowVocabulary
from anabranch.drafting.settings import TreeSettings
from anabranch.methods.heads.module import DraftHeads, VocabularyHeads
from anabranch.model.decoder import Decoder
from anabranch.tree import DraftTree

__all__ = ["Best", "HeadDraft", "HeadDrafter", "HeadSettings", "HeadState"]

Best: TypeAlias = Callable[[Tensor, slice], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class HeadSettings(TreeSettings):
    """Settings of methods with draft heads.

    tree   best, chain, product, auto (best, with a size that follows the load), a number: best with so many nodes; or
           sparse: nodes at fixed places (the head's best, second best, ... token), whatever their probabilities
    nodes  node budget, counting the root; 0: 16, or with tree=auto 24
    k      maximum number of children of a node; 0: 10, or in a product tree 3
    depth  number of heads used; 0: all
    """

    trees: ClassVar[tuple[str, ...]] = ("best", "chain", "sparse", "product", "auto")
    budgeted = ("best", "sparse", "auto")
    children = 10
    k: int = 0
    depth: int = 0


class HeadDraft(ABC):
    """Builds trees from the states of draft heads, for one target and module."""

    call: Call  # all heads
    trees: tuple[str, ...]  # the kinds of trees that it builds

    def __init__(self, target: Decoder, module: DraftHeads, settings: HeadSettings | None = None) -> None:
        self.settings = settings or HeadSettings()
        self.depth = self.settings.depth_for(module.config.num_heads, "heads")
        self.max_nodes = self.settings.size_for(self.depth)
        self.heads = module.shared(target, VocabularyHeads, lambda: VocabularyHeads(target, module))

    def row(self) -> RowVocabulary | None:
        """The own tokens of a new row; None for heads of their own, which have rows for the draft vocabulary only."""
        return None if self.heads.shared is None else RowVocabulary(self.heads.shared)

    def depth_of(self, budget: int) -> int:
        """The number of heads that a tree of ``budget`` nodes uses."""
        return min(self.depth, budget - 1)

    @abstractmethod
    def states(self, hidden_BD: Tensor) -> Tensor:
        """States to build trees from [B, S, D], from the target's after the last norm [B, D]."""

    @torch.inference_mode()
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
        """One tree per row from its states and its root.

        rows    the rows' own tokens, if ``row`` made some
        noise   that of the rows that are sampled
        budget  nodes at most, root included
        depths  of the rows' trees at most
        """
        budget = self.max_nodes if budget is None else min(budget, self.max_nodes)
        depth = self.depth_of(budget if depths is None else min(budget, 1 + max(depths)))
        limits = [depth] * len(roots) if depths is None else [min(depth, limit) for limit in depths]
        drawn = None if noise is None else DrawNoise.together(noise, depth, states_BSD.device)
        k = min(self.settings.widths[0], budget - 1)

        def best(states_BFD: Tensor, levels: slice) -> tuple[Tensor, Tensor]:
            return self.heads[levels.start].best_tokens(states_BFD, k, rows, drawn, levels)

        return self._grow(states_BSD, roots, best, budget, limits)

    @abstractmethod
    def _grow(
        self, states_BSD: Tensor, roots: list[int], best: Best, budget: int, depths: Sequence[int]
    ) -> list[DraftTree]:
        """The trees of rows, each of at most ``budget`` nodes and as deep as ``depths`` says.

        best  (states [B, F, D] of some heads, or one head's, and the levels of these heads) -> the best next tokens and
              their log probabilities [B, F, k]
        """


@dataclass
class HeadState:
    """The state of a row: its own part of the draft vocabulary, and the states [S, D] of its last accepted node."""

    words: RowVocabulary | None
    states_SD: Tensor | None = None


class HeadDrafter(Drafter):
    """Drafts from heads on the target's last hidden state."""

    rules = ("match",)

    def __init__(self, name: str, tree: HeadDraft) -> None:
        self.name, self.tree, self.adaptive = name, tree, tree.settings.adaptive
        self.max_nodes = tree.max_nodes

    def depth_of(self, budget: int) -> int:
        """The number of heads that a tree of ``budget`` nodes uses."""
        return self.tree.depth_of(min(budget, self.max_nodes))

    def join(self, row: Row) -> None:
        """A new row has no states before its first step."""
        row.state[self] = self._fresh()

    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        """Trees from the states of the last step; only the root for rows that have none yet."""
        all_trees = [DraftTree.root(row.root) for row in rows]
        known = [b for b, row in enumerate(rows) if row.max_depth > 0 and self._of(row).states_SD is not None]
        if budget < 2 or not known:
            return all_trees
        drafting = [rows[b] for b in known]
        kept = [self._of(row) for row in drafting]
        words = [state.words.extend(row.tokens) for row, state in zip(drafting, kept, strict=True) if state.words]
        trees = self.tree.build(
            torch.stack([state.states_SD for state in kept if state.states_SD is not None]),
            [row.root for row in drafting],
            words or None,
            [DrawNoise.of(row, self.depth_of(budget)) for row in drafting],
            budget=budget,
            depths=[row.max_depth for row in drafting],
        )
        tally(self.tree.call, drafting)
        for b, tree in zip(known, trees, strict=True):
            all_trees[b] = tree
        return all_trees

    def observe(self, rows: Sequence[Row], seen: Observation) -> None:
        """Keep the heads' input at each row's accepted node; not computed if nothing will be drafted."""
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
        """Input of the heads for the next draft [B, D]; ``last_BD`` are the target's states of the accepted nodes."""
        return last_BD

    def _fresh(self) -> HeadState:
        """The state of a new row."""
        return HeadState(self.tree.row())

    def _of(self, row: Row) -> HeadState:
        state: HeadState = row.state[self]
        return state
