"""Text over tokens: chunks of text from an engine's steps, stop strings, and what is left when a row ends."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from anabranch.engine import Engine, Request, Step
from anabranch.stats import Stats

__all__ = ["Chunk", "Detokenizer", "Generation", "generate", "stream"]

REPLACEMENT = "�"


@dataclass(frozen=True)
class Chunk:
    """What one step added: text (whole characters only), its tokens, who proposed them, and the step itself."""

    text: str
    token_ids: tuple[int, ...]
    sources: tuple[str, ...]
    step: Step


@dataclass
class Generation:
    """A finished sequence. ``token_ids`` are the new tokens only, an end token included; ``text`` is without it.

    finish_reason  "stop": an end token or a stop string; "length": max_new_tokens or the model's limit
    log_probs      the target's raw log probability of each token, where asked for
    """

    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    stats: Stats
    prompt_ids: list[int]
    sources: list[str] = field(default_factory=list)
    log_probs: list[float] | None = None


class Detokenizer:
    """Text from tokens as they come. Never half a character; ends equal to decoding all tokens at once.

    A text that may still become a stop string is held back. When one is found, ``stopped`` is set, the text ends
    before it, and ``kept`` tokens are those up to the one that completed it.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(s for s in stop if s)
        self._ids: list[int] = []
        self._prefix, self._read = 0, 0
        self._text = ""  # decoded so far
        self._given = 0  # characters handed out
        self.stopped = False

    @property
    def kept(self) -> int:
        """Tokens that count."""
        return len(self._ids)

    @property
    def text(self) -> str:
        """All text so far, held back parts included."""
        return self._text

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def add(self, tokens: Sequence[int]) -> str:
        """Take tokens in; returns the text that is safe to show."""
        for token in tokens:
            if self.stopped:
                break
            self._ids.append(token)
            # decode behind a few known tokens: some tokenizers glue a word to what precedes it
            known = self._decode(self._ids[self._prefix : self._read])
            now = self._decode(self._ids[self._prefix :])
            if len(now) > len(known) and not now.endswith(REPLACEMENT):
                self._text += now[len(known) :]
                self._prefix, self._read = self._read, len(self._ids)
            self._look()
        return self._give(len(self._text) if self.stopped else len(self._text) - self._held())

    def finish(self) -> str:
        """No token comes any more; returns what was held back."""
        if not self.stopped:
            whole = self._decode(self._ids)
            if whole.startswith(self._text):
                self._text = whole
            self._look()
        return self._give(len(self._text))

    def _look(self) -> None:
        found = [at for at in (self._text.find(s, max(0, self._given - len(s))) for s in self._stop) if at >= 0]
        if found:
            self._text = self._text[: min(found)]
            self.stopped = True

    def _held(self) -> int:
        longest = 0
        for s in self._stop:
            for n in range(min(len(s) - 1, len(self._text)), 0, -1):
                if self._text.endswith(s[:n]):
                    longest = max(longest, n)
                    break
        return longest

    def _give(self, end: int) -> str:
        new = self._text[self._given : end]
        self._given = max(self._given, end)
        return new


class _Row:
    def __init__(self, index: int, request: Request, tokenizer: Any, stop: Sequence[str]) -> None:
        self.index, self.request = index, request
        self.detokenizer = Detokenizer(tokenizer, stop)
        self.stats = Stats()
        self.tokens: list[int] = []
        self.sources: list[str] = []
        self.log_probs: list[float] = []
        self.began = time.perf_counter()

    def take(self, step: Step) -> Chunk:
        text = self.detokenizer.add(step.tokens)
        kept = self.detokenizer.kept - len(self.tokens)
        tokens, sources = step.tokens[:kept], step.sources[:kept]
        self.tokens += tokens
        self.sources += sources
        if step.log_probs is not None:
            self.log_probs += step.log_probs[:kept]
        self.stats.add(step)
        self.stats.tokens += kept - len(step.tokens)
        self.stats.seconds = time.perf_counter() - self.began
        if step.finish is not None and not self.detokenizer.stopped:
            text += self.detokenizer.finish()
        return Chunk(text, tokens, sources, step)

    def result(self, reason: Literal["stop", "length"]) -> Generation:
        return Generation(
            self.detokenizer.text,
            self.tokens,
            "stop" if self.detokenizer.stopped else reason,
            self.stats,
            list(self.request.prompt_ids),
            self.sources,
            self.log_probs if self.request.log_probs else None,
        )


def _run(
    engine: Engine, requests: Sequence[Request], tokenizer: Any, stop: Sequence[str]
) -> Iterator[tuple[int, Chunk, Generation | None]]:
    """Chunks of all requests as they come: (index of the request, chunk, result if that was its last)."""
    waiting = list(enumerate(requests))
    rows: dict[int, _Row] = {}
    try:
        while waiting or rows:
            while waiting and engine.active < engine.cache.rows:
                index, request = waiting.pop(0)
                row = _Row(index, request, tokenizer, stop)
                rows[engine.add(request)] = row
                row.stats.prefill_seconds = time.perf_counter() - row.began
            for step in engine.step():
                row = rows[step.row]
                chunk = row.take(step)
                reason = step.finish
                if row.detokenizer.stopped:
                    engine.remove(step.row)
                    reason = "stop"
                if reason is not None:
                    del rows[step.row]
                yield row.index, chunk, None if reason is None else row.result(reason)
    finally:
        # whoever stops listening, or an error on the way: the rows go back
        for key in rows:
            engine.remove(key)


def generate(
    engine: Engine, requests: Sequence[Request], tokenizer: Any, *, stop: Sequence[str] = ()
) -> list[Generation]:
    """Decode all requests, as many at a time as the engine has rows; results in the order of the requests."""
    found: dict[int, Generation] = {}
    for index, _, result in _run(engine, requests, tokenizer, stop):
        if result is not None:
            found[index] = result
    return [found[index] for index in range(len(requests))]


def stream(
    engine: Engine, request: Request, tokenizer: Any, *, stop: Sequence[str] = ()
) -> Generator[Chunk, None, Generation | None]:
    """Chunks of one request as they come; closing the generator frees its row. Returns the whole at the end."""
    last: Generation | None = None
    for _, chunk, result in _run(engine, [request], tokenizer, stop):
        last = result
        yield chunk
    return last
