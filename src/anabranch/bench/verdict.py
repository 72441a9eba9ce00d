"""Summary of a comparison: a sentence about the fastest contender, and a table of five columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from anabranch.bench.report import plain_table

__all__ = ["TITLES", "short_rows", "short_table", "verdict"]

TITLES = ("contender", "tokens/s", "speedup\n(quartiles)", "mean accept-\nance length", "equal")
SHORTEST = 20  # columns for a contender's name, which is broken at its punctuation if it is longer
PLAIN = "plain decoding"

Record = Mapping[str, Any]


def verdict(contenders: Sequence[Record]) -> str:
    """One sentence: which contender is the fastest, and by how much."""
    good = [record for record in contenders if "error" not in record]
    if not good:
        return "no contender could be measured"
    ranked = sorted(good, key=lambda record: -float(record["tokens_per_second"]))
    best, drafting = ranked[0], [record for record in ranked if "speedup_quartiles" in record and not _plain(record)]
    if not _plain(best):
        return f"{best['name']} is the fastest: {_rate(best)}{_against(best)}{_differing(best)}"
    fastest = f"{_described(best)} is the fastest: {_rate(best)}"
    if not drafting:
        return fastest if len(good) > 1 else f"{_described(best)} reaches {_rate(best)}"
    return f"{fastest}; the best drafter is {drafting[0]['name']} with {_rate(drafting[0])}{_against(drafting[0])}"


def short_rows(contenders: Sequence[Record]) -> list[list[str]]:
    """The cells of ``TITLES`` of every contender that was measured."""
    rows = []
    for record in contenders:
        if "error" in record:
            continue
        spread, length = record.get("speedup_quartiles"), record.get("mean_acceptance_length")
        rows.append(
            [
                str(record["name"]),
                f"{record['tokens_per_second']:.1f}",
                "-" if spread is None else "{1:.2f} ({0:.2f}-{2:.2f})".format(*spread),
                "-" if length is None else f"{length:.2f}",
                f"{record['equal_outputs']}/{record['prompts']}" if "equal_outputs" in record else "-",
            ]
        )
    return rows


def short_table(contenders: Sequence[Record], width: int) -> Table:
    """The five columns for a terminal of ``width`` columns; long names are broken after their punctuation."""
    rows, table = short_rows(contenders), plain_table()
    taken = [
        max(len(line) for cell in cells for line in cell.split("\n")) + 1 for cells in zip(TITLES, *rows, strict=True)
    ]
    room = max(SHORTEST, width - sum(taken[1:]))
    for place, title in enumerate(TITLES):
        table.add_column(title, justify="left" if place == 0 else "right")
    for name, *cells in rows:
        table.add_row(Text(_broken(name, room)), *cells)
    return table


def _broken(name: str, room: int) -> str:
    """A name in lines of at most ``room`` characters, broken after a plus sign, a comma or a colon where possible."""
    lines, rest = [], name
    while len(rest) > room:
        at = max(rest.rfind(sign, 0, room) for sign in "+,:") + 1
        at = at or room
        lines.append(rest[:at])
        rest = rest[at:]
    return "\n".join([*lines, rest])


def _plain(record: Record) -> bool:
    return bool(record.get("spec", record["name"]) == "none")


def _described(record: Record) -> str:
    weights = record.get("weights", "none")
    return PLAIN if weights == "none" else f"{PLAIN} with {weights} weights"


def _rate(record: Record) -> str:
    return f"{record['tokens_per_second']:.1f} tokens/s"


def _against(record: Record) -> str:
    spread = record.get("speedup_quartiles")
    if spread is None:
        return ""
    low, middle, high = spread
    return f", {middle:.2f} times {_described(record)} (quartiles {low:.2f} to {high:.2f})"


def _differing(record: Record) -> str:
    if "equal_outputs" not in record or record["equal_outputs"] == record["prompts"]:
        return ""
    differing = record["prompts"] - record["equal_outputs"]
    return f"; {differing} of {record['prompts']} outputs differ from it ('anabranch certify' tells why)"
