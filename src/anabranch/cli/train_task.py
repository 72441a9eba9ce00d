"""The options of ``anabranch train`` for the rows of a task."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anabranch.cli import options
from anabranch.errors import InputError

if TYPE_CHECKING:
    from anabranch.train.task_data import TaskData

__all__ = ["TaskConfig", "Timing"]

Timing = Annotated[
    bool | None,
    typer.Option(
        "--timing/--no-timing",
        help="decode a few held-out prompts at the end and time them (default: below 500M parameters, or on a GPU)",
    ),
]


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """The rows of an application to learn from, and the form of their prompts."""

    task: Annotated[
        str | None,
        typer.Option(help="take the training rows of this application: sql, e2e, dialogsum or a file of rows"),
    ] = None
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="read the data set of --task here")] = None
    prompt_template: options.PromptTemplate = None
    completion: options.Completion = None
    task_rows: Annotated[int | None, typer.Option(help="with --task: draw this many rows (default: all)")] = None
    raw: options.Raw = False

    def check(self) -> None:
        """Check that no option is given without --task. Raises InputError."""
        for name in ("data", "prompt_template", "completion", "task_rows", "raw"):
            if self.task is None and getattr(self, name) != getattr(TaskConfig, name):
                raise InputError(f"--{name.replace('_', '-')} needs --task; give both, or leave it out")

    def words(self) -> list[str]:
        """The words after ``bench`` that decode the test rows; empty without --task."""
        if self.task is None:
            return []
        named = {"--data": self.data, "--prompt-template": self.prompt_template, "--completion": self.completion}
        given = [str(word) for option, value in named.items() if value is not None for word in (option, value)]
        return ["task", self.task, *given, *(["--raw"] if self.raw else [])]

    def read(self) -> TaskData | None:
        """The rows, before a model is loaded; None without --task. Raises InputError or FileError."""
        from anabranch.train.task_data import TaskData

        if self.task is None:
            return None
        return TaskData.read(
            self.task,
            data=self.data,
            template=self.prompt_template,
            completion=self.completion,
            limit=self.task_rows,
            raw=self.raw,
        )
