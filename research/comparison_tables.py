"""The tables of docs/comparison.md, from a result of ``research/compare_methods.py``; each is a list of lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from anabranch.bench.summary import CALL_TITLES, call_cells
from benchmark_tables import command_line, machine_line, table
from intervals import task_cell
from speed_chart import Dot

__all__ = [
    "acceptance",
    "alone",
    "by_depth",
    "costs",
    "depths",
    "dots",
    "failures",
    "heading",
    "in_order",
    "largest",
    "methods",
    "minutes",
    "newest_of_each",
    "ranks",
    "sampled_speeds",
    "speeds",
    "summary",
]

Result = Mapping[str, Any]
Method = Mapping[str, Any]
Record = Mapping[str, Any]
FORMATS = {"none": "bf16", "int8": "int8", "int4": "int4", "auto": "as stored"}
LOAD, PLAIN, REJECTION = "auto", "none", "rejection"
MOST = 10  # dots of the chart
DEPTHS = 8  # columns of acceptance by depth; longer drafts are those of lookups
# seconds of the trainings that an adapter started from, by its SHA-256 (docs/adapter.md)
EARLIER = {"d5c9afd60fead4a6925e62861eb761de53b68eb1d11e456c5b0707812230571d": 53 + 159}


class Printed(NamedTuple):
    """A method's mean acceptance length in a paper, and why ours is below it."""

    length: float
    source: str
    reason: str


PRINTED = {
    **dict.fromkeys(
        ("eagle", "eagle-1:tree=static"),
        Printed(
            *(3.94, "ACL table 6 (Vicuna-7B)"),
            "Its layer and its head run once for each depth: with this target of 30 narrow layers that costs more than "
            "half a pass, with one of 7B about a thirtieth of one. Its training gains less than 0.02 in the last "
            "two evaluations (see above). What other texts or a larger target would give, this run does not tell.",
        ),
    ),
    "paper-lossless:placement=ride": Printed(
        *(3.52, "ACL table 6 (Vicuna-7B)"),
        "Its training is level. Each draft token is scored without the tokens above it; of the parts that were "
        "[changed alone](reproduction.md#the-papers-lossless-form-with-one-part-changed), conditioning the scores on "
        "them gains the most. What the literal form reaches on a target of 7B, this run does not tell.",
    ),
    "hydra-paper": Printed(
        *(3.70, "ACL table 6 (Vicuna-7B)"),
        "Its training still gains a little at its end (see above). What other texts or a larger target would give, "
        "this run does not tell.",
    ),
    "hydra": Printed(
        *(3.70, "ACL table 6 (Vicuna-7B)"),
        "Its length still rises at the end of its training (see above). How far more completions would lengthen it, "
        "this run does not tell.",
    ),
    "medusa-paper:tree=sparse": Printed(
        *(2.67, "the ACL version (Vicuna-7B)"),
        "Further epochs on these completions bring nothing, and larger drafts bring little (see above). What other "
        "texts or a larger target would give, this run does not tell.",
    ),
    "draft_model": Printed(
        *(3.46, "ACL table 6 (Vicuna-7B)"),
        "The draft model that ships has 7 million parameters. The 0.5B that drafts for the 1.5B [exceeds their "
        "length](#from-05-to-15-billion-parameters).",
    ),
    "lookahead": Printed(
        *(2.08, "ACL table 6 (Llama-2-Chat-7B)"),
        "Its length is near theirs. Its pass has rows for a window and for guesses besides, which an A100 computes in "
        "the time that it waits for memory, and two cores do not.",
    ),
}


def heading(result: Result) -> list[str]:
    """The run and the machine in one sentence."""
    run = result["run"]
    measured = {name for method in methods(result) for name in method["parts"]}
    text = f"{machine_line(result)} {run['limit']} prompts of {run['suite']} one at a time, "
    text += f"{run['max_new_tokens']} new tokens"
    if any(name.startswith(f"{run['rows']} rows") for name in measured):
        text += f"; throughput of {run['rows_limit']} prompts, {run['rows']} at a time, {run['repeats']} repeats"
    if "certificate" in measured:
        text += f"; certified in float32 on {run['certify_limit']} prompts, {run['certify_tokens']} new tokens"
    stopped = "" if result["complete"] else " **The run was stopped before its end.**"
    return [
        f"{text}.{stopped}",
        "",
        command_line(result),
        "",
    ]


