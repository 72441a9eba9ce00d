"""Drafters that grow their trees by asking a model of their own, level by level, what follows some nodes.

B rows of the batch, n nodes of a pass.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from anabranch.drafting.drafter import Drafter, Observation, Row
from anabranch.drafting.grow import Form, Growth, Node, by_depth, grow, product_size
from anabranch.drafting.kept import Family, Kept
from anabranch.drafting.reader import Continuations, Reader
from anabranch.drafting.settings import TreeSettings
from anabranch.errors import CapabilityError
from anabranch.model.decoder import Decoder
from anabranch.model.encoder import Source
from anabranch.sampling import SamplingParams, generator
from anabranch.tree import DraftTree
from anabranch.verify import Rule

__all__ = ["FRONTIER", "AutoregressiveDrafter"]

DRAFT_LANE = 3  # of the noise that sampled drafts are drawn with; lanes 0 to 2 are the target's and the streams'
FRONTIER = 12  # nodes of a best-first tree that are asked about in one round

R = TypeVar("R", bound=Reader)


class AutoregressiveDrafter(Drafter, Generic[R]):
    """Asks its reader what follows the root, then what follows the best nodes found, until the tree is complete.

    One pass of the reader's model serves all rows. A subclass turns what the reader returns into the best next tokens
    of each node, or into distributions where tokens are sampled.

    depth          tokens of a path at most
    sampled_trees  the settings of trees whose nodes can be sampled, for messages
    label          of the sources of its nodes, before their depth
    """

    sampled_trees: str
    label = "draft"

    def __init__(self, target: Decoder, reader: R, settings: TreeSettings, depth: int) -> None:
        self.target, self.reader, self.settings, self.depth = target, reader, settings, depth
        self.adaptive, self.max_nodes = settings.adaptive, settings.size_for(depth)

    def check(self, sampling: SamplingParams, rule: Rule, source: Source | None = None) -> None:
        """*Rejection* needs trees that are verified as they were sampled."""
        super().check(sampling, rule, source)
        if rule == "rejection" and (self.settings.kind == "best" or self.adaptive):
            what = "drafts that the load may cut" if self.adaptive else "best-first trees"
            raise CapabilityError(
                f"{what} hold the most probable nodes, not all that were sampled, so rule='rejection' is not exact; "
                f"use rule='match', or {self.sampled_trees} with a fixed number of tokens"
            )

    def depth_of(self, budget: int) -> int:
        """At most ``depth``."""
        return min(self.depth, budget - 1)

    # -- rows ------------------------------------------------------------------------------------------
    def recall(self, tokens: Sequence[int], kept: Kept, family: Family) -> None:
        """Take in the model's kept keys and values."""
        self.reader.recall(tokens, kept, family)

    def keep(self, row: Row, length: int, kept: Kept, family: Family) -> None:
        """Keep the model's keys and values."""
        self.reader.keep(row, length, kept, family)

    @torch.inference_mode()
    def leave(self, row: Row) -> None:
        """Free the row's slot."""
        super().leave(row)
        self.reader.leave(row)

    def observe(self, rows: Sequence[Row], seen: Observation) -> None:
        """Commit what became text to the cache."""
        self.reader.settle()

    # -- drafts ----------------------------------------------------------------------------------------
    @torch.inference_mode()
    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        """Trees for all rows together: one pass for each level, fewer where nodes were guessed.

        The root alone where a text has reached the end of what the model can read.
        """
        trees = [DraftTree.root(row.root) for row in rows]
        longest = self.reader.longest
        for row in rows:
            if len(row.tokens) >= longest:
                self.reader.forget(row)
        able = [b for b, row in enumerate(rows) if row.max_depth > 0 and len(row.tokens) < longest and self._able(row)]
        if budget < 2 or not able:
            return trees
        growths: list[Growth] = []
        for b, continuations in zip(able, self.reader.begin([rows[b] for b in able]), strict=True):
            depth = min(rows[b].max_depth, longest - len(rows[b].tokens), self.depth_of(budget))
            form = self._form(rows[b], min(budget, self.max_nodes), depth)
            growths.append(Growth(rows[b].root, form, state=0, key=_Text(rows[b], continuations, depth)))
        for b, tree in zip(able, grow(growths, self._expand, by_depth(self.label)), strict=True):
            trees[b] = tree
        return trees

    def _expand(self, nodes: Sequence[Node]) -> list[Any]:
        """Children of some nodes; None for those of rows that wait for a pass while others need none."""
        of_text: dict[_Text, list[int]] = {}
        for node in nodes:
            text: _Text = node.growth.key
            if node.parent is not None and node.state is None:
                node.state = text.continuations.child(node.parent.state, node.token)
                if node.growth.form.chain:
                    text.continuations.chain.append(node.state)
            of_text.setdefault(text, []).append(node.state)
        ready = {text for text, places in of_text.items() if all(place in text.continuations.known for place in places)}
        if not ready:
            wanted: list[tuple[_Text, list[int]]] = []
            for text, places in of_text.items():
                new = list(dict.fromkeys(place for place in places if place not in text.continuations.known))
                # what follows the deepest nodes is of no use
                wanted.append((text, new + self._guesses(text.row, text.continuations, new, text.depth - 1)))
            answer = self.reader.ask({text.row: places for text, places in wanted})
            self._tell([(text.row, text.continuations, places) for text, places in wanted], answer)
            ready = set(of_text)
        return [node.growth.key.continuations.known[node.state] if node.growth.key in ready else None for node in nodes]

    def _able(self, row: Row) -> bool:
        """Return whether the model can draft for a row now."""
        return True

    def _guesses(self, row: Row, continuations: Continuations, nodes: Sequence[int], depth: int) -> list[int]:
        """Further nodes, at most ``depth`` deep, that may be worth asking about in the same pass."""
        return []

    def _form(self, row: Row, budget: int, depth: int) -> Form:
        settings = self.settings
        form = Form(budget, depth, settings.widths, settings.floor, rounds=depth)
        if row.rule == "rejection":
            fitting = max(d for d in range(self.depth + 1) if product_size(settings.widths, d) <= budget)
            noise = generator(row.sampling.seed, len(row.tokens), lane=DRAFT_LANE)
            return replace(form, depth=min(depth, fitting), noise=noise, replacement=settings.kind != "without")
        return replace(form, frontier=FRONTIER if settings.kind == "best" else budget)

    @staticmethod
    def _sampling(
        row: Row, continuations: Continuations, nodes: Sequence[int]
    ) -> tuple[SamplingParams, list[list[int]] | None]:
        """Sampling without the user's own functions, which see the target's scores alone; the texts it depends on."""
        params = replace(row.sampling, processors=())
        if not params.needs_history:
            return params, None
        return params, [[*row.tokens, *continuations.path(node)] for node in nodes]

    @staticmethod
    def _know_best(
        continuations: Continuations,
        nodes: Sequence[int],
        tokens: Sequence[Sequence[float]],
        log_probs: Sequence[Sequence[float]],
    ) -> None:
        """Record the best next tokens of some nodes, best first."""
        for node, *pairs in zip(nodes, tokens, log_probs, strict=True):
            continuations.known[node] = [
                (int(token), p, None) for token, p in zip(*pairs, strict=True) if math.isfinite(p)
            ]

    @staticmethod
    def _know_distributions(continuations: Continuations, nodes: Sequence[int], q_nV: Tensor) -> None:
        """Record the distributions that the next tokens of some nodes are sampled from."""
        finite = q_nV.isfinite().all(dim=-1).tolist()
        continuations.known.update((node, q if ok else ()) for node, q, ok in zip(nodes, q_nV, finite, strict=True))

    @abstractmethod
    def _tell(self, answered: Sequence[tuple[Row, Continuations, Sequence[int]]], answer: Tensor) -> None:
        """Record the children of the nodes of a pass, from the reader's answer in the same order.

        ``known`` gets the best next tokens and their log probabilities as ``grow.Child``, or where the rule is
        *rejection* the distribution that they are sampled from, () where it is not finite.
        """


@dataclass(frozen=True, eq=False)
class _Text:
    """A row whose tree grows, and how deep that may be."""

    row: Row
    continuations: Continuations
    depth: int
