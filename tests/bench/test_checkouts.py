"""The scripts that compare two checkouts, here this one with itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anabranch.native.library import library

ROOT = Path(__file__).resolve().parents[2]


def compared(script: str, *words: object) -> Any:
    """The record that a comparison of this checkout with itself writes."""
    *options, out = words
    command = [sys.executable, str(ROOT / "scripts" / script), "--before", str(ROOT), "--out", str(out)]
    done = subprocess.run([*command, *map(str, options)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(Path(str(out)).read_text(encoding="utf-8"))


@pytest.mark.thorough
@pytest.mark.skipif(library() is None, reason="needs the native kernels")
@pytest.mark.parametrize("kind", ["int4", "compact"])
def test_passes(kind: str, tmp_path: Path) -> None:
    shapes = ("--shape", "1x1", "--shape", "1x3", "--context", "40")
    options = ("--format", kind, *shapes, "--passes", "1", "--repeats", "2")
    result = compared("compare_passes.py", *options, tmp_path / "passes.json")
    assert [each["pass"] for each in result["cases"]] == ["1x1", "1x3"]
    assert all(each["same_results"] and each["ratio"]["median"] > 0 for each in result["cases"])


@pytest.mark.default_model
@pytest.mark.thorough
def test_texts(tmp_path: Path) -> None:
    suites = [tmp_path / "short.jsonl", tmp_path / "long.jsonl"]
    for suite in suites:
        suite.write_text("".join(json.dumps({"prompt": f"What is {n} + {n}?"}) + "\n" for n in range(6)), "utf-8")
    options = ("--suite", f"{suites[0]}:2", "--suite", suites[1], "--limit", "3", "--max-new-tokens", "8")
    result = compared("compare_commits.py", *options, "--case", "int4:streams:tree=4", tmp_path / "texts.json")
    assert result["prompts"] == 5
    (case,) = result["cases"]
    assert case["same_tokens"] == "5 of 5"
    assert case["by_suite"].keys() == {str(suite) for suite in suites}
