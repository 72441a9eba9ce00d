"""``anabranch train --task``: examples of a task's rows, its splits in the record, and what is refused."""

from __future__ import annotations

import json
import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from anabranch.adapters.folder import load_adapter
from anabranch.cli.train import app
from anabranch.errors import FileError, InputError, TrainingWarning
from anabranch.methods.streams.entry import TRAINED
from anabranch.model import load
from anabranch.tasks import find_task
from anabranch.train.task_data import TaskData
from small import as_target, prompt, small

pytestmark = pytest.mark.filterwarnings("ignore::anabranch.errors.TrainingWarning")
TARGET = as_target(small(), name="default")  # its end token is 2, its template puts w3 before and w4 behind
SMALL = (
    "--recipe",
    "small",
    "--batch-tokens",
    120,
    "--held-out",
    4,
    "--stream-layers",
    2,
    "--warmup",
    0,
    "--no-timing",
)


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "load_target", lambda *_, **__: TARGET)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=True)


def words(length: int, seed: int) -> str:
    return " ".join(f"w{i}" for i in prompt(length, seed))


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of the task dialogsum, whose validation has one prompt of the test."""
    for split, first, count in (("train", 0, 24), ("validation", 40, 6), ("test", 45, 5)):
        field = "summaries" if split == "test" else "summary"
        rows = [{"dialogue": words(3, first + n), "summary": words(6, first + n)} for n in range(count)]
        write(tmp_path / f"{split}.jsonl", [{"dialogue": row["dialogue"], field: row["summary"]} for row in rows])
    return tmp_path


def test_a_task_is_trained_on_and_recorded(folder: Path) -> None:
    out = folder / "adapter"
    task = ("--task", "dialogsum", "--data", folder, "--prompt-template", "{dialogue}", "--task-rows", 20)
    with pytest.warns(TrainingWarning, match="the data of dialogsum may not be used commercially"):
        result = call("streams", *task, "--out", out, *SMALL, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    own = ["task", "dialogsum", "--data", str(folder), "--prompt-template", "{dialogue}"]
    own += ["--adapter", str(out), "--methods", "none,auto"]
    assert record["run"]["bench"] == shlex.join(["anabranch", "bench", *own])
    assert record["training"]["task"] == {
        "name": "dialogsum",
        "template": "{dialogue}",
        "completion": ["summary", "summaries"],
        "chat_template": True,
        "rows": {"train": 20, "of": 24, "validation": 5, "test": 5, "left_out": 1},
        "commercial": False,
    }
    assert record["training"]["data"] == [{"source": "dialogsum", "examples": 20, "licence": "CC BY-NC-SA 4.0"}]
    assert record["measured"]["held-out answers"] == 4  # of the validation split: all training rows are trained on
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "| dialogsum | 20 | CC BY-NC-SA 4.0 |" in card
    load_adapter(out, TARGET)


def test_examples_have_the_prompts_of_the_benchmark_and_an_end_token(tmp_path: Path) -> None:
    rows = [{"ask": f"w{n % 15 + 4}", "tell": ["w6 w7", "w8 w9 w10"], "id": f"row {n}"} for n in range(12)]
    path = write(tmp_path / "mine.jsonl", rows)
    recipe = TRAINED.training.recipe("small", {"held_out": 2, "max_tokens": 16})

    def read(before: int, *, raw: bool = False) -> TaskData:
        return TaskData.read(str(path), template="w11 " * before + "{ask}", completion="tell", raw=raw)

    data = read(1)
    train, validation = data.examples(TARGET, recipe)
    assert len(train) == 2 * len(data.rows.train)
    assert len(validation) == min(2, len(data.rows.validation))
    first = data.rows.train[0]
    asked = int(first.name.split()[1]) % 15 + 4
    assert train[0].prompt_ids == (3, 11, asked, 4)
    assert train[0].answer_ids == (6, 7, 2)
    assert train[1].answer_ids == (8, 9, 10, 2)
    assert (train[0].source, train[0].id) == ("mine", first.name)
    raw, _ = read(1, raw=True).examples(TARGET, recipe)
    assert {example.prompt_ids[0] for example in raw} == {11}
    assert {example.prompt_ids[-1] for example in raw} <= set(range(4, 19))
    cut, _ = read(11).examples(TARGET, recipe)
    assert {example.answer_ids for example in cut} == {(6, 7), (8, 9)}, "14 tokens of a prompt leave room for two"
    why = "the task mine has no example to train on: .* whose prompt fills the 16 tokens of --max-tokens"
    with pytest.raises(InputError, match=why):
        read(12).examples(TARGET, recipe)
    long = write(tmp_path / "long.jsonl", [*rows, *({"ask": words(20, n), "tell": "w5"} for n in range(9))])
    with pytest.warns(TrainingWarning, match="examples of the task long are left out: .* whose prompt fills the 16"):
        TaskData.read(str(long), template="{ask}", completion="tell").examples(TARGET, recipe)


def test_the_target_completes_the_training_prompts_of_a_task(tmp_path: Path) -> None:
    rows = [{"ask": words(4, n), "tell": "w5"} for n in range(8)]
    path, out = write(tmp_path / "mine.jsonl", rows), tmp_path / "answers.jsonl"
    task = ("--task", path, "--prompt-template", "{ask}", "--completion", "tell")
    result = call("answers", *task, "--out", out, "--max-new-tokens", 5, "--task-rows", 3, "--json")
    assert result.exit_code == 0, result.output
    written = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    found = TaskData.read(str(path), template="{ask}", completion="tell", limit=3)
    assert {line["id"] for line in written} == {row.name for row in found.rows.train}
    assert {line["source"] for line in written} == {"mine"}
    assert all(line["prompt_ids"][0] == 3 for line in written)
    twice = write(tmp_path / "twice.jsonl", [{"ask": words(4, n), "tell": "w5", "id": 7} for n in range(8)])
    refused = call("answers", "--task", twice, *task[2:], "--out", tmp_path / "b.jsonl")
    assert isinstance(refused.exception, FileError)
    assert "two rows of the task twice have the id '7'; ids must be unique" in str(refused.exception)


def test_only_data_that_are_not_free_are_warned_of(folder: Path) -> None:
    write(folder / "train.jsonl", [{"meaning_representation": "w5", "human_reference": "w6 w7"}])
    write(folder / "test.jsonl", [{"meaning_representation": "w6", "references": ["w6 w7"]}])
    write(folder / "validation.jsonl", [{"meaning_representation": "w7", "references": ["w6 w7"]}])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert TaskData.read("e2e", data=folder).licences == {"e2e": find_task("e2e").licence}


def test_what_cannot_be_trained_on_is_refused_before_a_model_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "load_target", lambda *_, **__: pytest.fail("loaded"))
    train, out = folder / "train.jsonl", folder / "new"
    write(folder / "own.jsonl", [{"a": "w5", "b": "w6"}, {"a": "w5"}])
    task = ("--task", "dialogsum", "--data", folder)
    streams = ("streams", "--out", out)
    for arguments, message in (
        ((*streams, *task, "--answers", train), "--task and --answers are both data to learn from; give one"),
        ((*streams, *task, "--text", train), "--task and --text are both data to learn from; give one"),
        ((*streams, *task, "--evaluate", train), "--task evaluates on its own validation rows"),
        ((*streams, *task, "--self-tokens", 9), "--self-tokens is for data that the model writes itself"),
        ((*streams, *task, "--task-rows", 0), "limit must be at least 1, got 0"),
        ((*streams, *task, "--prompt-template", "{talk}"), f"row 1 of {train} has no field 'talk'"),
        ((*streams, "--answers", train, "--raw"), "--raw needs --task"),
        ((*streams, "--data", folder), "--data needs --task"),
        ((*streams, "--task", "sql"), "the task sql needs its data"),
        ((*streams, "--task", "none"), "there is no task or file 'none'"),
        ((*streams, "--task", folder / "own.jsonl"), "so it needs --prompt-template"),
        (
            (*streams, "--task", folder / "own.jsonl", "--prompt-template", "{a}", "--completion", "b"),
            "has no field 'b'; its fields are a: choose with --completion",
        ),
        (("answers", *task, "--out", out, "--limit", 2), "--limit is for --prompts; give the number of rows"),
        (("answers", *task, "--out", out, "--prompts", train), "give either a file of prompts (--prompts), a number"),
        (("answers", "--task", train, "--out", train), "contains the prompts"),
        (("answers", "--prompts", train, "--out", out, "--raw"), "--raw needs --task"),
    ):
        result = call(*arguments)
        assert isinstance(result.exception, (InputError, FileError)), (arguments, result.output)
        assert message in str(result.exception)
    assert not out.exists()
