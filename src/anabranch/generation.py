"""Text over tokens: chunks of text from a scheduler's steps, stop strings, and the result of a request.

An end token and the tokens of a stop string are among ``token_ids``, since the target emitted them; neither is part of
the text. So ``token_ids`` are the same however many tokens a step accepted.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any

from anabranch.engine import FinishReason, Request, Step
from anabranch.methods.base import Drafter
from anabranch.scheduler import Scheduler, Ticket
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


class _Text:
    """The text of one request while it is decoded."""

    def __init__(self, ticket: Ticket, tokenizer: Any, stop: Sequence[str]) -> None:
        self.ticket = ticket
        self.detokenizer = Detokenizer(tokenizer, stop)
        self.stats = Stats()
        self.tokens: list[int] = []
        self.sources: list[str] = []
        self.log_probs: list[float] = []

    def take(self, step: Step) -> Chunk:
        """Count a step; returns its chunk, with the result if it was the last."""
        # the end token has no text, whether its tokenizer calls it special or not
        shown = step.tokens[:-1] if step.finish == "stop" else step.tokens
        text = self.detokenizer.add(shown)
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
        self.stats.seconds, self.stats.prefill_seconds = self.ticket.seconds, self.ticket.prefill_seconds
        return Chunk(text, tokens, sources, step, log_probs, None if finish is None else self._result(finish))

    def _result(self, reason: FinishReason) -> Generation:
        request = self.ticket.request
        self.stats.prefill_tokens = len(request.prompt_ids) - 1 - self.ticket.reused
        log_probs = self.log_probs if request.log_probs else None
        prompt = list(request.prompt_ids)
        return Generation(self.detokenizer.text, self.tokens, reason, self.stats, prompt, self.sources, log_probs)


def stream(
    scheduler: Scheduler, request: Request, drafter: Drafter, tokenizer: Any, *, stop: Sequence[str] = ()
) -> Generator[Chunk, None, None]:
    """Chunks of one request as they come. Closing the generator cancels the request and frees its row.

    Raises InputError or CapabilityError for a request that cannot be served, at once and not with the first chunk.
    """
    return _chunks(scheduler, scheduler.submit(request, drafter), tokenizer, stop)


def _chunks(scheduler: Scheduler, ticket: Ticket, tokenizer: Any, stop: Sequence[str]) -> Generator[Chunk, None, None]:
    text = _Text(ticket, tokenizer, stop)
    try:
        for step in scheduler.steps(ticket):
            chunk = text.take(step)
            if chunk.result is not None:
                scheduler.cancel(ticket)  # a stop string ends the text before the target does
            yield chunk
            if chunk.result is not None:
                return
    finally:
        scheduler.cancel(ticket)


def generate(
    scheduler: Scheduler,
    requests: Sequence[Request],
    drafter: Drafter,
    tokenizer: Any,
    *,
    stop: Sequence[str] = (),
    rows: int = 8,
    cancelled: threading.Event | None = None,
) -> list[Generation]:
    """Decode all requests, at most ``rows`` of them at a time; results in the order of the requests.

    Raises InputError or CapabilityError for a request that cannot be served, before any is decoded, and CancelledError
    after the step during which ``cancelled`` is set.
    """
    for request in requests:
        scheduler.check(request, drafter)
    waiting, running = deque(enumerate(requests)), deque[tuple[int, Ticket, _Text]]()
    found: dict[int, Generation] = {}
    try:
        with scheduler.target.decoding():  # once for all ticks
            while waiting or running:
                while waiting and len(running) < rows:
                    index, request = waiting.popleft()
                    ticket = scheduler.submit(request, drafter)
                    running.append((index, ticket, _Text(ticket, tokenizer, stop)))
                if not any(ticket.steps or ticket.done for _, ticket, _ in running):
                    scheduler.advance(running[0][1])
                for entry in list(running):
                    index, ticket, text = entry
                    result = None
                    for step in scheduler.ready(ticket):
                        result = text.take(step).result
                        if result is not None:
                            break
                    if cancelled is not None and cancelled.is_set():
                        raise CancelledError
                    if result is not None:
                        scheduler.cancel(ticket)
                        found[index] = result
                        running.remove(entry)
    finally:
        for _, ticket, _ in running:
            scheduler.cancel(ticket)
    return [found[index] for index in range(len(requests))]
