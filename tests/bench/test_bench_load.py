"""``anabranch bench load`` on toys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toy_text import ToyFolders
from verbs import Anabranch


@pytest.fixture
def where(toys: ToyFolders, tmp_path: Path) -> list[object]:
    (tmp_path / "suite.jsonl").write_text("".join(f'{{"prompt": "{text}"}}\n' for text in ("the thing", "other", "a")))
    start = ["bench", "load", "--model", toys.model, "--adapter", toys.adapter, "--dtype", "float32", "--raw"]
    return [*start, "--suite", tmp_path / "suite.jsonl", "-n", 6, "--rows", 1, "--rows", 2]


@pytest.mark.thorough  # the peer is a process with PyTorch
def test_the_verb_measures_ours_and_a_peer(anabranch: Anabranch, where: list[object], tmp_path: Path) -> None:
    out = tmp_path / "result"
    done = anabranch(*where, "--method", "auto", "--peer", "transformers", "--repeats", 2, "--out", out)
    assert done.code == 0, done.err
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert (result["kind"], result["complete"], result["run"]["rows"]) == ("throughput", True, [1, 2])
    by_rows = {(record["name"], record["rows"]): record for record in result["results"]}
    assert list(by_rows) == [(name, rows) for name in ("none", "auto", "transformers") for rows in (1, 2)]
    for record in by_rows.values():
        assert record["equal_outputs"] == record["prompts"] == 3, record
        assert 0 < record["ratio"][0] <= record["ratio"][1] <= record["ratio"][2]
        assert record["first_token_ms"]["median"] > 0
    assert "TTFT" in done.out
    again = anabranch(*where, "--method", "auto", "--out", out)
    assert "exists already" in again.err


def test_quantized_weights_have_a_plain_decoding_of_their_own(anabranch: Anabranch, where: list[object]) -> None:
    done = anabranch(*where, "--method", "auto", "--quantize", "int8", "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert [entry["name"] for entry in result["contenders"]] == ["none@int8", "auto@int8"]
    assert {entry["weights"] for entry in result["contenders"]} == {"int8"}
    assert all(record["equal_outputs"] == 3 for record in result["results"])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--rows", 0), "--rows must be at least 1, got 0"),
        (("--rows", 9), "--rows 9 needs at least 9 prompts, got 3"),
        (("--rows", 2), "--rows has a number twice"),
        (("--peer", "transformers-lookup"), "'bench load' cannot measure it"),
    ],
)
def test_what_is_refused_before_loading(
    anabranch: Anabranch, where: list[object], words: tuple[object, ...], why: str
) -> None:
    refused = anabranch(*where, *words)
    assert (refused.code, why in refused.err) == (1, True)


def test_a_contender_that_cannot_be_opened_is_reported(anabranch: Anabranch, where: list[object]) -> None:
    done = anabranch(*where, "--method", "bad=streams:depth=99", "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert [record["name"] for record in result["results"]] == ["none", "none", "bad"]
    assert result["results"][-1]["error"] == result["contenders"][-1]["error"]
    nothing = anabranch(*where, "--method", "bad=streams:depth=99@int8", "--quantize", "int8", "--rows", 3)
    assert "failed: " in nothing.out
