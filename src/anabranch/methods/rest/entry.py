"""Retrieval from a datastore (REST, He et al. 2024): the most frequent continuations of the longest match, as a tree.

The paper's tree holds the prefixes that are most frequent among the continuations. Here a node's joint belief is that
frequency, reduced where few continuations speak for it, as prediction by partial matching (PPM) does: of c
continuations with t different next tokens, c / (c + t) are trusted, more behind a longer match. What is left goes to
the continuations of the next shorter match, so that a long match which occurs once does not leave the budget unused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from anabranch.drafting.drafter import Drafter, Method, Row, sized
from anabranch.drafting.draws import Draws
from anabranch.drafting.grow import Child, Form, Growth, Node, grow
from anabranch.drafting.settings import BUDGETS
from anabranch.drafting.tables import Tables, TableSettings, find_tables
from anabranch.errors import InputError
from anabranch.methods.rest.datastore import Datastore
from anabranch.methods.rest.suffixes import WIDTH, build
from anabranch.methods.tables import DATASTORE
from anabranch.model.decoder import Decoder
from anabranch.tree import DraftTree

__all__ = ["METHOD", "Datastore", "RestDrafter", "RestSettings"]

LEVELS = 3  # matches of different lengths whose continuations are merged
LEFT = 0.05  # confidence left below which no shorter match is looked up
DOUBT = 2.0  # a match of k tokens that occurs once has the confidence k / (k + DOUBT)

Continuations = Sequence[tuple[float, list[int]]]  # weights and tokens
State = tuple[Continuations, int]  # what follows a node, and how many tokens up to there match


@dataclass(frozen=True)
class RestSettings(TableSettings):
    """Settings of ``rest:...``, besides those of ``TableSettings``.

    ngram    maximum length of a match
    depth    maximum number of drafted tokens of a continuation
    matches  maximum number of continuations read per match, evenly spread over all of them
    """

    least = (("depth", 1), ("matches", 1))
    ngram: int = 16
    depth: int = 10
    matches: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.ngram <= WIDTH:
            raise InputError(f"ngram must be from 1 to {WIDTH}, got {self.ngram}")


class RestDrafter(Drafter):
    """Drafts from a datastore."""

    name = "rest"

    def __init__(self, store: Datastore, settings: RestSettings | None = None) -> None:
        self.store, self.settings = store, settings or RestSettings()
        self.adaptive, self.max_nodes = self.settings.adaptive, self.settings.nodes

    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        """One tree a row, the root alone where nothing matches."""
        return [self._draft(row, min(budget, self.max_nodes)) for row in rows]

    def depth_of(self, budget: int) -> int:
        """No deeper than continuations are."""
        return min(self.settings.depth, budget - 1)

    def _draft(self, row: Row, nodes: int) -> DraftTree:
        depth = min(self.settings.depth, row.max_depth, nodes - 1)
        if depth < 1:
            return DraftTree.root(row.root)
        state = self._retrieve(row.tokens[-self.settings.ngram :], depth)
        draws = None if row.sampling.greedy else Draws(row, depth)

        def children(frontier: list[Node]) -> list[list[Child]]:
            return [_children(node.state, state[1], draws) for node in frontier]

        (tree,) = grow([Growth(row.root, Form(nodes, depth), state=state)], children, lambda node: self.name)
        return tree

    def _retrieve(self, context: Sequence[int], depth: int) -> State:
        """Weighted continuations of the longest match and of shorter ones."""
        length, low, high = self.store.longest(context, self.settings.ngram)
        weighted: list[tuple[float, list[int]]] = []
        left, here = 1.0, length
        for _ in range(LEVELS):
            if not here or left < LEFT:
                break
            texts = [t for t in self.store.following(low, high, here, depth, self.settings.matches) if t]
            if texts:
                confidence = left * _confidence(len(texts), len({text[0] for text in texts}), here)
                weighted += [(confidence / len(texts), text) for text in texts]
                left -= confidence
            here = (here + 1) // 2 if here > 1 else 0
            low, high = self.store.find(context[len(context) - here :]) if here else (0, 0)
        return weighted, length


def _confidence(count: int, distinct: int, matched: int) -> float:
    """The share of confidence that ``count`` continuations earn together, given ``distinct`` next tokens among them."""
    return count / (count + DOUBT * distinct / matched)


def _children(state: State, first: int, draws: Draws | None) -> list[Child]:
    """The next tokens among the continuations, most probable first, and what follows each.

    first  tokens that match up to the root, whose continuations have weights that say what they are trusted
    draws  of the row's next tokens, where it is not greedy
    """
    continuations, matched = state
    weights: dict[int, float] = {}
    rest: dict[int, list[tuple[float, list[int]]]] = {}
    for weight, text in continuations:
        if text:
            weights[text[0]] = weights.get(text[0], 0.0) + weight
            rest.setdefault(text[0], []).append((weight, text[1:]))
    scale = 1.0
    if matched > first:
        total = sum(weight for weight, _ in continuations)
        scale = _confidence(len(continuations), len(rest), matched) / total
    scores = {token: math.log(min(1.0, weight * scale)) for token, weight in weights.items()}
    if draws is not None and scores:
        scores = dict(zip(scores, draws(matched - first, list(scores), list(scores.values())).tolist(), strict=True))
    order = sorted(scores, key=lambda token: (-scores[token], token))
    return [(token, scores[token], (rest[token], matched + 1)) for token in order]


def _build(target: Decoder, settings: RestSettings, module: object) -> Drafter:
    return RestDrafter(Datastore(find_tables(TABLES, target, settings.data)), settings)


TABLES = Tables("rest", command="datastore", training=DATASTORE, build=build)

METHOD = Method(
    name="rest",
    summary="continuations of the longest match in a datastore of text; needs one (anabranch train datastore)",
    settings=RestSettings,
    with_source=True,
    build=_build,
    tables=TABLES,
    variants=("", "tree=auto"),
    candidates=sized(RestSettings, BUDGETS[:8]),
    detached=True,
    labels=("rest",),
)
