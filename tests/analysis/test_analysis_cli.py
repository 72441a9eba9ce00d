"""``simulate`` and ``generate --trace`` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anabranch.analysis.trace import read_trace
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
