"""Chunks of text from the scheduler's steps, and the result of a request.

``token_ids`` include the end token and the tokens of a stop string, since the target emitted them; the text includes
neither. Thus ``token_ids`` do not depend on how many tokens each step accepted.
"""

from __future__ import annotations

import html
import threading
from collections import Counter, deque
from collections.abc import Generator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from anabranch.decoding.detokenizer import Detokenizer
from anabranch.decoding.engine import FinishReason, Request, Step
from anabranch.decoding.scheduler import Scheduler, Ticket
from anabranch.decoding.stats import Stats
from anabranch.drafting.drafter import Drafter

__all__ = ["Chunk", "Generation", "Output", "coloured", "generate", "stream"]

SHOWN = 60  # characters of a text in its representation
# translucent, so that text is readable on light and on dark pages
COLOURS = (
    "46,160,67",
    "31,136,222",
    "163,80,200",
    "209,134,22",
    "20,160,150",
    "214,80,120",
    "120,120,220",
    "150,150,40",
)
TARGET = "target"  # the target's own tokens have no colour


@dataclass
class Generation:
    """A finished sequence. ``token_ids`` are the new tokens, including an end token; ``text`` excludes it.

    finish_reason  "stop": an end token or a stop string; "length": max_new_tokens or the model's context length
    stop_reason    with "stop": the end token's id, or the stop string
    sources        what proposed each token: "target", or a label of the drafter
    prompt_ids     the prompt; the source of an encoder-decoder model
    drafter        the drafter that was used, as a specification: with "auto" the one that was chosen
    log_probs      the target's raw log probability of each token, if requested
    top_log_probs  at each place the most probable tokens by id, most probable first, if requested
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: Stats
    prompt_ids: list[int]
    sources: list[str] = field(default_factory=list)
    log_probs: list[float] | None = None
    drafter: str = ""
    stop_reason: int | str | None = None
    top_log_probs: list[dict[int, float]] | None = None

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= SHOWN else f"{self.text[:SHOWN]}..."
        return f"Generation({text!r}, {len(self.token_ids)} tokens, {self.finish_reason!r}, drafter={self.drafter!r})"

    def _repr_html_(self) -> str:
        """The text for notebooks, coloured by the source of each token; a copy has no colours."""
        tokenizer = vars(self).get(TOKENIZER)
        facts = f"{self.stats.mean_acceptance_length:.2f} tokens per target pass, drafter {self.drafter}"
        return coloured(self.text, None if tokenizer is None else self._pieces(tokenizer), self.sources, facts)

    def _pieces(self, tokenizer: Any) -> list[str]:
        """The text of each token; together they are ``text``."""
        left, pieces = len(self.text), []
        for piece in Detokenizer(tokenizer).pieces(self.token_ids, last=True):
            pieces.append(piece[:left])
            left -= len(pieces[-1])
        return pieces

    def __getstate__(self) -> dict[str, Any]:
        """The fields without the tokenizer."""
        return {name: value for name, value in vars(self).items() if name != TOKENIZER}


TOKENIZER = "_tokenizer"  # an attribute of results, and no field: it is no part of their value


class Chunk(NamedTuple):
    """The output of one step: text (complete characters only), tokens, what proposed each, and the step itself.

    The texts of all chunks add up to the text of the result. A token's text may arrive with a later chunk, while a
    character is incomplete or a stop string may have begun. ``result`` is set on the last chunk.
    """

    text: str
    token_ids: tuple[int, ...]
    sources: tuple[str, ...]
    step: Step
    log_probs: tuple[float, ...] | None = None
    top_log_probs: tuple[dict[int, float], ...] | None = None
    result: Generation | None = None


class Output:
    """The output of one request while it is being decoded; ``whole``: its text is wanted only in the result."""

    def __init__(self, ticket: Ticket, tokenizer: Any, stop: Sequence[str], *, whole: bool = False) -> None:
        self.ticket = ticket
        self.detokenizer = Detokenizer(tokenizer, stop, whole=whole)
        self.stats = Stats()
        self.tokens: list[int] = []
        self.sources: list[str] = []
        self.log_probs: list[float] = []
        self.top_log_probs: list[dict[int, float]] = []

    def add(self, step: Step) -> Chunk:
        """Append a step; returns its chunk, with the result if it was the last."""
        # the end token has no text, even if the tokenizer does not list it as special
        shown = step.tokens[:-1] if step.finish == "stop" else step.tokens
        text = self.detokenizer.add(shown)
        finish, kept = step.finish, len(step.tokens)
        if self.detokenizer.stopped is not None:
            finish, kept = "stop", self.detokenizer.kept - len(self.tokens)
        elif finish is not None:
            text += self.detokenizer.finish()
        tokens, sources = step.tokens[:kept], step.sources[:kept]
        log_probs = None if step.log_probs is None else step.log_probs[:kept]
        top = None if step.top_log_probs is None else step.top_log_probs[:kept]
        self.top_log_probs += top or ()
        self.tokens += tokens
        self.sources += sources
        self.log_probs += log_probs or ()
        self.stats.add(step, kept)
        self.stats.seconds, self.stats.prefill_seconds = self.ticket.seconds, self.ticket.prefill_seconds
        return Chunk(text, tokens, sources, step, log_probs, top, None if finish is None else self._result(finish))

    def _result(self, reason: FinishReason) -> Generation:
        stopped = self.tokens[-1] if reason == "stop" and self.detokenizer.stopped is None else self.detokenizer.stopped
        request, used = self.ticket.request, self.ticket.used
        assert used is not None, "a row that has steps has a drafter"
        self.stats.cached_tokens = self.ticket.reused
        source = () if request.source is None else request.source.tokens
        self.stats.prefill_tokens = len(source) + len(request.prompt_ids) - 1 - self.ticket.reused
        log_probs = self.log_probs if request.log_probs else None
        prompt = list(source or request.prompt_ids)
        return Generation(
            *(self.detokenizer.text, self.tokens, reason, self.stats, prompt, self.sources, log_probs),
            drafter=used.spec or used.name,
            stop_reason=stopped,
            top_log_probs=self.top_log_probs if request.top_log_probs else None,
        )


def coloured(text: str, pieces: Sequence[str] | None, sources: Sequence[str], facts: str) -> str:
    """A text as HTML, coloured by source if the ``pieces`` of its tokens are known, with a legend and ``facts``."""
    counts = Counter(sources)
    drafted = sorted(source for source in counts if source != TARGET)
    colours = {source: COLOURS[place % len(COLOURS)] for place, source in enumerate(drafted)}
    if pieces is None:
        shown = html.escape(text)
    else:
        shown = "".join(_span(piece, source, colours) for piece, source in zip(pieces, sources, strict=True))
    listed = [source for source in (TARGET, *drafted) if source in counts]
    legend = " ".join(f"{_span(source, source, colours)} {counts[source]}" for source in listed)
    return (
        f'<div style="white-space:pre-wrap">{shown}</div>'
        f'<div style="margin-top:0.5em;opacity:0.8;font-size:90%">proposed by: {legend}<br>{html.escape(facts)}</div>'
    )


def _span(text: str, source: str, colours: dict[str, str]) -> str:
    if not text or source not in colours:
        return html.escape(text)
    title = html.escape(source, quote=True)
    return f'<span style="background:rgba({colours[source]},0.3)" title="{title}">{html.escape(text)}</span>'


def stream(
    scheduler: Scheduler, request: Request, drafter: Drafter, tokenizer: Any, *, stop: Sequence[str] = ()
) -> Generator[Chunk, None, None]:
    """Yield the chunks of one request as they are decoded. Closing the generator cancels the request and frees its row.

    Raises InputError or CapabilityError for a request that cannot be served, immediately rather than with the first
    chunk; the request is submitted with the first one.
    """
    scheduler.check(request, drafter)
    return _chunks(scheduler, request, drafter, tokenizer, stop)


def _chunks(
    scheduler: Scheduler, request: Request, drafter: Drafter, tokenizer: Any, stop: Sequence[str]
) -> Generator[Chunk, None, None]:
    ticket = scheduler.submit(request, drafter, checked=True)
    output = Output(ticket, tokenizer, stop)
    try:
        for step in scheduler.steps(ticket):
            chunk = output.add(step)
            if chunk.result is not None:
                vars(chunk.result)[TOKENIZER] = tokenizer
                scheduler.cancel(ticket)  # at a stop string the target would continue
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
    """Decode all requests, at most ``rows`` of them at a time; returns results in the order of the requests.

    Raises InputError or CapabilityError for a request that cannot be served, before any is decoded, and CancelledError
    after the step during which ``cancelled`` was set.
    """
    for request in requests:
        scheduler.check(request, drafter)
    waiting, running = deque(enumerate(requests)), deque[tuple[int, Ticket, Output]]()
    results: dict[int, Generation] = {}
    try:
        with scheduler.target.inference():  # entered once for all ticks
            while waiting or running:
                while waiting and len(running) < rows:
                    index, request = waiting.popleft()
                    ticket = scheduler.submit(request, drafter, checked=True)
                    running.append((index, ticket, Output(ticket, tokenizer, stop, whole=True)))
                if not any(ticket.steps or ticket.done for _, ticket, _ in running):
                    scheduler.advance(running[0][1])
                for entry in list(running):
                    index, ticket, output = entry
                    result = None
                    for step in scheduler.ready(ticket):
                        result = output.add(step).result
                        if result is not None:
                            break
                    if cancelled is not None and cancelled.is_set():
                        raise CancelledError
                    if result is not None:
                        vars(result)[TOKENIZER] = tokenizer
                        scheduler.cancel(ticket)
                        results[index] = result
                        running.remove(entry)
    finally:
        for _, ticket, _ in running:
            scheduler.cancel(ticket)
    return [results[index] for index in range(len(requests))]