def _part(method: Method, name: str) -> list[Record]:
    """The records of a part that was measured, without those that failed."""
    found = method.get("parts", {}).get(name, [])
    return [] if isinstance(found, dict) else [record for record in found if "error" not in record]


def alone(method: Method, weights: str | None = None) -> list[Record]:
    """The records of one row: with these weights, or with the first that were measured."""
    return [record for record in _row(method, weights) if record["name"] != PLAIN]


def _row(method: Method, weights: str | None = None) -> list[Record]:
    first = next((name for name in method["parts"] if name.startswith("1 row, ")), "")
    return _part(method, first if weights is None else f"1 row, {weights}")


def _fixed(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record["name"] not in (LOAD, PLAIN, REJECTION)]


def largest(records: Sequence[Record]) -> Record | None:
    """The record of the largest node budget."""
    fixed = _fixed(records)
    return fixed[-1] if fixed else None


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _length(record: Record | None) -> str:
    return "-" if record is None else _number(record["mean_acceptance_length"])


def methods(result: Result) -> Iterator[Method]:
    """The methods of which some part was measured."""
    return (method for method in result["compared"] if "parts" in method)


def in_order(results: Mapping[str, Result]) -> list[tuple[str, Result]]:
    """Results by name: those of two cores before those of a GPU, the newest first."""

    def place(each: tuple[str, Result]) -> tuple[bool, str]:
        where = each[1]["environment"]
        return where["device"] == "cpu", where["date"]

    return sorted(results.items(), key=place, reverse=True)


def newest_of_each(results: Mapping[str, Result]) -> Iterator[tuple[str, Result, Method]]:
    """Each method from the first result ``in_order`` that has it: (name of the result, result, method)."""
    seen: set[str] = set()
    for stem, result in in_order(results):
        fresh = [method for method in methods(result) if method["name"] not in seen]
        seen.update(method["name"] for method in fresh)
        yield from ((stem, result, method) for method in fresh)


def _speed(method: Method, rows: int, weights: str, name: str | None = None) -> str:
    """The median ratio to plain decoding, and its range: of ``name``, or of what follows the load if there is that."""
    records = [r for r in _part(method, f"{_counted(rows)}, {weights}") if r["name"] != PLAIN]
    wanted = name or (LOAD if any(record["name"] == LOAD for record in records) else None)
    chosen = [record for record in records if wanted is None or record["name"] == wanted]
    if not chosen:
        return "-"
    spread = chosen[-1].get("speedup_quartiles" if rows == 1 else "ratio")
    return "-" if spread is None else f"{spread[1]:.2f} ({spread[0]:.2f}-{spread[2]:.2f})"


def _counted(rows: int) -> str:
    return f"{rows} row" if rows == 1 else f"{rows} rows"


def _verdict(method: Method) -> str:
    found = method["parts"].get("certificate", {})
    if "verdict" not in found:
        return "-"
    counts = ", ".join(f"{count['equal']}/{found['prompts']}" for count in found["rows"].values())
    return f"{found['verdict']} ({counts})"


def summary(result: Result) -> list[str]:
    """One line a method."""
    run = result["run"]
    kinds = [(rows, weights) for rows in (1, run["rows"]) for weights in run["weights"]]
    titles = ["method", "parameters", "training, min", "mean acceptance length", *CALL_TITLES, "at T = 1", "step"]
    titles += [f"{_counted(rows)}, {FORMATS[weights]}" for rows, weights in kinds]
    lines = []
    for method in methods(result):
        greedy, sampled = largest(alone(method)), largest(_part(method, "sampled"))
        cells = [f"`{method['name']}`", f"{method['facts']['extra_parameters']:,}"]
        cells += [minutes(method["facts"]), _length(greedy)]
        cells += [*call_cells(greedy or {}), _length(sampled)]
        cells += ["-" if greedy is None else _number(greedy.get("relative_step"))]
        cells += [_speed(method, rows, weights) for rows, weights in kinds]
        lines.append([*cells, _verdict(method)])
    return [*table([*titles, "equal in float32"], lines), *_sizes(result)]


