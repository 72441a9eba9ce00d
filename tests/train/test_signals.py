"""SIGTERM ends a run as Ctrl-C does, in real processes: what is done is kept, and a resumed run is the same run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from anabranch.cli import app, main
from anabranch.support.interrupt import Terminated, shielded, sigterm_raises
from small import write_answers
from toy_text import ToyFolders

pytestmark = [
    pytest.mark.skipif(os.name == "nt", reason="signals of POSIX"),
    pytest.mark.filterwarnings("ignore::anabranch.errors.TrainingWarning"),
]
HELD = Path(__file__).with_name("held.py")
RECIPE = ("--recipe", "small", "--batch-tokens", "60", "--held-out", "2", "--epochs", "16", "--stream-layers", "1")


def started(*arguments: object, program: Sequence[object] = ("-m", "anabranch"), **env: str) -> subprocess.Popen[str]:
    """The program with ``arguments``, on one thread as the tests' own process is."""
    return subprocess.Popen(
        [sys.executable, *map(str, (*program, *arguments))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )


def terminated(process: subprocess.Popen[str], ready: Callable[[], bool], number: int = signal.SIGTERM) -> str:
    """Send a signal once something is ``ready``; returns what the process said on standard error."""
    while process.poll() is None and not ready():
        time.sleep(0.005)
    process.send_signal(number)
    return process.communicate(timeout=300)[1]


def has_lines(path: Path, count: int) -> bool:
    return path.is_file() and path.read_bytes().count(b"\n") >= count


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return write_answers(tmp_path / "a.jsonl")


@pytest.mark.thorough
def test_sigterm_in_the_middle_of_a_training(toys: ToyFolders, written: Path, tmp_path: Path) -> None:
    def arguments(folder: Path) -> list[str]:
        words = ("train", "streams", "--model", toys.model, "--answers", written, "--out", folder, *RECIPE)
        return [*map(str, words), "--no-timing"]

    stopped = tmp_path / "stopped"
    log = stopped / "training" / "log.jsonl"
    process = started(*arguments(stopped), program=[HELD], HOLD=str(tmp_path), TWICE="yes")
    said = terminated(process, lambda: any(tmp_path.glob("held-*")))
    assert process.returncode == 143, said
    assert "the same command resumes from here" in said
    assert "Traceback" not in said
    record = json.loads((stopped / "training" / "checkpoint.json").read_text(encoding="utf-8"))
    last = json.loads(log.read_text(encoding="utf-8").splitlines()[-1])
    assert record["step"] == 25 >= last["step"] >= 10, "everything that was done is kept"
    assert not (stopped / "adapter_config.json").exists()
    for folder in (stopped, tmp_path / "whole"):
        assert CliRunner().invoke(app, arguments(folder)).exit_code == 0
    weights = [(folder / "adapter.safetensors").read_bytes() for folder in (stopped, tmp_path / "whole")]
    assert weights[0] == weights[1]


@pytest.mark.thorough
def test_a_killed_training_resumes_from_its_last_checkpoint(toys: ToyFolders, written: Path, tmp_path: Path) -> None:
    def arguments(folder: Path) -> list[str]:
        words = ("train", "streams", "--model", toys.model, "--answers", written, "--out", folder, *RECIPE)
        return [*map(str, words), "--no-timing", "--checkpoint-every", "7"]

    killed, whole = tmp_path / "killed", tmp_path / "whole"
    log = killed / "training" / "log.jsonl"
    process = started(*arguments(killed), program=[HELD], HOLD=str(tmp_path))
    terminated(process, lambda: any(tmp_path.glob("held-*")), signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert json.loads((killed / "training" / "checkpoint.json").read_text(encoding="utf-8"))["step"] == 21
    for folder in (killed, whole):
        assert CliRunner().invoke(app, arguments(folder)).exit_code == 0
    weights = [(folder / "adapter.safetensors").read_bytes() for folder in (killed, whole)]
    assert weights[0] == weights[1]
    steps = [json.loads(line)["step"] for line in log.read_text(encoding="utf-8").splitlines()]
    assert steps == sorted(set(steps))


@pytest.mark.thorough
def test_sigterm_keeps_the_answers_that_are_written(toys: ToyFolders, tmp_path: Path) -> None:
    prompts, out = tmp_path / "p.jsonl", tmp_path / "a.jsonl"
    prompts.write_text("".join(f'{{"prompt": "the {n}"}}\n' for n in range(1000)), encoding="utf-8")
    words = ("train", "answers", "--model", toys.model, "--prompts", prompts, "--out", out, "--max-new-tokens", 8)
    process = started(*words)
    said = terminated(process, lambda: has_lines(out, 5))
    assert process.returncode == 143, said
    assert "the same command resumes from here" in said
    lines = out.read_text(encoding="utf-8").splitlines()
    assert 5 <= len(lines) < 1000
    assert all(json.loads(line)["answer_ids"] for line in lines)


@pytest.mark.thorough
def test_sigterm_ends_a_chat(toys: ToyFolders) -> None:
    process = started("chat", "--model", toys.model, "--drafter", "none")
    assert process.stdin is not None
    process.stdin.write("the thing\n")
    process.stdin.flush()
    said = terminated(process, lambda: bool(process.stdout and process.stdout.readline()))
    assert process.returncode == 143, said
    assert "Traceback" not in said


def test_any_verb_ends_with_143_after_sigterm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def slow(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("anabranch.model.fetch.default_model_dir", slow)
    for verb in ("pull", "tune"):
        with pytest.raises(SystemExit) as ended:
            main([verb, *(["--data", "/nowhere"] if verb == "tune" else [])])
        assert ended.value.code == 143
        assert capsys.readouterr().err.strip() == "stopped"


def test_a_process_that_ignores_sigterm_goes_on_ignoring_it() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with sigterm_raises():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
            with shielded():
                signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sigterm_waits_for_what_is_shielded_and_says_how_it_ended() -> None:
    done = []

    def interrupted() -> None:
        with sigterm_raises(), shielded():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)  # a second one, of the other kind
            done.append(1)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated):
        interrupted()
    assert done == [1]
    assert signal.getsignal(signal.SIGTERM) is before
