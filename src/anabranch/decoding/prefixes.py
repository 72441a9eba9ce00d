"""Keys and values of texts that ended, for prompts that begin like them.

A text is cut into blocks of ``BLOCK`` tokens. Each lies below the block before it, so texts share the blocks of a
common beginning, and a text that continues another one adds only blocks of its own:

    64 tokens -- 64 tokens -+- 64 tokens -- 12 tokens       two conversations with one system prompt
                            +- 41 tokens

A drafter's model has keys and values of its own, which are kept in the same way as texts of another family.

The least recently used blocks go first. A text that is used takes its blocks from its end to its beginning, so a block
never goes before those below it. With ``files`` they stay on disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from anabranch.decoding.prefix_files import PrefixFiles, StoredBlock
from anabranch.drafting.kept import Family
from anabranch.model.cache import Cache, shared_length

__all__ = ["BLOCK", "Prefixes"]

BLOCK = 64  # tokens; texts that differ inside a block keep that block twice


@dataclass(eq=False)
class _Block:
    """Keys and values [layers, K, n, E] of n tokens that follow those of ``parent``; a root has none.

    stored  in memory; None: on disk only
    name    of its file; empty: it has none
    """

    tokens: tuple[int, ...] = ()
    parent: _Block | None = None
    stored: tuple[Tensor, Tensor] | None = None
    name: str = ""
    used: int = 0
    children: dict[tuple[int, ...], _Block] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
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
    """The keys and values of texts, up to ``most`` bytes of them in memory.

    files  where they are kept too; texts of a LoRA are not, whose name may mean another one later
    """

    def __init__(self, most: int, files: PrefixFiles | None = None) -> None:
        self.most, self.files, self.nbytes = most, files, 0
        self._roots: dict[Family, _Block] = {}
        self._recent: dict[_Block, None] = {}  # the blocks in memory, the least recently used first
        self._clock = 0
        self._open()

    def clear(self) -> None:
        """Free the memory. Blocks on disk stay there."""
        for block in [block for root in self._roots.values() for block in root.below()]:
            block.stored = None
            if not block.name and block.parent is not None:
                del block.parent.children[block.tokens]
        self._recent.clear()
        self.nbytes = 0

    def close(self) -> None:
        """Free the memory, after everything was written."""
        if self.files is not None:
            self.files.close()
        self.files = None
        self._roots.clear()
        self._recent.clear()
        self.nbytes = 0

    def _open(self) -> None:
        """Take in the blocks on disk, each below the one before it."""
        if self.files is None:
            return
        waiting: dict[tuple[Family, str], list[StoredBlock]] = {}
        for block in self.files.blocks():
            waiting.setdefault((block.family, block.parent), []).append(block)
        left = [(family, self._root(family)) for family, parent in waiting if not parent]
        while left:
            family, above = left.pop()
            for stored in waiting.get((family, above.name), ()):
                above.children[stored.tokens] = made = _Block(stored.tokens, above, name=stored.name)
                left.append((family, made))

    def _root(self, family: Family) -> _Block:
        return self._roots.setdefault(family, _Block())

    # -- looking up -------------------------------------------------------------------------------------
    def find(self, family: Family, tokens: Sequence[int]) -> int:
        """Return how many of the first tokens are kept."""
        return sum(count for _, count in self._path(family, tokens))

    def copy(self, family: Family, tokens: Sequence[int], cache: Cache, slot: int) -> int:
        """Write what is kept of ``tokens`` to the beginning of a slot; returns how many tokens."""
        self._clock += 1
        start, path = 0, list(self._path(family, tokens))
        blocks = [block for block, _ in path]
        self._use(blocks)  # none of them makes room for another one
        for block, count in path:
            if (stored := block.stored or self._loaded(block, cache)) is None:
                self._drop(block)
                break
            cache.put(slot, start, *(part[:, :, :count] for part in stored))
            start += count
        self._use(blocks)
        if self.files is not None:
            self.files.used([block.name for block in blocks if block.name])
        return start

    def _path(self, family: Family, tokens: Sequence[int]) -> Iterator[tuple[_Block, int]]:
        """The blocks of the longest kept beginning of ``tokens``, and how many tokens of each belong to it."""
        block, start = self._roots.get(family), 0
        while block is not None:
            child, count = block.closest(tuple(tokens[start : start + BLOCK]))
            if child is None:
                return
            yield child, count
            block, start = child if count == BLOCK else None, start + count

    def _loaded(self, block: _Block, cache: Cache) -> tuple[Tensor, Tensor] | None:
        """The keys and values of a block on disk, which are in memory again where it suffices."""
        count = len(block.tokens)
        keys, values = (part[:, 0, :, :1].expand(-1, -1, count, -1) for part in (cache.keys, cache.values))
        stored = None if self.files is None else self.files.load(block.name, (keys, values))
        if stored is not None and self._fits(count * cache.token_bytes):
            self._hold(block, stored)
        return stored

    # -- keeping ----------------------------------------------------------------------------------------
    def keep(self, family: Family, tokens: Sequence[int], cache: Cache, slot: int) -> None:
        """Keep the keys and values of the first tokens of a slot, as many as memory suffices for."""
        self._clock += 1
        block, path = self._root(family), []
        for start in range(0, len(tokens), BLOCK):
            piece = tuple(tokens[start : start + BLOCK])
            child, count = block.closest(piece)
            if child is None or count < len(piece):
                if child is not None and count == len(child.tokens):
                    self._drop(child)  # the end of a text that this one continues
                if not self._fits(len(piece) * cache.token_bytes):
                    break
                block.children[piece] = child = _Block(piece, block)
                self._hold(child, cache.taken(slot, start, start + len(piece)))
            self._use([child])
            block = child
            path.append(child)
        self._use(path)
        self._store(family, path)

    def _store(self, family: Family, path: Sequence[_Block]) -> None:
        """Store the blocks of a text that are not on disk yet, from its beginning on."""
        if self.files is None or family.lora is not None:
            return
        above = ""
        for block in path:
            if not block.name:
                name = self.files.name(above, family, block.tokens)
                stored = StoredBlock(name, above, family, block.tokens)
                if block.stored is None or not self.files.store(stored, block.stored):
                    break
                block.name = name
            above = block.name
        self.files.used([block.name for block in path if block.name])

    # -- memory -----------------------------------------------------------------------------------------
    def _hold(self, block: _Block, stored: tuple[Tensor, Tensor]) -> None:
        """Take the keys and values of a block into memory."""
        block.stored = stored
        self._recent[block] = None
        self.nbytes += block.nbytes

    def _release(self, block: _Block) -> None:
        """Free the memory of a block."""
        self.nbytes -= block.nbytes
        block.stored = None
        self._recent.pop(block, None)

    def _use(self, path: Sequence[_Block]) -> None:
        """Make the blocks of a text, from its beginning on, the most recently used ones."""
        for block in reversed(path):
            block.used = self._clock
            if block in self._recent:
                del self._recent[block]
                self._recent[block] = None

    def _fits(self, needed: int) -> bool:
        """Make room for so many bytes, without blocks of the text in use; returns whether there is."""
        while self.nbytes + needed > self.most:
            oldest = next(iter(self._recent), None)
            if oldest is None or oldest.used == self._clock:
                return False
            if oldest.name:
                self._release(oldest)
            else:
                self._drop(oldest)
        return True

    def _drop(self, block: _Block) -> None:
        """Forget a block and those below it, on disk too."""
        assert block.parent is not None
        del block.parent.children[block.tokens]
        for each in (block, *block.below()):
            self._release(each)
            if each.name and self.files is not None:
                self.files.remove(each.name)
