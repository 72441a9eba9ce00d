"""``scripts/check_gpu.py`` at toy size, on the host and on a ``pretended`` GPU, so that a lent one is not wasted."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

import pretended

PATH = Path(__file__).resolve().parents[1] / "scripts" / "check_gpu.py"


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_gpu", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def checked(monkeypatch: pytest.MonkeyPatch, out: Path, *options: str) -> dict[str, list[dict[str, object]]]:
    """The file that it writes; it exits with 0 unless a part failed."""
    monkeypatch.setattr("anabranch.bench.machine.SIDE", {"cuda": 64, "cpu": 64})
    monkeypatch.setattr("anabranch.bench.machine.LEAST", {"cuda": 2**20, "cpu": 2**20})
    monkeypatch.setattr(sys, "argv", ["check_gpu.py", "--tiny", "--out", str(out), *options])
    with pytest.raises(SystemExit) as ended:
        _script().main()
    found = json.loads(out.read_text(encoding="utf-8"))
    assert not ended.value.code, found.get("failed")
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_part_runs(device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts = ["fused", "launches", "rows", "certify", "prompts"]
    if device == "cpu":
        parts += ["training", "shapes"]  # autograd does not run on a pretended device, and shapes take long there
        found = checked(monkeypatch, tmp_path / "gpu.json", "--device", device, "--parts", *parts)
    else:
        with pretended.cuda():
            found = checked(monkeypatch, tmp_path / "gpu.json", "--device", device, "--parts", *parts)
    assert set(parts) <= set(found)
    assert "failed" not in found
    assert found["fused"][0]["trusted"] == (device == "cuda")
    assert {verdict for line in found["certify"] for verdict in line["verdicts"]} <= {"equal", "tie"}


def test_no_part_begins_late(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = checked(monkeypatch, tmp_path / "gpu.json", "--device", "cpu", "--seconds", "0", "--parts", "fused", "rows")
    assert [line["part"] for line in found["skipped"]] == ["fused", "rows"]
