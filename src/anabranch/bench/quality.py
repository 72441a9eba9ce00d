"""The quality of a task's answers by contender, beside speed and size (Speculative Streaming, ACL, tables 3 and 5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anabranch.bench.suites import Application
from anabranch.bench.summary import CALL_TITLES, ContenderAnswers, call_cells
from anabranch.loading import Loaded
from anabranch.methods import Spec, resolve_spec
from anabranch.methods.spec import module_of
from anabranch.support.table import Table, decimal, percent, quartiles_cell
from anabranch.tasks import METRICS, spread

__all__ = ["COSTS", "Scores", "add_quality", "columns_of", "cost_cells", "extra_parameters", "quality_table"]

COSTS = ("speedup\n(quartiles)", "ms per\nsample", "mean acceptance\nlength", *CALL_TITLES, "extra\nparameters")
Decode = Callable[[Sequence[int]], str]


def columns_of(metrics: Sequence[str]) -> dict[str, str]:
    """The columns of some metrics: key in result files -> title."""
    return {key: title for name in metrics for key, title in METRICS[name].columns.items()}


def add_quality(
    records: Sequence[dict[str, Any]],
    gathered: Sequence[ContenderAnswers],
    application: Application,
    decode: Decode,
    *,
    baseline: Callable[[str], str],
) -> None:
    """Add the quality of the first repeat to the record of each contender that did not fail.

    quality      by column of the metrics: mean, 95 % interval over rows (low, high), scored rows, and every row's score
    equal_texts  rows whose text equals the ``baseline``'s

    decode  turns token ids into text
    """
    scores = Scores(application)
    measured = [one for one in gathered if one.error is None]
    texts = {one.name: [decode(answers[0].token_ids) for answers in one.answers] for one in measured}
    for record in records:
        mine = texts.get(record["name"])
        if mine is None:
            continue
        rows = [scores(index, text) for index, text in enumerate(mine)]
        record["quality"] = {
            key: spread(by_row := [row[key] for row in rows]) | {"scores": by_row} for key in scores.keys
        }
        if (reference := texts.get(baseline(record["name"]))) is not None:
            record["equal_texts"] = sum(a == b for a, b in zip(mine, reference, strict=True))


class Scores:
    """Scores every text of a row once, so that contenders with equal texts have equal scores."""

    def __init__(self, application: Application) -> None:
        self._rows = application.rows
        self._metrics = [METRICS[name] for name in application.task.metrics]
        self._known: dict[tuple[int, str], dict[str, float | None]] = {}
        self.keys = list(columns_of(application.task.metrics))

    def __call__(self, index: int, text: str) -> dict[str, float | None]:
        """The scores of a text as the answer to row ``index``, by column."""
        if (index, text) not in self._known:
            row = self._rows[index]
            values = [value for metric in self._metrics for value in metric.score(text, row.references, row.fields)]
            known = (None if value is None else round(value, 6) for value in values)
            self._known[index, text] = dict(zip(self.keys, known, strict=True))
        return self._known[index, text]


def extra_parameters(spec: str, loaded: Loaded) -> int:
    """The trained parameters that a drafter has besides the target."""
    resolved: Spec = resolve_spec(spec, *loaded.modules)
    parts = [part for one in (resolved, *resolved.choices) for part in one.parts]
    used = {id(module_of(part.method, loaded.modules)) for part in parts}
    return sum(adapter.module.num_parameters() for adapter in loaded.adapters if id(adapter.module) in used)


def quality_table(result: Mapping[str, Any]) -> Table:
    """The table of a task; texts that all equal plain decoding's have "=" for a score."""
    task = result["run"]["application"]
    columns = columns_of(task["metrics"])
    rows = []
    for record in result["contenders"]:
        if "quality" not in record:
            continue
        every = record.get("equal_texts") == record["prompts"] and record["spec"] != "none"
        cells = [("= " if every else "") + percent(record["quality"][key]) for key in columns]
        equal = f"{record['equal_texts']}/{record['prompts']}" if "equal_texts" in record else "-"
        rows.append([record["name"], *cells, equal, *cost_cells(record)])
    caption = (
        f"Quality in % (95 % interval) of {task['name']}, {result['prompts_done']} of {task['of']} rows of the split "
        f"{task['split']}; =: all texts are plain decoding's"
    )
    titles = ["contender", *(title.replace(" ", "\n") for title in columns.values()), "equal\ntexts", *COSTS]
    return Table(titles, rows, caption)


def cost_cells(record: Mapping[str, Any]) -> list[str]:
    """The cells of ``COSTS``."""
    return [
        quartiles_cell(record.get("speedup_quartiles")),
        quartiles_cell(record.get("sample_ms_quartiles"), 0),
        decimal(record.get("mean_acceptance_length")),
        *call_cells(record),
        decimal(record.get("extra_parameters"), 0),
    ]
