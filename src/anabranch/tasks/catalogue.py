"""The known tasks, which are those of Speculative Streaming's papers, and tasks made from a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from anabranch.errors import FileError, InputError
from anabranch.support.jsonfiles import read_rows
from anabranch.support.nearest import hint
from anabranch.tasks.metrics import METRICS
from anabranch.tasks.template import Conversation, Task, Template

__all__ = ["TASKS", "find_task"]

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "sql",
            Template(
                "Write one SQL query that answers the question. Reply with the query only.\n\n"
                "Tables: {context}\nQuestion: {question}"
            ),
            completion=("answer",),
            metrics=("exact_match", "execution"),
            folder="sql_create_context",
            licence="CC BY 4.0 (Spider: CC BY-SA 4.0, WikiSQL: BSD-3-Clause)",
        ),
        Task(
            "e2e",
            Template(
                "Describe the restaurant in one or two sentences, using these attributes.\n\n{meaning_representation}"
            ),
            completion=("human_reference", "references"),
            metrics=("rouge",),
            folder="e2e_nlg",
            licence="CC BY-SA 4.0",
        ),
        Task(
            "dialogsum",
            Template("Summarize the dialogue in one or two sentences.\n\n{dialogue}"),
            completion=("summary", "summaries"),
            metrics=("rouge",),
            folder="dialogsum",
            licence="CC BY-NC-SA 4.0",
            commercial=False,
        ),
    )
}


def find_task(
    text: str, *, template: str | None = None, completion: str | None = None, metrics: Sequence[str] = ()
) -> Task:
    """Find a known task by its name or its folder's, or make a task of a file of rows.

    template    of the prompt; optional for a file with the field ``prompt`` or ``messages``
    completion  the field of the completion; optional for a file with the field ``completion`` or ``messages``
    metrics     names of ``METRICS``; empty: those of the task, or exact_match for a file

    Raises InputError for a missing or an invalid value, FileError for a file that does not exist.
    """
    if unknown := [name for name in metrics if name not in METRICS]:
        raise InputError(
            f"there is no metric {unknown[0]!r}{hint(unknown[0], METRICS)}; metrics are {', '.join(METRICS)}"
        )
    known = next((task for task in TASKS.values() if text in (task.name, task.folder)), None)
    if known is not None:
        return replace(
            known,
            template=known.template if template is None else Template(template),
            completion=known.completion if completion is None else (completion,),
            metrics=tuple(metrics) or known.metrics,
        )
    path = Path(text)
    if not path.is_file():
        raise FileError(
            f"there is no task or file {text!r}{hint(text, TASKS)}; tasks are {', '.join(TASKS)}, or give a JSONL file"
        )
    name = path.name.split(".")[0]
    shape, field = _shape_of(path, template, completion)
    return Task(name, shape, (field,), tuple(metrics) or ("exact_match",), file=path)


def _shape_of(path: Path, template: str | None, completion: str | None) -> tuple[Template | Conversation, str]:
    """The template and the field of the completion of a file; by its first row if they are not given."""
    if template is not None and completion is not None:
        return Template(template), completion
    _, first = next(read_rows(path), (0, None))
    if first is None:
        raise FileError(f"{path} has no rows")
    if template is None and completion is None and "messages" in first:
        return Conversation(), "messages"
    missing = []
    if template is None and "prompt" not in first:
        missing.append("--prompt-template TEXT, with fields as {name}")
    if completion is None and "completion" not in first:
        missing.append("--completion FIELD")
    if missing:
        raise InputError(
            f"the task {path.name} is a file, so it needs {', and '.join(missing)}; its fields are "
            f"{', '.join(first) or 'none'}, and only prompt and completion, or messages, need no options"
        )
    return Template("{prompt}" if template is None else template), completion or "completion"
