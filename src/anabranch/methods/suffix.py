"""Suffix decoding (Oliaro et al. 2024): proposes what followed the end of this text before, by frequency.

Looked up are the row's own text, prompt included, and the outputs of earlier and of the other current rows. All places
where the last tokens occurred vote for the token that followed them there; the tree grows from the root by the most
probable node of all, so it is a chain where the places agree and branches where they do not. It needs no model and
learns while it serves.

    ... the cat sat on the mat ... the cat sat on the sofa ... the cat          sat - on - the +-- mat
                                                                                               +-- sofa

The votes are weighted by the length of the match. With a(n) the share of matches of n tokens whose continuation was
right, a place weighs a(n) / (1 - a(n)), and a token has the probability of its weight over that of all places and 1,
which stands for the tokens that none of them has seen. One place alone gives a(n), as in prompt lookup, and places that
agree make it surer. a(n) is counted for each row from its own drafts.

The structure is not a suffix tree but gives the same counts (docs/methods/suffix.md): see ``Occurrences``.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from anabranch.drafting.drafter import Drafter, Method, Row, Traits
from anabranch.drafting.grow import Child, Form, Growth, Node, grow
from anabranch.drafting.matches import LONGEST, MatchRates
from anabranch.drafting.settings import ADAPTIVE, Settings
from anabranch.errors import InputError
from anabranch.tree import DraftTree

__all__ = ["METHOD", "Occurrences", "Place", "SuffixDrafter", "SuffixSettings", "tree_of"]

OWN, SHARED = "suffix", "suffix shared"  # sources of nodes: this row's text, other rows' outputs

WEIGHT = 8.0  # of the prior of a(n), in matches
UNSEEN = 1.0  # the weight of tokens that no place proposes
ORDERS = (8, 4, 2, 1)  # lengths of the n-grams that are indexed
CONTEXT = 16  # tokens that a match is compared over
PLACES = 48  # that vote, of each of the two indexes
WALK = 96  # entries of one chain that are looked at
OVERHEAD = 16  # tokens that a text of its own is worth in memory
SMALLEST = 64
OWN_BUCKETS = 1024


@dataclass(frozen=True, eq=False)
class _Text:
    """Tokens that grow at the end, and for each indexed order and end the code of the previous entry of its bucket."""

    key: int
    tokens: array[int] = field(default_factory=lambda: array("i"))
    previous: tuple[array[int], ...] = field(default_factory=lambda: tuple(array("q") for _ in ORDERS))


@dataclass(frozen=True)
class Place:
    """A place where the last ``length`` tokens occurred; ``tokens[end]`` is what followed."""

    tokens: Sequence[int]
    end: int
    length: int


class Occurrences:
    """Index of the n-grams of some texts, with bounded memory: the oldest texts go first.

    For each order n, a table has the newest place after an n-gram with a given hash, and each place has the one before
    it: chains that are walked from the newest place on, as in a compressor of the LZ77 family. A place is compared
    before it counts, so what hashes alike does no harm. Per token that is 4 bytes, and 16 bytes an order.

    tokens   held at most (a text counts ``OVERHEAD`` more); None: no bound
    buckets  of each table
    """

    def __init__(self, *, tokens: int | None, buckets: int) -> None:
        self.bound, self.held = tokens, 0
        self._mask = (1 << (max(buckets, 2) - 1).bit_length()) - 1
        self._newest = [np.zeros(self._mask + 1, np.int64) for _ in ORDERS]
        self._texts: dict[int, _Text] = {}
        self._keys = 0

    def begin(self) -> int:
        """Start a text; returns its key."""
        self._keys += 1
        self._texts[self._keys] = _Text(self._keys)
        self.held += OVERHEAD
        self._evict()
        return self._keys

    def extend(self, key: int, tokens: Sequence[int]) -> None:
        """Append to a text. One that was evicted takes nothing in."""
        for token in tokens:
            text = self._texts.get(key)
            if text is None:
                return
            end = len(text.tokens)
            code = key << 32 | end
            for previous, newest, order in zip(text.previous, self._newest, ORDERS, strict=True):
                if order > end:
                    previous.append(0)
                    continue
                bucket = hash(tuple(text.tokens[end - order :])) & self._mask
                previous.append(int(newest[bucket]))
                newest[bucket] = code
            text.tokens.append(token)
            self.held += 1
            self._evict()

    def drop(self, key: int) -> None:
        """Forget a text."""
        if (text := self._texts.pop(key, None)) is not None:
            self.held -= len(text.tokens) + OVERHEAD

    def _evict(self) -> None:
        while self.bound is not None and self.held > self.bound:
            self.drop(next(iter(self._texts)))

    def find(self, context: Sequence[int], most: int = PLACES, *, but: int | None = None) -> list[Place]:
        """The places where the end of ``context`` occurred: longer n-grams first, then the newest; at most ``most``.

        but  the key of a text that is left out
        """
        places: list[Place] = []
        seen: set[int] = set()
        for level, order in enumerate(ORDERS):
            if order > len(context):
                continue
            code = int(self._newest[level][hash(tuple(context[-order:])) & self._mask])
            for _ in range(WALK):
                text = self._texts.get(code >> 32)
                if text is None or len(places) == most:
                    break  # a text that was evicted: so are nearly all places before this one
                end = code & 0xFFFFFFFF
                if code not in seen and text.key != but:
                    length = _agreement(text.tokens, end, context)
                    if length >= order:
                        seen.add(code)
                        places.append(Place(text.tokens, end, length))
                code = text.previous[level][end]
        return places


def _agreement(tokens: Sequence[int], end: int, context: Sequence[int]) -> int:
    """Number of tokens at the end of ``context`` that also precede ``end``, up to ``CONTEXT``."""
    most = min(CONTEXT, end, len(context))
    length = 0
    while length < most and tokens[end - 1 - length] == context[-1 - length]:
        length += 1
    return length


@dataclass
class _Seen:
    """State of a row.

    own     its text; ``key`` in there, and ``shared`` the key of its output in the shared texts
    taken   its tokens that were taken in
    bet     of its last draft: where it stood, the length of its longest match, the most probable token
    rates   the shares of matches whose most probable token was right
    """

    own: Occurrences
    key: int
    shared: int | None
    taken: int = 0
    bet: tuple[int, int, int] | None = None
    rates: MatchRates = field(default_factory=lambda: MatchRates(WEIGHT))

    def settle(self, text: Sequence[int]) -> None:
        """Count whether the last draft's most probable token came."""
        if self.bet is not None and self.bet[0] < len(text):
            at, length, token = self.bet
            self.rates.saw(length, right=text[at] == token)
        self.bet = None

    def odds(self) -> list[float]:
        """The weight of a place by the length of its match, from 0 (none) on."""
        shares = map(self.rates, range(1, LONGEST + 1))
        return [0.0, *(share / (1.0 - share) for share in shares)]


