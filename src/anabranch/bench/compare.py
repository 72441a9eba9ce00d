"""Compare two result files: ratios by contender, and differences between the runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from anabranch.bench.journal import FORMATS, Journal, beside
from anabranch.bench.report import SCHEMA
from anabranch.bench.summary import CALL_KEYS, CALL_TITLES, quartiles
from anabranch.errors import FileError
from anabranch.support.jsonfiles import is_number, read_json, shown
from anabranch.support.table import Table, decimal, quartiles_cell

__all__ = ["PLACE", "RUN", "compare", "comparison_table", "invalid", "read_result"]

SIDE = ("tokens_per_second", "speedup_quartiles", "mean_acceptance_length", *CALL_KEYS)  # shown of each result
SHOWN = 8  # maximum number of files listed in an error

# fields that should be equal in a fair comparison, and the warning if they differ
RUN = {
    "fingerprint": "the model differs",
    "dtype": "the dtype differs",
    "suite": "the suite differs",
    "prompts_sha256": "the prompts differ",
    "max_new_tokens": "the number of new tokens differs",
    "temperature": "the temperature differs",
    "repeats": "the number of repeats differs",
}
PLACE = {
    "processor": "the processor differs",
    "device": "the device differs",
    "threads": "the number of threads differs",
    "torch": "the torch version differs",
}


def read_result(path: Path) -> dict[str, Any]:
    """Read a result file of this version's schema; ``path`` is its full name, or the argument of ``bench --out``.

    Raises FileError for anything else.
    """
    path = _existing(path)
    advice = "give a file that 'anabranch bench --out FILE' wrote"
    result = read_json(path, advice)
    if "schema" not in result and "timed" in result:
        raise FileError(
            f"{path} is a result of 'bench shape', which compare does not read; give results of 'bench run'"
        )
    if (schema := result.get("schema")) != SCHEMA:
        raise FileError(f"{path} has the result schema {shown(schema)}, and this version reads {SCHEMA}; measure again")
    if wrong := _malformed(result):
        raise FileError(f"{path} has no valid {wrong}; {advice}")
    return result


def _malformed(result: Mapping[str, Any]) -> str:
    """The first required field that is missing or malformed; empty if there is none."""
    for name in ("run", "environment"):
        if not isinstance(result.get(name), dict):
            return repr(name)
    if "prompts_sha256" not in result["run"]:
        return "'prompts_sha256'"
    if not isinstance(result.get("complete"), bool):
        return "'complete'"
    contenders = result.get("contenders")
    if not isinstance(contenders, list):
        return "'contenders'"
    for number, one in enumerate(contenders):
        if not isinstance(one, dict) or not all(isinstance(one.get(key), str) for key in ("name", "spec")):
            return f"the name or spec of contender {number}"
        if "error" not in one and (wrong := invalid(one, MEASURED)):
            return f"{wrong} of contender {number}"
    return ""


def invalid(record: Mapping[str, Any], checks: Mapping[str, Callable[[Any], bool]]) -> str:
    """The first key whose value, None if absent, fails its check; empty if there is none."""
    return next((repr(key) for key, valid in checks.items() if not valid(record.get(key))), "")


def _are_numbers(values: Any, least: float, most: float) -> bool:
    """Return whether a value is a list of numbers in this range."""
    return isinstance(values, list) and all(is_number(value, least, most) for value in values)


def _are_quartiles(values: Any) -> bool:
    known = isinstance(values, list) and len(values) == 3
    return values is None or (known and all(value is None or is_number(value) for value in values))


# of a contender that was measured
MEASURED: dict[str, Callable[[Any], bool]] = {
    "tokens_per_second_by_prompt": lambda rates: _are_numbers(rates, 1e-9, 1e12),
    "tokens_per_second": lambda rate: is_number(rate, 1e-9, 1e12),
    "mean_acceptance_length": lambda length: length is None or is_number(length),
    **dict.fromkeys(CALL_KEYS, lambda calls: calls is None or is_number(calls, 0)),
    "speedup_quartiles": _are_quartiles,
}


def _existing(path: Path) -> Path:
    """The JSON file for ``path``: the file itself, the one next to its .csv or .md, or its stem with .json."""
    result = beside(path, ".json")
    if result.is_file() or (path.is_file() and path.suffix not in FORMATS):
        return result if result.is_file() else path
    if Journal.path_of(path).is_file():
        raise FileError(
            f"the run that writes {result} is not finished; continue it with 'anabranch bench ... --resume'"
        )
    folder = path if path.is_dir() else path.parent
    there = sorted(other.name for other in folder.glob("*.json")) if folder.is_dir() else []
    more = f" and {len(there) - SHOWN} more" if len(there) > SHOWN else ""
    listed = f"{folder} has {', '.join(there[:SHOWN])}{more}" if there else "'anabranch bench --out FILE' writes one"
    raise FileError(f"there is no result {result}; {listed}")


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """The ratio B / A for each contender: tokens/s by prompt (quartiles), and speedup over plain decoding.

    If the runs have different prompts, only the ratio of the totals is given.
    """
    warnings = []
    for group, facts in (("run", RUN), ("environment", PLACE)):
        for key, words in facts.items():
            was, now = a[group].get(key), b[group].get(key)
            if was != now:
                detail = f": {was} and {now}" if len(f"{was}{now}") < 80 else ""
                warnings.append(f"{words}{detail}")
    warnings += [f"{name} is incomplete" for name, result in (("A", a), ("B", b)) if not result["complete"]]
    # a stopped run has the first prompts of the list
    same = a["run"]["prompts_sha256"] == b["run"]["prompts_sha256"]
    sides = [{record["name"]: record for record in result["contenders"]} for result in (a, b)]
    records = []
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        one, two = (side.get(name) for side in sides)
        record: dict[str, Any] = {"name": name, "a": _side(one), "b": _side(two)}
        if one is not None and two is not None and "error" not in one and "error" not in two:
            if one["spec"] != two["spec"]:
                warnings.append(f"{name} is {one['spec']} in A and {two['spec']} in B")
            record["ratio_total"] = round(two["tokens_per_second"] / one["tokens_per_second"], 4)
            if same and one.get("every") == two.get("every"):
                pairs = zip(one["tokens_per_second_by_prompt"], two["tokens_per_second_by_prompt"], strict=False)
                record["ratio_quartiles"] = quartiles([y / x for x, y in pairs])
        records.append(record)
    return {"warnings": warnings, "contenders": records}


def _side(record: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if record is None:
        return None
    return {key: record[key] for key in ("error", *SIDE) if key in record}


def comparison_table(compared: Mapping[str, Any]) -> Table:
    """The table of ``compare``."""
    rows = []
    for record in compared["contenders"]:
        ratio = f"{record['ratio_total']:.2f} (totals)" if "ratio_total" in record else "-"
        if record.get("ratio_quartiles"):
            ratio = quartiles_cell(record["ratio_quartiles"])
        pairs = [_cell(record[side], key) for key in SIDE[1:] for side in "ab"]
        rows.append([record["name"], *(_cell(record[side], SIDE[0], 1) for side in "ab"), ratio, *pairs])
    titles = [f"{side}\n{what}" for what in ("speedup", "mean acceptance\nlength", *CALL_TITLES) for side in "AB"]
    return Table(["contender", "A\ntokens/s", "B\ntokens/s", "B / A\n(quartiles)", *titles], rows)


def _cell(side: Mapping[str, Any] | None, key: str, digits: int = 2) -> str:
    if side is None:
        return "absent"
    if "error" in side:
        return "error"
    value = side.get(key)
    return decimal(value[1] if isinstance(value, list) else value, digits)
