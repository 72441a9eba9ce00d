"""Pages that scripts generate from result files: write them, or check that they are as the script would write them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
PICTURES = "docs/pictures"
Result = Mapping[str, Any]


def results(pattern: str) -> dict[str, Result]:
    """The result files that match a pattern, by name without the suffix."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(BENCHMARKS.glob(pattern))}


def newest(pattern: str, fits: Callable[[Result], bool] = lambda result: True) -> tuple[str, Result] | None:
    """The name and content of the newest result that matches a pattern and fits, by the date in it."""
    fitting = (each for each in results(pattern).items() if fits(each[1]))
    return max(fitting, key=lambda each: (each[1]["environment"]["date"], each[0]), default=None)


def between(page: str, text: str, marks: tuple[str, str], lines: Sequence[str]) -> str:
    """The text of a page with lines between two marks, each of which stands there once."""
    first, last = marks
    if text.count(first) != 1 or text.count(last) != 1 or text.index(first) > text.index(last):
        raise SystemExit(f"{page} must contain '{first}' and '{last}' once each, in this order")
    return text.split(first)[0] + "\n".join([first, *lines, last]) + text.split(last)[1]


def write_or_check(script: str, description: str | None, outputs: Callable[[], Mapping[str, str]]) -> None:
    """The main part of a script. With ``--check`` it writes nothing, and exits with 1 if a file would change.

    script, description  its ``__file__`` and ``__doc__``
    outputs              returns the text of every file, by its path from the root
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file would change")
    check = parser.parse_args().check
    changed = []
    for name, text in outputs().items():
        path = ROOT / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            changed.append(name)
            if not check:
                path.write_text(text, encoding="utf-8")
    for name in changed:
        print(f"{name} differs; run python research/{Path(script).name}" if check else f"wrote {name}")
    raise SystemExit(1 if check and changed else 0)
