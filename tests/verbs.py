"""Runs verbs in this process, as the console script would."""

from __future__ import annotations

import io
import sys
from typing import NamedTuple

import pytest

from anabranch.cli import main


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


class Anabranch:
    """The program, called with arguments and the text or the bytes of standard input."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.capsys, self.monkeypatch = capsys, monkeypatch

    def __call__(self, *arguments: object, stdin: str | bytes | None = None) -> Outcome:
        if stdin is not None:
            data = stdin.encode() if isinstance(stdin, str) else stdin
            self.monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = self.capsys.readouterr()
        code = ended.value.code
        return Outcome(code, captured.out, captured.err)
