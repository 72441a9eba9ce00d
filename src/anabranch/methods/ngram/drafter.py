"""An n-gram model as a drafter: the most probable continuations as a tree, or one sampled continuation as a chain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from anabranch.drafting.drafter import Drafter, Row
from anabranch.drafting.draws import Draws
from anabranch.drafting.grow import Child, Form, Growth, Node, grow
from anabranch.errors import CapabilityError
from anabranch.methods.ngram.model import NGramModel
from anabranch.model.encoder import Source
from anabranch.sampling import SamplingParams, generator, target_probs
from anabranch.tree import DraftTree
from anabranch.verify import Rule

__all__ = ["NGramDrafter"]

# lane of the counter-based noise for sampling drafts; the target's draws use lane 0, rejection lane 1
DRAFT_LANE = 2
CHILDREN = 16  # candidates below one node
DRAWN = 64  # the same for sampled rows, whose tokens are less probable


class NGramDrafter(Drafter):
    """Drafts from an n-gram model.

    nodes     node budget, root included
    chain     one continuation instead of a tree: the most probable one under *matching*; under *rejection* it is
              sampled, and the tree carries the distributions that it was sampled from
    adaptive  whether the load decides how many nodes are drafted, up to ``nodes``
    """

    name = "ngram"
    rules = ("match", "rejection")

    def __init__(self, model: NGramModel, *, nodes: int = 16, chain: bool = False, adaptive: bool = False) -> None:
        self.model, self.chain, self.adaptive = model, chain, adaptive
        self.max_nodes = nodes

    def check(self, sampling: SamplingParams, rule: Rule, source: Source | None = None) -> None:
        """*Rejection* needs a chain that is sampled."""
        super().check(sampling, rule, source)
        if rule == "rejection" and not self.chain:
            raise CapabilityError(
                "best-first trees hold the most probable nodes, not sampled ones, so rule='rejection' is not exact; "
                "use rule='match', or ngram:tree=chain"
            )
        if rule == "rejection" and (sampling.greedy or sampling.needs_history):
            raise CapabilityError(
                "rule='rejection' samples its drafts from the n-gram model's own distribution and needs temperature "
                "> 0 without repetition penalty or logits processors; use rule='match'"
            )

    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        """One tree a row."""
        return [self._draft(row, min(budget, self.max_nodes)) for row in rows]

    def _draft(self, row: Row, nodes: int) -> DraftTree:
        if nodes < 2 or row.max_depth < 1:
            return DraftTree.root(row.root)
        if row.rule == "rejection":
            return self._sampled(row, min(nodes - 1, row.max_depth))
        count = 1 if self.chain else min(CHILDREN, nodes - 1)
        draws = None if row.sampling.greedy else Draws(row, min(row.max_depth, nodes))

        def children(node: Node) -> Sequence[Child]:
            if draws is None:
                return self.model.best(node.state, count)
            if not (candidates := self.model.best(node.state, DRAWN)):
                return []
            words, probs, after = zip(*candidates, strict=True)
            log_probs = draws(node.depth, words, probs)
            best = np.argsort(-log_probs, kind="stable")[:count].tolist()
            return [(words[i], float(log_probs[i]), after[i]) for i in best]

        growth = Growth(row.root, Form(nodes, row.max_depth), state=self.model.context(row.tokens))
        (tree,) = grow([growth], lambda nodes: map(children, nodes), lambda node: self.name)
        return tree

    def _sampled(self, row: Row, length: int) -> DraftTree:
        def distributions(nodes: list[Node]) -> Tensor:
            texts = [[*row.tokens[-2:], *node.path] for node in nodes]
            return target_probs(self.model.probs(texts).log(), row.sampling)

        noise = generator(row.sampling.seed, len(row.tokens), lane=DRAFT_LANE)
        growth = Growth(row.root, Form(length + 1, length, (1,), noise=noise))
        (tree,) = grow([growth], distributions, lambda node: self.name)
        return tree
