"""Write the results part of docs/applications.md from the newest application result of each task and model.

python research/applications_page.py            # write
python research/applications_page.py --check    # write nothing; exit 1 and name every file that would change
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anabranch.bench.summary import CALL_TITLES, call_cells
from anabranch.support.table import percent, quartiles_cell, signed_percent
from benchmark_tables import command_line, machine_line, table
from generated import ROOT, Result, between, results, write_or_check

PAGE = "docs/applications.md"
START, END = "<!-- results: research/applications_page.py -->", "<!-- end of results -->"
LED = ", led"  # behind a 4-bit copy, which drafts hardly faster; the file has these rows
DEFAULT = "default"
TITLES = {"sql": "Text to SQL", "e2e": "Restaurant descriptions", "dialogsum": "Summaries of dialogues"}


def newest() -> dict[str, Result]:
    """The newest result of each task and model, by title."""
    by_date = sorted(results("application-*.json").values(), key=lambda each: str(each["environment"]["date"]))
    latest = {title_of(result): result for result in by_date}
    order = list(TITLES.values())
    return dict(sorted(latest.items(), key=lambda item: (*(item[0] != title for title in order), item[0])))


def title_of(result: Result) -> str:
    """The title of a result's section: the task, and the model if it is not the default one."""
    name, model = result["task"]["name"], model_of(result)
    return TITLES.get(name, name) + ("" if model == DEFAULT else f", {model}")


def model_of(result: Result) -> str:
    return str(result.get("model", DEFAULT)).removesuffix(".gguf")


def section(title: str, result: Result) -> list[str]:
    """The section of one task and model."""
    task = result["task"]
    return [
        f"### {title}",
        "",
        f"{machine_line(result)} {result['rows']} of {task['of']:,} rows of the split {task['split']}, greedy, at most "
        f"{result['max_new_tokens']} new tokens.",
        "",
        command_line(result),
        "",
        *decoded(result),
        *(scored(result) if "scored" in result else []),
    ]


def scored(result: Result) -> list[str]:
    """Quality of every target on more rows."""
    of = result["scored"]
    titles = ["target"]
    for title in result["columns"].values():
        titles += [f"{title}, %", "difference from `lora`"]
    lines = []
    for one in of["targets"]:
        cells = [f"`{one['target']}`"]
        for key in result["columns"]:
            cells += [percent(one["quality"][key]), signed_percent(one["difference"][key])]
        lines.append(cells)
    text = f"Quality of plain decoding on {of['rows']:,} rows, decoded {of['decoded_at_a_time']} at a time:"
    metric = next(iter(result["columns"].values()))
    parts = [
        f"By {metric}, `{one['target']}` alone has {one['right_alone']:,} rows right and `lora` alone "
        f"{one['wrong_alone']:,}."
        for one in of["targets"]
        if one["target"] != "untuned" and one.get("right_alone", 0) + one.get("wrong_alone", 0)
    ]
    return [text, "", *table(titles, lines), *([*parts, ""] if parts else [])]


def decoded(result: Result) -> list[str]:
    """Quality and speed of every model and drafter."""
    titles = ["model", "drafter"]
    for title in result["columns"].values():
        titles += [f"{title}, %", "difference"]
    titles += [
        "equal texts",
        "mean acceptance length",
        *CALL_TITLES,
        "over its own plain decoding",
        "over plain LoRA's",
    ]
    lines = []
    for one in result["contenders"]:
        if one["name"].endswith(LED):
            continue
        cells = [f"`{one['result']}`", f"`{one['name']}`"]
        if "error" in one:
            lines.append([*cells, one["error"]])
            continue
        for key in result["columns"]:
            cells += [percent(one["quality"][key]), signed_percent(one["difference"][key])]
        length = one["mean_acceptance_length"]
        cells += [f"{one['equal_texts']}/{result['rows']}", "-" if length is None else f"{length:.2f}"]
        cells += call_cells(one)
        cells += [quartiles_cell(one["own_speedup_quartiles"]), quartiles_cell(one["speedup_quartiles"])]
        lines.append(cells)
    return table(titles, lines, left=2)


def trained(latest: Mapping[str, Result]) -> list[str]:
    """The table of training costs, of all tasks of a model."""
    forms: dict[str, dict[str, Mapping[str, Any]]] = {}
    for name, result in latest.items():
        for one in result["forms"]:
            forms.setdefault(one["form"], {})[name] = one
    lines = []
    for form, tasks in forms.items():
        one = next(iter(tasks.values()))
        sizes = [f"{one['extra_parameters']:,}", f"{one['bytes'] / 1e6:.1f}", f"{one['lora_bytes'] / 1e6:.1f}"]
        costs = [
            f"{t['examples']:,}, {t['steps']:,}, {t['seconds'] / 60:.0f}" if (t := tasks.get(n)) else "-"
            for n in latest
        ]
        lines.append([f"`{form}`", *sizes, *costs])
    titles = [f"{title}: rows, steps, minutes" for title in latest]
    return table(("form", "extra parameters", "MB", "MB of LoRA", *titles), lines)


def outputs() -> dict[str, str]:
    """The page, with its results part as the newest results say."""
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    latest = newest()
    models: dict[str, dict[str, Result]] = {}
    for title, result in latest.items():
        models.setdefault(model_of(result), {})[title] = result
    lines = ["### Training", ""]
    for model, own in models.items():
        lines += [f"Forms of {'the default model' if model == DEFAULT else model}:", "", *trained(own)]
    lines += [line for name, result in latest.items() for line in section(name, result)]
    return {PAGE: between(PAGE, text, (START, END), lines)}


if __name__ == "__main__":
    write_or_check(__file__, __doc__, outputs)
