"""Passes of a drafter's own model: its KV cache for the rows of a batch, and the continuations that it scores.

    text   a b c d        d is the root: not in the cache yet
    trie   d +-- e        the first pass reads what the cache lacks of the text, d at least; later passes read the nodes
             +-- f -- g   that are asked about, together with their ancestors

Nodes are read again in each pass that asks about their descendants, and dropped after it, since only the text is
committed. A chain is different: its nodes stay in the cache (``held``) until the target has judged them. ``settle``
then commits the nodes that the target accepted and forgets the others.

B rows of the cache, M nodes of a pass, n nodes that are asked about.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from anabranch.drafting.drafter import Call, Row, tally
from anabranch.drafting.kept import Family, Kept
from anabranch.model.cache import Cache, shared_length
from anabranch.model.encoder import Memory
from anabranch.model.inputs import Inputs

__all__ = ["CHUNK", "Continuations", "Place", "Reader"]

CHUNK = 512  # tokens of a text that one pass reads
TOGETHER = 32  # tokens that a row may lack in a pass that it shares with others
SHORTEST = 16  # tokens that a shared beginning must have to be copied
LEAST = 256  # positions of the smallest cache
IDLE = 4608  # positions of all rows that a cache may hold when no row uses it


class Continuations:
    """A trie of continuations of one text; node 0 is the text's last token.

    known   what follows each node that was asked about
    chain   nodes that are drafted for sure, each the child of the one before; stays empty where trees are drafted
    """

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.depths = [root], [-1], [0]
        self.known: dict[int, Any] = {}
        self.chain: list[int] = []
        self._at: dict[tuple[int, int], int] = {}

    def child(self, node: int, token: int) -> int:
        """The child of a node that carries a token, added if it is not there."""
        known = self.look(node, token)
        if known is not None:
            return known
        self._at[node, token] = added = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(node)
        self.depths.append(self.depths[node] + 1)
        return added

    def look(self, node: int, token: int) -> int | None:
        """The child of a node that carries a token, if it is there."""
        return self._at.get((node, token))

    def above(self, nodes: Iterable[int]) -> list[int]:
        """Some nodes and all their ancestors but the root, ascending."""
        seen: set[int] = set()
        for node in nodes:
            while node > 0 and node not in seen:
                seen.add(node)
                node = self.parents[node]
        return sorted(seen)

    def path(self, node: int) -> list[int]:
        """The tokens from below the root to a node."""
        tokens: list[int] = []
        while node > 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]


@dataclass(eq=False)
class Place:
    """A row's place in the cache.

    continuations  those that the target has not judged yet, of a text of ``length`` tokens
    base    tokens of the text in the last pass, not committed yet
    read    nodes in the last pass, behind these tokens
    held    nodes of a chain that are in the cache
    """

    slot: int
    continuations: Continuations | None = None
    length: int = 0
    base: int = 0
    read: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)


_Text = tuple[str | None, Sequence[int]]  # the LoRA of its row, and its tokens


class Reader(ABC):
    """A model and its KV cache. Rows get a slot when they are first read for.

    longest    the longest text that the model reads
    place      what is kept for a row
    skipped    tokens at the beginning of a text that take no position in the cache
    of_target  whether keys and values depend on the target's states, and so on the LoRA of a row
    passes     over continuations, for tests
    """

    place: ClassVar[type[Place]] = Place
    skipped = 0
    of_target = True

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.cache: Cache | None = None
        self.passes = 0
        self._rows: list[Row] = []  # by slot
        self._places: dict[Row, Any] = {}
        self._left: dict[int, _Text] = {}  # by free slot, the text whose keys and values still lie there
        self._open = False  # whether the last pass is neither committed nor dropped

    @property
    def persists(self) -> bool:
        """Return whether the cache is kept when no row uses it, whatever its size."""
        return False

    @property
    @abstractmethod
    def call(self) -> Call:
        """A pass of the model, as rows count it."""

    @abstractmethod
    def _new_cache(self, rows: int, capacity: int) -> Cache:
        """An empty cache. Raises DeviceError where memory does not suffice."""

    @abstractmethod
    def _read(self, row: Row, tokens: Sequence[int]) -> None:
        """A pass over the next ``tokens`` of a row's text, not committed; there is room for them in the cache."""

    @abstractmethod
    def _run(self, inputs: Inputs, at: Sequence[tuple[int, int]]) -> Tensor:
        """A pass over all rows; returns what it computes [n, ...] after the nodes ``at``: slots and places there."""

    @abstractmethod
    def _family(self, tokens: Sequence[int], family: Family) -> Family | None:
        """That of the model's keys and values of a text, given that of the target's; None: they are not kept."""

    def _memory(self, row: Row) -> Memory | None:
        """The keys and values of a row's source; None: the model has no encoder."""
        return None

    # -- rows leave, texts are read ---------------------------------------------------------------------
    def leave(self, row: Row) -> None:
        """Free a row's slot; its keys and values serve the next text that begins like it."""
        self.settle()
        place = self._places.pop(row, None)
        if place is None or self.cache is None:
            return
        last, moved = self.cache.count - 1, self._rows[-1]
        self._left[last] = row.lora, row.tokens[: self.cache.lengths[place.slot] + self.skipped]
        self.cache.remove_row(place.slot)
        self._rows[place.slot] = moved
        self._rows.pop()
        if moved is not row:
            self._places[moved].slot = place.slot
        if not self._rows and not self.persists and self.cache.rows * self.cache.capacity > IDLE:
            self.cache = None
            self._left.clear()

    def read(self, row: Row, length: int, *, most: int | None = None) -> None:
        """Read a row's text up to ``length`` tokens into the cache, at most ``most`` tokens of it now."""
        self.settle()
        place = self._seat(row)
        assert self.cache is not None
        start = self.cache.lengths[place.slot]
        end = length - self.skipped if most is None else min(length - self.skipped, start + most)
        while start < end:
            stop = min(end, start + CHUNK)
            self._reserve(stop)
            self._read(row, row.tokens[start + self.skipped : stop + self.skipped])
            self.cache.commit([range(stop - start)])
            tally(self.call, [row])
            start = stop

    def forget(self, row: Row) -> None:
        """Drop what was read of a row that no draft is made for any more."""
        self.settle()
        place = self._places.get(row)
        if place is not None and self.cache is not None:
            self.cache.rewind(place.slot, 0)

    def keep(self, row: Row, length: int, kept: Kept, family: Family) -> None:
        """Keep the keys and values of a row's first ``length`` tokens, as far as they were read."""
        self.settle()
        place, own = self._places.get(row), self._family(row.tokens, family)
        if place is not None and self.cache is not None and own is not None:
            end = min(length, self.cache.lengths[place.slot] + self.skipped)
            kept.keep(own, row.tokens[self.skipped : end], self.cache, place.slot)

    def recall(self, tokens: Sequence[int], kept: Kept, family: Family) -> None:
        """Take in the kept keys and values of the beginning of a text, as if a row with it had just left."""
        text, own = tokens[self.skipped : -1], self._family(tokens, family)
        if own is None or kept.find(own, text) < max(SHORTEST, self.known(tokens, family.lora)[0] + 1):
            return
        self.settle()
        self._reserve(len(tokens) + TOGETHER, rows=len(self._rows) + 1)
        assert self.cache is not None
        slot = self.cache.count
        self._left[slot] = family.lora, list(tokens[: kept.copy(own, text, self.cache, slot) + self.skipped])

    def known(self, tokens: Sequence[int], lora: str | None = None) -> tuple[int, int]:
        """The most positions at the beginning of a text, before its root, that the cache holds; and their slot.

        lora  that of the text's row

        0 positions where it holds too few to be worth a copy.
        """
        if self.cache is None:
            return 0, 0
        lengths = {row: self.cache.lengths[place.slot] + self.skipped for row, place in self._places.items()}
        held = {self._places[row].slot: (row.lora, row.tokens[:length]) for row, length in lengths.items()}
        shared = {
            slot: shared_length(text, tokens[:-1]) - self.skipped
            for slot, (own, text) in (self._left | held).items()
            if own == lora or not self.of_target
        }
        source = max(shared, key=shared.__getitem__, default=0)
        return (shared[source], source) if shared.get(source, 0) >= SHORTEST else (0, 0)

    def _seat(self, row: Row) -> Any:
        """The row's place; a new one begins with the longest beginning of its text that the cache holds anywhere."""
        if row in self._places:
            return self._places[row]
        self._reserve(len(row.tokens) + TOGETHER, rows=len(self._rows) + 1)
        assert self.cache is not None
        slot, (count, source) = self.cache.count, self.known(row.tokens, row.lora)
        self.cache.add_row(len(row.tokens), self._memory(row))
        if count:
            self.cache.fork(source, slot, count)
            self.cache.lengths[slot] = count
        self._left.pop(slot, None)
        self._rows.append(row)
        self._places[row] = place = self.place(slot)
        return place

    def _reserve(self, positions: int, *, rows: int = 1) -> None:
        """Make room. Raises DeviceError where memory does not suffice."""
        cache = self.cache
        capacity, count = (0, 0) if cache is None else (cache.capacity, cache.rows)
        if positions <= capacity and rows <= count:
            return
        capacity = max(capacity, LEAST, 1 << (positions - 1).bit_length()) if positions > capacity else capacity
        count = max(count, 1 << (rows - 1).bit_length())
        kept = {slot: len(text) - self.skipped for slot, (_, text) in self._left.items()}
        self.cache = self._new_cache(count, capacity) if cache is None else cache.resized(count, capacity, kept=kept)

    # -- continuations ----------------------------------------------------------------------------------
    def begin(self, rows: Sequence[Row]) -> list[Continuations]:
        """Continuations of the rows' texts, nothing asked yet; all but the end of each text is read."""
        self.settle()
        for row in rows:
            place = self._seat(row)
            assert self.cache is not None
            before = len(row.tokens) - 1 - self.skipped
            # the root is read again where the text has not grown since its last draft
            self.cache.rewind(place.slot, min(self.cache.lengths[place.slot], before))
            if before - self.cache.lengths[place.slot] >= TOGETHER:
                self.read(row, len(row.tokens) - 1)
        all_continuations = []
        for row in rows:
            place = self._places[row]
            place.continuations, place.length = Continuations(row.root), len(row.tokens)
            all_continuations.append(place.continuations)
        return all_continuations

    def ask(self, wanted: Mapping[Row, Sequence[int]]) -> Tensor:
        """Output of the model after some nodes of each row's continuations [n, ...], row by row, in one pass."""
        self._close()
        assert self.cache is not None
        tokens: list[int] = []
        parents: list[int] = []
        counts = [0] * len(self._rows)
        for row, place in ((row, self._places[row]) for row in self._rows):
            if row in wanted:
                start = len(tokens)
                self._feed(row, place, wanted[row], tokens, parents)
                counts[place.slot] = len(tokens) - start
        self._reserve(max(self.cache.lengths) + max(counts))
        where: list[tuple[int, int]] = []
        for row, nodes in wanted.items():
            place = self._places[row]
            at = {0: place.base - 1} | {node: place.base + i for i, node in enumerate(place.read)}
            where += [(place.slot, at[node]) for node in nodes]
        output = self._run(Inputs(np.asarray(tokens, np.int64), np.asarray(parents, np.int64), counts), where)
        self._open = True
        self.passes += 1
        tally(self.call, list(wanted))
        return output

    def _feed(self, row: Row, place: Any, wanted: Sequence[int], tokens: list[int], parents: list[int]) -> None:
        """Append a row's nodes of a pass: what the cache lacks of its text, then nodes with their ancestors."""
        assert self.cache is not None
        assert place.continuations is not None
        base, held = row.tokens[self.cache.lengths[place.slot] + self.skipped : place.length], set(place.held)
        place.base, place.read = len(base), [node for node in place.continuations.above(wanted) if node not in held]
        tokens += base
        parents += range(-1, len(base) - 1)
        at = {0: len(base) - 1} | dict.fromkeys(held, -1)
        for i, node in enumerate(place.read):
            at[node] = len(base) + i
            above = place.continuations.parents[node]
            assert above not in held or above == place.held[-1], "a chain goes on at its end"
            tokens.append(place.continuations.tokens[node])
            parents.append(at[above])

    def _close(self) -> None:
        """Between two passes of a draft: commit the text and chains, drop the nodes of trees."""
        if self._open:
            tries = [self._places[row].continuations for row in self._rows]
            self._commit([[] if each is None else each.chain for each in tries])

    def settle(self) -> None:
        """After the target's verdict, or before any other pass: commit what became text, forget the rest."""
        judged = self._open  # otherwise a pass has failed
        if judged:
            self._commit([self._accepted(row) for row in self._rows])
        for place in self._places.values():
            if place.continuations is not None and self.cache is not None:
                kept = place.length - self.skipped + (len(place.held) if judged else 0)
                self.cache.rewind(place.slot, min(self.cache.lengths[place.slot], kept))
            place.continuations, place.base, place.read, place.held = None, 0, [], []

    def _accepted(self, row: Row) -> list[int]:
        """The nodes that the text went on with, without its new last token: that is the next root."""
        place, nodes, node = self._places[row], [], 0
        if place.continuations is not None:
            for token in row.tokens[place.length : -1]:
                child = place.continuations.look(node, token)
                if child is None:
                    break
                nodes.append(node := child)
        return nodes

    def _commit(self, kept: Sequence[Sequence[int]]) -> None:
        """Commit the text's tokens and the ``kept`` nodes of each row's last pass, as far as they are in the cache."""
        assert self.cache is not None
        paths: list[list[int]] = []
        for row, nodes in zip(self._rows, kept, strict=True):
            place = self._places[row]
            path, same = list(range(place.base)), shared_length(place.held, nodes)
            if same == len(place.held):
                places = {node: place.base + i for i, node in enumerate(place.read)}
                for node in nodes[same:]:
                    if node not in places:
                        break
                    path.append(places[node])
                    place.held.append(node)
                same = len(place.held)
            paths.append(path)
            place.base, place.read = 0, []
            place.held = place.held[:same]
        self.cache.commit(paths)
        self._open = False
