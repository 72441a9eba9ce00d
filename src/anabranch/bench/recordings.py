"""Traces of a benchmark's steps for ``anabranch simulate``, one file per contender of ours: DIR/LABEL.jsonl.

Each prompt is a row with the steps of its first measured repeat, numbered as in the result. Rows are written after all
contenders have decoded the prompt, outside all timing; an interrupted prompt is dropped.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from anabranch.analysis.trace import TraceRecord, TraceWriter, read_trace
from anabranch.bench.entries import Entry
from anabranch.bench.run import Answer
from anabranch.decoding.engine import Step
from anabranch.errors import FileError, InputError
from anabranch.support.files import check_folder, check_output

__all__ = ["Recordings", "recorded_places"]


def recorded_places(folder: Path, entries: Sequence[Entry], *, resume: bool, force: bool = False) -> dict[str, Path]:
    """The file of each contender of ours, by name; checks that the folder is writable.

    Raises InputError for two labels that would share a file, and FileError for a folder that is not writable or has one
    of the files already, unless they are to be continued (``resume``) or replaced (``force``).
    """
    places = {entry.name: _place(folder, entry.name) for entry in entries if entry.kind == "ours"}
    for name, path in places.items():
        if twice := next((n for n, p in places.items() if n != name and p.name.lower() == path.name.lower()), None):
            raise InputError(f"{name!r} and {twice!r} would both be recorded in {path}; give one of them another label")
    check_folder(folder, "recordings", "--trace")
    for path in places.values():
        check_output(path, force=force or resume, what="recordings", option="--trace")
    return places


def _place(folder: Path, name: str) -> Path:
    return folder / (re.sub(r"[^\w.,+=-]", "-", name) + ".jsonl")


class Recordings:
    """Collects steps during decoding and writes those of a prompt together; a context manager.

    places    the files, from ``recorded_places``
    specs     the drafter of each contender, for the first line of its file
    settings  for the first line of every file
    """

    def __init__(self, places: Mapping[str, Path], specs: Mapping[str, str], settings: Mapping[str, Any]) -> None:
        self.places, self.specs, self.settings = places, specs, settings
        self._writers: dict[str, TraceWriter] = {}
        self._taken: dict[str, Sequence[Step]] = {}
        self._exits = ExitStack()

    def __enter__(self) -> Recordings:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exits.close()

    @property
    def written(self) -> list[Path]:
        """The files that have been started."""
        return [writer.path for writer in self._writers.values()]

    def take(self, name: str, answer: Answer) -> None:
        """Keep the steps of an answer, if it is the first of its prompt."""
        if name in self.places:
            self._taken.setdefault(name, answer.steps)

    def write(self, index: int, names: Sequence[str]) -> None:
        """Write the steps of prompt ``index`` for the contenders ``names``, and discard the rest."""
        for name in names:
            if name in self._taken:
                writer = self._writer(name)
                for step in self._taken[name]:
                    writer.add(step._replace(row=index))
        self._taken.clear()

    def go_on(self, done: int, names: Sequence[str]) -> None:
        """Continue the files of ``names`` after the first ``done`` prompts. Raises FileError if these are missing."""
        places = {name: path for name in names if (path := self.places.get(name)) and (done or path.exists())}
        kept = {name: _kept(path, done) for name, path in places.items()}
        for name, records in kept.items():
            path = places[name]
            aside = path.rename(path.with_suffix(".before"))
            writer = self._writer(name)
            for record in records:
                writer.add(_step(record), record.kept)
            aside.unlink()

    def _writer(self, name: str) -> TraceWriter:
        if name not in self._writers:
            settings = {"contender": name, "drafter": self.specs[name], **self.settings}
            self.places[name].unlink(missing_ok=True)  # allowed by ``recorded_places``
            self._writers[name] = self._exits.enter_context(TraceWriter(self.places[name], settings=settings))
        return self._writers[name]


def _kept(path: Path, done: int) -> list[TraceRecord]:
    """The records of the first ``done`` prompts, without one that was incomplete when the run stopped."""
    records = []
    if path.exists():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an incomplete line is of a prompt that will be decoded again
            records = [record for record in read_trace(path) if record.row < done]
    if {record.row for record in records} != set(range(done)):
        raise FileError(
            f"{path} lacks some of the {done} prompts that are done; give the original --trace, or start again"
        )
    return records


def _step(record: TraceRecord) -> Step:
    """The step of a record, without what traces do not contain."""
    sources = (*(record.tree.sources[node] for node in record.verdict.path[1:]), "target")[: record.kept]
    return Step(
        record.row,
        record.tokens,
        sources,
        record.tree,
        record.drafted,
        record.verdict,
        record.timings,
        finish=record.finish,
    )
