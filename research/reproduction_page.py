"""Write docs/reproduction.md and its figures from the newest benchmarks/study-*.json of each study.

python research/reproduction_page.py            # write
python research/reproduction_page.py --check    # write nothing; exit 1 and name every file that would change

A figure is named after its result and drawn once: delete it to have it drawn again, and delete those of older results.
"""

from __future__ import annotations

from collections.abc import Mapping

from anabranch.analysis.theory import expected_operations, expected_tokens, optimal_gamma, speedup
from benchmark_tables import machine_line, table
from generated import PICTURES, ROOT, Result, newest, write_or_check
from paper_items import ITEMS, Item, nothing
from paper_values import scored
from studies import STUDIES
from studies.base import Study
from studies.draw import draw

PAGE = "docs/reproduction.md"
MISSING = "not run yet"
Named = tuple[str, Result]

INTRODUCTION = """# The papers' studies

The figures and tables of the Speculative Streaming paper (ACL, and its first version v1, arXiv 2402.11131), of
Leviathan et al. and of Spector and Ré, measured at a size that two CPU cores can do, on the default model unless a row
says otherwise. `python research/study.py --list` lists the studies, and one command runs each. A study of several parts
that was stopped continues with the next part when its command is repeated. `python research/reproduction_page.py`
writes this page from the newest results in `benchmarks/`. DIR is a folder with the data sets. Where the papers print
no numbers, their finding is given in words. Where a chart shows the numbers, some tables are left to the result files.

What was compared: the text of the ACL submission, the text of v1, and summaries of Leviathan et al. (arXiv 2211.17192)
and of Spector and Ré (arXiv 2308.04623), all without the pictures. A value that only a picture or the full text of the
last two shows is not among *theirs*.

## Every table and figure

*Reproduced*: ours shows the same, at our size. *Differs*: it does not, for the reason stated, with its measurement.
*Inconclusive*: our measurement decides nothing. *Needs a GPU*: no smaller form of it says anything. Tokens are those
of a pass of the target, and x is times plain decoding. A dash: the paper's text has no numbers, or nothing is measured.
An item of v1 stands with the ACL item of the same content; where its values differ, the row says so.
""".splitlines()


def index(results: Mapping[str, Named | None]) -> list[str]:
    """A row per table and figure of the papers."""
    rows = []
    for item in judged(results):
        number = f"{item.number}; v1 {item.v1}" if item.v1 else item.number
        why = f"{item.why} ([more](#{anchor(heading(item))}))" if item.note else item.why
        rows.append((f"*{item.verdict}*", item.paper, number, item.shows, item.theirs, item.ours(), why))
    return table(("verdict", "paper", "item", "what it shows", "theirs", "ours", "why, and where"), rows, left=7)


def judged(results: Mapping[str, Named | None]) -> list[Item]:
    """The items, of which those that rest on a study without a result are inconclusive."""
    missing = [f"(#{anchor(study.title)})" for study in STUDIES if results[study.name] is None]
    return [
        item._replace(verdict="inconclusive", why=f"{MISSING}: {item.why}", ours=nothing)
        if any(link in item.why for link in missing)
        else item
        for item in ITEMS
    ]


def heading(item: Item) -> str:
    """The title of an item's note."""
    return f"{item.paper} {item.number}"


def notes() -> list[str]:
    """The longer texts on single items."""
    lines = ["## Notes", ""]
    for item in ITEMS:
        if item.note:
            lines += [f"### {heading(item)}", "", *item.note.splitlines(), ""]
    return lines


def example() -> list[str]:
    """A row of SQL that shared streams alone have right (ACL figure 7)."""
    (paper,) = [each for each in scored()["targets"] if each["target"] == "paper"]
    texts = paper["example"]
    code = [f"-- {line}" for line in texts["prompt"].partition("\n\n")[2].splitlines()]
    for name, key in SHOWN.items():
        code += ["", f"-- {name}", texts[key]]
    return [
        "## A text where seeing the future helps",
        "",
        f"ACL figure 7. Row {texts['row']} of the test split, which the shared form of the paper has right and plain "
        "LoRA has not:",
        "",
        *("```sql", *code, "```", ""),
    ]


