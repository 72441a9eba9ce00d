"""``anabranch bench task``: quality beside speed, examples, the page; on a toy model with rows written here."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from anabranch.bench.quality import add_quality, quality_table
from anabranch.bench.run import Answer, Pass, passes_of
from anabranch.bench.suites import Application
from anabranch.bench.summary import ContenderAnswers
from anabranch.cli.options import Prompts
from anabranch.decoding.engine import Step, Timings
from anabranch.tasks import TaskRow, find_task
from anabranch.tree import DraftTree
from anabranch.verify import Verdict
from toy_text import ToyFolders
from verbs import Anabranch, Outcome

BOATS = "CREATE TABLE boats (name VARCHAR, seats INTEGER)"
Bench = Callable[..., Outcome]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with the test split of the task sql."""
    folder = tmp_path / "data" / "sql_create_context"
    folder.mkdir(parents=True)
    rows = [
        {"question": f"{n} seats?", "context": BOATS, "answer": f"SELECT name FROM boats WHERE seats = {n}"}
        for n in range(6)
    ]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder.parent


@pytest.fixture
def bench(toys: ToyFolders, data: Path, anabranch: Anabranch, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Runs the verb on the task."""
    monkeypatch.setattr("sys.argv", ["anabranch", "bench", "task", "sql"])
    where = ["--model", toys.model, "--adapter", toys.adapter, "--dtype", "float32", "--raw", "--max-new-tokens", 8]
    task = ["task", "sql", "--data", data, "--prompt-template", "{question}"]
    return lambda *arguments: anabranch("bench", *task, *where, *arguments)


def read(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def test_quality_speed_and_examples_side_by_side(bench: Bench, tmp_path: Path) -> None:
    out, page = tmp_path / "result.json", tmp_path / "page.html"
    done = bench("--methods", "none,streams", "--method", "auto", "--limit", 3, "--out", out, "--html", page)
    assert done.code == 0, done.err
    result = read(out)
    assert result["run"]["suite"] == "sql"
    assert result["run"]["application"] == {
        "name": "sql",
        "template": "{question}",
        "completion": ["answer"],
        "metrics": ["exact_match", "execution"],
        "split": "test",
        "rows": 3,
        "of": 6,
        "licence": "CC BY 4.0 (Spider: CC BY-SA 4.0, WikiSQL: BSD-3-Clause)",
        "examples": 1,
    }
    by_name = {record["name"]: record for record in result["contenders"]}
    assert set(by_name) == {"none", "streams", "auto"}
    assert by_name["none"]["extra_parameters"] == 0
    assert by_name["streams"]["extra_parameters"] == by_name["auto"]["extra_parameters"] > 0
    for record in by_name.values():
        assert record["equal_texts"] == 3
        assert record["quality"] == by_name["none"]["quality"]
        assert set(record["quality"]) == {"exact_match", "execution"}
        assert len(record["quality"]["execution"]["scores"]) == record["quality"]["execution"]["rows"] == 3
        assert len(record["sample_ms_quartiles"]) == 3
    with out.with_suffix(".csv").open(newline="") as file:
        row = next(row for row in csv.DictReader(file) if row["contender"] == "streams")
    assert (row["exact_match_mean"], row["equal_texts"]) == ("0.0", "3")
    assert row["extra_parameters"] == str(by_name["streams"]["extra_parameters"])
    assert "| contender | exact match | same results | equal texts |" in out.with_suffix(".md").read_text("utf-8")
    assert "= 0.0 (0.0-56.1)" in done.out
    assert "Example " in done.out
    assert "reference: SELECT name FROM boats WHERE seats = " in done.out
    assert "proposed by: target" in done.out

    text = page.read_text(encoding="utf-8")
    assert not re.search(r"<script|<link|src=|https?:", text), "nothing from elsewhere"
    assert text.count("<h2>") == 1
    assert text.count("<details>") == 3
    assert "<h1>Task sql: quality and speed</h1>" in text
    shown = re.findall(r'<div class="text">(.*?)</div>', text, re.DOTALL)
    plain = {unescape(re.sub("<[^>]+>", "", one)) for one in shown}
    assert len(plain) == 1, "all contenders show one text"
    last = [re.sub("<[^>]+>", "", one) for one in re.findall(r"<li>(.*?)</li></ol>", text, re.DOTALL)]
    assert all(unescape(line).endswith(plain.copy().pop()) for line in last)
    refused = bench("--methods", "none", "--html", page)
    assert refused.code == 1
    assert "page.html exists already; give another --html, or --force to replace it" in refused.err


def test_a_stopped_run_keeps_its_examples(bench: Bench, tmp_path: Path, stopped: Callable[[int], None]) -> None:
    out, page = tmp_path / "result.json", tmp_path / "page.html"
    arguments = ("--methods", "none,streams", "--limit", 2, "--out", out, "--html", page)
    stopped(5)
    first = bench(*arguments)
    assert first.code == 130, first.err
    assert read(out)["prompts_done"] == 1
    assert len(read(out)["contenders"][0]["quality"]["exact_match"]["scores"]) == 1
    other = bench(*arguments, "--resume", "--examples", 2)
    assert other.code == 1
    assert "was measured with another application" in other.err
    done = bench(*arguments, "--resume")
    assert done.code == 0, done.err
    result = read(out)
    assert (result["complete"], len(result["contenders"][1]["quality"]["exact_match"]["scores"])) == (True, 2)
    assert page.read_text(encoding="utf-8").count('<div class="text">') == 2


def test_a_task_of_a_file_is_one_command(bench: Bench, toys: ToyFolders, anabranch: Anabranch, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(f'{{"ask": "say {n}", "tell": "it is {n}"}}\n' for n in range(3)), encoding="utf-8")
    words = ("--prompt-template", "{ask}", "--completion", "tell", "--split", "all", "--metric", "rouge")
    model = ("--model", toys.model, "--dtype", "float32", "--max-new-tokens", 4)
    done = anabranch("bench", "task", path, *model, *words, "--methods", "none", "--examples", 0, "--json")
    assert done.code == 0, done.err
    record = json.loads(done.out)["contenders"][0]
    assert set(record["quality"]) == {"rouge1", "rougeLsum"}
    assert record["quality"]["rouge1"]["rows"] == 3


def test_results_of_several_targets_in_one_table(
    bench: Bench, toys: ToyFolders, anabranch: Anabranch, tmp_path: Path
) -> None:
    a, b = tmp_path / "lora", tmp_path / "shared"
    assert bench("--methods", "none", "--limit", 3, "--out", a).code == 0
    assert bench("--methods", "streams", "--limit", 3, "--completion", "question", "--out", b).code == 0
    done = anabranch("bench", "table", a, f"{b}.json")
    assert done.code == 0, done.err
    assert "warning: shared: the completion of the task differs" in done.out
    firsts = [line.split()[0] for line in done.out.splitlines() if line.split()]
    assert [first for first in firsts if first in ("lora", "shared")] == ["lora", "shared", "shared"]
    table = json.loads(anabranch("bench", "table", a, b, "--json").out)
    assert table["contenders"][0]["speedup_quartiles"] == [1.0, 1.0, 1.0]
    zero = {"mean": 0.0, "low": 0.0, "high": 0.0, "rows": 3}
    unknown = {"mean": None, "low": None, "high": None, "rows": 0}  # a question is no query
    assert table["contenders"][2]["difference"] == {"exact_match": zero, "execution": unknown}
    result = read(tmp_path / "lora.json")

    def changed(**values: Any) -> Path:
        path = tmp_path / "changed.json"
        path.write_text(json.dumps({**result, **values}), encoding="utf-8")
        return path

    task, (plain,) = result["run"]["application"], result["contenders"]
    quality = plain["quality"] | {"execution": {"scores": [0.0, 2.0, 0.0]}}
    for values, why in (
        ({"run": result["run"] | {"application": None}}, "changed has no valid 'application'; give results of"),
        ({"run": result["run"] | {"application": task | {"metrics": ["x"]}}}, "has no valid 'application'"),
        (
            {"run": result["run"] | {"application": task | {"name": "e2e"}}},
            "has other name than lora (e2e, not sql)",
        ),
        ({"prompts": result["prompts"][:2]}, "has no valid 'quality' of none"),
        ({"prompts": [{"name": str(n)} for n in range(3)]}, "has other rows than lora; measure the same split"),
        ({"contenders": [plain | {"quality": quality}]}, "has no valid 'quality' of none"),
        ({"contenders": [plain | {"sample_ms_quartiles": None}]}, "no valid 'sample_ms_quartiles' of none"),
        ({"contenders": [plain | {"extra_parameters": "few"}]}, "no valid 'extra_parameters' of none"),
    ):
        refused = anabranch("bench", "table", a, changed(**values))
        assert (refused.code, why in refused.err) == (1, True), refused.err
    refused = anabranch("bench", "table", changed(contenders=[plain | {"spec": "streams"}]), a)
    assert "changed has no plain decoding to compare with" in refused.err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (
            ["--data", "nowhere"],
            "there is no split test of the task sql in nowhere; expected nowhere/sql_create_context",
        ),
        (["--prompt-template", "{query}"], "has no field 'query'; its fields are question, context, answer"),
        (["--completion", "reply"], "row 1 of"),
        (["--split", "half"], "the split must be one of train, validation, test and all, got 'half'"),
        (["--metric", "bleu"], "there is no metric 'bleu'"),
        (["--limit", "0"], "limit must be at least 1, got 0"),
        (["--examples", "-1"], "--examples must be at least 0, got -1"),
        (["--methods", "none,fast"], "there is no drafter 'fast'"),
    ],
)
def test_bad_input_is_one_sentence_before_anything_is_loaded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, arguments: list[str], why: str
) -> None:
    monkeypatch.setattr("anabranch.cli.options.load", lambda *_, **__: pytest.fail("loaded"))
    done = bench(*arguments)
    assert done.code == 1
    assert why in done.err
    assert len(done.err.strip().splitlines()) == 1


def test_other_verbs_decode_the_prompts_of_a_task(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(f'{{"ask": "say {n}", "tell": "it"}}\n' for n in range(4)), encoding="utf-8")
    asked = Prompts(task=(str(path),), prompt_template="Please {ask}", completion="tell", split="all", limit=2).read()
    assert len(asked) == 2
    assert {prompt.text for prompt in asked} <= {f"Please say {n}" for n in range(4)}
    assert {prompt.task for prompt in asked} == {"mine"}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("run", "--task", "sql"), "measure the application 'sql' with 'bench task sql'"),
        (("load", "--task", "sql", "--task", "e2e"), "decodes one application at a time, got sql and e2e"),
        (("load", "--task", "sql", "--field", "x"), "--field has no effect with --task"),
        (("run", "--suite", "mt_bench", "--completion", "x"), "--completion needs --task without --suite"),
        (("--split", "all"), "--split needs --task"),
    ],
)
def test_options_of_tasks_in_other_verbs(anabranch: Anabranch, arguments: tuple[str, ...], why: str) -> None:
    done = anabranch("bench", *arguments)
    assert (done.code, why in done.err) == (1, True), done.err


def test_quality_is_that_of_every_contenders_own_texts() -> None:
    task = find_task("sql", metrics=["exact_match", "execution"])
    query = "SELECT name FROM boats WHERE seats > 4"
    rows = [TaskRow(str(n), "q", (query,), {"context": BOATS}) for n in range(2)]
    texts = {1: query, 2: "SELECT name FROM boats WHERE seats >= 5", 3: "no query"}
    gathered = [
        ContenderAnswers(name, [[Answer([token], 1.0)] for token in tokens])
        for name, tokens in (("none", (1, 3)), ("same", (1, 3)), ("other", (2, 3)))
    ]
    gathered.append(ContenderAnswers("broken", error="no"))
    records = [{"name": one.name, "prompts": 2, "spec": one.name} for one in gathered]
    application = Application(task, "test", rows, 2)
    add_quality(records, gathered, application, lambda ids: texts[ids[0]], baseline=lambda name: "none")
    means = {record["name"]: [part["mean"] for part in record["quality"].values()] for record in records[:3]}
    assert means == {"none": [0.5, 0.5], "same": [0.5, 0.5], "other": [0.0, 0.5]}
    assert [record.get("equal_texts") for record in records] == [2, 2, 1, None]
    result = {"run": {"application": application.described()}, "contenders": records, "prompts_done": 2}
    table = quality_table(result)
    assert table.titles[:4] == ["contender", "exact\nmatch", "same\nresults", "equal\ntexts"]
    assert [row[1][:4] for row in table.rows] == ["50.0", "= 50", "0.0 "]


def test_a_pass_has_the_drafts_that_it_rejected() -> None:
    # the root 9 and its children 5 and 6; 5 -> 7 -> 8 and 6 -> 4: the target takes 5, then its own 3
    tree = DraftTree.from_paths(9, [[5, 7, 8], [6, 4]])
    path = (0, tree.children(0)[0])
    step = Step(0, (5, 3), ("draft 1", "target"), tree, 5, Verdict(path, 3), Timings(0, 0, 0, 0, 0))
    assert passes_of([step]) == [Pass((5, 3), ("draft 1", "target"), (7, 8))]
    assert passes_of([step._replace(finish="stop")])[0].rejected == ()
    assert Pass.from_list(json.loads(json.dumps(passes_of([step])[0].to_list()))) == passes_of([step])[0]
