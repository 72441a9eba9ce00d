"""The adapter to Spec-Bench's evaluation, on a toy; Spec-Bench itself is not part of the repository."""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from anabranch.errors import AnabranchError
from toy_text import END, VOCABULARY, toy_model

SCRIPT = Path(__file__).resolve().parents[2] / "research" / "spec_bench.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("spec_bench_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("drafter", ["none", "prompt_lookup", "streams:nodes=8"])
def test_the_forward_func(script: ModuleType, drafter: str) -> None:
    model = toy_model()
    tokenizer = script.Tokenizer(model.tokenizer)
    inputs = tokenizer(["the thing and the other thing"], return_tensors="pt").to("cuda")
    ids, new, steps, lengths = script.forward(inputs, script.Evaluated(model), tokenizer, 24, drafter=drafter)
    prompt = inputs.input_ids[0].tolist()
    generation = model.generate(prompt, max_new_tokens=24, drafter=drafter)
    assert ids.shape == (1, len(prompt) + new)
    assert ids[0].tolist() == prompt + generation.token_ids
    assert (new, steps) == (len(generation.token_ids), generation.stats.steps)
    assert (sum(lengths), len(lengths)) == (new, steps)
    assert min(lengths) >= 1
    if drafter == "none":
        assert lengths == [1] * new


def test_an_end_token_counts_in_the_step_that_emits_it(script: ModuleType) -> None:
    free = toy_model("none", eos=())
    prompt = free.tokenizer.encode("the thing")
    ends = free.generate(prompt, max_new_tokens=12).token_ids[5]
    model = toy_model("streams", eos=(ends,))
    inputs = script.Inputs(torch.tensor([prompt]))
    ids, new, _, lengths = script.forward(inputs, script.Evaluated(model), model.tokenizer, 12)
    assert ids[0, -1] == ends
    assert sum(lengths) == new <= 6


def test_a_conversation_is_the_models_own(script: ModuleType) -> None:
    model = toy_model()
    conversation = script.Conversation(model.tokenizer)
    conversation.append_message(conversation.roles[0], "one")
    conversation.append_message(conversation.roles[1], None)
    tokenizer = script.Tokenizer(model.tokenizer)
    ids = tokenizer([conversation.get_prompt()], return_tensors="pt").input_ids
    assert ids[0].tolist() == model.chat_ids([{"role": "user", "content": "one"}])
    conversation.messages[-1][-1] = "two"
    conversation.append_message(conversation.roles[0], "three")
    conversation.append_message(conversation.roles[1], None)
    assert conversation.get_prompt() == "[user]one[assistant]two[user]three[assistant]"
    assert script.Conversation(model.tokenizer).messages == [], "conversations share nothing"
    assert tokenizer.decode(torch.tensor([VOCABULARY - 1])) == END


def answer(tokens: list[int], seconds: list[float], steps: list[int], text: str = "x") -> dict[str, Any]:
    turns = {"turns": [text], "new_tokens": tokens, "wall_time": seconds, "decoding_steps": steps}
    return {"choices": [turns]}


def test_our_numbers_of_its_answers(script: ModuleType) -> None:
    plain = [answer([10, 10], [1.0, 1.0], [10, 10]), answer([4], [1.0], [4])]
    fast = [answer([10, 10], [0.5, 0.5], [4, 6]), answer([4], [1.0], [2], text="y")]
    summary = script.ours(fast, plain)
    assert summary["mean_acceptance_length"] == 24 / 12
    assert summary["tokens_per_second"] == 24 / 2
    assert summary["plain_tokens_per_second"] == 24 / 3
    assert (summary["speedup"], summary["speedup_total"]) == (1.5, 1.5)
    assert summary["equal_texts"] == 1


def test_questions(script: ModuleType, tmp_path: Path) -> None:
    rows = [{"question_id": i, "turns": ["?"]} for i in range(10)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(text)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    assert script.read_lines(tmp_path / "a.jsonl") == script.read_lines(tmp_path / "a.jsonl.gz") == rows
    assert [row["question_id"] for row in script.spread(rows, 3)] == [0, 3, 6]
    assert script.spread(rows, None) == script.spread(rows, 99) == rows


def test_what_cannot_be_used(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "plain.jsonl").write_text("")
    (tmp_path / "bad.jsonl").write_text("{")
    for call, words in (
        (lambda: script.check_spec_bench(tmp_path), "is no checkout of Spec-Bench"),
        (lambda: script.read_lines(tmp_path / "bad.jsonl"), "line 1 of .* is not JSON"),
        (lambda: script.read_lines(tmp_path / "none.jsonl"), "cannot be read"),
        (lambda: script.spread([], -1), "limit must be at least 1"),
        (lambda: script.main(["--spec-bench", str(tmp_path), "--out", str(tmp_path)]), "is there already"),
    ):
        with pytest.raises(AnabranchError, match=words):
            call()