@dataclass(frozen=True)
class SuffixSettings(Settings):
    """Settings of ``suffix:...``.

    nodes      verified at most, root included, or auto: up to 24, as the load decides
    depth      of a draft at most
    threshold  joint probability below which a node is not drafted
    store      tokens of earlier outputs that are kept, the oldest texts going first; 0: each text learns from itself
    """

    least = (("depth", 1),)
    load = "nodes"
    nodes: str = "16"
    depth: int = 16
    threshold: float = 0.03
    store: int = 2**18

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_count("nodes", 2)
        if not 0.0 <= self.threshold < 1.0:
            raise InputError(f"threshold must be at least 0 and less than 1, got {self.threshold}")
        if self.store and not SMALLEST <= self.store <= 2**30:
            raise InputError(f"store must be {SMALLEST} to {2**30} tokens, or 0 to keep no outputs, got {self.store}")

    @property
    def budget(self) -> int:
        """Also the nodes of a tree that is merged from this one and others."""
        return ADAPTIVE if self.adaptive else int(self.nodes)


class SuffixDrafter(Drafter):
    """Trees by the frequency of continuations; ``shared`` are the outputs of other rows."""

    name = "suffix"
    traits = Traits(free="all")

    def __init__(self, settings: SuffixSettings | None = None) -> None:
        self.settings = settings = settings or SuffixSettings()
        self.max_nodes, self.adaptive = settings.budget, settings.adaptive
        self.shared = Occurrences(tokens=settings.store, buckets=settings.store) if settings.store else None

    def join(self, row: Row) -> None:
        """Index the row's prompt when it is first drafted for."""
        own = Occurrences(tokens=None, buckets=OWN_BUCKETS)
        shared = None if self.shared is None else self.shared.begin()
        row.state[self] = _Seen(own, own.begin(), shared)

    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        """One tree a row, or the root alone where nothing matches."""
        return [self._draft(row, budget) for row in rows]

    def depth_of(self, budget: int) -> int:
        """No deeper than ``depth``."""
        return min(budget - 1, self.settings.depth)

    def leave(self, row: Row) -> None:
        """Take in the end of the row's output; it stays for others."""
        seen: _Seen | None = row.state.get(self)
        if seen is not None:
            self._take(row, seen)
        super().leave(row)

    def _take(self, row: Row, seen: _Seen) -> None:
        """Take in what the row's text has gained."""
        text = row.context
        new = text[seen.taken :]
        seen.own.extend(seen.key, new)
        if self.shared is not None and seen.shared is not None:
            self.shared.extend(seen.shared, new[max(0, row.given - seen.taken) :])
        seen.taken = len(text)

    def _draft(self, row: Row, budget: int) -> DraftTree:
        seen: _Seen = row.state[self]
        seen.settle(row.tokens)
        self._take(row, seen)
        depth, count = min(self.settings.depth, row.max_depth), min(self.max_nodes, budget)
        if depth < 1 or count < 2:
            return DraftTree.root(row.root)
        context = row.tokens[-CONTEXT:]
        places = seen.own.find(context)
        mine = len(places)
        if self.shared is not None:
            places += self.shared.find(context, but=seen.shared)
        if not places:
            return DraftTree.root(row.root)
        votes = [_Vote(place, place.length, OWN if n < mine else SHARED) for n, place in enumerate(places)]
        tree = tree_of(row.root, votes, seen.odds(), count, depth, self.settings.threshold)
        if tree.size > 1:
            longest = max(place.length for place in places)
            seen.bet = (len(row.tokens), longest, int(tree.tokens[1]))
        return tree


