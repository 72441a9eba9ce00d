"""Rows of a task: read, checked, and split into train, validation and test.

A known data set has a file per split; rows whose prompt is also in the test split are left out of the other two. Rows
of a user's file are split by a hash of the prompt: 80 % train, 10 % validation, 10 % test. So a row stays in its split
when others are added, and equal prompts are in the same split.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabranch.errors import FileError, InputError
from anabranch.support.files import LONE_SURROGATES
from anabranch.support.jsonfiles import rows_made
from anabranch.support.nearest import hint
from anabranch.tasks.metrics import METRICS
from anabranch.tasks.template import Conversation, Task, field_text

__all__ = ["SPLITS", "TaskRow", "TrainingRows", "rows_of", "sample", "training_rows"]

SPLITS = ("train", "validation", "test")
ALL = "all"
BELOW = {"train": 0.8, "validation": 0.9, "test": 1.0}  # of the hash of a prompt, between 0 and 1


@dataclass(frozen=True)
class TaskRow:
    """A row: its name, the prompt, the references (at least one), and its fields in the file.

    messages  the conversation whose text is the prompt; empty: the prompt is a user's message
    """

    name: str
    prompt: str
    references: tuple[str, ...]
    fields: Mapping[str, Any] = field(repr=False, default_factory=dict)
    messages: tuple[dict[str, str], ...] = ()

    @property
    def chat(self) -> str | tuple[dict[str, str], ...]:
        """The text or messages that ``prompts.chat_ids`` encodes."""
        return self.messages or self.prompt


@dataclass(frozen=True)
class TrainingRows:
    """The rows to train on and to validate with.

    test      number of rows of the test split, none of which is in the other two
    left_out  number of rows of train and validation whose prompt is also in a later split
    """

    train: list[TaskRow]
    validation: list[TaskRow]
    test: int
    left_out: int


def rows_of(task: Task, split: str, data: Path | None = None) -> list[TaskRow]:
    """The rows of a split; "all": all rows of a user's file.

    data  the folder of known data sets, or of this one

    Raises InputError for an unknown split or missing ``data``, FileError for a missing or malformed file, or one
    without rows of this split.
    """
    if split not in (*SPLITS, ALL):
        raise InputError(
            f"the split must be one of {', '.join(SPLITS)} and {ALL}, got {split!r}{hint(split, (*SPLITS, ALL))}"
        )
    if task.file is not None:
        if data is not None:
            raise InputError(f"the task {task.file.name} is a file, so --data has no effect; leave it out")
        rows = [row for row in _read(task, task.file) if split in (ALL, split_of(row.prompt))]
        if not rows:
            raise FileError(f"{task.file} has no rows of the split {split}; add rows, or choose another --split")
        return rows
    if split == ALL:
        raise InputError(f"the split all is for files of your own; give one of {', '.join(SPLITS)} for {task.name}")
    path = _place(task, split, _folder(task, split, data))
    rows = _read(task, path)
    if not rows:
        raise FileError(f"{path} has no rows; copy it again")
    return rows


def training_rows(task: Task, data: Path | None = None) -> TrainingRows:
    """The rows to train on. Raises what ``rows_of`` raises; validation and test splits may be missing."""
    if task.file is not None:
        groups: dict[str, list[TaskRow]] = {split: [] for split in SPLITS}
        for row in rows_of(task, ALL, data):
            groups[split_of(row.prompt)].append(row)
        if not groups["train"]:
            raise FileError(f"{task.file} has no rows of the split train; add rows")
        return TrainingRows(groups["train"], groups["validation"], len(groups["test"]), 0)
    folder = _folder(task, "train", data)
    train = rows_of(task, "train", data)
    others = {split: rows_of(task, split, data) if _found(task, split, folder) else [] for split in SPLITS[1:]}
    tested = {row.prompt for row in others["test"]}
    validation = [row for row in others["validation"] if row.prompt not in tested]
    seen = tested | {row.prompt for row in validation}
    kept = [row for row in train if row.prompt not in seen]
    if not kept:
        raise FileError(f"every prompt of {_place(task, 'train', folder)} is also in validation or test; copy it again")
    left_out = len(train) - len(kept) + len(others["validation"]) - len(validation)
    return TrainingRows(kept, validation, len(others["test"]), left_out)


def split_of(prompt: str) -> str:
    """The split of a row of a user's file."""
    place = int.from_bytes(_hash(prompt)[:8], "big") / 2**64
    return next(split for split, below in BELOW.items() if place < below)


