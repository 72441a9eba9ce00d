"""``anabranch certify``: both modes, their exit status, and options that contradict each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anabranch.certify import SamplingCertificate
from toy_text import ToyFolders
from verbs import Anabranch

SAMPLING = ("--sampling", "--temperature", "0.4", "--effect", "1", "--drafter", "prompt_lookup")


@pytest.fixture
def command(toys: ToyFolders, tmp_path: Path) -> list[object]:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("the thing the thing", "a", "other ab")))
    return ["certify", "--model", toys.model, "--adapter", toys.adapter, "--prompts", path, "--max-new-tokens", 12]


def test_several_rows_at_a_time(anabranch: Anabranch, command: list[object]) -> None:
    done = anabranch(*command, "--rows", 2, "--drafter", "streams:nodes=6")
    assert (done.code, done.out) == (0, "3 equal, 0 ties, 0 bugs of 3 prompts with streams:nodes=6\n")


def test_the_result_is_written(
    anabranch: Anabranch, command: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*command, "--drafter", "prompt_lookup", "--out", tmp_path / "new" / "found"]
    monkeypatch.setattr("sys.argv", ["anabranch", *map(str, words)])
    assert anabranch(*words).code == 0
    result = json.loads((tmp_path / "new" / "found.json").read_text(encoding="utf-8"))
    assert result["counts"] == {"equal": 3, "tie": 0, "BUG": 0}
    assert [prompt["verdict"] for prompt in result["prompts"]] == ["equal"] * 3
    assert result["certified"]["suite"] == "prompts.jsonl"
    assert str(tmp_path) not in json.dumps(result)
    again = anabranch(*words)
    assert "--force" in again.err
    assert again.code == 1


def test_the_distribution(
    anabranch: Anabranch, command: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, out = tmp_path / "new" / "page.html", tmp_path / "new" / "found"
    words = [*command, *SAMPLING, "--limit", 1, "--html", page, "--out", out]
    monkeypatch.setattr("sys.argv", ["anabranch", *map(str, words)])
    done = anabranch(*words)
    assert done.code == 0, done.out
    assert "samples per arm after each of 1 contexts find effects of w = 1" in done.err
    assert "wrong rule's" in done.out
    assert done.out.splitlines()[-1].startswith("lossless: none of 3 tests finds a difference")
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    result = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    assert result["verdict"] == "lossless"
    folder = Path(str(command[command.index("--model") + 1])).parent
    assert str(folder) not in json.dumps(result), "folders are left out"


def test_the_exit_status_is_the_verdict(
    anabranch: Anabranch, command: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for verdict, code in (("lossless", 0), ("inconclusive", 1), ("BUG", 1)):
        monkeypatch.setattr(SamplingCertificate, "verdict", verdict)
        done = anabranch(*command, *SAMPLING, "--effect", 2, "--limit", 1, "--json", "--rows", 8)
        assert done.code == code
        result = json.loads(done.out)
        assert result["verdict"] == verdict
        assert len(result["tests"]) == 6
        assert result["sampling"]["temperature"] == 0.4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--sampling",), "temperature 0 has none; give --temperature 1, say"),
        (("--effect", 0.1), "are for the test of --sampling; add it"),
        (("--html", "x.html"), "are for the test of --sampling; add it"),
        ((*SAMPLING, "--rule", "toss"), "rule must be 'match' or 'rejection', got 'toss'"),
        ((*SAMPLING, "--effect", 0), "effect must be from 0.01 to 2, got 0.0"),
        ((*SAMPLING, "--power", 1), "power must be from 0.5 to 0.9999, got 1.0"),
        (("--rows", 0), "--rows must be at least 1, got 0"),
        ((*SAMPLING, "--rule", "rejection"), "rule='rejection' would not be exact; use rule='match'"),
    ],
)
def test_options_that_are_refused(
    anabranch: Anabranch, command: list[object], options: tuple[object, ...], message: str
) -> None:
    done = anabranch(*command, *options)
    assert (done.code, done.out) == (1, "")
    assert message in done.err


def test_a_page_that_exists_is_kept(anabranch: Anabranch, command: list[object], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("mine")
    done = anabranch(*command, *SAMPLING, "--html", page)
    assert done.code == 1
    assert "exists already; give another --html, or --force" in done.err
    assert page.read_text() == "mine"
