"""The command line as a user meets it, on a toy model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from anabranch.cli import app

sys.path.insert(0, str(Path(__file__).parent / "model"))
from toys import CASES, save_toy, toy_hf

VERBS = ("pull", "generate", "chat", "info", "certify", "bench", "train")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_toy(toy_hf(*CASES["llama"]), tmp_path_factory.mktemp("cli")))


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    code = "from anabranch.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_is_there(verb: str) -> None:
    result = CliRunner().invoke(app, [verb, "--help"] if verb else ["--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_help_does_not_load_torch() -> None:
    code = "import sys; import anabranch.cli; assert 'torch' not in sys.modules, 'slow start'"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_generate_shows_text_and_a_line_of_figures(folder: str) -> None:
    words = ("generate", "w3 w4 w5", "--model", folder, "--drafter", "prompt_lookup", "--max-new-tokens", "5")
    result = _run(*words, "--dtype", "float32", "--compare")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    for part in ("tokens/s", "mean acceptance length", "forwards", "speedup", "same tokens"):
        assert part in result.stderr


def test_generate_json_and_drafts(folder: str) -> None:
    words = ["generate", "w3 w3 w3 w3", "--model", folder, "--drafter", "prompt_lookup", "--max-new-tokens", "4"]
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert len(record["token_ids"]) == record["tokens"] == 4
    shown = CliRunner().invoke(app, [*words, "--show-drafts"])
    assert shown.exit_code == 0
    assert "who proposed it" in shown.output


def test_certify_exits_with_0_where_all_is_equal(folder: str) -> None:
    words = ["certify", "--model", folder, "--drafter", "prompt_lookup", "--dtype", "float32", "--max-new-tokens", "8"]
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["counts"] == {"equal": 6, "tie": 0, "BUG": 0}


def test_bench_writes_a_result(folder: str, tmp_path: Path) -> None:
    words = ["bench", "--model", folder, "--method", "none", "--method", "prompt_lookup", "--peer", "transformers"]
    out = tmp_path / "made" / "result"
    result = CliRunner().invoke(app, [*words, "--dtype", "float32", "--max-new-tokens", "6", "--out", str(out)])
    assert result.exit_code == 0, result.output
    record = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    assert [c["name"] for c in record["contenders"]] == ["none", "prompt_lookup", "transformers"]
    assert all(c["equal_outputs"] == 6 for c in record["contenders"])
    assert "tokens/s" in out.with_suffix(".md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("generate", "w3", "--model", "{folder}"), "needs an adapter"),
        (("generate", "", "--model", "{folder}", "--drafter", "none"), "empty"),
        (("generate", "w3", "--model", "{folder}", "--drafter", "none", "--max-new-tokens", "0"), "max_new_tokens"),
        (("generate", "w3", "--model", "{folder}", "--drafter", "none", "--temperature", "-1"), "temperature"),
        (("generate", "w3", "--model", "{folder}", "--drafter", "none", "--top-p", "0"), "top_p"),
        (("generate", "w3", "--model", "{folder}", "--drafter", "streams:k=0"), "adapter"),
        (("generate", "w3", "--model", "{folder}", "--device", "tpu", "--drafter", "none"), "device"),
        (("generate", "w3", "--model", "{folder}", "--dtype", "int3", "--drafter", "none"), "dtype"),
        (("generate", "w3", "--model", "{folder}", "--adapter", "nowhere"), "no adapter folder"),
        (("info", "{folder}/nothing.gguf"), "nothing.gguf"),
        (("bench", "--model", "{folder}", "--suite", "spec_bench", "--method", "none"), "--data"),
        (("bench", "--model", "{folder}", "--method", "none", "--peer", "magic"), "no peer"),
    ],
)
def test_mistakes_end_in_a_sentence(folder: str, words: tuple[str, ...], message: str) -> None:
    result = _run(*(word.format(folder=folder) for word in words))
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert message in " ".join(result.stderr.split())
