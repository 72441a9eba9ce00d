"""Long contexts: prompts to train on, and the cost of a step by length."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import long_context
from toy_text import ToyFolders
from verbs import Anabranch


def run(words: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["long_context.py", *map(str, words)])
    long_context.main()


@pytest.mark.thorough
def test_an_adapter_for_long_texts_is_measured(
    toys: ToyFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anabranch: Anabranch
) -> None:
    monkeypatch.setattr(long_context, "ASK", "")
    text, prompts, out = tmp_path / "book.txt", tmp_path / "prompts.jsonl", tmp_path / "long.json"
    text.write_text("the thing and the other thing of the other\n" * 40)
    words = ["--text", text, "--model", toys.model, "--lengths", 30, 60, "--passages", 2]
    run([*words, "--prompts", prompts], monkeypatch)
    assert [json.loads(line)["id"] for line in prompts.read_text().splitlines()] == ["30-0", "30-1", "60-0", "60-1"]
    given = ("--model", toys.model, "--prompts", prompts, "--max-new-tokens", 4, "--out", tmp_path / "answers.jsonl")
    assert anabranch("train", "answers", *given).code == 0
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert {len(each["prompt_ids"]) <= int(str(each["id"]).split("-")[0]) for each in answers} == {True}
    drafter = "streams:tree=product,depth=2,k=2"
    run([*words, "--adapter", toys.adapter, "--new", 6, "--method", "none", drafter, "--out", out], monkeypatch)
    rows = json.loads(out.read_text())["rows"]
    assert [(row["context"], row["method"]) for row in rows] == [(n, m) for n in (30, 60) for m in ("none", drafter)]
    assert rows[0]["tokens_per_step"] == 1.0
    assert str(tmp_path) not in out.read_text()
