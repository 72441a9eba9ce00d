"""The verbs as a user types them."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from anabranch.api import Model, load
from anabranch.cli import app, main
from anabranch.engine import Engine
from toy_text import ToyFolders

VERBS = ("pull", "generate", "chat", "info", "certify", "tune", "simulate", "analyze", "bench", "train")
PROGRAM = [sys.executable, "-c", "from anabranch.cli import main; main()"]


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


class Anabranch:
    """Runs a verb in this process, as the console script would."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.capsys, self.monkeypatch = capsys, monkeypatch

    def __call__(self, *arguments: object, stdin: str | None = None) -> Outcome:
        if stdin is not None:
            self.monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = self.capsys.readouterr()
        code = ended.value.code
        assert isinstance(code, int)
        return Outcome(code, captured.out, captured.err)


@pytest.fixture
def anabranch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Anabranch:
    return Anabranch(capsys, monkeypatch)


@pytest.fixture
def generate(toys: ToyFolders) -> list[object]:
    """The start of a command line that uses the toy."""
    return ["generate", "--model", toys.model, "--adapter", toys.adapter, "--dtype", "float32", "--device", "cpu"]


@pytest.fixture(scope="module")
def model(toys: ToyFolders) -> Model:
    return load(toys.model, adapter=toys.adapter, dtype="float32", device="cpu")


def answer(model: Model, text: str, **options: Any) -> Any:
    return model.chat([{"role": "user", "content": text}], **options)


