"""A task to measure: its rows as prompts, and the description of both for the result file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabranch.bench.suites import SuitePrompt
from anabranch.tasks import Task, TaskRow, find_task, rows_of, sample

__all__ = ["Application"]


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
