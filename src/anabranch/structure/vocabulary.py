"""A model's tokens as llguidance sees them: the bytes that each adds to a text, and which of them end it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

from anabranch.errors import CapabilityError
from anabranch.model.text import encode, hidden_ids, tokens_bytes

__all__ = ["Vocabulary", "library"]

T = TypeVar("T")
KEPT = 64  # compiled grammars, the most recently used ones
_known: WeakKeyDictionary[Any, dict[tuple[int, tuple[int, ...]], Vocabulary]] = WeakKeyDictionary()
_lock = threading.Lock()


def library() -> Any:
    """The module ``llguidance``. Raises CapabilityError where it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise CapabilityError(
            f"schema, regex and grammar need llguidance, which does not import ({error}); run pip install "
            "'anabranch[structure]'"
        ) from None
    return llguidance


class Vocabulary:
    """The tokens of a model.

    tokenizer  the transformers tokenizer
    size       of the model's vocabulary; ids that the tokenizer does not have follow no text
    ends       the ids that end a text
    special    the ids that are no text: those that end it, and others whose text is not shown
    """

    def __init__(self, tokenizer: Any, size: int, ends: Sequence[int]) -> None:
        self.ends, self.special = frozenset(ends), hidden_ids(tokenizer) | frozenset(ends)
        described = _Described(tokenizer, size, tuple(ends), sorted(token for token in self.special if token < size))
        module = library()
        self.tokens = module.LLTokenizer(module.TokenizerWrapper(described), n_vocab=size, eos_token=[*ends])
        self._kept: dict[Any, Future[Any]] = {}
        self._lock = threading.Lock()

    @staticmethod
    def of(tokenizer: Any, size: int, ends: Sequence[int]) -> Vocabulary:
        """The vocabulary of a tokenizer, which is described once: that takes a second for 150,000 tokens."""
        library()
        key = size, tuple(ends)
        with _lock:
            known = _known.setdefault(tokenizer, {})
            if key not in known:
                known[key] = Vocabulary(tokenizer, size, ends)
            return known[key]

    def kept(self, key: Any, make: Callable[[], T]) -> T:
        """A value that is made once, such as a compiled grammar. It may take seconds, in which others are made."""
        with self._lock:
            known: Future[T] | None = self._kept.pop(key, None)
            made = Future() if known is None else known
            while len(self._kept) >= KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = made
        if known is None:
            try:
                made.set_result(make())
            except BaseException as error:
                with self._lock:
                    if self._kept.get(key) is made:
                        del self._kept[key]
                made.set_exception(error)
        return made.result()


class _Described:
    """A tokenizer as llguidance reads it: the bytes of all tokens, and a function from text to tokens."""

    def __init__(self, tokenizer: Any, size: int, ends: tuple[int, ...], special: Sequence[int]) -> None:
        self._tokenizer = ref(tokenizer)  # which owns the vocabulary (``_known``)
        self.eos_token_id, self.bos_token_id, self.special_token_ids = ends[0], None, special
        self.tokens = tokens_bytes(tokenizer, range(size))

    def __call__(self, text: str) -> list[int]:
        tokenizer = self._tokenizer()
        return [] if tokenizer is None else encode(tokenizer, text, add_special_tokens=False)
