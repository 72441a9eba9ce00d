"""``research/train_on_gpu.py`` before a GPU is at hand: parts of a model, completions and a training."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

import train_on_gpu
from anabranch.adapters.record import read_record
from anabranch.decoding.engine import Request
from anabranch.model.weights import build_decoder
from small import LLAMA, plain, prompt, randomise
from toy_text import ToyFolders


def test_a_model_is_put_together_from_its_parts(tmp_path: Path) -> None:
    model, parts, there = tmp_path / "m.gguf", tmp_path / "parts", tmp_path / "there"
    model.write_bytes(bytes(range(256)) * 8000)
    train_on_gpu.split(Namespace(model=model, megabytes=1, out=parts))
    assert sorted(path.name for path in parts.iterdir()) == [
        *("m.gguf.part000", "m.gguf.part001", "m.gguf.part002", "m.gguf.sha256")
    ]
    there.mkdir()
    train_on_gpu.join(there / "m.gguf", parts)
    assert (there / "m.gguf").read_bytes() == model.read_bytes()
    (parts / "m.gguf.part001").unlink()
    with pytest.raises(ValueError, match="are not the whole file; copy them again"):
        train_on_gpu.join(there / "m.gguf", parts)
    assert sorted(path.name for path in there.iterdir()) == ["m.gguf"]


def test_many_prompts_are_completed_as_one_at_a_time() -> None:
    decoder = build_decoder(replace(LLAMA, family="qwen2", qkv_bias=True), device="cpu")
    randomise(decoder, seed=3)
    prompts = [prompt(length, seed=length) for length in (12, 3, 7, 1)]
    alone = [tokens for text in prompts for tokens in plain(decoder, [Request(text, 40)])]
    decoder.config = replace(decoder.config, eos_token_ids=(alone[0][4], alone[2][-2]))
    ends = set(decoder.config.eos_token_ids)
    until = [next((n for n, token in enumerate(text, 1) if token in ends), len(text)) for text in alone]
    assert min(until) < 34 < max(until)
    assert train_on_gpu.decode(decoder, prompts, 40) == [text[:end] for text, end in zip(alone, until, strict=True)]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*completion tokens are few")
def test_several_methods_are_trained_on_the_same_completions(
    toys: ToyFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("NEW", 12), ("RESERVE", 0.0)):
        monkeypatch.setattr(train_on_gpu, name, value)
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    rows = ({"id": n, "source": "own", "prompt_ids": [3 + n % 7, 4 + n % 5, 5 + n]} for n in range(40))
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    where = [str(toys.model), "--device", "cpu", "--out"]

    def run(verb: str, *words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["train_on_gpu.py", verb, *words])
        train_on_gpu.main()

    run("complete", *where, str(answers), "--prompts", str(prompts), "--seconds", "30")
    assert len(answers.read_text().splitlines()) == 40
    few = ["--seconds", "2", "--batch-tokens", "64", "--answers", str(answers), "--set", "held_out=4"]
    for method, more in (("medusa", ("num_heads=2", "head=shared")), ("eagle", ("draft_vocabulary=0",))):
        out = tmp_path / method
        run("train", *where, str(out), *few, "--method", method, *(word for one in more for word in ("--set", one)))
        assert read_record(out)["method"] == method
    assert read_record(tmp_path / "medusa")["config"]["num_heads"] == 2
