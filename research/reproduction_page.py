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
MOST_ROWS = 14  # of a table beside a chart of the same numbers
Found = tuple[str, Result]

INTRODUCTION = """# The papers' studies

What figures and tables of the two Speculative Streaming papers (ACL; "v1" is arXiv 2402.11131), of Leviathan et al.
and of Spector and Ré show, measured at a size that two CPU cores can do, on the default model unless a row says
otherwise. `python research/study.py --list` lists the studies, one command runs
each, and `python research/reproduction_page.py` writes this page from the newest results in `benchmarks/`. DIR is a
folder with the data sets. Where the papers print no numbers, their finding is given in words. Long tables are left to
their charts and result files.

## Every table and figure

*Reproduced*: ours shows the same, at our size. *Differs*: it does not, for the reason stated, with its measurement.
*Inconclusive*: our measurement decides nothing. *Needs a GPU*: no smaller form of it says anything.
""".splitlines()
STUDIES_TITLE = ("## Studies", "")


def index(results: Mapping[str, Found | None]) -> list[str]:
    """A row per table and figure of the papers."""
    rows = [(f"*{item.verdict}*", *item[:3], item.why) for item in judged(results)]
    return table(("verdict", "paper", "item", "what it shows", "why, and where"), rows, left=5)


def judged(results: Mapping[str, Found | None]) -> list[Item]:
    """The items, of which those that rest on a study without a result are inconclusive."""
    missing = [f"(#{anchor(study)})" for study in STUDIES if results[study.name] is None]
    return [
        item._replace(verdict="inconclusive", why=f"{MISSING}: {item.why}")
        if any(link in item.why for link in missing)
        else item
        for item in ITEMS
    ]


def summary(results: Mapping[str, Found | None]) -> list[str]:
    """A row per study: the paper's figure, ours, the paper's, the differences, the command."""
    rows = []
    for study in STUDIES:
        found = results[study.name]
        ours = MISSING if found is None else study.ours(found[1])
        link = f"[{study.title}](#{anchor(study)})"
        rows.append((link, study.papers, ours, study.paper, study.differs, f"`{study.shown_command}`"))
    return table(("study", "paper", "ours", "the paper's", "what differs", "command"), rows, left=6)


def anchor(study: Study) -> str:
    """The heading's anchor."""
    return "".join(c for c in study.title.lower().replace(" ", "-") if c.isalnum() or c == "-")


def section(study: Study, found: Found | None) -> list[str]:
    """The lines of one study."""
    lines = [f"## {study.title}", ""]
    if found is None:
        return [*lines, f"{study.papers}. {study.measures} **{MISSING.capitalize()}.**", ""]
    stem, result = found
    titles, rows = study.table(result)
    lines += [f"{study.papers}. {study.measures} {machine_line(result)}", ""]
    if study.chart is None or study.whole or len(rows) <= MOST_ROWS:
        lines += table(titles, rows)
    if study.chart is not None:
        lines += [f"![{study.chart(result).title}](pictures/{stem}.svg)", ""]
    return lines


def outputs() -> dict[str, str]:
    """The text of every file that this script writes, by its path from the root."""
    results = {study.name: newest(study.pattern) for study in STUDIES}
    lines = [*INTRODUCTION, "", *index(results), *STUDIES_TITLE, *summary(results)]
    files: dict[str, str] = {}
    for study in STUDIES:
        found = results[study.name]
        lines += section(study, found)
        if found is not None and study.chart is not None:
            name = f"{PICTURES}/{found[0]}.svg"
            path = ROOT / name
            files[name] = path.read_text(encoding="utf-8") if path.is_file() else draw(study.chart(found[1]))
    return {PAGE: "\n".join(lines).rstrip() + "\n", **files}


if __name__ == "__main__":
    write_or_check(__file__, __doc__, outputs)