SHOWN = {"reference": "reference", "plain LoRA": "lora", "shared streams": "paper"}
ALPHAS, GAMMAS, COSTS = (0.5, 0.6, 0.7, 0.8, 0.9), (2, 3, 5, 7, 10), (0.01, 0.02, 0.05, 0.1)


def closed_forms() -> list[str]:
    """The values of Leviathan et al.'s table 1 and figures 2 to 4, by our formulas."""
    titles = ["alpha"]
    titles += [f"tokens, gamma {gamma} (operations)" for gamma in GAMMAS]
    titles += [f"best gamma (speedup), c {c}" for c in COSTS]
    rows = []
    for alpha in ALPHAS:
        row = [f"{alpha}"]
        row += [f"{expected_tokens(alpha, gamma):.2f} ({expected_operations(alpha, gamma, 0):.2f})" for gamma in GAMMAS]
        best = {c: optimal_gamma(alpha, c) for c in COSTS}
        rows.append([*row, *(f"{gamma} ({speedup(alpha, gamma, c):.2f})" for c, gamma in best.items())])
    return [
        "## Closed forms of Leviathan et al.",
        "",
        "Leviathan et al. table 1 and figures 2 to 4, computed by `anabranch.analysis.theory` "
        "([formulas](theory.md#closed-forms)). Figure 2 is the expected tokens of a pass (equation 1). With c = 0 they "
        "are the speedup of table 1 and figure 4, whose operations over plain decoding's (theorem 3.11) stand in "
        "brackets. Figure 3 is the gamma with the largest speedup (theorem 3.8). `research/theory_figures.py` draws "
        "the predictions for T5-XXL, but not these curves.",
        "",
        *table(titles, rows),
    ]


def anchor(title: str) -> str:
    """The anchor of a heading."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c == "-")


COUNTS = {"prompts": "prompts", "passages": "passages", "texts": "texts", "limit": "prompts"}


def sample(study: Study, result: Result) -> str:
    """A sentence on the number of texts of a result, as far as it has any."""
    if "task" in result:
        return f"{result['task']['rows']:,} of {result['task']['of']:,} test rows. "
    key = next((key for key in COUNTS if key in result), "")
    if not key or (key == "limit" and not study.suite):
        return ""
    suite = f" of `{result['suite']}`" if study.suite else ""
    new = f", {result['new_tokens']} new tokens" if "new_tokens" in result else ""
    return f"{result[key]:,} {COUNTS[key] if result[key] > 1 else COUNTS[key][:-1]}{suite}{new}. "


def section(study: Study, latest: Named | None) -> list[str]:
    """The lines of one study."""
    paper = f"The paper: {study.paper}. What differs: {study.differs}. Command: `{study.shown_command}`."
    if latest is None:
        return [f"## {study.title}", "", f"**{MISSING.capitalize()}.** {study.papers}. {study.measures} {paper}", ""]
    stem, result = latest
    titles, rows = study.table(result)
    tabled = study.chart is None or study.whole
    measured = f"{study.papers}. {study.measures} {sample(study, result)}{machine_line(result)}"
    lines = [f"## {study.title}", "", measured, "", f"Ours: {study.ours(result)}. {paper}", ""]
    if tabled:
        lines += table(titles, rows)
    if study.chart is not None:
        lines += [f"![{study.chart(result).title}](pictures/{stem}.svg)", ""]
    return lines


def outputs() -> dict[str, str]:
    """The text of every file that this script writes, by its path from the root."""
    results = {study.name: newest(study.pattern) for study in STUDIES}
    lines = [*INTRODUCTION, "", *index(results), *notes(), *example(), *closed_forms()]
    files: dict[str, str] = {}
    for study in STUDIES:
        latest = results[study.name]
        lines += section(study, latest)
        if latest is not None and study.chart is not None:
            name = f"{PICTURES}/{latest[0]}.svg"
            path = ROOT / name
            files[name] = path.read_text(encoding="utf-8") if path.is_file() else draw(study.chart(latest[1]))
    return {PAGE: "\n".join(lines).rstrip() + "\n", **files}


if __name__ == "__main__":
    write_or_check(__file__, __doc__, outputs)
