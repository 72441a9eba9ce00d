"""The suffix array of a text of token ids, built in bounded memory.

    text [n]          token ids; SEPARATOR = V after each document
    places [n - d]    where the suffixes begin that do not begin with a separator, in ascending order
    starts [V + 1]    where in ``places`` the suffixes with each first token begin

V vocabulary, d documents. Suffixes are ordered by their first ``WIDTH`` tokens, the longest match of a lookup; equal
ones by position. The text is first written to its file. Suffixes are then sorted in groups that fit in memory: those
whose first token is in a range, and if one first token alone has too many, those whose second token is in a range, and
so on. Each group takes one pass over the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.drafting.tables import ArrayWriter, Documents, Report, write_array
from anabranch.errors import InputError

__all__ = ["WIDTH", "build", "text_type"]

WIDTH = 16  # tokens by which suffixes are ordered
BYTES_A_SUFFIX = 96  # that sorting takes
READ = 1 << 20  # tokens of the text that are looked at at a time
LARGEST = 2**32 - 1  # tokens of a text: places are uint32
KEY_BITS = 64

Places = NDArray[np.int64]


def text_type(vocab_size: int) -> str:
    """The type that holds token ids and the separator."""
    return "<u2" if vocab_size < 1 << 16 else "<u4"


def build(documents: Documents, vocab_size: int, folder: Path, memory: int, report: Report) -> dict[str, Any]:
    """Write the arrays of a datastore into ``folder``; see ``Tables.build``."""
    count, size, firsts = _write_text(documents, vocab_size, folder, report)
    text = _Text(np.load(folder / "text.npy", mmap_mode="r", allow_pickle=False), vocab_size)
    starts = np.concatenate(([0], np.cumsum(firsts)))
    write_array(folder, "starts", "<i8", starts)
    room = max(1024, memory // BYTES_A_SUFFIX)
    with ArrayWriter(folder, "places", "<u4") as out:
        for places in _groups(text, (), firsts, room):
            out.append(_sorted(text, places))
            report(f"{out.length:,} of {count:,} suffixes sorted")
    assert out.length == count, "every suffix is in one group"
    return {"tokens": count, "documents": size - count}


def _write_text(
    documents: Documents, vocab_size: int, folder: Path, report: Report
) -> tuple[int, int, NDArray[np.int64]]:
    """Write the text; returns the number of tokens, that with separators, and the counts [V] of the tokens."""
    firsts = np.zeros(vocab_size, np.int64)
    count = reported = 0
    separator = np.array([vocab_size])
    with ArrayWriter(folder, "text", text_type(vocab_size)) as out:
        for document in documents:
            if not len(document):
                continue
            if not 0 <= int(document.min()) <= int(document.max()) < vocab_size:
                raise InputError(f"the text has token ids outside the vocabulary of {vocab_size:,} tokens")
            if out.length + len(document) + 1 > LARGEST:
                raise InputError(f"a datastore holds at most {LARGEST:,} tokens; give less text")
            firsts += np.bincount(document, minlength=vocab_size)
            out.append(document)
            out.append(separator)
            count += len(document)
            if count - reported >= 1 << 22:
                reported = count
                report(f"{count:,} tokens read")
    if not count:
        raise InputError("there are no tokens to store; give a longer text")
    return count, out.length, firsts


@dataclass(frozen=True)
class _Text:
    """The text; beyond its end it goes on with separators."""

    tokens: NDArray[Any]
    separator: int

    @property
    def bits(self) -> int:
        """That a token or separator takes."""
        return self.separator.bit_length()

    def at(self, places: Places) -> NDArray[np.uint64]:
        """The tokens at some places."""
        inside = places < len(self.tokens)
        tokens = self.tokens[np.where(inside, places, 0)].astype(np.uint64)
        tokens[~inside] = self.separator
        return tokens


def _groups(text: _Text, prefix: tuple[int, ...], counts: NDArray[np.int64], room: int) -> Iterator[Places]:
    """The places of all suffixes that begin with ``prefix``, in groups of at most ``room`` that ascend.

    counts  of the suffixes by the token behind the prefix; separators have the last of V + 1, behind a prefix

    Suffixes that agree in ``WIDTH`` tokens may be a larger group: they need no sorting.
    """
    low = 0
    while low < len(counts):
        total, high = int(counts[low]), low + 1
        while high < len(counts) and total + counts[high] <= room:
            total += int(counts[high])
            high += 1
        if total > room and len(prefix) + 1 < WIDTH:
            longer = (*prefix, low)
            following = np.zeros(text.separator + 1, np.int64)
            for places in _find(text, longer, 0, text.separator + 1):
                following += np.bincount(text.at(places + len(longer)).astype(np.int64), minlength=len(following))
            yield from _groups(text, longer, following, room)
        elif total > room:
            yield from _find(text, prefix, low, high)
        elif total:
            yield np.concatenate(list(_find(text, prefix, low, high)))
        low = high


def _find(text: _Text, prefix: tuple[int, ...], low: int, high: int) -> Iterator[Places]:
    """The places, ascending, of suffixes that begin with ``prefix`` and go on with a token from ``low`` to ``high``."""
    size = len(text.tokens)
    for begin in range(0, size, READ):
        window = np.asarray(text.tokens[begin : begin + READ + len(prefix)])
        if len(window) < READ + len(prefix):
            pad = np.full(READ + len(prefix) - len(window), text.separator, window.dtype)
            window = np.concatenate((window, pad))
        length = min(READ, size - begin)
        last = window[len(prefix) : len(prefix) + length]
        here = (last >= low) & (last < high)
        for depth, token in enumerate(prefix):
            here &= window[depth : depth + length] == token
        if not prefix:
            here &= last != text.separator
        yield np.flatnonzero(here) + begin


def _sorted(text: _Text, places: Places) -> Places:
    """Order places, which ascend, by the first ``WIDTH`` tokens of their suffixes.

    As many tokens as fit in one integer are compared at a time, and then only suffixes that still tie.
    """
    order = np.array(places)
    tied = np.arange(len(order))  # places in ``order`` of what is not yet apart from its neighbours
    group = np.zeros(len(order), np.uint64)  # of each tied suffix, ascending
    depth = 0
    while len(tied) and depth < WIDTH:
        group_bits = int(group[-1]).bit_length()
        tokens = min((KEY_BITS - group_bits) // text.bits, WIDTH - depth)
        here, keys = order[tied], group
        for step in range(depth, depth + tokens):
            keys = (keys << np.uint64(text.bits)) | text.at(here + step)
        moved = np.argsort(keys)
        order[tied] = here[moved]
        keys = keys[moved]
        same = keys[1:] == keys[:-1]
        alike = np.concatenate(([False], same)) | np.concatenate((same, [False]))
        tied = tied[alike]
        group = np.cumsum(np.concatenate(([False], keys[alike][1:] != keys[alike][:-1]))[: len(tied)]).astype(np.uint64)
        depth += tokens
    if len(tied):
        order[tied] = order[tied][np.lexsort((order[tied], group))]
    return order
