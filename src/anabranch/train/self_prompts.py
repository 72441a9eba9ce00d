"""Prompts that a target writes itself: sampled, judged, and appended to a JSONL file that ``read_prompts`` reads.

    {"id": 7, "source": "self-written", "prompt": "..."}
    {"id": 8, "source": "self-written", "prompt": "...", "dropped": "near-duplicate"}

Prompts that are not used stay in the file with the reason, so that it can be inspected, and a later run resumes it.
"""

from __future__ import annotations

import itertools
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabranch.decoding.engine import Request
from anabranch.decoding.scheduler import Scheduler, Ticket
from anabranch.errors import CapabilityError, InputError
from anabranch.methods.none import NoDrafter
from anabranch.model.load import Target
from anabranch.model.text import encode, foreign_errors, render_chat
from anabranch.sampling import SamplingParams
from anabranch.support.appended import agree, append, begin, records
from anabranch.support.files import check_writable
from anabranch.support.jsonfiles import is_whole
from anabranch.support.memory import keep_memory
from anabranch.train.answers import seed_of
from anabranch.train.sieve import REASONS, Sieve

__all__ = [
    "SOURCE",
    "OpenTurn",
    "PromptProgress",
    "check_prompts",
    "in_words",
    "open_turn",
    "special_ids",
    "write_prompts",
]

SOURCE = "self-written"
WHAT = "a prompt that the model wrote, with id and prompt"
TEMPERATURE, TOP_P = 1.0, 0.95
LONGEST = 256  # tokens of a prompt; longer ones are dropped as cut
OPENING = (8, 64)  # tokens of a base model's text that serve as a prompt: least, most
SAMPLES, LEAST = 400, 0.05  # give up if after this many samples a smaller share of them is kept


@dataclass(frozen=True)
class PromptProgress:
    """Prompts kept, wanted, and sampled in total, how many were dropped by reason, and this run's speed.

    tokens             sampled by this run
    tokens_per_second  of this run
    seconds_left       estimated
    """

    kept: int
    wanted: int
    sampled: int
    dropped: Mapping[str, int]
    tokens: int
    tokens_per_second: float
    seconds_left: float


def check_prompts(out: Path) -> None:
    """Check that prompts can be appended to ``out``, before a model is loaded. Raises FileError."""
    check_writable(out, "prompts")
    for _ in records(out, _check, WHAT):
        pass


def _check(record: Any) -> None:
    dropped = record.get("dropped", "")
    if not is_whole(record["id"], 0) or not isinstance(record["prompt"], str) or dropped not in ("", *REASONS):
        raise TypeError


def write_prompts(
    target: Target,
    out: Path,
    count: int,
    *,
    rows: int = 64,
    seed: int = 0,
    report: Callable[[PromptProgress], None] | None = None,
) -> PromptProgress:
    """Sample prompts until ``out`` has ``count`` that are kept; returns the last progress.

    A few more than ``count`` may be kept, since prompts that are being written are finished. Each has a seed of its own
    (from ``seed`` and its id), so a text does not depend on the others.

    Raises InputError for a count or rows below 1, CapabilityError if the target cannot write prompts or hardly any
    prompt is worth keeping, and FileError if ``out`` cannot be written or was started otherwise.
    """
    for name, value in (("count", count), ("rows", rows)):
        if value < 1:
            raise InputError(f"{name} must be at least 1, got {value}")
    keep_memory()  # sampling allocates a few vectors of the size of the vocabulary for each token
    turn = open_turn(target)
    check_writable(out, "prompts")
    settings = {
        "fingerprint": target.fingerprint,
        "temperature": TEMPERATURE,
        "top_p": TOP_P,
        "seed": seed,
        "longest": LONGEST,
    }
    agree(out, settings)
    written = _Written(target, turn, count)
    for record in records(out, _check, WHAT):
        written.resume(record)
    begin(out, settings, "prompts")
    for number, ids in _sampled(target, turn, written, rows=rows, seed=seed):
        append(out, written.judge(number, ids))
        if report is not None:
            report(written.progress())
        written.check()
    return written.progress()


@dataclass
class _Written:
    """The prompts so far, and the counts."""

    target: Target
    turn: OpenTurn
    wanted: int
    kept: int = 0
    ids: set[int] = field(default_factory=set)
    dropped: Counter[str] = field(default_factory=Counter)
    tokens: int = 0

    def __post_init__(self) -> None:
        self.sieve = Sieve(self.target.tokenizer, special_ids(self.target.tokenizer) | self.turn.stop_ids)
        self.began, self.before = time.monotonic(), 0

    def resume(self, record: dict[str, Any]) -> None:
        """A prompt of an earlier run."""
        self.ids.add(record["id"])
        if reason := record.get("dropped", ""):
            self.dropped[reason] += 1
        else:
            self.sieve.keep(record["prompt"])
            self.kept += 1
        self.before = self.kept

    def judge(self, number: int, sampled: list[int]) -> dict[str, Any]:
        """The line of a new prompt."""
        text, ended = _text(self.target, self.turn, sampled)
        reason = self.sieve.judge(text, cut=self.turn.chat and not ended)
        self.ids.add(number)
        record = {"id": number, "source": SOURCE, "prompt": text}
        if reason:
            self.dropped[reason] += 1
            return {**record, "dropped": reason}
        self.kept += 1
        return record

    @property
    def rate(self) -> float:
        """The share of samples that is kept; three of four before any is known."""
        return (self.kept + 3) / (len(self.ids) + 4)

    def check(self) -> None:
        """Raise CapabilityError where hardly anything is kept."""
        if len(self.ids) >= SAMPLES and self.kept < LEAST * len(self.ids):
            raise CapabilityError(
                f"only {self.kept} of {len(self.ids)} prompts that {self.target.name} wrote are usable "
                f"({in_words(self.dropped)}); give prompts (--prompts)"
            )

    def progress(self) -> PromptProgress:
        taken = max(time.monotonic() - self.began, 1e-9)
        now = self.kept - self.before
        left = taken / now * max(0, self.wanted - self.kept) if now else 0.0
        speed = self.tokens / taken
        return PromptProgress(self.kept, self.wanted, len(self.ids), dict(self.dropped), self.tokens, speed, left)


