"""An n-gram model as a drafter: the most probable continuations as a tree, or one sampled continuation as a chain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from anabranch.drafting.best_first import best_first
from anabranch.drafting.drafter import Drafter, Row
from anabranch.drafting.draws import Draws
from anabranch.errors import CapabilityError
from anabranch.methods.ngram.model import Context, NGramModel
from anabranch.sampling import SamplingParams, generator, inverse_cdf, target_probs
from anabranch.tree import DraftTree
from anabranch.verify import Rule

__all__ = ["NGramDrafter"]

# lane of the counter-based noise for sampling drafts; the target's draws use lane 0, rejection lane 1
DRAFT_LANE = 2
CHILDREN = 16  # candidates below one node
DRAWN = 64  # the same for sampled rows, whose tokens are less probable

State = tuple[Context, int]  # context and depth of a node


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

    def check(self, sampling: SamplingParams, rule: Rule) -> None:
        """*Rejection* needs a chain that is sampled."""
        super().check(sampling, rule)
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

        def children(state: State) -> list[tuple[int, float, State]]:
            context, depth = state
            if draws is None:
                return [(w, p, (after, depth + 1)) for w, p, after in self.model.best(context, count)]
            found = self.model.best(context, DRAWN)
            if not found:
                return []
            words, probs, after = zip(*found, strict=True)
            beliefs = draws(depth, words, probs)
            best = np.argsort(-beliefs, kind="stable")[:count].tolist()
            return [(words[i], float(beliefs[i]), (after[i], depth + 1)) for i in best]

        start = (self.model.context(row.tokens), 0)
        return best_first(row.root, start, children, nodes=nodes, depth=row.max_depth, source=self.name)

    def _sampled(self, row: Row, length: int) -> DraftTree:
        noise = generator(row.sampling.seed, len(row.tokens), lane=DRAFT_LANE)
        text, drawn, probs = list(row.tokens[-2:]), [], []
        for _ in range(length):
            q_1V = target_probs(self.model.probs([text]).log(), row.sampling)
            drawn.append(int(inverse_cdf(q_1V, [noise.random()])))
            text.append(drawn[-1])
            probs.append(q_1V)
        return DraftTree.chain(row.root, drawn, source=self.name, draft_probs=torch.cat(probs))
