"""The table that results are printed as."""

from __future__ import annotations

import io

from rich.console import Console

from anabranch.support.table import Table, one_line

TABLE = Table(("contender", "tokens/\nstep", "accept-\nance", "calls\n/token"), [("a|b<c>", 2, "0.5", "[x]")], "Rates")


def test_markdown_has_titles_of_one_line_and_escaped_bars() -> None:
    assert TABLE.markdown() == [
        "| contender | tokens/step | acceptance | calls/token |",
        "|---|---:|---:|---:|",
        "| a\\|b<c> | 2 | 0.5 | [x] |",
        "",
    ]
    assert one_line("mean over\nprompts") == "mean over prompts"


def test_html_is_escaped() -> None:
    assert TABLE.html() == (
        "<table><caption>Rates</caption>\n<thead><tr><th>contender</th><th>tokens/<br>step</th><th>accept-<br>ance</th>"
        "<th>calls<br>/token</th></tr></thead>\n"
        "<tbody>\n<tr><td>a|b&lt;c&gt;</td><td>2</td><td>0.5</td><td>[x]</td></tr></tbody></table>"
    )
    assert "<caption>" not in Table(("x",), []).html()


def test_csv_and_terminal() -> None:
    assert Table(("a", "b"), [("x,y", 1)]).csv() == 'a,b\n"x,y",1\n'
    console = Console(width=60, file=io.StringIO())
    console.print(TABLE.terminal())
    assert "[x]" in console.file.getvalue(), "brackets are no markup"  # type: ignore[attr-defined]