class _Vote(NamedTuple):
    """A place that has been followed ``ahead`` tokens; ``source`` says whose text it is in."""

    place: Place
    length: int
    source: str
    ahead: int = 0


def tree_of(
    root: int, votes: Sequence[_Vote], odds: Sequence[float], count: int, depth: int, threshold: float
) -> DraftTree:
    """The ``count`` most probable nodes, root included, of the tree of all continuations.

    votes  the places that the root's children follow at
    odds   the weight of a place by the length of its match
    """
    weights_of = [*odds, *[odds[-1]] * (CONTEXT + depth)]  # by length

    def following(node: Node) -> list[Child]:
        votes: list[_Vote] = node.state
        if node.depth:
            votes = [_Vote(v.place, v.length + 1, v.source, v.ahead + 1) for v in votes]
        by_token: dict[int, list[_Vote]] = {}
        for vote in votes:
            at = vote.place.end + vote.ahead
            if at < len(vote.place.tokens):
                by_token.setdefault(vote.place.tokens[at], []).append(vote)
        weights = {token: sum([weights_of[v.length] for v in those]) for token, those in by_token.items()}
        total = sum(weights.values()) + UNSEEN
        best = sorted(weights, key=weights.__getitem__, reverse=True)
        return [(token, math.log(weights[token] / total), by_token[token]) for token in best]

    def source(node: Node) -> str:
        own = sum([weights_of[v.length] * (1 if v.source == OWN else -1) for v in node.state])
        return OWN if own >= 0 else SHARED

    form = Form(count, depth, floor=math.log(threshold) if threshold > 0 else -math.inf)
    (tree,) = grow([Growth(root, form, state=votes)], lambda nodes: map(following, nodes), source)
    return tree


METHOD = Method(
    name="suffix",
    summary="continuations of the text's end by frequency, in this text and in earlier outputs; needs nothing",
    settings=SuffixSettings,
    variants=("", "nodes=auto"),
    with_source=True,
    build=lambda target, settings, module: SuffixDrafter(settings),
    # without a store: the tuner decodes the same prompts again and again, and would measure how well it remembers them
    candidates=lambda nodes: (SuffixSettings(nodes=str(n), store=0) for n in (3, 5, 8, 16, 24) if n <= nodes),
    detached=True,
    labels=(OWN, SHARED),
)
