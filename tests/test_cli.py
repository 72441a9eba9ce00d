"""The verbs as a user types them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch.decoding.scores import Scores
from toy_text import ToyFolders
from verbs import Anabranch

PROGRAM = [sys.executable, "-c", "from anabranch.cli import main; main()"]


def test_info(anabranch: Anabranch, toys: ToyFolders) -> None:
    facts = json.loads(anabranch("info", toys.model, "--json").out)
    assert (facts["family"], facts["layers"], facts["max_positions"]) == ("llama", 3, 96)
    assert facts["fingerprint"] in anabranch("info", toys.model).out.replace("\n", "").replace(" ", "")
    record = json.loads(anabranch("info", toys.adapter, "--json").out)
    assert record["target"]["fingerprint"] == facts["fingerprint"]
    assert "Speculative Streaming for toy" in anabranch("info", toys.adapter).out


def certify_arguments(toys: ToyFolders, prompts: Path) -> list[object]:
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("the thing", "a", "other")))
    start = ["certify", "--model", toys.model, "--adapter", toys.adapter, "--dtype", "float32", "--prompts", prompts]
    return [*start, "--max-new-tokens", 16]


def test_certify(anabranch: Anabranch, toys: ToyFolders, tmp_path: Path) -> None:
    arguments = certify_arguments(toys, tmp_path / "prompts.jsonl")
    done = anabranch(*arguments)
    assert done.code == 0
    assert "3 equal, 0 ties, 0 bugs of 3 prompts with streams:tree=" in done.out, "what auto became"
    sampled = anabranch(*arguments, "--temperature", 1, "--limit", 2, "--json")
    found = json.loads(sampled.out)
    assert found["counts"] == {"equal": 2, "tie": 0, "BUG": 0}
    assert [c["verdict"] for c in found["prompts"]] == ["equal", "equal"]


def test_certify_takes_threads_and_checks_files_first(
    anabranch: Anabranch, toys: ToyFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored_threads: int
) -> None:
    arguments = certify_arguments(toys, tmp_path / "prompts.jsonl")
    assert anabranch(*arguments, "--threads", restored_threads + 1, "--limit", 1).code == 0
    assert torch.get_num_threads() == restored_threads + 1
    monkeypatch.setattr("anabranch.model.load.load_target", None)
    for verb in ("certify", "bench"):
        done = anabranch(verb, "--model", toys.model, "--adapter", tmp_path / "gone")
        assert (done.code, done.out) == (1, "")
        assert "there is no adapter folder" in done.err


@pytest.mark.parametrize("temperature", [0, 1])
def test_certify_finds_a_bug(
    anabranch: Anabranch, toys: ToyFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: int
) -> None:
    honest = Scores.verdict

    def wrong(self: Scores, b: int, tree: Any) -> Any:
        verdict = honest(self, b, tree)
        if tree.size == 1:
            return verdict
        return type(verdict)(verdict.path, (verdict.next_token + 40) % 200)

    monkeypatch.setattr(Scores, "verdict", wrong)
    options = ("--temperature", temperature, "--drafter", "streams:nodes=8")
    done = anabranch(*certify_arguments(toys, tmp_path / "prompts.jsonl"), *options)
    assert done.code == 1
    assert "3 bugs" in done.out


def test_pull_names_the_folder(anabranch: Anabranch, toys: ToyFolders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.model.fetch.default_model_dir", lambda *args, **options: toys.model)
    assert anabranch("pull").out == f"default is in {toys.model}\n"
    assert json.loads(anabranch("pull", "--json").out) == {"model": "default", "folder": str(toys.model)}
    assert anabranch("pull", toys.model).out == f"{toys.model} is in {toys.model}\n"


def test_ctrl_c_while_fetching(anabranch: Anabranch, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **options: Any) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr("anabranch.model.fetch.default_model_dir", interrupted)
    done = anabranch("pull")
    assert (done.code, done.err.strip()) == (130, "stopped")