def in_words(dropped: Mapping[str, int]) -> str:
    """The counts of dropped prompts in words: "310 cut, 12 duplicate"."""
    return ", ".join(f"{dropped[reason]:,} {reason}" for reason in REASONS if dropped.get(reason)) or "none dropped"


def _sampled(
    target: Target, turn: OpenTurn, written: _Written, *, rows: int, seed: int
) -> Iterator[tuple[int, list[int]]]:
    """Samples as they end, numbered, until enough are kept."""
    scheduler, drafter = Scheduler(target.decoder, rows=rows), NoDrafter()
    growing: dict[Ticket, tuple[int, list[int]]] = {}
    taken = iter(number for number in itertools.count() if number not in written.ids)
    while True:
        while len(growing) < 2 * rows and written.kept + len(growing) * written.rate < written.wanted:
            number = next(taken)
            own = SamplingParams(temperature=TEMPERATURE, top_p=TOP_P, seed=seed_of(seed, f"prompt {number}"))
            request = Request(turn.ids, _longest(target, turn, number), own, turn.stop_ids)
            growing[scheduler.submit(request, drafter)] = (number, [])
        if not growing:
            return
        for ticket, step in scheduler.tick():
            number, ids = growing[ticket]
            ids.extend(step.tokens)
            written.tokens += len(step.tokens)
            over = step.finish is not None
            if not over and turn.stop and turn.stop in _decoded(target, ids):
                scheduler.cancel(ticket)
                over = True
            if over:
                del growing[ticket]
                yield number, ids
        for error in (ticket.error for ticket in growing):
            if error is not None:
                raise error


def _longest(target: Target, turn: OpenTurn, number: int) -> int:
    """The most tokens of a sample: half of the target's context is left for the answer."""
    room = max(1, target.config.max_positions // 2 - len(turn.ids))
    least, most = OPENING
    return min(room, LONGEST if turn.chat else least + zlib.crc32(b"%d" % number) % (most - least + 1))


def _text(target: Target, turn: OpenTurn, ids: list[int]) -> tuple[str, bool]:
    """A sample's text, and whether the model ended it."""
    ended = bool(ids) and ids[-1] in turn.stop_ids
    text = _decoded(target, ids[:-1] if ended else ids)
    if turn.stop and turn.stop in text:
        text, ended = text.partition(turn.stop)[0], True
    return text.strip(), ended


def _decoded(target: Target, ids: list[int]) -> str:
    with foreign_errors(lambda why: InputError(f"the tokenizer cannot decode what the model wrote ({why})")):
        return str(target.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


# -- the beginning of a prompt ------------------------------------------------------------------------------
PLACEHOLDER = "PLACEHOLDER"


@dataclass(frozen=True)
class OpenTurn:
    """Token ids to continue, and what ends the continuation.

    chat      whether it is a user's turn; otherwise the beginning of a text, which nothing ends
    stop_ids  tokens that end a prompt
    stop      text that ends it, where the template has no special token for that; empty: none
    """

    ids: tuple[int, ...]
    chat: bool
    stop_ids: frozenset[int]
    stop: str = ""


def special_ids(tokenizer: Any) -> frozenset[int]:
    """The ids of a tokenizer's special and added tokens, such as the marks of a chat template."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    return frozenset({*(getattr(tokenizer, "all_special_ids", None) or ()), *map(int, added)})


def open_turn(target: Target) -> OpenTurn:
    """The beginning from which a model writes its own prompt: the open user turn of its template, or its start token.

    An instruction-tuned model continues the beginning of a user's turn with a request (Magpie, Xu et al. 2024). The
    turn is cut from the text of the template, whatever its syntax, at a placeholder:

        <|im_start|>user PLACEHOLDER <|im_end|> <|im_start|>assistant
                         ^ cut       ^ the first token after it ends the prompt

    Raises CapabilityError without a usable template or a start token.
    """
    tokenizer, stops = target.tokenizer, frozenset(target.config.eos_token_ids)
    if not getattr(tokenizer, "chat_template", None):
        return OpenTurn((_start(target),), False, stops)
    before, mark, after = render_chat(tokenizer, [{"role": "user", "content": PLACEHOLDER}]).partition(PLACEHOLDER)
    # a space before the text is usually part of its first token
    ids = tuple(encode(tokenizer, before.rstrip(" "), add_special_tokens=False))
    if not mark or PLACEHOLDER in after or not ids:
        raise CapabilityError(
            f"the chat template of {target.name} does not show where a user's turn begins, so it cannot write its own "
            "prompts; give prompts (--prompts)"
        )
    after = after.lstrip()
    first = encode(tokenizer, after, add_special_tokens=False)[:1] if after else []
    if first and first[0] in special_ids(tokenizer):
        return OpenTurn(ids, True, stops | set(first))
    return OpenTurn(ids, True, stops, after.partition("\n")[0].rstrip())


def _start(target: Target) -> int:
    config = target.config
    for token in (config.bos_token_id, getattr(target.tokenizer, "bos_token_id", None), *config.eos_token_ids):
        if token is not None:
            return int(token)
    raise CapabilityError(
        f"{target.name} has neither a chat template nor a start token, so it cannot write its own prompts; give "
        "prompts (--prompts)"
    )
