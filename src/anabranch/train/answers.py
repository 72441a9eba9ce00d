"""Self-generated data: completions written by the target, for training and evaluation.

Plain decoding through the scheduler, many rows at a time. Each completion is one line of a JSONL file, written when it
is finished, so a run may stop at any time and the same command resumes it.

    prompts   {"prompt": "...", "chat": true, "id": 7, "source": "gsm8k"}  or  {"messages": [{"role", "content"}, ...]}
    out       {"id": 7, "source": "gsm8k", "prompt_ids": [...], "answer_ids": [...]}

``chat``, ``id`` and ``source`` are optional: chat is on where the tokenizer has a template, ids count lines from 0.
"""

from __future__ import annotations

import random
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from anabranch.decoding.engine import Request
from anabranch.decoding.scheduler import Scheduler, Ticket
from anabranch.errors import CapabilityError, FileError, InputError
from anabranch.methods.none import NoDrafter
from anabranch.model.encoder import begun
from anabranch.model.load import Target
from anabranch.model.text import encode, render_chat
from anabranch.sampling import SamplingParams
from anabranch.support import locks
from anabranch.support.appended import agree, append, begin, records
from anabranch.support.files import check_writable
from anabranch.support.jsonfiles import is_whole, read_rows
from anabranch.train.data import lone_surrogate

__all__ = [
    "CHUNK",
    "AnswerProgress",
    "Complete",
    "EncodedPrompt",
    "alone",
    "answer_settings",
    "check_completion",
    "check_out",
    "completions",
    "encode_chat",
    "read_prompts",
    "seed_of",
    "write_answers",
]

# prompts per row of a chunk. Chunks are shuffled and each is sorted by length: long enough that neighbours have similar
# lengths, short enough that the first few chunks are a fair sample of all prompts
CHUNK = 8

# yields the line of each prompt in any order; the request is one but for its prompt, the number is that of the rows
Complete: TypeAlias = "Callable[[Target, Sequence[EncodedPrompt], Request, int], Iterator[dict[str, Any]]]"


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as token ids; ``id`` is unique in its file."""

    id: int | str
    source: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class AnswerProgress:
    """Completions in the file and wanted in total, and this run's tokens, tokens/s and estimated seconds left."""

    answers: int
    wanted: int
    tokens: int
    tokens_per_second: float
    seconds_left: float


