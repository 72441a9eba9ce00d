"""Suites: reading, spreading over tasks, and what is wrong with a file."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from anabranch.bench.suites import load_suite
from anabranch.errors import FileError, InputError


def _write(path: Path, rows: list[object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def test_own_prompts_need_nothing() -> None:
    assert {prompt.task for prompt in load_suite("own")} == {"own"}


def test_suite_takes_the_first_turn_and_spreads_the_limit_over_tasks(tmp_path: Path) -> None:
    rows = [{"question_id": i, "task": "ab"[i // 3], "turns": [f"t{i}", "later"]} for i in range(6)]
    _write(tmp_path / "spec_bench" / "test.jsonl.gz", rows)
    found = load_suite("spec_bench", data=tmp_path, limit=4)
    assert [(p.task, p.text) for p in found] == [("a", "t0"), ("b", "t3"), ("a", "t1"), ("b", "t4")]


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = _write(tmp_path / "mine.jsonl", [{"question": "why?"}])
    assert [p.text for p in load_suite(str(path), field="question")] == ["why?"]


@pytest.mark.parametrize(
    ("suite", "message"),
    [("spec_bench", "--data"), ("nothing-there.jsonl", "no suite or file")],
)
def test_what_is_not_there(suite: str, message: str) -> None:
    with pytest.raises((InputError, FileError), match=message):
        load_suite(suite)


def test_rows_without_a_prompt_are_named(tmp_path: Path) -> None:
    path = _write(tmp_path / "mine.jsonl", [{"prompt": "fine"}, {"text": "no prompt"}])
    with pytest.raises(FileError, match="line 2"):
        load_suite(str(path))
    with pytest.raises(InputError, match="limit"):
        load_suite("own", limit=0)
    (tmp_path / "bad.jsonl").write_text("{", encoding="utf-8")
    with pytest.raises(FileError, match="not JSON"):
        load_suite(str(tmp_path / "bad.jsonl"))
