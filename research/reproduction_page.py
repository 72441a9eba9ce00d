"""Write docs/reproduction.md and its figures from the newest benchmarks/study-*.json of each study.

python research/reproduction_page.py            # write
python research/reproduction_page.py --check    # write nothing; exit 1 and name every file that would change

A figure is named after its result and drawn once: delete it to have it drawn again, and delete those of older results.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmark_tables import machine_line, table
from generated import PICTURES, ROOT, Result, newest, write_or_check
from paper_items import ITEMS, Item
from studies import STUDIES
from studies.base import Study
from studies.draw import draw

PAGE = "docs/reproduction.md"
MISSING = "not run yet"
Named = tuple[str, Result]

INTRODUCTION = """# The papers' studies

The figures and tables of the Speculative Streaming paper (ACL), of Leviathan et al. and of Spector and Ré, measured at
a size that two CPU cores can do, on the default model unless a row says otherwise. `python research/study.py --list`
lists the studies, one command runs each, and `python research/reproduction_page.py` writes this page from the newest
results in `benchmarks/`. DIR is a folder with the data sets. Where the papers print no numbers, their finding is given
in words. Where a chart shows the numbers, the table is left to the result file.

The first version of the paper, v1 (arXiv 2402.11131), shows the same in other places: its figures 1, 2 and 4 to 12 are
the ACL paper's figures 1, 3, 20, 10, 11, 14, 15, 12, 17, 22 and 23, its tables 1 and 2 tables 3 and 5; `paper-v1` in
[applications](applications.md#results) is its form. Its figure 3, arithmetic intensity, is counted here as figure 17.

## Every table and figure

*Reproduced*: ours shows the same, at our size. *Differs*: it does not, for the reason stated, with its measurement.
*Inconclusive*: our measurement decides nothing. *Needs a GPU*: no smaller form of it says anything.
""".splitlines()


def index(results: Mapping[str, Named | None]) -> list[str]:
    """A row per table and figure of the papers."""
    rows = [(f"*{item.verdict}*", *item[:3], item.why) for item in judged(results)]
    return table(("verdict", "paper", "item", "what it shows", "why, and where"), rows, left=5)


def judged(results: Mapping[str, Named | None]) -> list[Item]:
    """The items, of which those that rest on a study without a result are inconclusive."""
    missing = [f"(#{anchor(study)})" for study in STUDIES if results[study.name] is None]
    return [
        item._replace(verdict="inconclusive", why=f"{MISSING}: {item.why}")
        if any(link in item.why for link in missing)
        else item
        for item in ITEMS
    ]


def anchor(study: Study) -> str:
    """The heading's anchor."""
    return "".join(c for c in study.title.lower().replace(" ", "-") if c.isalnum() or c == "-")


def section(study: Study, latest: Named | None) -> list[str]:
    """The lines of one study."""
    paper = f"The paper: {study.paper}. What differs: {study.differs}. Command: `{study.shown_command}`."
    if latest is None:
        return [f"## {study.title}", "", f"**{MISSING.capitalize()}.** {study.papers}. {study.measures} {paper}", ""]
    stem, result = latest
    titles, rows = study.table(result)
    tabled = study.chart is None or study.whole
    ours = "" if tabled else f"Ours: {study.ours(result)}. "
    lines = [f"## {study.title}", "", f"{study.papers}. {study.measures} {machine_line(result)}", "", ours + paper, ""]
    if tabled:
        lines += table(titles, rows)
    if study.chart is not None:
        lines += [f"![{study.chart(result).title}](pictures/{stem}.svg)", ""]
    return lines


def outputs() -> dict[str, str]:
    """The text of every file that this script writes, by its path from the root."""
    results = {study.name: newest(study.pattern) for study in STUDIES}
    lines = [*INTRODUCTION, "", *index(results)]
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
