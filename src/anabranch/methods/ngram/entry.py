"""N-gram drafts: a Katz back-off model over token ids (Katz 1987), as in staged speculative decoding.

Spector and Ré 2023 draft for their draft model with a trigram model, counted from 120M tokens that it wrote; unigrams
and bigrams are the trivial approximation models of Leviathan et al. 2023, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from anabranch.drafting.drafter import Drafter, Method, Row, sized
from anabranch.drafting.draws import Draws
from anabranch.drafting.grow import Child, Form, Growth, Node, grow
from anabranch.drafting.settings import BUDGETS
from anabranch.drafting.tables import Tables, TableSettings, find_tables
from anabranch.errors import CapabilityError, InputError
from anabranch.methods.ngram.counts import build
from anabranch.methods.ngram.model import NGramModel
from anabranch.methods.tables import NGRAMS
from anabranch.model.decoder import Decoder
from anabranch.model.encoder import Source
from anabranch.sampling import SamplingParams, generator, target_probs
from anabranch.tree import DraftTree
from anabranch.verify import Rule

__all__ = ["METHOD", "NGramDrafter", "NGramModel", "NGramSettings"]

# lane of the counter-based noise for sampling drafts; the target's draws use lane 0, rejection lane 1
DRAFT_LANE = 2
CHILDREN = 16  # candidates below one node
DRAWN = 64  # the same for sampled rows, whose tokens are less probable


@dataclass(frozen=True)
class NGramSettings(TableSettings):
    """Settings of ``ngram:...``, besides those of ``TableSettings``.

    tree   also chain: one continuation, which can be verified by rejection too
    order  length of the n-grams: 3, 2 or 1
    """

    trees = budgeted = ("best", "auto", "chain")
    order: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.order <= 3:
            raise InputError(f"order must be 1, 2 or 3, got {self.order}")


class NGramDrafter(Drafter):
    """Drafts from an n-gram model: the most probable tree or chain; under *rejection* a sampled chain.

    A sampled chain carries the distributions that it was sampled from.
    """

    name = "ngram"
    rules = ("match", "rejection")

    def __init__(self, model: NGramModel, settings: NGramSettings | None = None) -> None:
        settings = settings or NGramSettings()
        self.model, self.chain, self.adaptive = model, settings.tree == "chain", settings.adaptive
        self.max_nodes = settings.nodes

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


def _build(target: Decoder, settings: NGramSettings, module: object) -> Drafter:
    return NGramDrafter(NGramModel(find_tables(TABLES, target, settings.data), settings.order), settings)


TABLES = Tables("ngram", command="ngram", training=NGRAMS, build=build)

METHOD = Method(
    name="ngram",
    summary="a trigram model of token ids; needs a table of counts (anabranch train ngram)",
    settings=NGramSettings,
    with_source=True,
    build=_build,
    tables=TABLES,
    variants=("", "tree=auto", "tree=chain"),
    candidates=sized(NGramSettings, BUDGETS[:8]),
    detached=True,
    labels=("ngram",),
)