def minutes(facts: Mapping[str, Any]) -> str:
    """Minutes of training; those of the last of several trainings say so, unless the others are known."""
    if "seconds" not in facts:
        return "-"
    earlier = EARLIER.get(facts["adapter"])
    last = " (the last training)" if facts.get("init") and earlier is None else ""
    return f"{_number((facts['seconds'] + (earlier or 0)) / 60, 0)}{last}"


def _sizes(result: Result) -> list[str]:
    """The sizes of datastores and tables of n-grams, or that the result does not have them."""
    sizes = []
    for method in methods(result):
        if method["method"] in ("rest", "ngram"):
            facts = method["facts"]
            size = f"{facts['tables']['tokens']:,} tokens, {facts['bytes'] / 1e6:.1f} MB" if "tables" in facts else ""
            sizes.append(f"`{method['name']}`: {size or 'not recorded'}")
    return [f"Sizes of the tables: {'; '.join(sizes)}.", ""] if sizes else []


def acceptance(result: Result) -> list[str]:
    """Mean acceptance length by task, greedy."""
    records = ((method, record) for method in methods(result) for record in _fixed(alone(method)))
    return [_behind(result), "", *_by_task(records, "mean_acceptance_length")]


def speeds(result: Result) -> list[str]:
    """Tokens/s over plain decoding's by task, with intervals by bootstrap where the result has rates by prompt."""
    caption = (
        "Tokens per second over plain decoding's, of all prompts of a task; in brackets, where the result has rates by "
        f"prompt, the middle 95 % over resampled prompts (bootstrap). {_behind(result)}"
    )
    return [caption, "", *_speeds_by_task(result, _row, result["run"].get("tasks", []))]


def sampled_speeds(result: Result) -> list[str]:
    """The same at temperature 1; nothing where that was not measured."""
    measured = [record for method in methods(result) for record in _part(method, "sampled")]
    if not measured:
        return []
    tasks = result["run"].get("sampled_tasks") or result["run"].get("tasks", [])
    caption = (
        f"As above, on {measured[0]['prompts']} prompts. Drafts are verified by matching, and those of the rows "
        "*rejection* by that rule, whose texts differ from plain decoding's."
    )
    return [caption, "", *_speeds_by_task(result, lambda method: _part(method, "sampled"), tasks, length=True)]


def _speeds_by_task(
    result: Result, part: Callable[[Method], list[Record]], tasks: Sequence[str], *, length: bool = False
) -> list[str]:
    """A row for each drafter of a part; ``length``: after its mean acceptance length. ``tasks``: of the prompts."""
    return _by_task(
        ((method, record) for method in methods(result) for record in part(method) if record["name"] != PLAIN),
        "speedup_total",
        lambda method, record, task: task_cell(record, part(method)[0], tasks, task),
        length=length,
    )


def _behind(result: Result) -> str:
    """The number of prompts of a task, in a sentence."""
    records = (record for method in methods(result) for record in alone(method))
    counts = {part["prompts"] for record in records for part in record["by_task"].values()}
    number = " to ".join(str(count) for count in sorted({min(counts, default=0), max(counts, default=0)}))
    return f"A cell of one task rests on {number} prompt{'' if number == '1' else 's'}."


def depths(result: Result) -> list[str]:
    """Acceptance by depth, greedy, with the largest node budget."""
    found = ((method["name"], largest(alone(method))) for method in methods(result))
    return by_depth([([f"`{name}`", record["name"]], record) for name, record in found if record], ("method", "draft"))


def by_depth(records: Sequence[tuple[list[str], Record]], titles: Sequence[str]) -> list[str]:
    """A row per record, which begins with the given cells; shares of the steps with a draft, in percent."""
    rows = []
    for cells, record in records:
        shares = [f"{100 * share:.0f}" for share in record["acceptance_by_depth"][:DEPTHS]]
        rows.append([*cells, *shares, *["-"] * (DEPTHS - len(shares))])
    return table([*titles, *map(str, range(1, DEPTHS + 1))], rows, left=len(titles))


