"""Several results of one task in one table: several targets, as in table 3 of Speculative Streaming (ACL).

Everything is relative to plain decoding in the first result: speed by row, and quality as the difference by row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from anabranch.bench.compare import PLACE, RUN, invalid
from anabranch.bench.quality import COSTS, columns_of, cost_cells
from anabranch.bench.summary import CALL_KEYS, quartiles
from anabranch.errors import FileError, InputError
from anabranch.support.jsonfiles import is_number, is_whole
from anabranch.support.table import Table, percent, signed_percent
from anabranch.tasks import METRICS, difference, spread

__all__ = ["collect", "rows_of_table"]

PLAIN = "none"
DIFFERS = ("template", "completion", "split", "rows", "of")  # of the task: a warning
OF_RUN = {name: words for name, words in RUN.items() if name not in ("fingerprint", "suite")}  # targets may differ


def collect(results: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """The records of all contenders, and warnings where the results do not compare.

    results  (name, result) of each file

    Raises FileError for a result without a task, InputError for other tasks or metrics, fewer rows than the first, or
    a first result without plain decoding.
    """
    for name, result in results:
        if wrong := _malformed(result):
            raise FileError(f"{name} has no valid {wrong}; give results of 'anabranch bench task ... --out FILE'")
    first_name, first = results[0]
    task = first["run"]["application"]
    base = next((one for one in first["contenders"] if one["spec"] == PLAIN and "error" not in one), None)
    if base is None:
        raise InputError(f"{first_name} has no plain decoding to compare with; measure it again with --method none")
    warnings, records, columns = [], [], columns_of(task["metrics"])
    for name, result in results:
        own = result["run"]["application"]
        for key in ("name", "metrics"):
            if own[key] != task[key]:
                raise InputError(f"{name} has other {key} than {first_name} ({own[key]}, not {task[key]}); give others")
        if [row["name"] for row in result["prompts"]] != [row["name"] for row in first["prompts"]]:
            raise InputError(f"{name} has other rows than {first_name}; measure the same split with the same --limit")
        warnings += _warnings(name, result, first)
        records += [_record(name, one, base, columns) for one in result["contenders"]]
    return {
        "task": task,
        "rows": len(first["prompts"]),
        "columns": columns,
        "warnings": warnings,
        "contenders": records,
    }


def _malformed(result: Mapping[str, Any]) -> str:
    """The first field that is missing or malformed, of those that ``compare.read_result`` did not check."""
    task, prompts = result["run"].get("application"), result.get("prompts")
    if not isinstance(task, dict) or invalid(task, TASK):
        return "'application'"
    if not isinstance(prompts, list) or not all(isinstance(one, dict) and "name" in one for one in prompts):
        return "'prompts'"
    count = len(prompts)

    def scored(quality: Any) -> bool:
        parts = [quality.get(key) if isinstance(quality, dict) else None for key in columns_of(task["metrics"])]
        return all(isinstance(part, dict) and _are_scores(part.get("scores"), count) for part in parts)

    checks = {
        "quality": scored,
        "tokens_per_second_by_prompt": lambda rates: len(rates) == count,
        "sample_ms_quartiles": lambda ms: isinstance(ms, list) and len(ms) == 3 and all(map(is_number, ms)),
        "extra_parameters": lambda extra: extra is None or is_whole(extra, 0),
    }
    measured = (one for one in result["contenders"] if "error" not in one)
    return next((f"{wrong} of {one['name']}" for one in measured if (wrong := invalid(one, checks))), "")


TASK: dict[str, Callable[[Any], bool]] = {
    "name": lambda name: isinstance(name, str),
    "metrics": lambda names: isinstance(names, list) and all(isinstance(n, str) and n in METRICS for n in names),
}


def _are_scores(values: Any, count: int) -> bool:
    known = isinstance(values, list) and len(values) == count
    return known and all(value is None or is_number(value, 0, 1) for value in values)


def _warnings(name: str, result: Mapping[str, Any], first: Mapping[str, Any]) -> list[str]:
    warnings = [] if result["complete"] else [f"{name} is incomplete"]
    for group, facts in (("run", OF_RUN), ("environment", PLACE)):
        mine, other = result[group], first[group]
        warnings += [f"{name}: {words}" for key, words in facts.items() if mine.get(key) != other.get(key)]
    task, own = first["run"]["application"], result["run"]["application"]
    return warnings + [f"{name}: the {key} of the task differs" for key in DIFFERS if own.get(key) != task.get(key)]


def _record(name: str, one: Mapping[str, Any], base: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """The line of a contender; ``base`` is plain decoding in the first result, ``keys`` the columns."""
    record: dict[str, Any] = {"result": name, "name": one["name"], "spec": one["spec"]}
    if "error" in one:
        return record | {"error": one["error"]}
    rates = zip(one["tokens_per_second_by_prompt"], base["tokens_per_second_by_prompt"], strict=True)
    scores = {key: (one["quality"][key]["scores"], base["quality"][key]["scores"]) for key in keys}
    return record | {
        "quality": {key: spread(mine) for key, (mine, _) in scores.items()},
        "difference": {key: difference(mine, theirs) for key, (mine, theirs) in scores.items()},
        "speedup_quartiles": quartiles([mine / theirs for mine, theirs in rates]),
        "sample_ms_quartiles": one["sample_ms_quartiles"],
        "mean_acceptance_length": one.get("mean_acceptance_length"),
        **{key: one[key] for key in CALL_KEYS if key in one},
        "extra_parameters": one.get("extra_parameters"),
    }


def rows_of_table(collected: Mapping[str, Any]) -> Table:
    """The table of ``collect``."""
    task, columns = collected["task"], collected["columns"]
    rows = []
    for record in collected["contenders"]:
        cells = [record["result"], record["name"]]
        if "error" in record:
            rows.append([*cells, "error"])
            continue
        for key in columns:
            cells += [percent(record["quality"][key]), signed_percent(record["difference"][key])]
        rows.append([*cells, *cost_cells(record)])
    caption = f"{task['name']}, {collected['rows']} rows: quality in % (95 % interval), relative to the first line"
    scores = [title for column in columns.values() for title in (column, "difference")]
    return Table(["result", "contender", *scores, *COSTS], rows, caption, left=2)
