"""Write the results of docs/comparison.md, and a chart, from benchmarks/methods-*.json.

The page begins with the results of targets of 0.5 billion parameters or more (methods-qwen*), two cores before a GPU
and the newest first. Those of the default model (the other methods-*) follow.

python research/comparison_page.py            # write
python research/comparison_page.py --check    # write nothing; exit 1 and name every file that would change
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import by_target
import larger_targets
from benchmark_tables import table
from comparison_tables import (
    acceptance,
    costs,
    depths,
    dots,
    failures,
    heading,
    in_order,
    ranks,
    sampled_speeds,
    speeds,
    summary,
)
from generated import PICTURES, ROOT, Result, between, write_or_check
from generated import results as stored
from paper_parameters import MODELS, parameter_rows
from speed_chart import speed_chart

PAGE = "docs/comparison.md"
RESULTS = "<!-- results: research/comparison_page.py -->", "<!-- end of results -->"
DEFAULT = "<!-- default: research/comparison_page.py -->", "<!-- end of default -->"
TARGETS = "<!-- targets: research/comparison_page.py -->", "<!-- end of targets -->"
LARGER = "<!-- larger: research/comparison_page.py -->", "<!-- end of larger -->"
PARAMETERS = "<!-- parameters: research/comparison_page.py -->", "<!-- end of parameters -->"
SECTIONS: tuple[tuple[str, str, Callable[[Result], list[str]]], ...] = (
    ("Summary", "", summary),
    ("Mean acceptance length by task", "", acceptance),
    (
        "Acceptance by depth",
        "Of the steps with a draft, the percentage that accepted at least so many of its tokens; the largest drafts.",
        depths,
    ),
    ("Times plain decoding by task", "", speeds),
    ("Times plain decoding by task, at temperature 1", "", sampled_speeds),
    ("Cost of a step", "One prompt at a time; medians over prompts.", costs),
    ("Where the papers rank a method higher", "", ranks),
    ("Not measured", "", failures),
)


def results(larger: Mapping[str, Result]) -> list[str]:
    """One section for each result of a larger target."""
    lines = []
    for stem, result in larger.items():
        model, device = result["run"]["model"].removesuffix(".gguf"), result["environment"]["device"]
        where = f"two cores, {result['environment']['kernels']}" if device == "cpu" else device
        lines += [f"### {model}, on {where}", "", *heading(result)]
        if device == "cpu":
            lines += [f"![Mean acceptance length against the cost of a step](pictures/{stem}.svg)", ""]
        lines += sections(result, "####")
    return lines


def default(results: Mapping[str, Result]) -> list[str]:
    """The results of the default model, the newest first."""
    lines = []
    for _, result in in_order(results):
        title = f"{result['environment']['date']}, {result['environment']['kernels']}"
        lines += [f"### {title}", "", *heading(result), *sections(result, "####")]
    return lines


def sections(result: Result, level: str) -> list[str]:
    """The tables, each under a heading that begins with ``level``."""
    lines = []
    for title, sentence, tables in SECTIONS:
        if found := tables(result):
            lines += [f"{level} {title}", "", *([sentence, ""] if sentence else []), *found]
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
    text = between(PAGE, text, LARGER, larger_targets.lines())
    every = stored("methods-*.json")
    small = {stem: each for stem, each in every.items() if "-qwen" not in stem}
    text = between(PAGE, text, DEFAULT, default(small))
    larger = dict(in_order({stem: each for stem, each in every.items() if "-qwen" in stem}))
    text = between(PAGE, text, TARGETS, by_target.lines(small, larger))
    files = {PAGE: between(PAGE, text, RESULTS, results(larger))}
    for stem, result in larger.items():
        if result["environment"]["device"] == "cpu":
            files[f"{PICTURES}/{stem}.svg"] = chart(result)
    return files


if __name__ == "__main__":
    write_or_check(__file__, __doc__, outputs)
