"""The fuzzers run, and a short run finds nothing; ``scripts/fuzz.py`` says what a finding is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "fuzz.py"


def fuzz(*options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)


@pytest.mark.thorough
def test_a_quarter_of_a_minute_finds_nothing(tmp_path: Path) -> None:
    done = fuzz("--seconds", 15, "--seed", 16, "--out", tmp_path / "counts.json", "--keep", tmp_path / "kept")
    assert done.returncode == 0, done.stdout
    kinds = json.loads((tmp_path / "counts.json").read_text())["kinds"]
    assert all(counts["accepted"] + counts["refused"] > 0 for counts in kinds.values())


@pytest.mark.thorough
def test_crashes_hangs_and_tracebacks_are_findings(tmp_path: Path) -> None:
    """A kind that crashes, hangs or raises is kept with its files, and the run goes on."""
    broken = tmp_path / "fuzz_broken.py"
    broken.write_text(
        "import os, runpy, sys, time\n"
        f"sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        "import fuzz\n"
        "sys.path[:0] = map(str, fuzz.TOYS)\n"
        "import fuzz_cases\n"
        "fuzz.HANG = 1.0\n"
        "def fail(folder):\n"
        "    text = (folder / 'latency.json').read_text()\n"
        '    if text != \'{"1": 10.2, "8": 12.0, "16": 14.0}\':\n'
        "        actions = (os.abort, lambda: time.sleep(9), lambda: 1 // 0)\n"
        "        actions[len(text) % 3]()\n"
        "old = fuzz_cases.KINDS['latency']\n"
        "fuzz_cases.KINDS['latency'] = fuzz_cases.Kind(old.make, old.spoil, fail)\n"
        "sys.exit(fuzz.main())\n"
    )
    command = [sys.executable, str(broken), "--only", "latency", "--cases", "12", "--keep", str(tmp_path / "kept")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 1, done.stderr
    folders = list((tmp_path / "kept").iterdir())
    assert all((folder / "latency.json").is_file() for folder in folders)
    kept = [(folder / "finding.txt").read_text() for folder in folders]
    for words in ("status -6", "no end after 1 seconds", "ZeroDivisionError"):
        assert any(words in text for text in kept), words
