"""The figures of the theory, with the numbers that they show."""

from __future__ import annotations

import csv
import importlib
from pathlib import Path

import pytest

from anabranch.errors import FileError, InputError


@pytest.mark.thorough
def test_the_figures_and_their_tables(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures = importlib.import_module("theory_figures")
    written = figures.write_figures(tmp_path, model="Phi-3")
    names = {"streaming_speedup", "t5", "overhead", "operations"}
    assert set(written) == {tmp_path / f"{name}.{kind}" for name in names for kind in ("csv", "png", "svg")}
    assert all(path.stat().st_size > 100 for path in written)
    with (tmp_path / "streaming_speedup.csv").open() as file:
        rows = list(csv.DictReader(file))
    at_parity = [r for r in rows if r["zeta_over_beta"] == "1.4" and r["target_over_draft"] == "10"]
    assert [float(r["speedup"]) for r in at_parity] == [1.0]
    with (tmp_path / "t5.csv").open() as file:
        assert next(round(float(r["predicted"]), 2) for r in csv.DictReader(file)) == 3.16
    with pytest.raises(InputError, match="no model 'GPT'"):
        figures.write_figures(tmp_path, model="GPT")
    with pytest.raises(FileError, match="exists already"):
        figures.write_figures(tmp_path)
