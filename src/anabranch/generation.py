"""Text over tokens: chunks of text from an engine's steps, stop strings, and what is left when a row ends.

An end token and the tokens of a stop string are among ``token_ids``, since the target said them; neither is part of
the text. So ``token_ids`` are the same however many tokens a step accepted.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import CancelledError
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch

from anabranch.engine import Engine, FinishReason, Request, Step
from anabranch.errors import DeviceError
from anabranch.stats import Stats

__all__ = ["Chunk", "Detokenizer", "Generation", "generate", "stream"]

REPLACEMENT = "�"


@dataclass
class Generation:
    """A finished sequence. ``token_ids`` are the new tokens only, an end token included; ``text`` is without it.

    finish_reason  "stop": an end token or a stop string; "length": max_new_tokens or the model's limit
    sources        who proposed each token: "target", "stream 1", ..., "prompt_lookup"
    log_probs      the target's raw log probability of each token, where asked for
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: Stats
    prompt_ids: list[int]
    sources: list[str] = field(default_factory=list)
    log_probs: list[float] | None = None


@dataclass(frozen=True)
class Chunk:
    """What one step added: text (whole characters only), its tokens, who proposed them, and the step itself.

    Texts of all chunks together are the text of the result. The text of a token may come with a later chunk, where a
    character is not complete or a stop string may have begun. ``result`` is set on the last chunk.
    """

    text: str
    token_ids: tuple[int, ...]
    sources: tuple[str, ...]
    step: Step
    log_probs: tuple[float, ...] | None = None
    result: Generation | None = None


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
        # a stop string ends the text at the token that completes it; without one, a step is decoded at once
        for group in [[token] for token in tokens] if self._stop else [tokens]:
            if self.stopped:
                break
            self._ids += group
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
            known = self._decode(self._ids[self._prefix : self._read])
            self._text += self._decode(self._ids[self._prefix :])[len(known) :]
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
    """One request while it is decoded. ``clock`` are the seconds spent decoding, without those of who listens."""

    def __init__(self, request: Request, tokenizer: Any, stop: Sequence[str], clock: float) -> None:
        self.request, self.began = request, clock
        self.detokenizer = Detokenizer(tokenizer, stop)
        self.stats = Stats()
        self.tokens: list[int] = []
        self.sources: list[str] = []
        self.log_probs: list[float] = []

    def take(self, step: Step, clock: float) -> Chunk:
        """Count a step; returns its chunk, with the result if it was the last."""
        # the end token has no text, whether its tokenizer calls it special or not
        spoken = step.tokens[:-1] if step.finish == "stop" else step.tokens
        text = self.detokenizer.add(spoken)
        finish, kept = step.finish, len(step.tokens)
        if self.detokenizer.stopped:
            finish, kept = "stop", self.detokenizer.kept - len(self.tokens)
        elif finish is not None:
            text += self.detokenizer.finish()
        tokens, sources = step.tokens[:kept], step.sources[:kept]
        log_probs = None if step.log_probs is None else step.log_probs[:kept]
        self.tokens += tokens
        self.sources += sources
        self.log_probs += log_probs or ()
        self.stats.add(step, kept)
        self.stats.seconds = clock - self.began
        return Chunk(text, tokens, sources, step, log_probs, None if finish is None else self._result(finish))

    def _result(self, reason: FinishReason) -> Generation:
        log_probs = self.log_probs if self.request.log_probs else None
        prompt = list(self.request.prompt_ids)
        return Generation(self.detokenizer.text, self.tokens, reason, self.stats, prompt, self.sources, log_probs)


def _run(
    engine: Engine, requests: Sequence[Request], tokenizer: Any, stop: Sequence[str]
) -> Generator[tuple[int, Chunk], None, None]:
    """Chunks of all requests as they come, each with the index of its request."""
    waiting = deque(enumerate(requests))
    rows: dict[int, tuple[int, _Row]] = {}
    away = 0.0  # spent by who listens, which is not decoding
    try:
        while waiting or rows:
            while waiting and engine.active < engine.cache.rows:
                index, request = waiting.popleft()
                began = time.perf_counter()
                row = _Row(request, tokenizer, stop, began - away)
                rows[engine.add(request)] = index, row
                row.stats.prefill_seconds = time.perf_counter() - began
                row.stats.prefill_tokens = len(request.prompt_ids) - 1
            for step in engine.step():
                index, row = rows[step.row]
                chunk = row.take(step, time.perf_counter() - away)
                if chunk.result is not None:
                    del rows[step.row]
                    engine.remove(step.row)
                left = time.perf_counter()
                yield index, chunk
                away += time.perf_counter() - left
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"{engine.target.device} has no memory left for this; use a shorter prompt, fewer rows, a smaller tree "
            "or device='cpu'"
        ) from error
    finally:
        # whoever stops listening, or an error on the way: the rows go back
        for key in rows:
            engine.remove(key)


def generate(
    engine: Engine,
    requests: Sequence[Request],
    tokenizer: Any,
    *,
    stop: Sequence[str] = (),
    cancelled: threading.Event | None = None,
) -> list[Generation]:
    """Decode all requests, as many at a time as the engine has rows; results in the order of the requests.

    Raises InputError or CapabilityError for a request that cannot be served, before any is decoded, and CancelledError
    after the step during which ``cancelled`` is set.
    """
    for request in requests:
        engine.check(request)
    found = {}
    # nobody listens between steps, so once is enough
    with engine.target.decoding(), closing(_run(engine, requests, tokenizer, stop)) as run:
        for index, chunk in run:
            if cancelled is not None and cancelled.is_set():
                raise CancelledError
            found[index] = chunk.result
    results = [found[index] for index in range(len(requests))]
    return [result for result in results if result is not None]


def stream(
    engine: Engine, request: Request, tokenizer: Any, *, stop: Sequence[str] = ()
) -> Generator[Chunk, None, None]:
    """Chunks of one request as they come. Closing the generator cancels the request and frees its row.

    Raises InputError or CapabilityError for a request that cannot be served, at once and not with the first chunk.
    """
    engine.check(request)
    return _chunks(_run(engine, [request], tokenizer, stop))


def _chunks(run: Generator[tuple[int, Chunk], None, None]) -> Generator[Chunk, None, None]:
    with closing(run):
        for _, chunk in run:
            yield chunk