def sample(rows: Sequence[TaskRow], limit: int | None) -> list[TaskRow]:
    """``limit`` rows, drawn by a hash of their prompts, in file order: the same ones in every run; None: all.

    Raises InputError for a limit below 1.
    """
    if limit is not None and limit < 1:
        raise InputError(f"limit must be at least 1, got {limit}")
    drawn = sorted(range(len(rows)), key=lambda i: (_hash("sample" + rows[i].prompt), i))[:limit]
    return [rows[i] for i in sorted(drawn)]


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _folder(task: Task, split: str, data: Path | None) -> Path:
    if data is None:
        raise InputError(
            f"the task {task.name} needs its data, which are not part of the package; give --data DIR with "
            f"DIR/{task.folder}/{split}.jsonl.gz, rows of {_fields(task)}"
        )
    return data


def _fields(task: Task) -> str:
    return f"{', '.join(task.template.fields)} and {' or '.join(task.completion)}"


def _found(task: Task, split: str, data: Path) -> Path | None:
    names = (f"{split}.jsonl.gz", f"{split}.jsonl")
    return next(
        (path for folder in (data / task.folder, data) for name in names if (path := folder / name).is_file()), None
    )


def _place(task: Task, split: str, data: Path) -> Path:
    path = _found(task, split, data)
    if path is None:
        raise FileError(
            f"there is no split {split} of the task {task.name} in {data}; expected "
            f"{data / task.folder / split}.jsonl.gz or .jsonl, rows of {_fields(task)}"
        )
    return path


def _read(task: Task, path: Path) -> list[TaskRow]:
    return rows_made(path, lambda number, row: _row(task, number, row, f"row {number} of {path}"))


def _row(task: Task, number: int, row: Mapping[str, Any], where: str) -> TaskRow:
    completion = next((name for name in task.completion if name in row), task.completion[0])
    needed = tuple(name for metric in task.metrics for name in METRICS[metric].needs)
    _check_fields(row, where, task.template.fields, completion, needed)
    prompt = task.template.render(row, where)
    messages: tuple[dict[str, str], ...] = ()
    if isinstance(task.template, Conversation):
        references: tuple[str, ...] = (task.template.answer(row, where),)
        messages = task.template.messages(row, where)
    else:
        references = _references(row, completion, where)
    for name in needed:
        field_text(row, name, where)
    made = TaskRow(str(row.get("id", number)), prompt, references, row, messages)
    for text in (made.name, made.prompt, *made.references):
        if half := LONE_SURROGATES.search(text):
            raise FileError(f"{where} contains an unpaired surrogate, {half[0][0]!a}; correct or delete the line")
    return made


def _check_fields(
    row: Mapping[str, Any], where: str, template: Sequence[str], completion: str, needed: Sequence[str]
) -> None:
    """Raise FileError naming all missing fields of a row, and the options that choose others."""
    groups = {"--prompt-template": template, "--completion": (completion,), "--metric": needed}
    missing = {option: [name for name in names if name not in row] for option, names in groups.items()}
    lacking = list(dict.fromkeys(name for names in missing.values() for name in names))
    if lacking:
        options = " and ".join(option for option, names in missing.items() if names and option != "--metric")
        advice = [f"choose with {options}"] if options else []
        advice += ["leave out the metric that needs it, with --metric"] if missing["--metric"] else []
        raise FileError(
            f"{where} has no field{'s' if len(lacking) > 1 else ''} {' and '.join(map(repr, lacking))}; its fields are "
            f"{', '.join(row) or 'none'}: {', or '.join(advice)}"
        )


def _references(row: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    value = row[name]
    if not isinstance(value, list):
        return (field_text(row, name, where),)
    if not value or not all(isinstance(text, str) and text.strip() for text in value):
        raise FileError(f"{where}: the field {name!r} must be a text or a list of texts, none of them empty")
    return tuple(value)
