"""Count the files of the package whose functions run on the way of a prompt, a bench row and a training example.

    python research/walks.py
    PYTHONPATH=OTHER/src python research/walks.py    # of another checkout

Each walk is a command of the command line on the default model. Files that run only while a model is loaded, and files
of ``support``, are not counted: a reader takes both as given. Helpers count as well as what a reader would open.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import pkgutil
import re
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import anabranch

PACKAGE = Path(anabranch.__file__).parent
SPEC = "streams:tree=8"
ROWS = [{"prompt_ids": list(range(20 + n, 40 + n)), "answer_ids": [*range(60 + n, 100 + n), 2]} for n in range(12)]
WALKS = {
    "a prompt": ["generate", "Explain why the sky is blue.", "-n", "16", "--drafter", SPEC],
    "a bench row": ["bench", "--prompts", "prompts.jsonl", "--methods", f"none,{SPEC}", "-n", "8"],
    "a training example": ["train", "streams", "--answers", "rows.jsonl", "--recipe", "small", "--no-timing"],
}
MORE = {"a training example": ["--epochs", "1", "--held-out", "2", "--out", "adapter"]}


class Files:
    """Files of the package in the order in which their functions first run, apart from those seen while loading."""

    def __init__(self) -> None:
        self.seen: dict[str, None] = {}
        self.loading = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event in ("call", "return") and path.endswith("anabranch/loading.py") and frame.f_code.co_name == "load":
            self.loading += 1 if event == "call" else -1
        elif event == "call" and not self.loading and path.startswith(str(PACKAGE)):
            self.seen.setdefault(str(Path(path).relative_to(PACKAGE).with_suffix("")))


@contextlib.contextmanager
def _traced(files: Files) -> Iterator[None]:
    threading.setprofile(files)
    sys.setprofile(files)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def walk(arguments: list[str]) -> list[str]:
    """The files of a command, run in an empty folder that has the data sets of ``WALKS``."""
    from anabranch.cli import main

    files = Files()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("rows.jsonl").write_text(
            "".join(json.dumps(row | {"id": n, "source": ""}) + "\n" for n, row in enumerate(ROWS))
        )
        Path("prompts.jsonl").write_text(json.dumps({"prompt": "Name a river."}) + "\n")
        sys.argv = ["anabranch", *arguments]
        with _traced(files), contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
            main()
    return [name for name in files.seen if not name.startswith("support") and not name.endswith("__init__")]


def main() -> None:
    warnings.simplefilter("ignore")
    for module in pkgutil.walk_packages([str(PACKAGE)], "anabranch."):
        if not re.search(r"\.servers|\.device\.|__main__|ray_serve|vllm", module.name):
            importlib.import_module(module.name)
    for name, arguments in WALKS.items():
        found = walk([*arguments, *MORE.get(name, [])])
        print(f"{name}: {len(found)}\n    {', '.join(found)}")


if __name__ == "__main__":
    main()
