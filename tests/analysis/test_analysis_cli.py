"""``simulate``, ``analyze`` and ``generate --trace`` as a user types them."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

from anabranch.analysis.trace import read_trace
from anabranch.support import plots
from toy_text import ToyFolders
from verbs import Anabranch


@pytest.fixture
def generate(toys: ToyFolders) -> list[object]:
    where = ["--model", toys.model, "--adapter", toys.adapter, "--dtype", "float32", "--device", "cpu"]
    return ["generate", *where, "--max-new-tokens", 30, "--drafter", "streams:nodes=20", "--json", "the thing"]


def test_from_a_recording_to_a_prediction(anabranch: Anabranch, generate: list[object], tmp_path: Path) -> None:
    path, every = tmp_path / "run.jsonl", tmp_path / "every.jsonl"
    code, out, _ = anabranch(*generate, "--trace", path)
    assert code == 0
    decoded = json.loads(out)
    assert read_trace(path).settings["drafter"] == "streams:nodes=20"
    code, out, _ = anabranch("simulate", path, "--nodes", "1,8", "--k", "2", "--json")
    assert code == 0
    first, none, eight = json.loads(out)["predictions"]
    assert first["mean_acceptance_length"] == decoded["stats"]["mean_acceptance_length"]
    assert first["steps"] == decoded["stats"]["steps"]
    assert none["mean_acceptance_length"] == 1
    assert eight["cut"] == {"nodes": 8, "depth": None, "k": 2, "threshold": 0.0, "drop": []}

    code, out, _ = anabranch(*generate, "--trace", every, "--every-position")
    assert code == 0
    assert json.loads(out)["token_ids"] == decoded["token_ids"]
    code, out, _ = anabranch("simulate", every, "--json")
    (whole,) = json.loads(out)["predictions"]
    assert whole["mean_acceptance_length"] == decoded["stats"]["mean_acceptance_length"]

    (tmp_path / "ms.csv").write_text("1,10\n20,20\n")
    code, out, _ = anabranch("simulate", path, "--drop-source", "stream", "--latency", tmp_path / "ms.csv")
    assert code == 0
    assert "as recorded" in out
    assert "without stream" in out
    assert "100.0" in out  # nothing is drafted: 10 ms a token

    for arguments in (("--nodes", "1,8"), ("--drop-source", "stream", "--k", "2", "--threshold", "0.001")):
        code, out, _ = anabranch("simulate", path, "--latency", tmp_path / "ms.csv", "--depth", "12", *arguments)
        assert code == 0
        assert "…" not in out
    assert "depth 12, k 2, threshold 0.001, without stream" in out


def test_cuts_that_cannot_be_replayed_are_refused(anabranch: Anabranch, generate: list[object], tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    assert anabranch(*generate, "--trace", path)[0] == 0
    for arguments, message in (
        (("simulate", tmp_path / "missing"), "cannot be read"),
        (("simulate", path, "--nodes", "eight"), "--nodes must be whole numbers"),
        (("simulate", path, "--threshold", "2"), "threshold must be"),
        (("simulate", path, "--drop-source", "foo"), "was drafted by 'foo'; its drafts are of stream 1"),
        (("simulate", path, "--drop-source", "stream", "--drop-source", "stream 9"), "was drafted by 'stream 9'"),
        ((*generate, "--trace", path), "exists"),
        ((*generate, "--every-position"), "give a file with --trace"),
    ):
        code, out, err = anabranch(*arguments)
        assert (code, out == "") == (1, "--json" not in arguments)
        assert message in out + err
        assert "Traceback" not in err


@pytest.mark.thorough
def test_the_figures_and_their_tables(anabranch: Anabranch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    code, out, _ = anabranch("analyze", "--out", tmp_path, "--model", "Phi-3", "--json")
    assert code == 0
    names = {"streaming_speedup", "t5", "overhead", "operations"}
    expected = {tmp_path / f"{name}.{kind}" for name in names for kind in ("csv", "png", "svg")}
    assert {Path(name) for name in json.loads(out)} == expected
    assert all(path.stat().st_size > 100 for path in expected)
    with (tmp_path / "streaming_speedup.csv").open() as file:
        rows = list(csv.DictReader(file))
    at_parity = [r for r in rows if r["zeta_over_beta"] == "1.4" and r["target_over_draft"] == "10"]
    assert [float(r["speedup"]) for r in at_parity] == [1.0]
    with (tmp_path / "t5.csv").open() as file:
        assert next(round(float(r["predicted"]), 2) for r in csv.DictReader(file)) == 3.16
    code, _, err = anabranch("analyze", "--out", tmp_path, "--model", "GPT")
    assert code == 1
    assert "no model 'GPT'" in err
    for path in sorted(expected):
        code, _, err = anabranch("analyze", "--out", tmp_path)
        assert code == 1
        assert "exists already; give another --out, or --force to replace it" in err
        path.unlink()
    (tmp_path / "t5.csv").write_text("old")
    monkeypatch.setattr(plots, "save_both", lambda figure, path: [])  # drawing takes long
    assert anabranch("analyze", "--out", tmp_path, "--force")[0] == 0
    assert (tmp_path / "t5.csv").read_text() != "old"


def test_figures_that_could_not_be_written(
    anabranch: Anabranch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("anabranch.analysis.figures._streaming", lambda: 1 / 0)
    (tmp_path / "file").write_text("mine")
    for folder, words in ((tmp_path / "file", "is a file; give a folder"), (tmp_path / "file" / "x", "choose another")):
        code, out, err = anabranch("analyze", "--out", folder)
        assert (code, out) == (1, "")
        assert words in err
    assert (tmp_path / "file").read_text() == "mine"


def test_without_matplotlib(anabranch: Anabranch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = anabranch("analyze", "--out", tmp_path)
    assert code == 1
    assert "anabranch[figures]" in err
