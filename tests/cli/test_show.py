"""Text for a terminal: cleaned, wrapped between facts, and lines that go away."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable

import pytest

from anabranch.cli import show
from anabranch.cli.screen import screen
from anabranch.errors import PerformanceWarning


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\n", "plain\ttext\n"),
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("over\rwritten\b", r"over\x0dwritten\x08"),
        ("\x9b31m\x7f", r"\x9b31m\x7f"),
        ("\u202eabc\u2066", r"\u202eabc\u2066"),
        ("grün 漢字 \u200f\u0628 👩\u200d🔬", "grün 漢字 \u200f\u0628 👩\u200d🔬"),
    ],
)
def test_control_characters_are_spelled_out(text: str, shown: str) -> None:
    assert show.cleaned(text) == shown


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes standard error say that it is a terminal of 40 columns."""

    def pretend(kind: str = "xterm") -> None:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", "40")
        monkeypatch.setenv("TERM", kind)

    return pretend


def test_marks_are_numbers_or_first_letters_and_the_legend_is_ordered() -> None:
    assert [show._mark(source) for source in ("stream 3", "stream 12", "prompt_lookup", "echo")] == [
        "3",
        "12",
        "p",
        "e",
    ]
    ordered = sorted(("prompt_lookup", "stream 10", "unknown", "stream 2", "target"), key=show._place)
    assert ordered == ["target", "stream 2", "stream 10", "prompt_lookup", "unknown"]


FACTS = ["256 tokens, 98.1 tokens/s", "drafter streams", "mean acceptance length 2.61", "a" * 38]


def test_facts_break_between_sentences(terminal: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    terminal()
    show.sentences(FACTS)
    lines = capsys.readouterr().err.replace("\x1b[2m", "").replace("\x1b[0m", "").splitlines()
    assert lines == ["256 tokens, 98.1 tokens/s;", "drafter streams;", "mean acceptance length 2.61;", "a" * 38]


def test_facts_are_one_line_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    show.sentences(FACTS)
    assert capsys.readouterr().err == "; ".join(FACTS) + "\n"


def test_a_waiting_line_goes_away(terminal: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    terminal()
    with show.Wait("loading " + "x" * 60) as wait:
        assert len(capsys.readouterr().err) == 39
        wait.tell("reading")
        assert capsys.readouterr().err == "\r\x1b[Kreading"
    assert capsys.readouterr().err == "\r\x1b[K"


def test_a_warning_is_printed_above_the_waiting_line(
    terminal: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal()
    monkeypatch.setattr(warnings, "showwarning", show.show_warning)
    with warnings.catch_warnings(), show.Wait("loading"):
        warnings.simplefilter("always")
        warnings.warn("slow", PerformanceWarning, stacklevel=1)
        shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().err)
    assert shown == "loading\r\x1b[Kwarning: slow\nloading"


def test_a_warning_is_printed_above_live_lines(
    terminal: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal()
    monkeypatch.setattr(warnings, "showwarning", show.show_warning)
    with warnings.catch_warnings(), screen() as shown:
        warnings.simplefilter("always")
        shown.show("step 1", "two", plain="")
        warnings.warn("slow", PerformanceWarning, stacklevel=1)
        note = "a" * 30
        show.note(note)
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err).split("\n")]
    assert lines.index("warning: slow") < lines.index(note) < len(lines) - 1 - lines[::-1].index("two")


def test_a_dumb_terminal_gets_one_line(terminal: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    terminal("dumb")
    with show.Wait("loading") as wait:
        wait.tell("reading")
    assert capsys.readouterr().err == "loading\n"


def test_a_pipe_gets_no_waiting_line(capsys: pytest.CaptureFixture[str]) -> None:
    with show.Wait("loading") as wait:
        wait.tell("reading")
    assert capsys.readouterr().err == ""


def test_progress_of_a_prompt_is_shown_after_a_second(
    terminal: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal()
    now = [0.0]
    monkeypatch.setattr(show.time, "monotonic", lambda: now[0])
    with show.Wait() as wait:
        tell = show.prompt_progress(wait)
        tell(512, 7000)
        now[0] = 1.5
        tell(7000, 7000)
        assert capsys.readouterr().err == ""
        tell(1024, 7000)
        assert capsys.readouterr().err == "reading prompt: 1,024 of 7,000 tokens"
