"""Keys of a terminal and what they do, without a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from anabranch.cli.keyboard import Terminal

UP, LEFT, ALT_ENTER, CTRL_C, CTRL_D = "\x1b[A", "\x1b[D", "\x1b\r", "\x03", "\x04"
Type = Callable[[str], str | None]


@pytest.fixture
def history(tmp_path: Path) -> Path:
    return tmp_path / "kept" / "chat_history"


@pytest.fixture
def typed(history: Path) -> Iterator[Type]:
    """Press keys and return the message that is read."""
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        terminal = Terminal(history, ["/help", "/reset"])

        def press(what: str) -> str | None:
            keys.send_bytes(what.encode("utf-8", "surrogateescape"))
            return terminal.read()

        yield press


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("hello\r", "hello"),
        ("hllo" + LEFT * 3 + "e\r", "hello"),
        ("one" + ALT_ENTER + "two\r", "one\ntwo"),
        ("one\\\rtwo\r", "one\ntwo"),
        ("one\\" + LEFT + "\r", "one\\"),
        ("\x1b[200~one\ntwo\n\x1b[201~three\r", "one\ntwo\nthree"),
        ("/he\t\r", "/help"),
        ("\r", ""),
        (CTRL_D, None),
    ],
)
def test_keys(typed: Type, keys: str, message: str | None) -> None:
    assert typed(keys) == message


def test_ctrl_c_clears_the_line(typed: Type) -> None:
    with pytest.raises(KeyboardInterrupt):
        typed("half a thought" + CTRL_C)
    assert typed("whole\r") == "whole"


def test_the_history_is_kept_for_its_owner_alone(typed: Type, history: Path) -> None:
    typed("first\r")
    typed("of" + ALT_ENTER + "two lines\r")
    assert typed(UP + UP + UP + "\r") == "first"
    assert history.stat().st_mode & 0o777 == 0o600
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        keys.send_text("of" + CTRL_C)
        again = Terminal(history, [])
        with pytest.raises(KeyboardInterrupt):
            again.read()  # the file is read while the first prompt is shown
        keys.send_text(UP + UP + UP + "\r")
        assert again.read() == "of\ntwo lines"


def test_a_history_that_cannot_be_kept(typed: Type, history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history.parent.write_text("a file where the folder should be")
    assert typed("one\r") == "one"
    assert typed("two\r") == "two"
    assert typed(UP + UP + "\r") == "one"
    assert capsys.readouterr().err.count("the history cannot be kept") == 1


def test_half_characters_do_not_break_the_history(typed: Type, history: Path) -> None:
    assert typed("a\udce9\r") == "a\udce9"
    assert "\udce9" not in history.read_text()