def encode_chat(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """A conversation in the model's chat template, ending where the completion starts."""
    return encode(tokenizer, render_chat(tokenizer, messages), add_special_tokens=False)


def read_prompts(path: Path, tokenizer: Any, *, limit: int | None = None) -> list[EncodedPrompt]:
    """Read a JSONL file of prompts and encode them, the first ``limit`` lines if given.

    Raises FileError that names the malformed line, and InputError for a limit below 1.
    """
    if limit is not None and limit < 1:
        raise InputError(f"limit must be at least 1, got {limit}")
    if not path.is_file():
        raise FileError(f"there is no file {path}; give a JSONL file with a field 'prompt' or 'messages' per line")
    prompts: dict[int | str, EncodedPrompt] = {}
    for number, record in read_rows(path):
        if limit is not None and len(prompts) >= limit:
            break
        if record.get("dropped"):  # by the model that wrote it (train.self_prompts)
            continue
        prompt = _prompt(record, f"line {number} of {path}", number - 1, tokenizer)
        if prompt.id in prompts:
            raise FileError(f"line {number} of {path} has the id {prompt.id!r} of an earlier line; ids must be unique")
        prompts[prompt.id] = prompt
    if not prompts:
        raise FileError(f"{path} has no prompts")
    return list(prompts.values())


def _prompt(record: dict[str, Any], where: str, number: int, tokenizer: Any) -> EncodedPrompt:
    messages: Any = record.get("messages")
    text: Any = record.get("prompt")
    template = bool(getattr(tokenizer, "chat_template", None))
    chat = record.get("chat", template or messages is not None)
    if (text is None) == (messages is None) or not isinstance(chat, bool):
        raise FileError(f"{where} needs a field 'prompt' or 'messages' (not both), and 'chat' must be true or false")
    if chat and not template:
        raise FileError(f"{where} asks for a chat, but the tokenizer has no chat template; use prompts with chat false")
    _check_text(record, where)
    try:
        if messages is not None:
            ids = encode_chat(tokenizer, messages)
        elif chat:
            ids = encode_chat(tokenizer, [{"role": "user", "content": text}])
        else:
            ids = encode(tokenizer, text)
    except InputError as error:
        raise FileError(f"{where} cannot be read: {error}") from error
    name = record.get("id", number)
    if not (isinstance(name, str) or is_whole(name)) or not ids:
        raise FileError(f"{where} is empty or has an id that is neither a number nor a text")
    return EncodedPrompt(name, str(record.get("source", "")), tuple(ids))


def _check_text(record: dict[str, Any], where: str) -> None:
    """Raise FileError for a record without text, with an empty text, or with text that UTF-8 cannot encode."""
    for field in ("prompt", "messages", "id", "source"):
        if half := lone_surrogate(record.get(field)):
            raise FileError(
                f"{where} contains the unpaired surrogate {half} in the field {field!r}; correct or delete the line"
            )
    messages = record.get("messages")
    if messages is None:
        field, texts = "prompt", [record["prompt"]]
    elif isinstance(messages, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages):
        field, texts = "messages", [message["content"] for message in messages]
    else:
        raise FileError(f"{where} has messages that are not a list of objects with a role and a content")
    if not all(isinstance(text, str) for text in texts) or not "".join(texts).strip():
        raise FileError(f"{where} has no text in the field {field!r}; correct or delete the line")


def check_out(out: Path, prompts: Path) -> None:
    """Check that completions of ``prompts`` can be appended to ``out``, before a model is loaded.

    Writes nothing. Raises FileError.
    """
    check_writable(out, "completions")
    if out.resolve() == prompts.resolve() or (out.exists() and prompts.exists() and out.samefile(prompts)):
        raise FileError(f"{out} contains the prompts and cannot take their completions; give --out another file")
    _answered(out)


def answer_settings(target: Target, max_new_tokens: int, sampling: SamplingParams) -> dict[str, Any]:
    """The content of the settings file of completions."""
    described = asdict(replace(sampling, processors=(), constraint=None))
    del described["processors"], described["constraint"]
    return {"fingerprint": target.fingerprint, "max_new_tokens": max_new_tokens, **described}


def write_answers(
    target: Target,
    prompts: Sequence[EncodedPrompt],
    out: Path,
    *,
    rows: int = 32,
    max_new_tokens: int = 256,
    longest_prompt: int = 1024,
    sampling: SamplingParams | None = None,
    report: Callable[[AnswerProgress], None] | None = None,
    complete: Complete | None = None,
) -> AnswerProgress:
    """Complete the prompts that ``out`` does not contain yet and append to it; returns the last progress.

    rows            sequences decoded at a time
    max_new_tokens  maximum length of a completion
    longest_prompt  longer prompts are skipped
    sampling        None: greedy; each prompt has its own seed
    complete        decodes the prompts, such as workers on Ray (``integrations.ray_data``); None: ``completions``

    Raises FileError if ``out`` cannot be written, is malformed or was written by another target, with other settings
    or for other prompts.
    """
    sampling = sampling or SamplingParams()
    for name, value in (("rows", rows), ("max_new_tokens", max_new_tokens)):
        if value < 1:
            raise InputError(f"{name} must be at least 1, got {value}")
    encoder = target.config.encoder
    if encoder is not None and encoder.channels:
        raise CapabilityError(f"{target.title} reads speech; give sounds (--sounds)")
    limit = target.config.max_positions - 1 if encoder is None else encoder.layers.max_positions
    longest = min(longest_prompt, limit)
    wanted = [prompt for prompt in prompts if len(prompt.ids) <= longest]
    if not wanted:
        raise InputError(f"no prompt has {longest} tokens or fewer; give shorter prompts")
    settings = answer_settings(target, max_new_tokens, sampling)
    check_writable(out, "completions")
    with alone(out):
        agree(out, settings)
        known = _answered(out)
        for prompt in prompts:
            if known.get(prompt.id, prompt.ids) != prompt.ids:
                raise FileError(
                    f"{out} contains another prompt with the id {prompt.id!r}; write to another file, or give each "
                    "prompt an id (by default, ids are line numbers)"
                )
        begin(out, settings, "completions")
        asked = Request((), max_new_tokens, sampling, frozenset(target.config.eos_token_ids))
        work = list(_ordered([prompt for prompt in wanted if prompt.id not in known], rows * CHUNK))
        clock = _Clock(len(wanted), len(wanted) - len(work), time.monotonic())
        if report is not None:
            report(clock.progress())
        for record in (complete or completions)(target, work, asked, rows):
            append(out, record)
            clock.answers += 1
            clock.tokens += len(record["answer_ids"])
            if report is not None:
                report(clock.progress())
        return clock.progress()


def alone(out: Path) -> AbstractContextManager[None]:
    """Keep other processes from the file meanwhile. Raises FileError if one writes to it, or if none can."""
    return locks.alone(
        out.with_name(f".{out.name}.lock"),
        busy=f"another process writes to {out}; wait for it, or give --out another file",
        failed=f"completions cannot be written to {out}",
        advice="choose another --out",
    )


def completions(
    target: Target, prompts: Sequence[EncodedPrompt], asked: Request, rows: int
) -> Iterator[dict[str, Any]]:
    """Decode prompts, ``rows`` at a time; yields the line of each when it is finished.

    ``asked`` is a request but for its prompt; the seed of each prompt depends on its id.
    """
    work = deque(prompts)
    scheduler, drafter = Scheduler(target.decoder, rows=rows), NoDrafter()
    growing: dict[Ticket, tuple[EncodedPrompt, list[int]]] = {}
    while work or growing:
        while work and len(growing) < 2 * rows:
            prompt = work.popleft()
            own = replace(asked.sampling, seed=seed_of(asked.sampling.seed, prompt.id))
            ids, source = begun(target.config, prompt.ids)
            ticket = scheduler.submit(replace(asked, prompt_ids=ids, sampling=own, source=source), drafter)
            growing[ticket] = (prompt, [])
        for ticket, step in scheduler.tick():
            prompt, answer = growing[ticket]
            answer.extend(step.tokens)
            if step.finish is not None:
                del growing[ticket]
                yield _record(prompt, answer)
        for error in (ticket.error for ticket in growing):
            if error is not None:
                raise error


@dataclass
class _Clock:
    wanted: int
    answers: int
    began: float
    tokens: int = 0

    def __post_init__(self) -> None:
        self.before = self.answers

    def progress(self) -> AnswerProgress:
        taken = max(time.monotonic() - self.began, 1e-9)
        now = self.answers - self.before
        left = taken / now * (self.wanted - self.answers) if now else 0.0
        return AnswerProgress(self.answers, self.wanted, self.tokens, self.tokens / taken, left)


def _record(prompt: EncodedPrompt, answer: list[int]) -> dict[str, Any]:
    return {"id": prompt.id, "source": prompt.source, "prompt_ids": list(prompt.ids), "answer_ids": answer}


def seed_of(seed: int, name: int | str) -> int:
    """A seed for each prompt: draws depend only on seed and position, so with one seed all rows would draw the same."""
    return (seed << 32) + zlib.crc32(repr(name).encode())


def _ordered(prompts: Sequence[EncodedPrompt], chunk: int) -> Iterator[EncodedPrompt]:
    """Random chunks, each sorted by length, alternately up and down so that neighbours are of similar length."""
    order = list(prompts)
    random.Random(0).shuffle(order)
    for number, first in enumerate(range(0, len(order), chunk)):
        yield from sorted(order[first : first + chunk], key=lambda prompt: len(prompt.ids), reverse=number % 2 == 1)


def _answered(out: Path) -> dict[int | str, tuple[int, ...]]:
    """The prompts that a file has completions of, by id. Raises FileError for other files; does not change the file."""
    completions = records(out, check_completion, "a completion with id, prompt_ids and answer_ids")
    return {record["id"]: tuple(record["prompt_ids"]) for record in completions}


def check_completion(record: Any) -> None:
    """Raise KeyError or TypeError for a JSON value that is no completion."""
    name, prompt, answer = record["id"], record["prompt_ids"], record["answer_ids"]
    if not (isinstance(name, str) or is_whole(name)):
        raise TypeError
    if not all(isinstance(ids, list) and all(map(is_whole, ids)) for ids in (prompt, answer)):
        raise TypeError
