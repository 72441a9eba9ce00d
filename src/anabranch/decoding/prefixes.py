"""Keys and values of texts that ended, for prompts that begin like them.

A text is cut into blocks of ``BLOCK`` tokens. Each lies below the block before it, so texts share the blocks of a
common beginning, and a text that continues another one adds only blocks of its own:

    64 tokens -- 64 tokens -+- 64 tokens -- 12 tokens       two conversations with one system prompt
                            +- 41 tokens

The least recently used blocks go first, from the ends of texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from anabranch.model.cache import Cache, shared_length

__all__ = ["BLOCK", "Family", "Prefixes"]

BLOCK = 64  # tokens; texts that differ inside a block keep that block twice


class Family(NamedTuple):
    """Which texts can share keys and values: those of one LoRA or none, and of one set of rotations (``Rope.key``)."""

    lora: str | None
    rotations: int


@dataclass(eq=False)
class _Block:
    """Keys and values [layers, K, n, E] of n tokens that follow those of ``parent``; a root has none."""

    tokens: tuple[int, ...] = ()
    parent: _Block | None = None
    stored: tuple[Tensor, Tensor] | None = None
    used: int = 0
    children: dict[tuple[int, ...], _Block] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return 0 if self.stored is None else sum(part.nbytes for part in self.stored)

    def below(self) -> Iterator[_Block]:
        """All blocks below this one."""
        left = [*self.children.values()]
        while left:
            yield (block := left.pop())
            left += block.children.values()

    def closest(self, tokens: tuple[int, ...]) -> tuple[_Block | None, int]:
        """The child that begins like ``tokens`` the longest, and how many tokens they share."""
        if (exact := self.children.get(tokens)) is not None:
            return exact, len(tokens)
        best: _Block | None = None
        count = 0
        for child in self.children.values():
            if (shared := shared_length(child.tokens, tokens)) > count:
                best, count = child, shared
        return best, count


class Prefixes:
    """The keys and values of texts, up to ``most`` bytes of them."""

    def __init__(self, most: int) -> None:
        self.most, self.nbytes = most, 0
        self._roots: dict[Family, _Block] = {}
        self._clock = 0

    def clear(self) -> None:
        """Free everything."""
        self._roots.clear()
        self.nbytes = 0

    # -- looking up -------------------------------------------------------------------------------------
    def find(self, family: Family, tokens: Sequence[int]) -> int:
        """Return how many of the first tokens are kept."""
        return sum(count for _, count in self._path(family, tokens))

    def copy(self, family: Family, tokens: Sequence[int], cache: Cache, slot: int) -> int:
        """Write what is kept of ``tokens`` to the beginning of a slot; returns how many tokens."""
        self._clock += 1
        start = 0
        for block, count in self._path(family, tokens):
            block.used = self._clock
            assert block.stored is not None
            cache.put(slot, start, *(part[:, :, :count] for part in block.stored))
            start += count
        return start

    def _path(self, family: Family, tokens: Sequence[int]) -> Iterator[tuple[_Block, int]]:
        """The blocks of the longest kept beginning of ``tokens``, and how many tokens of each belong to it."""
        block, start = self._roots.get(family), 0
        while block is not None:
            found, count = block.closest(tuple(tokens[start : start + BLOCK]))
            if found is None:
                return
            yield found, count
            block, start = found if count == BLOCK else None, start + count

    # -- keeping ----------------------------------------------------------------------------------------
    def keep(self, family: Family, tokens: Sequence[int], cache: Cache, slot: int) -> None:
        """Keep the keys and values of the first tokens of a slot, as many as memory suffices for."""
        self._clock += 1
        block = self._roots.setdefault(family, _Block())
        for start in range(0, len(tokens), BLOCK):
            piece = tuple(tokens[start : start + BLOCK])
            child, count = block.closest(piece)
            if child is None or count < len(piece):
                if child is not None and count == len(child.tokens):
                    self._drop(child)  # the end of a text that this one continues
                if not self._fits(len(piece) * cache.token_bytes):
                    break
                child = _Block(piece, block, cache.taken(slot, start, start + len(piece)))
                block.children[piece] = child
                self.nbytes += child.nbytes
            child.used = self._clock
            block = child

    def _fits(self, needed: int) -> bool:
        """Make room for so many bytes, without blocks of the text that is being kept; returns whether there is."""
        while self.nbytes + needed > self.most:
            ends = [block for root in self._roots.values() for block in root.below() if not block.children]
            oldest = min(ends, key=lambda block: block.used, default=None)
            if oldest is None or oldest.used == self._clock:
                return False
            self._drop(oldest)
        return True

    def _drop(self, block: _Block) -> None:
        assert block.parent is not None
        del block.parent.children[block.tokens]
        self.nbytes -= block.nbytes
