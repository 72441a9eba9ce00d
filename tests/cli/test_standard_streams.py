"""Standard streams that are closed, full or broken: an exit status, a sentence where possible, and no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from toy_text import ToyFolders

CLI = f"{sys.executable} -m anabranch"
GENERATE = f"{CLI} generate --model {{}} --raw --max-new-tokens 8 --drafter none 'abc'"


def run(command: str, folder: Path) -> tuple[int, str]:
    """Exit status and standard error of a command in a shell."""
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True, timeout=300, cwd=folder)
    return done.returncode, done.stderr


def quiet(text: str) -> bool:
    return not any(word in text for word in ("Traceback", "Exception ignored", "Errno"))


@pytest.mark.parametrize("verb", ["--version", "--help", "generate --help"])
@pytest.mark.parametrize(
    ("streams", "status", "sentence"),
    [
        (">&-", 1, "standard output cannot be written (it is closed)"),
        (">/dev/full", 1, "standard output cannot be written (No space left on device)"),
        (">/dev/full 2>/dev/full", 1, ""),
        (">&- 2>&- <&-", 1, ""),
        ("<&- >/dev/null", 0, ""),
        ("2>&- >/dev/null", 0, ""),
    ],
)
def test_streams_that_take_nothing(verb: str, streams: str, status: int, sentence: str, tmp_path: Path) -> None:
    code, said = run(f"{CLI} {verb} {streams}", tmp_path)
    assert code == status
    assert quiet(said)
    assert sentence in " ".join(said.split())


@pytest.mark.parametrize("streams", ["2>&- >/dev/null", "2>/dev/full >/dev/null", ">&- 2>/dev/full"])
def test_a_wrong_call_keeps_its_status(streams: str, tmp_path: Path) -> None:
    code, said = run(f"{CLI} generate --no-such-option {streams}", tmp_path)
    assert code == 2
    assert quiet(said)


@pytest.mark.thorough
def test_a_reader_that_has_ended(toys: ToyFolders, tmp_path: Path) -> None:
    code, said = run(f"{CLI} --help | true; exit ${{PIPESTATUS[0]}}", tmp_path)
    assert code == 141
    assert not said.strip()
    code, said = run(f"{GENERATE.format(toys.model)} 2>log | true; exit ${{PIPESTATUS[0]}}", tmp_path)
    assert code == 141
    assert quiet((tmp_path / "log").read_text())


@pytest.mark.thorough  # each takes seconds to import PyTorch, and ends as those of the quick verbs do
@pytest.mark.parametrize(
    ("streams", "status"),
    [
        (">&-", 1),
        ("2>/dev/full >out", 0),
        (">/dev/full", 1),
        ("2>&- >out", 0),
        ("<&- >out", 0),
    ],
)
def test_a_text_that_is_lost(streams: str, status: int, toys: ToyFolders, tmp_path: Path) -> None:
    code, said = run(f"{GENERATE.format(toys.model)} {streams}", tmp_path)
    assert code == status
    assert quiet(said)
    assert ("standard output cannot be written" in " ".join(said.split())) == (status == 1)
    assert status or (tmp_path / "out").read_text()
