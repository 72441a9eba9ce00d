"""Benchmark prompts: a suite from a data folder or the hub, a JSONL file, or a few built-in ones."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabranch.errors import FetchError, FileError, InputError
from anabranch.support.files import LONE_SURROGATES
from anabranch.support.jsonfiles import read_rows
from anabranch.support.nearest import hint
from anabranch.tasks import Task, TaskRow, find_task, rows_of, sample

__all__ = ["SUITES", "Application", "Suite", "SuitePrompt", "load_suite"]


@dataclass(frozen=True)
class SuitePrompt:
    """A prompt and its task.

    messages  the conversation that ``text`` shows or ends, if it is one
    later     the user's later turns, to be asked once the text is answered (``conversations.with_later_turns``)
    """

    name: str
    task: str
    text: str
    messages: tuple[dict[str, str], ...] = ()
    later: tuple[str, ...] = ()

    @property
    def asked(self) -> str | tuple[dict[str, str], ...]:
        """The text or messages that ``prompts.chat_ids`` encodes."""
        return self.messages or self.text


@dataclass(frozen=True)
class Suite:
    """The location of a known suite in a data folder, and its fields.

    hub          (data set, configuration, split, field of the prompt) on the hub, if it is there
    later_turns  keep the turns after the first of a conversation
    """

    stem: str
    field: str
    task_field: str = ""
    hub: tuple[str, str | None, str, str] | None = None
    later_turns: bool = False


SUITES: dict[str, Suite] = {
    "spec_bench": Suite("spec_bench/test", "turns", "task"),
    "mt_bench": Suite(
        *("mt_bench/test", "turns", "category"),
        hub=("HuggingFaceH4/mt_bench_prompts", None, "train", "prompt"),
        later_turns=True,
    ),
    "humaneval": Suite("humaneval/test", "prompt", "", ("openai/openai_humaneval", None, "test", "prompt")),
    "gsm8k": Suite("gsm8k/test", "question", "", ("openai/gsm8k", "main", "test", "question")),
}
NAMES = ("question_id", "task_id", "prompt_id", "id")

OWN = (
    ("explain", "Explain why the sky is blue."),
    ("list", "List five things to check before a long bicycle tour."),
    ("code", "Write a Python function that returns the n-th Fibonacci number, and explain how it works."),
    ("math", "A tank holds 240 litres and drains 8 litres a minute. When is it three quarters empty? Show the steps."),
    ("rewrite", "Rewrite politely: 'You sent me the wrong file again, send the right one now.'"),
    ("story", "Tell a short story about a river that splits in two and meets again."),
)


def load_suite(
    suite: str,
    *,
    data: Path | None = None,
    limit: int | None = None,
    field: str = "prompt",
    tasks: Sequence[str] = (),
) -> list[SuitePrompt]:
    """The prompts of ``suite``: a name of ``SUITES`` (from ``data``, else from the hub), "own", or a JSONL file.

    tasks  keep only the prompts of these tasks
    limit  keep this many prompts, spread evenly over the tasks in file order

    A prompt is the first turn of a conversation; of mt_bench, ``SuitePrompt.later`` has the others. Raises InputError
    for invalid arguments, FileError for an invalid file, and FetchError if the hub cannot be reached.
    """
    if limit is not None and limit < 1:
        raise InputError(f"limit must be at least 1, got {limit}")
    own = [SuitePrompt(name, "own", text) for name, text in OWN]
    prompts = own if suite == "own" else list(_read(suite, data, field))
    if not prompts:
        raise FileError(f"the suite {suite!r} has no prompts")
    if tasks:
        known = list(dict.fromkeys(prompt.task for prompt in prompts))
        if unknown := [task for task in tasks if task not in known]:
            raise InputError(
                f"the suite {suite!r} has no task {unknown[0]!r}{hint(unknown[0], known)}; "
                f"its tasks are {', '.join(known)}"
            )
        prompts = [prompt for prompt in prompts if prompt.task in tasks]
    return prompts if limit is None else _spread(prompts, limit)


def _read(suite: str, data: Path | None, field: str) -> Iterator[SuitePrompt]:
    known = SUITES.get(suite)
    if known is None:
        path = Path(suite)
        if not path.is_file():
            names = ", ".join(["own", *SUITES])
            raise FileError(
                f"there is no suite or file {suite!r}{hint(suite, ('own', *SUITES))}; "
                f"suites are {names}, or give a JSONL file"
            )
        yield from _prompts(read_rows(path), str(path), path.name.split(".")[0], field, "task")
        return
    if data is not None:
        path = _in_folder(suite, known, data)
        yield from _prompts(read_rows(path), str(path), suite, known.field, known.task_field, known.later_turns)
        return
    by_hand = f"the suite {suite!r} is not part of the package; give its folder with --data FOLDER"
    if known.hub is None:
        raise InputError(by_hand)
    rows = _hub(known.hub, by_hand)
    yield from _prompts(rows, known.hub[0], suite, known.hub[3], known.task_field, known.later_turns)


def _in_folder(suite: str, known: Suite, data: Path) -> Path:
    places = [data / f"{known.stem}.jsonl.gz", data / f"{known.stem}.jsonl"]
    for place in places:
        if place.is_file():
            return place
    raise FileError(f"there is no suite {suite!r} in {data}; expected {places[0]} or {places[1].name}")


def _prompts(
    rows: Iterator[tuple[int, Mapping[str, Any]]],
    where: str,
    task: str,
    field: str,
    task_field: str,
    later_turns: bool = False,
) -> Iterator[SuitePrompt]:
    for number, row in rows:
        value = row.get(field)
        texts: list[Any] = value if isinstance(value, list) and value else [value]
        if field not in row:
            fields = ", ".join(row) or "none"
            raise FileError(
                f"line {number} of {where} has no text in the field {field!r}; its fields are {fields}: choose with "
                "--field"
            )
        turns = texts if later_turns else texts[:1]
        for text in turns:
            if not isinstance(text, str) or not text.strip():
                what = "not a text" if text and not isinstance(text, str) else "empty"
                raise FileError(
                    f"line {number} of {where}: the field {field!r} is {what}; write a prompt there, or delete the line"
                )
        name = next((row[key] for key in NAMES if key in row), number)
        prompt = SuitePrompt(str(name), str(row.get(task_field, task)), turns[0], later=tuple(turns[1:]))
        _check_characters(prompt, number, where)
        yield prompt


def _check_characters(prompt: SuitePrompt, number: int, where: str) -> None:
    texts = [("text", text) for text in (prompt.text, *prompt.later)]
    for what, text in (("name", prompt.name), ("task", prompt.task), *texts):
        if half := LONE_SURROGATES.search(text):
            raise InputError(
                f"line {number} of {where}: the {what} of the prompt {prompt.name!a} contains an unpaired surrogate, "
                f"{half[0][0]!a}, at index {half.start()}; remove it"
            )


def _hub(where: tuple[str, str | None, str, str], by_hand: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise InputError(f"{by_hand}, or let 'pip install datasets' fetch it from the hub") from error
    name, configuration, split, _ = where
    try:
        table = datasets.load_dataset(name, configuration, split=split)
    except Exception as error:  # the library raises any exception of its transport
        raise FetchError(f"{name} cannot be fetched from the hub ({type(error).__name__}); {by_hand}") from error
    yield from enumerate(table, 1)


def _spread(prompts: list[SuitePrompt], limit: int) -> list[SuitePrompt]:
    tasks: dict[str, list[SuitePrompt]] = {}
    for prompt in prompts:
        tasks.setdefault(prompt.task, []).append(prompt)
    turns = max(len(group) for group in tasks.values())
    order = [group[turn] for turn in range(turns) for group in tasks.values() if turn < len(group)]
    return order[:limit]


@dataclass(frozen=True)
class Application:
    """A task and the rows to decode.

    split  the split that the rows are from, which has ``of`` rows
    """

    task: Task
    split: str
    rows: list[TaskRow]
    of: int

    @staticmethod
    def read(
        text: str,
        *,
        data: Path | None = None,
        split: str = "test",
        limit: int | None = None,
        template: str | None = None,
        completion: str | None = None,
        metrics: Sequence[str] = (),
    ) -> Application:
        """The task ``text``, a name or a JSONL file, and ``limit`` of its rows.

        Raises InputError or FileError.
        """
        task = find_task(text, template=template, completion=completion, metrics=metrics)
        rows = rows_of(task, split, data)
        return Application(task, split, sample(rows, limit), len(rows))

    @property
    def prompts(self) -> list[SuitePrompt]:
        """The prompts of the rows, in order."""
        return [SuitePrompt(row.name, self.task.name, row.prompt, row.messages) for row in self.rows]

    def described(self) -> dict[str, Any]:
        """The task, for the result file."""
        task = self.task
        return {
            "name": task.name,
            "template": task.template.text,
            "completion": list(task.completion),
            "metrics": list(task.metrics),
            "split": self.split,
            "rows": len(self.rows),
            "of": self.of,
            "licence": task.licence,
        }
