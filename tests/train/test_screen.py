"""The screen of a training: two lines on a terminal, plain ones in a pipe, a table at the end that fits 60 columns."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich import console as rich_console
from rich.cells import cell_len

from anabranch.cli import screen as screens
from anabranch.cli.screen import clock, screen
from anabranch.cli.show import show_warning
from anabranch.cli.train import _Report
from anabranch.cli.train_result import show, sparkline, summary
from anabranch.errors import TrainingWarning
from anabranch.train.trainer import Progress


def terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> io.StringIO:
    """Every console of the screen writes to this text, as to a terminal of so many columns."""
    text = io.StringIO()

    def made(**_: Any) -> rich_console.Console:
        return rich_console.Console(file=text, force_terminal=True, width=columns, height=20, _environ={})

    monkeypatch.setattr(screens, "Console", made)
    return text


def step(number: int, tree: float | None = None, steps: int = 12_000) -> Progress:
    evaluation = None if tree is None else {"tree": tree}
    return Progress(number, steps, 11.2345, (0.5,), 12_345.6, 36_000.0, evaluation)


@pytest.mark.parametrize("columns", [60, 80])
def test_two_lines_on_a_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = terminal(monkeypatch, columns)
    with screen() as shown:
        report = _Report(shown, [(1, 2.0)], held_out=4)
        report(step(11_000, 2.25))
        assert shown.live is not None
        shown.live.refresh()
        show_warning(TrainingWarning("the loss does not fall"), TrainingWarning)
    said = text.getvalue()
    first, second = said.replace("\x1b[?25h", "").splitlines()[-2:]
    assert first.endswith("step 11,000/12,000 92%, 12,346 tokens/s, 10:00:00 left")
    assert second == "loss 11.235, held-out mean acceptance length 2.25 (+0.25)"
    assert "the loss does not fall" in said
    assert "…" not in said, "nothing is cut"


def test_plain_lines_in_a_pipe(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(screens.time, "monotonic", lambda: now[0])
    with screen() as shown:
        report = _Report(shown, [], held_out=4)
        for number in range(1, 101):
            now[0] += 1.0
            report(step(number, 1.5 if number == 50 else None, steps=100))
    lines = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"[\d,]+ tokens/s in the first 3 steps: about [\d:]+ for the other 97", lines.pop(1))
    assert [line.split()[1].partition("/")[0] for line in lines] == ["1", "31", "50", "80", "100"]
    assert lines[0].endswith("left, loss 11.235, held-out not evaluated yet")
    assert lines[-1].endswith("held-out mean acceptance length 1.50")
    assert "\x1b" not in "".join(lines)


RECORD: dict[str, Any] = {
    "method": "streams",
    "parameters": 3_712_345,
    "bytes": 7_440_000,
    "training": {"steps": 12_000},
    "measured": {
        "held-out answers": 96,
        "predicted mean acceptance length": {"tree": 2.31, "4 nodes": 1.9, "8 nodes": 2.1, "chain": 1.8},
        "accuracy by stream": {"best token": [0.6, 0.5]},
    },
}
LOG = [
    {"step": n, "loss": 2.0, "accuracy": [0.7], "evaluation": {"tree": 1 + n / 10_000}} for n in (4_000, 8_000, 12_000)
]
SPEEDS = {"none": 101.1, "auto": 160.4}


@pytest.mark.parametrize("columns", [60, 80])
def test_the_end_fits_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    found = json.loads(json.dumps(summary(RECORD, LOG, SPEEDS, model="a model", out=Path("d"))))
    show(RECORD, found, Path("d"))
    said = capsys.readouterr().out
    assert all(cell_len(line) <= columns for line in said.splitlines()[:-1])
    assert re.search(r"8 nodes +2\.10\n", said)
    assert "160.4 tokens/s (auto), plain 101.1: 1.59 times" in said
    assert "▁▅█  1.40 at step 4,000, 2.20 at step 12,000" in said
    assert "still rising (+0.40 in the last third): new completions" in " ".join(said.split())
    assert said.endswith("Use it: anabranch generate \"...\" --model 'a model' --adapter d\n")


def test_without_speeds_and_without_held_out_answers(capsys: pytest.CaptureFixture[str]) -> None:
    show(RECORD, summary(RECORD, LOG, {}, model="default", out=Path("d")), Path("d"))
    assert "tokens/s" not in capsys.readouterr().out
    bare = RECORD | {"measured": {}}
    show(bare, summary(bare, [], {}, model="default", out=Path("d")), Path("d"))
    assert capsys.readouterr().out.endswith('Use it: anabranch generate "..." --adapter d\n')


def test_bars_and_clocks() -> None:
    assert sparkline([1.0, 2.0, 1.5]) == "▁█▅"
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert [clock(5), clock(65), clock(3_665)] == ["0:05", "1:05", "1:01:05"]
