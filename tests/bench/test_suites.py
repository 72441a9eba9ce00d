"""Suites: reading, spreading over tasks, and what is wrong with a file."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from anabranch.bench.suites import load_suite
from anabranch.errors import FetchError, FileError, InputError


def _write(path: Path, rows: list[object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def spec_bench(tmp_path: Path) -> Path:
    rows = [{"question_id": i, "task": "ab"[i // 3], "turns": [f"t{i}", "later"]} for i in range(6)]
    _write(tmp_path / "spec_bench" / "test.jsonl.gz", rows)
    return tmp_path


def test_own_prompts_need_nothing() -> None:
    assert {prompt.task for prompt in load_suite("own")} == {"own"}


def test_suite_takes_the_first_turn_and_spreads_the_limit_over_tasks(spec_bench: Path) -> None:
    prompts = load_suite("spec_bench", data=spec_bench, limit=4)
    assert [(p.task, p.text, p.later) for p in prompts] == [
        ("a", "t0", ()),
        ("b", "t3", ()),
        ("a", "t1", ()),
        ("b", "t4", ()),
    ]


def test_one_task_of_a_suite(spec_bench: Path) -> None:
    assert [p.text for p in load_suite("spec_bench", data=spec_bench, tasks=["b"], limit=2)] == ["t3", "t4"]
    with pytest.raises(InputError, match="no task 'c'; its tasks are a, b"):
        load_suite("spec_bench", data=spec_bench, tasks=["a", "c"])


def test_suites_have_their_own_fields(tmp_path: Path) -> None:
    _write(tmp_path / "mt_bench/test.jsonl", [{"question_id": 81, "category": "writing", "turns": ["one", "two"]}])
    _write(tmp_path / "humaneval/test.jsonl.gz", [{"task_id": "HumanEval/0", "prompt": "def f():"}])
    _write(tmp_path / "gsm8k/test.jsonl.gz", [{"question": "how many?", "answer": "1"}])
    prompts = [load_suite(name, data=tmp_path)[0] for name in ("mt_bench", "humaneval", "gsm8k")]
    assert [(p.name, p.task, p.text) for p in prompts] == [
        ("81", "writing", "one"),
        ("HumanEval/0", "humaneval", "def f():"),
        ("1", "gsm8k", "how many?"),
    ]
    assert [p.later for p in prompts] == [("two",), (), ()]


def test_a_later_turn_without_a_text(tmp_path: Path) -> None:
    path = _write(tmp_path / "mt_bench/test.jsonl", [{"question_id": 81, "turns": ["one", " "]}])
    with pytest.raises(FileError, match=r"line 1 of .*: the field 'turns' is empty"):
        load_suite("mt_bench", data=tmp_path)
    _write(path, [{"question_id": 81, "turns": ["one", "\ud800"]}])
    with pytest.raises(InputError, match="the text of the prompt '81' contains an unpaired surrogate"):
        load_suite("mt_bench", data=tmp_path)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = _write(tmp_path / "mine.jsonl", [{"question": "why?"}, {"question": "how?", "task": "other", "id": 7}])
    prompts = load_suite(str(path), field="question")
    assert [(p.name, p.task, p.text) for p in prompts] == [("1", "mine", "why?"), ("7", "other", "how?")]


@pytest.mark.parametrize(
    ("suite", "message"),
    [("spec_bench", "--data FOLDER"), ("nothing-there.jsonl", "no suite or file"), (".", "no suite or file")],
)
def test_what_is_not_there(suite: str, message: str) -> None:
    with pytest.raises((InputError, FileError), match=message):
        load_suite(suite)


def test_a_folder_without_the_suite(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"no suite 'gsm8k' in .*test\.jsonl\.gz or test\.jsonl"):
        load_suite("gsm8k", data=tmp_path)


def test_what_is_wrong_with_a_file(tmp_path: Path) -> None:
    path = _write(tmp_path / "mine.jsonl", [{"prompt": "fine"}, {"text": "no prompt", "id": 1}])
    with pytest.raises(FileError, match=r"line 2 .* no text in the field 'prompt'; its fields are text, id"):
        load_suite(str(path))
    with pytest.raises(InputError, match="limit"):
        load_suite("own", limit=0)
    path.write_text('{"prompt": "fine"}\n{', encoding="utf-8")
    with pytest.raises(FileError, match=r"line 2 .* is not JSON"):
        load_suite(str(path))
    path.write_text("[1]\n", encoding="utf-8")
    with pytest.raises(FileError, match="not a JSON object"):
        load_suite(str(path))
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(FileError, match="has no prompts"):
        load_suite(str(path))
    path.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(FileError, match="cannot be read as UTF-8"):
        load_suite(str(path))
    torn = tmp_path / "mine.jsonl.gz"
    torn.write_bytes(gzip.compress(b'{"prompt": "fine"}\n' * 1000)[:-20])
    with pytest.raises(FileError, match="cannot be read"):
        load_suite(str(torn))


@pytest.mark.parametrize(
    ("value", "words"),
    [("", "is empty"), (" \n", "is empty"), (None, "is empty"), ([], "is empty"), (5, "is not a text")],
)
def test_a_field_without_a_text(tmp_path: Path, value: object, words: str) -> None:
    path = _write(tmp_path / "mine.jsonl", [{"prompt": "fine"}, {"prompt": value}])
    with pytest.raises(FileError, match=f"line 2 of .*: the field 'prompt' {words}; write a prompt there"):
        load_suite(str(path))


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    for name in ("mine.jsonl", "mine.jsonl.gz"):
        path = _write(tmp_path / name, [{"prompt": "fine"}])
        opened = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        marked = b"\xef\xbb\xbf" + opened
        path.write_bytes(gzip.compress(marked) if path.suffix == ".gz" else marked)
        assert [p.text for p in load_suite(str(path))] == ["fine"]


@pytest.mark.parametrize("field", ["prompt", "id", "task"])
def test_half_a_character_is_refused(tmp_path: Path, field: str) -> None:
    path = _write(
        tmp_path / "mine.jsonl", [{"prompt": "whole \U0001f600"}, {"prompt": "b", "id": 7, field: "\ud800 x"}]
    )
    with pytest.raises(InputError, match=r"line 2 of .*the prompt '(7|\\ud800 x)' contains an unpaired surrogate"):
        load_suite(str(path))


def test_the_hub_is_asked_where_there_is_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library that would ask it is played: tests have no network."""
    asked: list[Any] = []
    library: Any = ModuleType("datasets")

    def load_dataset(name: str, configuration: str | None, *, split: str) -> list[dict[str, Any]]:
        asked.append((name, configuration, split))
        if "mt_bench" in name:
            raise ConnectionError("no network")
        return [{"question": "how many?", "answer": "1"}]

    library.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", library)
    assert [p.text for p in load_suite("gsm8k")] == ["how many?"]
    assert asked == [("openai/gsm8k", "main", "test")]
    with pytest.raises(FetchError, match=r"ConnectionError.*--data FOLDER"):
        load_suite("mt_bench")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="pip install datasets"):
        load_suite("gsm8k")
