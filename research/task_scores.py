"""Answers to the rows of a task, decoded many at a time, and their scores: for quality, not for speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anabranch.api import Model
from anabranch.bench.quality import Scores, columns_of
from anabranch.bench.suites import Application
from anabranch.decoding.generation import Generation
from anabranch.prompts import chat_ids
from anabranch.support.table import percent, signed_percent
from anabranch.tasks import difference, spread

__all__ = ["ROWS", "Columns", "answers", "compared", "first_metric", "quality_cells", "quality_titles", "scores_of"]

Columns = Mapping[str, Sequence[float | None]]  # a score for each row, by column of the task's metrics

ROWS = 32  # decoded at a time


def answers(
    model: Model, application: Application, new: int, *, drafter: str = "none", raw: bool = False
) -> list[Generation]:
    """The greedy answers to the rows, of at most ``new`` tokens."""
    prompts = [chat_ids(model.tokenizer, row.chat, raw=raw) for row in application.rows]
    return model.generate(prompts, max_new_tokens=new, rows=ROWS, temperature=0.0, drafter=drafter)


def scores_of(application: Application, texts: Sequence[str]) -> dict[str, list[float | None]]:
    """The scores of a text for each row, by column of the task's metrics."""
    scores = Scores(application)
    rows = [scores(index, text) for index, text in enumerate(texts)]
    return {key: [row[key] for row in rows] for key in scores.keys}


def compared(scores: Columns, others: Columns) -> dict[str, Any]:
    """The quality of answers and its difference from others', by column, with 95 % intervals."""
    return {
        "quality": {key: spread(mine) for key, mine in scores.items()},
        "difference": {key: difference(mine, others[key]) for key, mine in scores.items()},
    }


def first_metric(task: Mapping[str, Any]) -> tuple[str, str]:
    """The first column of a described task: its key and its title."""
    return next(iter(columns_of(task["metrics"]).items()))


def quality_titles(task: Mapping[str, Any]) -> list[str]:
    """The titles above ``quality_cells``."""
    return [
        each for title in columns_of(task["metrics"]).values() for each in (f"{title}, %", "difference from the first")
    ]


def quality_cells(task: Mapping[str, Any], record: Mapping[str, Any]) -> list[str]:
    """Table cells of a result of ``compared``: each metric and its difference from the first result, in percent."""
    cells = []
    for key in columns_of(task["metrics"]):
        cells += [percent(record["quality"][key]), signed_percent(record["difference"][key])]
    return cells
