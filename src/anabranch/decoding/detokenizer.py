"""From tokens to text, step by step: whole characters only, and nothing that may begin a stop string.

The pieces of text add up to the text that the tokenizer decodes from all tokens at once, however they are grouped.
Stop strings are matched as transformers does: in the bytes of the tokens, special tokens included, with the space
that a decoder drops at the beginning of a text.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

from anabranch.model.text import clean_up_of, hidden_ids, token_bytes

__all__ = ["Detokenizer"]

REPLACEMENT = "�"
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # a token of one byte; a run of them is decoded as a whole
# characters of the patterns that ``clean_up_tokenization`` replaces
CLEANED = frozenset(" .?!,'ntmsver")


class Detokenizer:
    """Incremental detokenizer: emits complete characters only; in total the text of decoding all tokens at once.

    Text that may be the beginning of a stop string is held back. When a stop string is found, ``stopped`` is that
    string, the text ends before it, and ``kept`` counts the tokens up to the one that completed it.

    whole  decode only in the end, which takes less time, unless there are stop strings to find before
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), *, whole: bool = False) -> None:
        self._tokenizer, self._hidden = tokenizer, hidden_ids(tokenizer)
        self._clean_up = clean_up_of(tokenizer)
        self._finder = _Finder(tokenizer, stop) if stop else None
        self._whole = whole and not stop
        self._ids: list[int] = []
        self._shown: list[int] = []  # of these, the ones that have text
        self._prefix, self._read = 0, 0  # of ``_shown``: where the context begins, and what was decoded
        self._raw = ""  # decoded so far
        self._lengths: list[int] = []  # of ``_raw`` after each token, where there are stop strings
        self._emitted = 0  # characters returned to the caller
        self._ended = False
        self.stopped: str | None = None

    @property
    def kept(self) -> int:
        """The number of tokens up to the end or the stop string."""
        return len(self._ids)

    @property
    def text(self) -> str:
        """All text so far, including text that is held back."""
        return self._cleaned(self._raw)

    def add(self, tokens: Sequence[int]) -> str:
        """Append tokens; returns the new text that is safe to show."""
        if self._finder is None:
            self._ids += tokens
            self._shown += filter(self._has_text, tokens)
            if not self._whole:
                self._advance()
            return self._emit(len(self._raw))
        for token in tokens:  # one at a time, to find the one that completes a stop string
            if self.stopped is not None:
                break
            self._ids.append(token)
            if self._has_text(token):
                self._shown.append(token)
                self._advance()
            if (match := self._finder.add(token)) is not None:
                self._stop_at(match)
            self._lengths.append(len(self._raw))
        held = self._finder.pending()
        safe = len(self._raw) if held is None or self.stopped is not None else self._lengths[held - 1] if held else 0
        return self._emit(safe)

    def finish(self) -> str:
        """End the text; returns what was held back."""
        if self.stopped is None:
            self._raw, self._ended = self._decode(self._shown), True
        return self._emit(len(self._raw))

    def pieces(self, tokens: Sequence[int], *, end: int | None = None, last: bool = False) -> list[str]:
        """Append tokens one by one; returns the text that each makes safe to show.

        end   the index of an end token, which has no text
        last  whether no tokens follow
        """
        pieces = ["" if i == end else self.add([token]) for i, token in enumerate(tokens)]
        if last and pieces:
            pieces[-1] += self.finish()
        return pieces

    def _has_text(self, token: int) -> bool:
        return token not in self._hidden and self._tokenizer.convert_ids_to_tokens(token) is not None

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _advance(self) -> None:
        """Decode the newest tokens after a few earlier ones, since a token's text may depend on them."""
        if self._shown and BYTE.fullmatch(str(self._tokenizer.convert_ids_to_tokens(self._shown[-1]))):
            return
        known = self._decode(self._shown[self._prefix : self._read])
        now = self._decode(self._shown[self._prefix :])
        if len(now) > len(known) and not now.endswith(REPLACEMENT):
            self._raw += now[len(known) :]
            context, self._read = self._read, len(self._shown)
            # a decoder may drop the first space of a text, so the context must not be empty without it
            while context > 0 and not self._decode(self._shown[context:]):
                context -= 1
            self._prefix = context

    def _stop_at(self, match: _Found) -> None:
        """End the text before a stop string. What follows is counted from the end: a space may lack at the start."""
        whole = self._decode(self._shown)
        after = b"".join(data for token, data in match.after if self._has_text(token))
        self._raw = whole[: max(0, len(whole) - len(after.decode("utf-8", "replace")))]
        self.stopped, self._ended = match.stop, True

    def _cleaned(self, raw: str) -> str:
        return raw if self._clean_up is None else str(self._clean_up(raw))

    def _emit(self, end: int) -> str:
        if self._clean_up is not None and not self._ended:
            while end and self._raw[end - 1] in CLEANED:
                end -= 1
        text = self._cleaned(self._raw[:end])
        new = text[self._emitted :]
        self._emitted = max(self._emitted, len(text))
        return new


class _Found(NamedTuple):
    """A stop string, and the tokens from its first byte on, each with its bytes from there on."""

    stop: str
    after: list[tuple[int, bytes]]


class _Finder:
    """Finds stop strings in the bytes of tokens."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = [(text, text.encode()) for text in stop]
        self._longest = max(len(data) for _, data in self._stops)
        self._known: dict[int, bytes] = {}  # by token id
        self._tokens: list[int] = []
        self._starts: list[int] = []  # of each token in ``_data``
        self._data = bytearray()

    def add(self, token: int) -> _Found | None:
        """Append a token; returns the stop string that it completes, if any: the one that begins first."""
        if token not in self._known:
            self._known[token] = token_bytes(self._tokenizer, token)
        begin = max(0, len(self._data) - self._longest + 1)
        self._tokens.append(token)
        self._starts.append(len(self._data))
        self._data += self._known[token]
        matches = [(at, text) for text, data in self._stops if (at := self._data.find(data, begin)) >= 0]
        if not matches:
            return None
        at, text = min(matches, key=lambda each: each[0])
        first = self._token_at(at)
        after = [(token, self._known[token]) for token in self._tokens[first:]]
        after[0] = (after[0][0], after[0][1][at - self._starts[first] :])
        return _Found(text, after)

    def pending(self) -> int | None:
        """The index of the token in which a stop string may have begun; None if none may have."""
        longest = 0
        for _, data in self._stops:
            for n in range(min(len(data) - 1, len(self._data)), longest, -1):
                if self._data.endswith(data[:n]):
                    longest = n
                    break
        return self._token_at(len(self._data) - longest) if longest else None

    def _token_at(self, place: int) -> int:
        return bisect_right(self._starts, place) - 1