def _by_task(
    records: Iterable[tuple[Method, Record]],
    key: str,
    interval: Callable[[Method, Record, str | None], str] = lambda method, record, task: "-",
    *,
    length: bool = False,
) -> list[str]:
    """A row per record. ``interval`` gives a value with its interval, "-" where there is none; no task is all."""
    tasks: list[str] = []
    lines = []
    for method, record in records:
        tasks = tasks or list(record["by_task"])
        parts = {None: record, **{task: record["by_task"].get(task, {}) for task in tasks}}
        intervals = (interval(method, record, task) for task in parts)
        cells = [
            _number(part.get(key)) if cell == "-" else cell
            for part, cell in zip(parts.values(), intervals, strict=True)
        ]
        lines.append([f"`{method['name']}`", record["name"], *([_length(record)] if length else []), *cells])
    titles = ["method", "draft", *(["mean acceptance length"] if length else [])]
    titles += ["all", *(task.replace("_", " ") for task in tasks)]
    return table(titles, lines, left=2)


def costs(result: Result) -> list[str]:
    """The parts of a step, in milliseconds and relative to a step of plain decoding."""
    weights = [each for each in result["run"]["weights"] if each in FORMATS]
    lines = []
    for method in methods(result):
        for record in _fixed(alone(method)):
            cells = [f"`{method['name']}`", record["name"]]
            for each in weights:
                same = next((r for r in alone(method, each) if r["name"] == record["name"]), {})
                cells += [f"{same[key]:.2f}" if key in same else "-" for key in ("draft_ms", "pass_ms")]
                cells.append(_number(same.get("relative_step")))
            lines.append(cells)
    titles = ("drafting, ms", "pass, ms", "step / plain step")
    columns = [f"{FORMATS[each]}: {title}" for each in weights for title in titles]
    return table(["method", "draft", *columns], lines, left=2)


def ranks(result: Result) -> list[str]:
    """A paragraph for each method that the papers rank higher: what is accepted of it here, and what a step costs.

    Their reasons are the default model's.
    """
    if result.get("run", {}).get("model", "default") != "default":
        return []
    paragraphs = []
    for method in methods(result):
        record, theirs = largest(alone(method)), PRINTED.get(method["name"])
        if theirs is None or record is None or "draft_share" not in record:
            continue
        first, second, *_ = [*record["acceptance_by_depth"], 0.0, 0.0]
        length = f"{record['mean_acceptance_length']:.2f}"
        whole = record["draft_share"] + record["pass_share"]
        paragraphs += [
            f"`{method['name']}` has {length} tokens a pass, where {theirs.source} prints "
            f"{theirs.length:.2f}: its first token is accepted in {first:.0%} of the steps, the second in "
            f"{second / max(first, 1e-9):.0%} of those. Drafting takes {record['draft_share']:.2f} plain steps and the "
            f"pass {record['pass_share']:.2f}, so it would gain from {whole:.1f} tokens on. {theirs.reason}",
            "",
        ]
    return paragraphs


def failures(result: Result) -> list[str]:
    """The table of failures, with their reasons."""
    lines = []
    for method in methods(result):
        for name, part in method["parts"].items():
            failed = [("", part)] if isinstance(part, dict) else [(record["name"], record) for record in part]
            lines += [[f"`{method['name']}`", name, who, r["error"]] for who, r in failed if "error" in r]
    return table(("method", "part", "draft", "error"), lines, left=4) if lines else []


def dots(result: Result) -> list[Dot]:
    """The fastest drafter of a fixed size for each of the ten fastest methods."""
    found = []
    for method in methods(result):
        records = [r for r in _fixed(alone(method)) if "relative_step" in r and "speedup_total" in r]
        if records:
            best = max(records, key=lambda record: float(record["speedup_total"]))
            is_trained = bool(method["facts"].get("adapter"))
            label = f"{method['name']}, {best['name']}" if best["name"] != "as given" else str(method["name"])
            dot = Dot(label, best["relative_step"], best["mean_acceptance_length"], is_trained)
            found.append((best["speedup_total"], dot))
    return [dot for _, dot in sorted(found, key=lambda each: -each[0])[:MOST]]
