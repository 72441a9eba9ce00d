"""One process that uses many drafter specifications and long prompts: what it holds stays within a bound."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "memory_growth.py"


@pytest.mark.default_model
@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_memory_does_not_grow_with_drafters_and_prompts(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--new", "6", "--long", "3", "--length", "2500"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "held.json")], capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "held.json").read_text(encoding="utf-8"))
    assert len(found["held_mb"]) == 33
    assert found["last_over_first"].keys() == {"specifications", "long_prompts"}
    assert max(found["last_over_first"].values()) < found["limit"] == 1.05
