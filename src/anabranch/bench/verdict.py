"""Summary of a comparison: a sentence about the fastest contender, and a table of five columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anabranch.bench.cells import decimal, quartiles_cell
from anabranch.support.table import Table

__all__ = ["short_table", "verdict"]

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


def short_table(contenders: Sequence[Record], width: int | None = None) -> Table:
    """Five columns for every contender that was measured; long names are broken to fit a terminal of ``width``."""
    rows = [_short_row(record) for record in contenders if "error" not in record]
    if width is not None:
        columns = zip(TITLES, *rows, strict=True)
        widths = [1 + max(len(line) for cell in cells for line in cell.split("\n")) for cells in columns]
        room = max(SHORTEST, width - sum(widths[1:]))
        rows = [[_broken(name, room), *cells] for name, *cells in rows]
    return Table(TITLES, rows)


def _short_row(record: Record) -> list[str]:
    return [
        str(record["name"]),
        f"{record['tokens_per_second']:.1f}",
        quartiles_cell(record.get("speedup_quartiles")),
        decimal(record.get("mean_acceptance_length")),
        f"{record['equal_outputs']}/{record['prompts']}" if "equal_outputs" in record else "-",
    ]


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