@pytest.mark.parametrize("verb", [*VERBS, "train streams", "train answers"])
def test_help_tells_what_a_verb_is_for(verb: str) -> None:
    result = CliRunner().invoke(app, [*verb.split(), "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output
    assert len(result.output) > 200


def test_help_lists_the_verbs_and_is_quick() -> None:
    shown = "import sys; from anabranch.cli import app; app(['--help'], standalone_mode=False)"
    code = f"{shown}; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(verb in done.stdout for verb in VERBS)


def test_generate_answers_through_the_template(anabranch: Anabranch, generate: list[object], model: Model) -> None:
    expected = answer(model, "the thing", max_new_tokens=12)
    done = anabranch(*generate, "the thing", "--max-new-tokens", 12)
    assert done.code == 0
    assert done.out == expected.text + "\n"
    assert f"{expected.stats.tokens} tokens, " in done.err
    assert f"mean acceptance length {expected.stats.mean_acceptance_length:.2f}" in done.err
    assert f"{expected.stats.steps} forwards" in done.err
    assert done.err.count("\n") == 1


def test_generate_raw_continues_the_text_of_standard_input(
    anabranch: Anabranch, generate: list[object], model: Model
) -> None:
    done = anabranch(*generate, "-", "--raw", "--max-new-tokens", 8, "--drafter", "none", stdin="the thing")
    assert done.out == model.generate("the thing", max_new_tokens=8).text + "\n"
    assert "mean acceptance length 1.00, 8 forwards" in done.err


def test_generate_json(anabranch: Anabranch, generate: list[object], model: Model) -> None:
    options = ("--max-new-tokens", 12, "--temperature", 1, "--top-k", 9, "--seed", 5, "--show-drafts", "--compare")
    done = anabranch(*generate, "the thing", "--json", *options)
    found = json.loads(done.out)
    expected = answer(model, "the thing", max_new_tokens=12, temperature=1.0, top_k=9, seed=5)
    assert found["token_ids"] == expected.token_ids
    assert found["text"] == expected.text
    assert found["finish_reason"] == expected.finish_reason
    assert found["sources"] == expected.sources
    assert found["stats"]["tokens"] == 12
    assert found["compare"]["equal"] is True
    assert found["compare"]["speedup"] > 0
    assert done.err == ""


def test_generate_stops_before_a_stop_string(anabranch: Anabranch, generate: list[object], model: Model) -> None:
    text = model.generate("the thing", max_new_tokens=12).text
    stop = next(text[i] for i in range(3, len(text)) if text[i] != "�")
    done = anabranch(*generate, "the thing", "--raw", "--max-new-tokens", 12, "--stop", stop)
    assert done.out == text[: text.index(stop)] + "\n"


def test_show_drafts_marks_every_source(anabranch: Anabranch, generate: list[object], model: Model) -> None:
    drafter = "streams+prompt_lookup"
    options = {"max_new_tokens": 40, "ignore_eos": False}
    expected = answer(model, "the the the", drafter=drafter, **options)
    done = anabranch(*generate, "the the the", "--max-new-tokens", 40, "--drafter", drafter, "--show-drafts")
    legend, line = done.err.splitlines()
    assert legend.startswith(f"proposed by: target {expected.stats.sources['target']}")
    for source, count in expected.stats.sources.items():
        assert any(word.startswith(source) and word.endswith(f" {count}") for word in legend[13:].split(", "))
    assert "tokens/s" in line
    unmarked = "".join(character for character in done.out if character not in "⁰¹²³⁴⁵⁶⁷⁸⁹ᵖ")
    assert unmarked == expected.text + "\n"


def test_compare_measures_both_ways(anabranch: Anabranch, generate: list[object]) -> None:
    done = anabranch(*generate, "the thing", "--max-new-tokens", 8, "--compare")
    assert "; speedup " in done.err
    assert "x over plain decoding (" in done.err
    assert "same tokens" in done.err
    refused = anabranch(*generate, "the thing", "--drafter", "none", "--compare")
    assert refused.code == 1
    assert "other drafter" in refused.err or "another drafter" in refused.err


def test_chat_remembers(anabranch: Anabranch, toys: ToyFolders, model: Model) -> None:
    where = ("--model", toys.model, "--adapter", toys.adapter, "--dtype", "float32")
    done = anabranch("chat", *where, "--max-new-tokens", 6, "--system", "the", stdin="thing\nother\n\n")
    messages = [{"role": "system", "content": "the"}, {"role": "user", "content": "thing"}]
    first = model.chat(messages, max_new_tokens=6).text
    second = model.chat(
        [*messages, {"role": "assistant", "content": first}, {"role": "user", "content": "other"}], max_new_tokens=6
    ).text
    assert done.code == 0
    assert done.out == f"> {first}\n> {second}\n> "
    ended = anabranch("chat", *where, stdin="")
    assert ended.code == 0


def test_chat_goes_on_after_a_question_that_does_not_fit(anabranch: Anabranch, toys: ToyFolders) -> None:
    where = ("--model", toys.model, "--adapter", toys.adapter, "--dtype", "float32")
    done = anabranch("chat", *where, "--max-new-tokens", 4, stdin=f"{'long ' * 40}\nthe\n\n")
    assert done.code == 0
    assert "the model's limit is 96" in done.err
    assert done.out.count("> ") == 3
    assert "mean acceptance length" in done.err


def test_info(anabranch: Anabranch, toys: ToyFolders) -> None:
    facts = json.loads(anabranch("info", toys.model, "--json").out)
    assert (facts["family"], facts["layers"], facts["max_positions"]) == ("llama", 3, 96)
    assert facts["fingerprint"] in anabranch("info", toys.model).out.replace("\n", "").replace(" ", "")
    record = json.loads(anabranch("info", toys.adapter, "--json").out)
    assert record["target"]["fingerprint"] == facts["fingerprint"]
    assert "Stream adapter for toy" in anabranch("info", toys.adapter).out


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


@pytest.mark.parametrize("temperature", [0, 1])
def test_certify_finds_a_bug(
    anabranch: Anabranch, toys: ToyFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: int
) -> None:
    honest = Engine._verify

    def wrong(self: Engine, row: Any, tree: Any, *rest: Any) -> Any:
        verdict = honest(self, row, tree, *rest)
        if tree.size == 1:
            return verdict
        return type(verdict)(verdict.path, (verdict.next_token + 40) % 200)

    monkeypatch.setattr(Engine, "_verify", wrong)
    done = anabranch(*certify_arguments(toys, tmp_path / "prompts.jsonl"), "--temperature", temperature)
    assert done.code == 1
    assert "3 bugs" in done.out


def _installed() -> bool:
    try:
        return bool(version("anabranch"))
    except PackageNotFoundError:
        return False


@pytest.mark.skipif(not _installed(), reason="a result file names the installed version")
def test_bench_writes_a_result(anabranch: Anabranch, toys: ToyFolders, tmp_path: Path) -> None:
    methods = ("--method", "none", "--method", "prompt_lookup", "--method", "streams", "--peer", "transformers")
    where = ("--model", toys.model, "--adapter", toys.adapter, "--dtype", "float32", "--raw")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the thing"}\n{"prompt": "other"}\n')
    suite = ("--suite", tmp_path / "prompts.jsonl", "--max-new-tokens", 6)
    out = tmp_path / "made" / "result"
    done = anabranch("bench", *where, *methods, *suite, "--out", out)
    assert done.code == 0, done.err
    record = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    assert [c["name"] for c in record["contenders"]] == ["none", "prompt_lookup", "streams", "transformers"]
    assert all(c["equal_outputs"] == 2 for c in record["contenders"])
    assert "tokens/s" in out.with_suffix(".md").read_text(encoding="utf-8")


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


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_ctrl_c_at_the_prompt_of_a_real_chat(toys: ToyFolders) -> None:
    command = [*PROGRAM, "chat", "--model", str(toys.model), "--drafter", "prompt_lookup", "--max-new-tokens", "4"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as chat:
        assert chat.stdin is not None
        assert chat.stderr is not None
        chat.stdin.write("the\n")
        chat.stdin.flush()
        assert "tokens/s" in chat.stderr.readline()  # answered, and waiting for the next question
        chat.send_signal(signal.SIGINT)
        _, err = chat.communicate(timeout=60)
    assert chat.returncode == 130
    assert "stopped" in err
    assert "Traceback" not in err


def test_a_real_run_into_a_pipe_that_closes(toys: ToyFolders) -> None:
    command = [*PROGRAM, "generate", "the thing", "--model", str(toys.model), "--drafter", "prompt_lookup", "--raw"]
    whole = subprocess.run(command, capture_output=True, check=False, timeout=120)
    assert whole.returncode == 0
    assert whole.stdout.endswith(b"\n")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as cut:
        assert cut.stdout is not None
        cut.stdout.close()
        assert cut.stderr is not None
        assert b"Traceback" not in cut.stderr.read()
