"""Prompt templates, rows and splits of tasks, and what is refused."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from anabranch.errors import FileError, InputError
from anabranch.tasks import TASKS, Template, find_task, rows_of, sample, training_rows

BOATS = "CREATE TABLE boats (name VARCHAR, seats INTEGER)"


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def boats(*numbers: int) -> list[dict[str, Any]]:
    """Rows for the task sql."""
    return [
        {
            "question": f"Which boats have {n} seats?",
            "context": BOATS,
            "answer": f"SELECT name FROM boats WHERE seats = {n}",
        }
        for n in numbers
    ]


def own(path: Path, **options: Any) -> Any:
    return find_task(str(path), **{"template": "Say {a}", "completion": "b", **options})


def test_a_template_writes_fields_and_braces() -> None:
    template = Template("{{{a}}}\\n{b} and {a}")
    assert template.fields == ("a", "b")
    assert template.render({"a": "x", "b": 3, "c": None}, "row 1") == "{x}\n3 and x"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("no field", "names no field"),
        ("{a", "cannot be read"),
        ("{}", "contains {}"),
        ("{0}", "contains {0}"),
        ("{a.b}", "contains {a.b}"),
        ("{a[0]}", "contains {a[0]}"),
        ("{a!r:>9}", "contains {a!r:>9}"),
    ],
)
def test_templates_that_are_refused(text: str, why: str) -> None:
    with pytest.raises(InputError) as refused:
        Template(text)
    assert why in str(refused.value)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"a": "x"}, "row 2 of {path} has no field 'b'; its fields are a: choose with --completion"),
        ({"b": "x"}, "row 2 of {path} has no field 'a'; its fields are b: choose with --prompt-template"),
        ({}, "row 2 of {path} has no fields 'a' and 'b'; its fields are none: choose with --prompt-template and"),
        ({"a": ["x"], "b": "y"}, "the field 'a' must be a string or a number, got list"),
        ({"a": True, "b": "y"}, "the field 'a' must be a string or a number, got bool"),
        ({"a": " ", "b": "y"}, "the field 'a' is empty"),
        ({"a": "x", "b": ""}, "the field 'b' is empty"),
        ({"a": "x", "b": None}, "the field 'b' must be a string or a number, got NoneType"),
        ({"a": "x", "b": []}, "must be a text or a list of texts, none of them empty"),
        ({"a": "x", "b": ["y", " "]}, "must be a text or a list of texts, none of them empty"),
        ({"a": "x\ud800", "b": "y"}, "contains an unpaired surrogate, '\\ud800'"),
        ({"a": "x", "b": ["y", "\udfff"]}, "contains an unpaired surrogate"),
    ],
)
def test_rows_that_are_refused_name_row_and_field(tmp_path: Path, row: dict[str, Any], why: str) -> None:
    path = write(tmp_path / "t.jsonl", [{"a": "x", "b": "y"}, row])
    with pytest.raises(FileError) as refused:
        rows_of(own(path), "all")
    assert why.format(path=path) in str(refused.value)
    assert f"row 2 of {path}" in str(refused.value)


def test_all_rows_that_are_refused_are_named_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [{"a": "x", "b": "y"}, {"a": "x"}, {"b": "y"}, *[{"a": "x", "b": ""}] * 12])
    with pytest.raises(FileError) as refused:
        rows_of(own(path), "all")
    assert str(refused.value).startswith(f"row 2 of {path} has no field 'b'; its fields are a: ")
    assert "; 13 more of 15 rows are unusable: 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, ..." in str(refused.value)


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Which?"},
    {"role": "assistant", "content": "Elm."},
]


def test_rows_of_prompt_and_completion_or_messages_need_no_template(tmp_path: Path) -> None:
    (row,) = rows_of(find_task(str(write(tmp_path / "p.jsonl", [{"prompt": "Say {x}", "completion": "y"}]))), "all")
    assert (row.chat, row.references) == ("Say {x}", ("y",))
    chats = [{"messages": CHAT}, {"messages": CHAT[1:]}]
    task = find_task(str(write(tmp_path / "m.jsonl", chats)))
    long, short = rows_of(task, "all")
    assert long.chat == (*CHAT[:2],)
    assert long.prompt == "system: Be brief.\nuser: Which?"
    assert short.prompt == "Which?"
    assert short.references == long.references == ("Elm.",)
    with pytest.raises(FileError, match=r"row 2 of .*: its messages must be a list of at least two, the last with"):
        rows_of(find_task(str(write(tmp_path / "m.jsonl", [*chats[:1], {"messages": CHAT[:2]}]))), "all")
    with pytest.raises(FileError, match=r"row 2 of .*: each of its messages must be an object with a role and"):
        rows_of(find_task(str(write(tmp_path / "m.jsonl", [*chats[:1], {"messages": ["Hello"]}]))), "all")


def test_a_metric_that_needs_a_field_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"none\.jsonl has no rows"):
        find_task(str(write(tmp_path / "none.jsonl", [])))
    path = write(tmp_path / "t.jsonl", [{"a": "x", "b": "y"}])
    with pytest.raises(FileError, match=r"row 1 of .* has no field 'context'; .* leave out the metric that needs it"):
        rows_of(own(path, metrics=["execution"]), "all")


def test_tasks_that_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [{"a": "x", "b": "y"}])
    for text, options, why in (
        ("sqll", {}, "there is no task or file 'sqll' (did you mean 'sql'?); tasks are sql, e2e,"),
        (str(path), {}, "TEXT, with fields as {name}, and --completion FIELD; its fields are a, b"),
        (str(path), {"completion": "b"}, "t.jsonl is a file, so it needs --prompt-template TEXT"),
        (str(path), {"template": "{a}"}, "t.jsonl is a file, so it needs --completion FIELD"),
        ("sql", {"metrics": ["bleu"]}, "there is no metric 'bleu'; metrics are exact_match, execution, rouge"),
    ):
        with pytest.raises((InputError, FileError)) as refused:
            find_task(text, **options)
        assert why in str(refused.value)


def test_data_that_are_missing_say_which_files_to_put_where(tmp_path: Path) -> None:
    task = TASKS["sql"]
    with pytest.raises(InputError) as refused:
        rows_of(task, "test")
    assert "give --data DIR with DIR/sql_create_context/test.jsonl.gz, rows of context, question" in str(refused.value)
    with pytest.raises(FileError, match=r"there is no split test of the task sql in .*; expected"):
        rows_of(task, "test", tmp_path)
    write(tmp_path / "test.jsonl", [])
    with pytest.raises(FileError, match="has no rows; copy it again"):
        rows_of(task, "test", tmp_path)
    with pytest.raises(InputError, match="the split must be one of train, validation, test and all, got 'tests'"):
        rows_of(task, "tests", tmp_path)
    with pytest.raises(InputError, match="the split all is for files of your own"):
        rows_of(task, "all", tmp_path)
    with pytest.raises(InputError, match="limit must be at least 1, got 0"):
        sample([], 0)
    path = write(tmp_path / "t.jsonl", [{"a": "x", "b": "y"}])
    with pytest.raises(InputError, match="so --data has no effect"):
        rows_of(own(path), "all", tmp_path)


def test_a_known_task_reads_its_folder_or_a_folder_of_its_own(tmp_path: Path) -> None:
    write(tmp_path / "sql_create_context" / "test.jsonl.gz", boats(1, 2))
    write(tmp_path / "mine" / "test.jsonl", boats(3))
    (first, _), (mine,) = (rows_of(TASKS["sql"], "test", tmp_path / name) for name in ("", "mine"))
    assert first.name == "1"
    assert first.references == ("SELECT name FROM boats WHERE seats = 1",)
    assert BOATS in first.prompt
    assert "Which boats have 3 seats?" in mine.prompt
    assert find_task("sql_create_context") == TASKS["sql"]


def test_fields_of_training_and_of_references_may_differ(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [{"meaning_representation": "name[Elm]", "human_reference": "It is Elm."}])
    write(tmp_path / "test.jsonl", [{"meaning_representation": "name[Ash]", "references": ["Ash.", "It is Ash."]}])
    assert rows_of(TASKS["e2e"], "train", tmp_path)[0].references == ("It is Elm.",)
    assert rows_of(TASKS["e2e"], "test", tmp_path)[0].references == ("Ash.", "It is Ash.")


def test_rows_of_the_test_are_never_trained_on(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", boats(1, 2, 3, 4, 4))
    write(tmp_path / "validation.jsonl", boats(3, 5, 6))
    write(tmp_path / "test.jsonl", boats(2, 5, 7))
    training = training_rows(TASKS["sql"], tmp_path)
    numbers = [[row.fields["answer"][-1] for row in rows] for rows in (training.train, training.validation)]
    assert numbers == [["1", "4", "4"], ["3", "6"]]
    assert (training.test, training.left_out) == (3, 3)
    (tmp_path / "validation.jsonl").unlink()
    (tmp_path / "test.jsonl").unlink()
    assert len(training_rows(TASKS["sql"], tmp_path).train) == 5
    write(tmp_path / "test.jsonl", boats(1, 2, 3, 4))
    with pytest.raises(FileError, match=r"every prompt of .*train.jsonl is also in validation or test"):
        training_rows(TASKS["sql"], tmp_path)


def test_a_file_is_split_by_its_prompts(tmp_path: Path) -> None:
    rows = [{"a": f"word {n % 150}", "b": str(n)} for n in range(200)]
    task = own(write(tmp_path / "t.jsonl", rows))
    training = training_rows(task)
    test = rows_of(task, "test")
    assert training.test == len(test)
    assert len(training.train) + len(training.validation) + len(test) == 200
    groups = [{row.prompt for row in group} for group in (training.train, training.validation, test)]
    assert sum(map(len, groups)) == len(set.union(*groups)) == 150
    assert 105 <= len(groups[0]) <= 135
    more = own(write(tmp_path / "more.jsonl", [*({"a": f"other {n}", "b": "x"} for n in range(9)), *rows]))
    assert groups[2] <= {row.prompt for row in rows_of(more, "test")}, "a row stays in its split"
    alone = own(write(tmp_path / "one.jsonl", [{"a": "word 0", "b": "x"}]))
    for split, group in zip(("train", "validation", "test"), groups, strict=True):
        if "Say word 0" in group:
            assert len(rows_of(alone, split)) == 1
        else:
            with pytest.raises(FileError, match=f"has no rows of the split {split}"):
                rows_of(alone, split)


def test_a_sample_is_the_same_in_every_run_and_grows(tmp_path: Path) -> None:
    rows = rows_of(own(write(tmp_path / "t.jsonl", [{"a": str(n), "b": "x"} for n in range(30)])), "all")
    few, more = (sample(rows, limit) for limit in (5, 12))
    assert len(few) == 5
    assert {row.name for row in few} <= {row.name for row in more}
    assert [int(row.name) for row in more] == sorted(int(row.name) for row in more)
    assert few != rows[:5]
    assert sample(rows, None) == rows
