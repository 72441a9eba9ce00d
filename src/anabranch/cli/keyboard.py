"""Input of ``chat``: a terminal with line editing and history, or the lines of a pipe."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from anabranch.cli.options import decoded
from anabranch.cli.show import note
from anabranch.support.files import LONE_SURROGATES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

__all__ = ["Pipe", "Reader", "Terminal", "reader"]

PROMPT, CONTINUED = "> ", "  "


class Reader(Protocol):
    """A source of messages."""

    interactive: bool

    def read(self) -> str | None:
        """The next message, or None at the end. Ctrl-C raises KeyboardInterrupt."""


def reader(history: Path | None, words: Sequence[str]) -> Reader:
    """A ``Terminal`` if input and output are terminals, otherwise a ``Pipe``.

    history  file of the input history; None: the history is not stored
    words    completions for Tab at the beginning of a message
    """
    if sys.stdin.isatty() and sys.stdout.isatty():
        return Terminal(history, words)
    return Pipe()


class Pipe:
    """Each line of standard input is a message. Raises InputError if it is not UTF-8."""

    interactive = False

    def __init__(self) -> None:
        self._read = 0

    def read(self) -> str | None:
        """The next line without its line break."""
        line = sys.stdin.buffer.readline()
        if not line:
            return None
        text = decoded(line, self._read)
        self._read += len(line)
        return text.removesuffix("\n")


class Terminal:
    """Line editing with prompt_toolkit. Enter sends; Alt+Enter, or Enter after a backslash, starts a new line.

    Pasted text of several lines is one message: only a key press sends.
    """

    interactive = True

    def __init__(self, history: Path | None, words: Sequence[str]) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import InMemoryHistory
        from prompt_toolkit.shortcuts import CompleteStyle

        self._session: PromptSession[str] = PromptSession(
            history=InMemoryHistory() if history is None else _kept_history(history),
            multiline=True,
            prompt_continuation=CONTINUED,
            key_bindings=_keys(),
            completer=WordCompleter(list(words), sentence=True),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            enable_history_search=False,
        )

    def read(self) -> str | None:
        """A message of one or more lines."""
        try:
            return self._session.prompt([("bold", PROMPT)])
        except EOFError:
            return None


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.current_line_before_cursor.endswith("\\") and buffer.document.is_cursor_at_the_end:
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _kept_history(path: Path) -> FileHistory:
    """A history in a file readable only by its owner; if it cannot be written, the history is not stored."""
    from prompt_toolkit.history import FileHistory

    class Kept(FileHistory):
        warned = False

        def load_history_strings(self) -> Iterable[str]:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
                path.chmod(0o600)
                return list(super().load_history_strings())
            except OSError as error:
                self._tell(error)
                return []

        def store_string(self, string: str) -> None:
            if LONE_SURROGATES.search(string):
                return
            try:
                super().store_string(string)
            except OSError as error:
                self._tell(error)

        def _tell(self, error: OSError) -> None:
            if not self.warned:
                self.warned = True
                note(f"the history cannot be kept in {path} ({error.strerror}); use --no-history to turn it off")

    return Kept(str(path))
