"""Write the results part of docs/comparison.md and its chart from the newest benchmarks/methods-*.json.

python research/comparison_page.py            # write
python research/comparison_page.py --check    # write nothing; exit 1 and name every file that would change
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from benchmark_tables import table
from comparison_tables import (
    acceptance,
    costs,
    dots,
    failures,
    heading,
    speeds,
    summary,
    trained,
)
from generated import ROOT, write_or_check
from paper_parameters import MODELS, parameter_rows
from speed_chart import speed_chart

BENCHMARKS = ROOT / "benchmarks"
PAGE, PICTURES = "docs/comparison.md", "docs/pictures"
START, END = "<!-- results: research/comparison_page.py -->", "<!-- end of results -->"
PARAMETERS = "<!-- parameters: research/comparison_page.py -->", "<!-- end of parameters -->"
Result = Mapping[str, Any]
SECTIONS: tuple[tuple[str, str, Callable[[Result], list[str]]], ...] = (
    ("Summary", "", summary),
    ("Training", "", trained),
    ("Mean acceptance length by task", "", acceptance),
    (
        "Times plain decoding by task",
        "Tokens per second over plain decoding's, of all prompts of a task.",
        speeds,
    ),
    ("Cost of a step", "One prompt at a time; medians over prompts.", costs),
    ("Not measured", "", failures),
)


def newest() -> tuple[str, Result] | None:
    """The name and content of the newest result, by the date in it."""
    found = [(path.stem, json.loads(path.read_text(encoding="utf-8"))) for path in BENCHMARKS.glob("methods-*.json")]
    return max(found, key=lambda each: (each[1]["environment"]["date"], each[0]), default=None)


def results(stem: str, result: Result) -> list[str]:
    """The lines between ``START`` and ``END``."""
    lines = [*heading(result), f"![Mean acceptance length against the cost of a step](pictures/{stem}.svg)", ""]
    for title, sentence, tables in SECTIONS:
        if found := tables(result):
            lines += [f"### {title}", "", *([sentence, ""] if sentence else []), *found]
    return lines


def chart(result: Result) -> str:
    run = result["run"]
    caption = (
        f"{run['suite']}, {run['limit']} prompts, {run['max_new_tokens']} new tokens, greedy, {run['dtype']}, one "
        "prompt at a time; blue: trained, orange: needs no training"
    )
    shown = dots(result)
    more = "" if len(shown) < 10 else " (ten fastest methods)"
    return speed_chart(f"Mean acceptance length against the cost of a step{more}", caption, shown)


def _between(text: str, marks: tuple[str, str], lines: list[str]) -> str:
    first, last = marks
    if text.count(first) != 1 or text.count(last) != 1 or text.index(first) > text.index(last):
        raise SystemExit(f"{PAGE} must contain '{first}' and '{last}' once each, in this order")
    return text.split(first)[0] + "\n".join([first, *lines]).rstrip() + "\n\n" + last + text.split(last)[1]


def outputs() -> dict[str, str]:
    """The text of every file that this script writes, by its path from the root."""
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    parameters = table(("method", *MODELS), parameter_rows())
    text = _between(text, PARAMETERS, parameters)
    found = newest()
    if found is None:
        return {PAGE: _between(text, (START, END), ["No result has been committed yet."])}
    stem, result = found
    return {PAGE: _between(text, (START, END), results(stem, result)), f"{PICTURES}/{stem}.svg": chart(result)}


def main() -> None:
    write_or_check("comparison_page.py", (__doc__ or "").splitlines()[0], outputs)


if __name__ == "__main__":
    main()
