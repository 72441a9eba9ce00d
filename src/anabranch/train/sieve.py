"""Filter a model's own prompts: keep those that are complete, not degenerate, and unlike the others.

Similarity is judged on the characters of a text without spaces, so that it works for languages that do not put spaces
between words. Two texts are near-duplicates if their sets of 5-character pieces A and B have |A and B| / |A or B| of
about 0.7 or more, estimated with 64 minimal hashes (MinHash, Broder 1997).
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.errors import InputError
from anabranch.model.text import encode

__all__ = ["REASONS", "Sieve"]

REASONS = ("cut", "empty", "markup", "repetitive", "duplicate", "near-duplicate")

SHORTEST = 5  # letters or digits
LOOP = 16  # characters; a text that consists of repeated pieces of this length is degenerate
REPEATED = 0.4  # the share of such pieces that occurred before, from which on a text is degenerate
PIECE = 5  # characters of the pieces that near-duplicates are recognised by
HASHES, BANDS = 64, 16
ALIKE = 0.7
_PRIME = (1 << 31) - 1


class Sieve:
    """Judges prompts one after another and remembers those that it kept; about 300 bytes and the text's hash each.

    tokenizer  of the model
    special    token ids that must not occur in a prompt
    """

    def __init__(self, tokenizer: Any, special: frozenset[int]) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._texts: set[bytes] = set()
        self._signatures: list[NDArray[np.uint32]] = []
        self._bands: list[dict[bytes, list[int]]] = [defaultdict(list) for _ in range(BANDS)]
        numbers = np.random.default_rng(0)
        self._factors = numbers.integers(1, _PRIME, HASHES, dtype=np.uint64)
        self._terms = numbers.integers(0, _PRIME, HASHES, dtype=np.uint64)

    def judge(self, text: str, *, cut: bool) -> str:
        """Why a prompt is dropped, one of ``REASONS``; "" if it is kept. ``cut``: the model did not end it."""
        if cut:
            return "cut"
        letters = "".join(re.findall(r"\w", text.casefold()))
        if len(letters) < SHORTEST:
            return "empty"
        if self._marked(text):
            return "markup"
        if _repeated(letters) > REPEATED:
            return "repetitive"
        name = letters.encode()
        if name in self._texts:
            return "duplicate"
        signature = self._signature(letters)
        if self._resembles(signature):
            return "near-duplicate"
        self._remember(name, signature)
        return ""

    def keep(self, text: str) -> None:
        """Remember a prompt that was kept by an earlier run."""
        letters = "".join(re.findall(r"\w", text.casefold()))
        self._remember(letters.encode(), self._signature(letters))

    def _marked(self, text: str) -> bool:
        """True if the text would be read with special tokens in it, such as the end of a turn."""
        try:
            return not self._special.isdisjoint(encode(self._tokenizer, text, add_special_tokens=False))
        except InputError:
            return True

    def _signature(self, letters: str) -> NDArray[np.uint32]:
        pieces = {letters[i : i + PIECE] for i in range(max(1, len(letters) - PIECE + 1))}
        hashes = np.array([zlib.crc32(piece.encode()) for piece in pieces], np.uint64) % _PRIME
        mixed = (hashes[:, None] * self._factors + self._terms) % _PRIME
        signature: NDArray[np.uint32] = mixed.min(0).astype(np.uint32)
        return signature

    def _resembles(self, signature: NDArray[np.uint32]) -> bool:
        near = {i for band, part in zip(self._bands, np.split(signature, BANDS), strict=True)
                for i in band.get(part.tobytes(), ())}  # fmt: skip
        return any(float(np.mean(self._signatures[i] == signature)) >= ALIKE for i in near)

    def _remember(self, name: bytes, signature: NDArray[np.uint32]) -> None:
        for band, part in zip(self._bands, np.split(signature, BANDS), strict=True):
            band[part.tobytes()].append(len(self._signatures))
        self._signatures.append(signature)
        self._texts.add(name)


def _repeated(letters: str) -> float:
    """The share of pieces of ``LOOP`` characters that occurred earlier in the text."""
    total = len(letters) - LOOP + 1
    if total < LOOP:
        return 0.0
    return 1 - len({letters[i : i + LOOP] for i in range(total)}) / total
