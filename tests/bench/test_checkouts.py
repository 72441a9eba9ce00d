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


def run(script: str, *options: object, status: int = 0) -> str:
    """The output of a comparison of this checkout with itself."""
    command = [sys.executable, str(ROOT / "scripts" / script), "--before", str(ROOT), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def compared(script: str, *words: object) -> Any:
    """The record that a comparison of this checkout with itself writes."""
    *options, out = words
    run(script, *options, "--out", out)
    return json.loads(Path(str(out)).read_text(encoding="utf-8"))


@pytest.mark.thorough
@pytest.mark.skipif(library() is None, reason="needs the native kernels")
def test_passes(tmp_path: Path) -> None:
    shapes = ("--shape", "1x1", "--shape", "1x3", "--context", "40")
    options = ("--format", "compact", *shapes, "--passes", "1", "--repeats", "2")
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


@pytest.mark.default_model
@pytest.mark.thorough
def test_tokens(tmp_path: Path) -> None:
    suite, out = tmp_path / "short.jsonl", tmp_path / "tokens.jsonl"
    suite.write_text("".join(json.dumps({"prompt": f"What is {n} + {n}?"}) + "\n" for n in range(3)), "utf-8")
    options = ("--tokens", "--suite", suite, "--dtype", "bf16", "--max-new-tokens", "6", "--out", out)
    options += ("--drafter", "none", "--drafter", "streams:tree=chain")
    lines = run("compare_commits.py", *options).splitlines()
    assert len(lines) == 2 * (2 + 3)  # rows; greedy and seeded, and of the chain rejection
    assert all(line.endswith(": 3 of 3 the same") for line in lines)

    kept = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    of_none = [answer for key, answer in kept if key[3:5] == ["none", "greedy"]]
    of_none[0]["tokens"][1][2] += 1
    out.write_text("".join(json.dumps(each) + "\n" for each in kept), "utf-8")
    assert "DIFFERENT on prompts [1]" in run("compare_commits.py", *options, status=1)

    options = ("--tokens", "--suite", suite, "--dtype", "float32", "--rows", 1, "--out", out)
    lines = run("compare_commits.py", *options, "--drafter", "quantized_draft").splitlines()
    assert len(lines) == 2
    assert all("both refuse: quantized_draft drafts with a 4-bit copy of bf16 weights" in line for line in lines)
