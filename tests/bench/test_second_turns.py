"""Both turns of MT-Bench: the second one follows the target's own plain answer to the first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anabranch.bench.conversations import with_later_turns
from anabranch.bench.suites import load_suite
from anabranch.errors import AnabranchWarning
from anabranch.loading import Loaded
from toy_text import ToyFolders, toy_model
from verbs import Anabranch


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with two questions of MT-Bench, the first of which has a second turn."""
    path = tmp_path / "mt_bench" / "test.jsonl"
    path.parent.mkdir()
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["the", "and?"]},
        {"question_id": 91, "category": "math", "turns": ["4"]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.parametrize("call", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
def test_a_second_turn_follows_the_plain_answer_to_the_first(data: Path, call: dict[str, float]) -> None:
    model = toy_model()
    first, second, other = with_later_turns(
        load_suite("mt_bench", data=data), Loaded(model.target, model.adapters), call=call, max_new_tokens=5
    )
    answer = model.chat([{"role": "user", "content": "the"}], max_new_tokens=5, drafter="none", **call).text
    assert (second.name, second.task, second.text) == ("81.2", "writing", "and?")
    assert second.asked == (
        {"role": "user", "content": "the"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "and?"},
    )
    assert (first.name, first.asked, other.name) == ("81", "the", "91")


def test_without_a_template_there_are_first_turns_only(data: Path) -> None:
    prompts = load_suite("mt_bench", data=data)
    for model, raw in ((toy_model(template=False), False), (toy_model(), True)):
        with pytest.warns(AnabranchWarning, match="only first turns are decoded"):
            found = with_later_turns(prompts, Loaded(model.target, ()), call={}, max_new_tokens=5, raw=raw)
        assert found == prompts


def test_the_benchmark_decodes_both_turns(data: Path, toys: ToyFolders, anabranch: Anabranch) -> None:
    where = ("--model", toys.model, "--adapter", toys.adapter, "--dtype", "float32", "--data", data)
    done = anabranch(*("bench", "--suite", "mt_bench", *where), *("-n", 4, "--method", "streams", "--json"))
    assert done.code == 0, done.err
    assert "answering the earlier turns by plain decoding" in done.err
    result = json.loads(done.out)
    assert [prompt["name"] for prompt in result["prompts"]] == ["81", "81.2", "91"]
    assert [each["equal_outputs"] for each in result["contenders"]] == [3, 3]
