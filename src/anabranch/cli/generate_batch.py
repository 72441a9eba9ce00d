"""``anabranch generate --prompts FILE.jsonl --out FILE``: answer the prompts of a file, one line of JSON each.

A line of the file has a ``prompt``, ``messages`` or ``token_ids``, perhaps an ``id`` (else the number of the line), and
perhaps options of its own (``OPTIONS``); other fields are ignored. Answers are written in the order of the file, each
line whole or not at all, so that the same command continues after an interruption.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from anabranch.cli import options, show
from anabranch.declared import CALL, STRUCTURES, Keywords
from anabranch.errors import AnabranchError, FileError, InputError
from anabranch.support.appended import append, records, repair
from anabranch.support.files import check_writable
from anabranch.support.interrupt import INTERRUPTED
from anabranch.support.jsonfiles import parse_object, read_lines, shown

if TYPE_CHECKING:
    from anabranch.api import Model
    from anabranch.decoding.generation import Chunk

__all__ = ["OPTIONS", "run"]

OPTIONS = (
    *("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop", "drafter"),
    *(*STRUCTURES, "prediction"),
)
PROMPTS = ("prompt", "messages", "token_ids")
ROWS = 8  # prompts decoded at the same time


@dataclass(frozen=True)
class Line:
    """A line of the file: its id, its fields, and why it cannot be answered (empty: it can)."""

    id: str | int
    fields: Mapping[str, Any]
    error: str = ""


def run(
    source: str,
    out: str | None,
    call: Keywords,
    load: Callable[[show.Wait], Model],
    *,
    force: bool,
    raw: bool,
    system: str | None,
) -> None:
    """Answer the lines that have no answer yet. Exits with 1 if some could not be answered, 130 after Ctrl-C.

    source  the file, or "-" for standard input
    out     where the answers go; None: standard output
    call    the options of lines that have none of their own
    """
    lines = _lines(source)
    output = _Output(out, force=force)
    done = output.finished({line.id for line in lines})
    waiting = [line for line in lines if line.id not in done]
    if done:
        show.note(f"continuing after {len(done)} of {len(lines)} prompts")
    with show.Wait() as wait:
        loaded = load(wait)
    failed = 0

    def stream(line: Line) -> Generator[Chunk, None, None]:
        own: Any = {**call, **{name: line.fields[name] for name in OPTIONS if name in line.fields}}
        if any(line.fields.get(name) is not None for name in STRUCTURES):  # instead of the command's
            own.update({name: line.fields.get(name) for name in STRUCTURES})
        return loaded.stream(_ids(loaded, line, raw=raw, system=system), **own)

    try:
        for record in _answers(loaded, waiting, stream):
            failed += "error" in record
            output.append(record)
    except KeyboardInterrupt:
        again = "; the same command continues" if output.path is not None else ""
        show.note(f"stopped after {len(done) + output.written:,} of {len(lines):,} prompts{again}")
        raise typer.Exit(INTERRUPTED) from None
    where = "" if output.path is None else f" in {output.path}"
    errors = f", {failed:,} of them errors" if failed else ""
    show.note(f"{output.written:,} answers{where}{errors}")
    if failed:
        raise typer.Exit(1)


def _lines(source: str) -> list[Line]:
    """The lines of a file or of standard input ("-"). Raises FileError, and InputError for an id that occurs twice."""
    if source == "-":
        numbered: Iterator[tuple[int, str]] = enumerate(options.standard_input().splitlines(), 1)
        where = "standard input"
    else:
        numbered, where = read_lines(Path(source).expanduser()), source
    lines: dict[str | int, Line] = {}
    for number, text in numbered:
        if not text.strip():
            continue
        line = _line(number, text, where)
        if line.id in lines:
            raise InputError(f"line {number} of {where} has the id {line.id!r} of an earlier line; give each its own")
        lines[line.id] = line
    if not lines:
        raise FileError(f"{where} has no prompts")
    return list(lines.values())


def _line(number: int, text: str, where: str) -> Line:
    try:
        row = parse_object(text, f"line {number} of {where}")
    except FileError as error:
        return Line(number, {}, str(error))
    name = row.get("id", number)
    if isinstance(name, bool) or not isinstance(name, str | int):
        return Line(
            number, {}, f"line {number} of {where}: the id must be a string or a whole number, got {shown(name)}"
        )
    given = [field for field in PROMPTS if field in row]
    if len(given) != 1:
        what = " and ".join(given) if given else "none of them"
        return Line(name, {}, f"line {number} of {where} needs one of {', '.join(PROMPTS)}, got {what}")
    if refused := [field for field in row if field in CALL and field not in OPTIONS]:
        return Line(
            name, {}, f"line {number} of {where}: {refused[0]} is no option of a line; those are {', '.join(OPTIONS)}"
        )
    return Line(name, row)


def _answers(
    loaded: Model, lines: Sequence[Line], stream: Callable[[Line], Generator[Chunk, None, None]]
) -> Iterator[dict[str, Any]]:
    """The records of the lines, in their order; several are decoded at the same time."""
    stopping = threading.Event()
    left, running = deque(lines), deque[Future[dict[str, Any]]]()

    def answer(line: Line) -> dict[str, Any]:
        """The record of one line: its answer, or why there is none."""
        if line.error:
            return {"id": line.id, "error": line.error}
        try:
            result = None
            with closing(stream(line)) as chunks:
                for chunk in chunks:
                    result = chunk.result
                    if stopping.is_set():
                        break
        except AnabranchError as error:
            return {"id": line.id, "error": str(error)}
        if result is None:
            return {"id": line.id, "error": "it was interrupted"}  # not written: nobody waits for it any more
        return {"id": line.id, **show.record(result, loaded)}

    with ThreadPoolExecutor(ROWS) as pool:
        try:
            while left or running:
                while left and len(running) < 4 * ROWS:  # one long answer keeps only so many others waiting
                    running.append(pool.submit(answer, left.popleft()))
                yield running.popleft().result()
        finally:
            stopping.set()
            pool.shutdown(cancel_futures=True)


def _ids(loaded: Model, line: Line, *, raw: bool, system: str | None) -> list[int]:
    """The prompt of a line. Raises InputError or CapabilityError."""
    row = line.fields
    if "token_ids" in row:
        if not isinstance(row["token_ids"], list):
            raise InputError(f"token_ids must be a list of whole numbers, got {shown(row['token_ids'])}")
        ids: list[int] = row["token_ids"]
        return ids
    if "prompt" in row and (not isinstance(row["prompt"], str) or not row["prompt"].strip()):
        raise InputError(f"the prompt must be a text that is not empty, got {shown(row['prompt'])}")
    if isinstance(row.get("messages"), str):
        return loaded.chat_ids(row["messages"])  # refuses it
    return show.prompt_ids(loaded, row["prompt"] if "prompt" in row else row["messages"], raw=raw, system=system)


class _Output:
    """The file of the answers, or standard output."""

    def __init__(self, out: str | None, *, force: bool) -> None:
        self.path = None if out in (None, "-") else Path(str(out)).expanduser()
        self.written = 0
        if self.path is not None:
            check_writable(self.path, "the answers")
            if force:
                self.path.unlink(missing_ok=True)

    def finished(self, wanted: set[str | int]) -> set[str | int]:
        """The ids with an answer; a line that was cut off is removed. Raises FileError for another file."""
        if self.path is None or not self.path.exists():
            return set()
        ids: set[str | int] = set()

        def check(row: Any) -> None:
            if row["id"] not in wanted:
                raise FileError(
                    f"{self.path} has other answers: no prompt has the id {shown(row['id'])} of its line "
                    f"{len(ids) + 1}; give another --out, or --force to replace it"
                )
            ids.add(row["id"])

        for _ in records(self.path, check, "an answer"):
            pass
        repair(self.path)
        return ids

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a line whole. Raises FileError if there is no room for it."""
        if self.path is None:
            sys.stdout.buffer.write(json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
            sys.stdout.flush()
        else:
            append(self.path, record)
        self.written += 1
