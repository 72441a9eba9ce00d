"""Profiles, traces, training data, checkpoints and results with wrong contents: one FileError, one line each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from anabranch.analysis.trace import TraceWriter, read_trace
from anabranch.bench.compare import compare, comparison_table, read_result
from anabranch.bench.journal import Journal
from anabranch.bench.report import SCHEMA
from anabranch.control.profiles import Situation, find_profile, save_profile
from anabranch.decoding.engine import Engine, Request
from anabranch.errors import FileError
from anabranch.methods import make_drafter
from anabranch.train.answers import read_prompts
from anabranch.train.checkpoint import load_checkpoint, save_checkpoint
from anabranch.train.data import read_examples
from small import RICH, Words, as_target, small, small_adapter

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
LONG = "[" * 100_000


def refused(read: Callable[[], Any]) -> str:
    with pytest.raises(FileError) as caught:
        read()
    sentence = str(caught.value)
    assert sentence
    assert "\n" not in sentence
    assert len(sentence) < 600
    return sentence


@pytest.mark.parametrize(
    "changes",
    [
        *({"drafter": value} for value in (7, None)),
        *({"costs": value} for value in (None, [], {}, {"draft": "1:1"}, {"pass": 7}, {"pass": "1:nan/8:2"})),
        *({"costs": {"pass": "1:1/8:2", **other}} for other in ({"draft": "x"}, {"prepare": [1]})),
    ],
)
def test_profiles(changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANABRANCH_HOME", str(tmp_path))
    situation = Situation.of(as_target(small()))
    save_profile(situation, costs={"pass": "1:8/8:9"}, drafter="none", record={})
    whole = find_profile(situation)
    situation.path().write_text(json.dumps({**whole, **changes}), encoding="utf-8")
    assert "run 'anabranch tune' again" in refused(lambda: find_profile(situation))
    situation.path().write_text(LONG, encoding="utf-8")
    assert "nested too deeply" in refused(lambda: find_profile(situation))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    decoder = small()
    with TraceWriter(tmp_path / "trace.jsonl", settings={}) as writer:
        engine = Engine(decoder, make_drafter("streams:nodes=6,k=3", decoder, small_adapter(decoder)), capacity=64)
        engine.add(Request([3, 4, 7], 12))
        for step in engine.run():
            writer.add(step)
    return tmp_path / "trace.jsonl"


WRONG_STEPS: dict[str, tuple[Any, ...]] = {
    "tokens": ([1, 10**30], "many"),
    "parents": ([-1, True],),
    "sources": ([0, -1],),
    "path": ([], [0, -1]),
    "next": ("5", -1),
    "kept": (99, None),
    "row": ([0],),
    "at": (-3,),
    "ms": ([1.0], [1.0, "2", 3.0, 4.0]),
    "log_probs": (["a"],),
    "finish": ("tired",),
    "max_depth": ("much", -1),
}


@pytest.mark.parametrize(
    "changes",
    [
        *({name: value} for name, values in WRONG_STEPS.items() for value in values),
        {"p": [0.5], "q": [0.5], "overlap": "all"},
    ],
)
def test_traces(changes: dict[str, Any], trace: Path) -> None:
    lines = trace.read_text(encoding="utf-8").splitlines()
    at = next(number for number, line in enumerate(lines) if "row" in line)
    lines[at] = json.dumps({**json.loads(lines[at]), **changes})
    trace.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert f"line {at + 1} of" in refused(lambda: read_trace(trace).rows())


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (LONG, "is not a trace"),
        ('{"trace": NaN}', "is not a trace"),
        ('{"trace": 2, "settings": {}, "rule": "toss", "every_position": false}', "is not a trace"),
        ('{"trace": 2, "settings": {}, "rule": "match", "every_position": 0}', "is not a trace"),
        ('{"trace": 2, "rule": "match", "every_position": false}', "is not a trace"),
        ('{"trace": 1, "settings": {}, "rule": "follow", "every_position": false}', "is a trace of version 1"),
    ],
)
def test_trace_headers(header: str, words: str, trace: Path) -> None:
    trace.write_text(header + "\n", encoding="utf-8")
    assert words in refused(lambda: read_trace(trace))


@pytest.mark.parametrize(
    "line",
    [
        LONG,
        "null",
        "\0",
        '{"prompt_ids": [1], "answer_ids": [2, NaN]}',
        '{"prompt_ids": [1], "answer_ids": [2, 3.5]}',
        '{"prompt_ids": [true], "answer_ids": [2, 3]}',
        '{"prompt_ids": [1], "answer_ids": ' + "9" * 5000 + "}",
        '{"prompt_ids": [1], "answer_ids": [2, 1e400]}',
        '{"prompt_ids": "12", "answer_ids": "34"}',
    ],
)
def test_answers(line: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt_ids": [1], "answer_ids": [2, 3]}\n' + line + "\n", encoding="utf-8")
    assert "line 2 of" in refused(lambda: read_examples(path, vocab_size=9, max_tokens=9))


@pytest.mark.parametrize("line", [LONG, "[]", '{"prompt": "w1", "id": true}', '{"prompt": "w1", "id": 1e3}'])
def test_prompts(line: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "w1"}\n' + line + "\n", encoding="utf-8")
    assert "line 2 of" in refused(lambda: read_prompts(path, Words()))


@pytest.fixture
def result(tmp_path: Path) -> Path:
    for path in sorted(BENCHMARKS.glob("spec-bench*.json")):
        if json.loads(path.read_text(encoding="utf-8")).get("schema") == SCHEMA:
            return Path(shutil.copy(path, tmp_path / "result.json"))
    pytest.fail("benchmarks/ has no result of this version")


@pytest.mark.parametrize(
    "changes",
    [
        {"run": None},
        {"run": {}},
        {"environment": [1]},
        {"complete": "yes"},
        {"contenders": {}},
        {"contenders": [7]},
        {"contenders": [{"name": "a"}]},
        {"contenders": [{"name": "a", "spec": "none", "tokens_per_second": 0, "tokens_per_second_by_prompt": [1.0]}]},
        {"contenders": [{"name": "a", "spec": "none", "tokens_per_second": 1, "tokens_per_second_by_prompt": [0]}]},
        {"schema": {"a": "b" * 5000}},
    ],
)
def test_results(changes: dict[str, Any], result: Path) -> None:
    whole = read_result(result)
    comparison_table(compare(whole, whole))
    result.write_text(json.dumps({**whole, **changes}), encoding="utf-8")
    refused(lambda: read_result(result))


@pytest.mark.parametrize("line", ["[]", '{"prompt": 0}', '{"prompt": 0, "answers": {"a": [7]}, "errors": {}}'])
def test_journals(line: str, tmp_path: Path) -> None:
    path = Journal.path_of(tmp_path / "r.json")
    path.write_text('{"settings": {}}\n' + line + "\n{}\n", encoding="utf-8")
    assert "line 2 of" in refused(lambda: Journal.resume(tmp_path / "r.json", {}))
    path.write_text("[1]\n", encoding="utf-8")
    assert "does not start with the settings of a run" in refused(lambda: Journal.resume(tmp_path / "r.json", {}))


CHECKPOINTS: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "another shape": lambda t: t.update({"optimizer.0.exp_avg": torch.zeros(2)}),
    "whole numbers": lambda t: t.update({"optimizer.0.exp_avg": t["optimizer.0.exp_avg"].int()}),
    "a parameter that is not there": lambda t: t.update({"optimizer.99.exp_avg": torch.zeros(2)}),
    "a name of too few parts": lambda t: t.update({"optimizer.exp_avg": torch.zeros(2)}),
    "a part of the state": lambda t: t.pop("optimizer.1.step"),
    "not a number": lambda t: t["optimizer.1.exp_avg"].fill_(float("nan")),
    "weights that are missing": lambda t: t.pop("weight.embeddings"),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints(name: str, tmp_path: Path) -> None:
    module = small_adapter(small(), RICH).requires_grad_(True)
    optimizer = torch.optim.AdamW(module.parameters())
    torch.stack([parameter.square().sum() for parameter in module.parameters()]).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path, module, optimizer, {"step": 3})
    assert load_checkpoint(tmp_path, module, optimizer) == {"step": 3}
    path = tmp_path / "checkpoint.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    CHECKPOINTS[name](tensors)
    save_file(tensors, path, metadata)
    assert "delete the folder to start over" in refused(lambda: load_checkpoint(tmp_path, module, optimizer))
    for record in ("[]", '{"step": "3"}', '{"step": -1}', LONG):
        save_file(tensors, path, {"record": record})
        assert "damaged" in refused(lambda: load_checkpoint(tmp_path, module, optimizer))
