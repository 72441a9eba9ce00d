"""Write the results of docs/comparison.md, and a chart, from benchmarks/methods-*.json and literal-*.json.

The page's results are the newest of the default model (methods-epyc-*); those of larger targets (methods-qwen*) follow,
one for each kind of machine.

python research/comparison_page.py            # write
python research/comparison_page.py --check    # write nothing; exit 1 and name every file that would change
"""

from __future__ import annotations

from collections.abc import Callable

import larger_targets
from benchmark_tables import table
from comparison_tables import (
    acceptance,
    costs,
    dots,
    failures,
    heading,
    ranks,
    speeds,
    summary,
)
from generated import PICTURES, ROOT, Result, between, newest, write_or_check
from generated import results as stored
from paper_parameters import MODELS, parameter_rows
from speed_chart import speed_chart

PAGE = "docs/comparison.md"
START, END = "<!-- results: research/comparison_page.py -->", "<!-- end of results -->"
LITERAL = "<!-- literal: research/comparison_page.py -->", "<!-- end of literal -->"
LARGER = "<!-- larger: research/comparison_page.py -->", "<!-- end of larger -->"
PARAMETERS = "<!-- parameters: research/comparison_page.py -->", "<!-- end of parameters -->"
SECTIONS: tuple[tuple[str, str, Callable[[Result], list[str]]], ...] = (
    ("Summary", "", summary),
    ("Mean acceptance length by task", "", acceptance),
    (
        "Times plain decoding by task",
        "Tokens per second over plain decoding's, of all prompts of a task; in brackets, where the result has rates by "
        "prompt, the middle 95 % over resampled prompts (bootstrap).",
        speeds,
    ),
    ("Cost of a step", "One prompt at a time; medians over prompts.", costs),
    ("Where the papers rank a method higher", "", ranks),
    ("Not measured", "", failures),
)


def results(stem: str, result: Result) -> list[str]:
    """The lines between ``START`` and ``END``."""
    picture = f"![Mean acceptance length against the cost of a step](pictures/{stem}.svg)"
    return [*heading(result), picture, "", *sections(result, "###")]


def sections(result: Result, level: str) -> list[str]:
    """The tables, each under a heading that begins with ``level``."""
    lines = []
    for title, sentence, tables in SECTIONS:
        if found := tables(result):
            lines += [f"{level} {title}", "", *([sentence, ""] if sentence else []), *found]
    return lines


def literal() -> list[str]:
    """The lines between the marks ``LITERAL``: the papers' literal forms, which are trained by name."""
    latest = newest("literal-*.json")
    if latest is None:
        return ["Not run yet.", ""]
    return [*heading(latest[1]), *sections(latest[1], "### Literal forms:")]


def learned() -> list[str]:
    """The same tables for methods that were trained for larger targets, one section a result."""
    lines = []
    for result in stored("methods-qwen*.json").values():
        model, device = result["run"]["model"].removesuffix(".gguf"), result["environment"]["device"]
        lines += [f"### Methods on {model}, on {'two cores' if device == 'cpu' else device}", ""]
        lines += [*heading(result), *sections(result, "####")]
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


def outputs() -> dict[str, str]:
    """The text of every file that this script writes, by its path from the root."""
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    text = between(PAGE, text, PARAMETERS, table(("method", *MODELS), parameter_rows()))
    text = between(PAGE, text, LITERAL, literal())
    text = between(PAGE, text, LARGER, [*larger_targets.lines(), *learned()])
    latest = newest("methods-epyc-*.json")
    if latest is None:
        return {PAGE: between(PAGE, text, (START, END), ["No result has been committed yet.", ""])}
    stem, result = latest
    return {PAGE: between(PAGE, text, (START, END), results(stem, result)), f"{PICTURES}/{stem}.svg": chart(result)}


if __name__ == "__main__":
    write_or_check(__file__, __doc__, outputs)
