"""Files that scripts generate: write them, or check that they are as the script would write them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def write_or_check(script: str, description: str, outputs: Callable[[], Mapping[str, str]]) -> None:
    """The main part of a script. With ``--check`` it writes nothing, and exits with 1 if a file would change.

    outputs  returns the text of every file, by its path from the root
    """
    parser = argparse.ArgumentParser(description=description)
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
        print(f"{name} differs; run python research/{script}" if check else f"wrote {name}")
    raise SystemExit(1 if check and changed else 0)
