"""Wrap text at word boundaries while it arrives, at the terminal's current width.

Text that cannot be placed yet, at most one word and the spaces before it, is held until the next piece: whether a word
fits is known once it ends. Nothing is erased, so that it works on every terminal. East Asian characters, which have two
columns and no spaces between them, are words of their own, with the punctuation that may not start a line.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from typing import TextIO
from unicodedata import category

from rich.cells import get_character_cell_size

__all__ = ["Wrapper", "columns_of", "wrapped"]

TAB = 8
STYLE = re.compile(r"\x1b\[[0-9;]*m")
NO_BREAK = "\u00a0\u202f\u2060"  # spaces that keep words together
JOINER = "\u200d"  # between the characters of one emoji
# categories of Unicode: closing and other punctuation may not start a line, opening brackets may not end one
ENDS, BEGINS = ("Pe", "Pf", "Po", "Lm"), ("Ps", "Pi")


def columns_of(stream: TextIO) -> int:
    """The columns of the terminal that ``stream`` writes to, as they are now."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return columns or shutil.get_terminal_size().columns


def wrapped(text: str, stream: TextIO | None = None) -> str:
    """The whole text with line breaks for a terminal (``stream``, by default standard output), else unchanged."""
    stream = stream or sys.stdout
    if not stream.isatty():
        return text
    wrapper = Wrapper(lambda: columns_of(stream))
    return wrapper.add(text) + wrapper.finish()


class Wrapper:
    """Inserts line breaks between words. The styles of a terminal (SGR sequences) take no columns.

    width  returns the columns of a line; called at each ``add``, so that resizing takes effect
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._columns = 1
        self._column = 0  # of the next character, after what was returned
        self._gap = ""  # the spaces before the word that is held
        self._word = ""
        self._last = ""  # the last character of the word

    def add(self, text: str) -> str:
        """Append text; returns what can be shown of all text so far."""
        columns = max(1, self._width())
        if columns != self._columns:
            self._columns, self._column = columns, self._column % columns  # terminals wrap the line that is shown
        shown, at = "", 0
        for style in STYLE.finditer(text):
            shown += self._characters(text[at : style.start()])
            self._word += style[0]
            at = style.end()
        return shown + self._characters(text[at:])

    def finish(self) -> str:
        """End the text; returns what was held."""
        return self._place()

    def _characters(self, text: str) -> str:
        return "".join(map(self._character, text))

    def _character(self, character: str) -> str:
        if character == "\n":
            shown = self._place() + "\n"
            self._column = 0
            return shown
        if character.isspace() and character not in NO_BREAK:
            shown = self._place() if self._last else ""
            self._gap += self._word + character
            self._word = ""
            return shown
        shown = self._place() if self._may_break(character) else ""
        # a word longer than a line
        if 2 * len(self._word) >= self._columns - 2 and self._columns_of(self._word + character, 0) > self._columns:
            shown += self._place()
        self._word += character
        self._last = character
        return shown

    def _may_break(self, character: str) -> bool:
        """Return whether a line may end between the word's last character and this one."""
        if not self._last or self._last == JOINER or category(self._last) in BEGINS:
            return False
        if category(character) in ENDS or get_character_cell_size(character) == 0:
            return False
        return 2 in (get_character_cell_size(self._last), get_character_cell_size(character))

    def _place(self) -> str:
        """The held spaces and word, on a new line if they do not fit on this one."""
        gap, word, self._gap, self._word = self._gap, self._word, "", ""
        drawn, self._last = bool(self._last), ""
        after_gap = self._columns_of(gap, self._column)
        end = self._columns_of(word, after_gap)
        if drawn and end > self._columns and self._column > 0:
            self._column = self._columns_of(word, 0)
            return "".join(STYLE.findall(gap)) + "\n" + word
        if after_gap > self._columns:  # spaces beyond the edge, before a line break
            gap, end = "".join(STYLE.findall(gap)), self._columns_of(word, self._column)
        self._column = end
        return gap + word

    def _columns_of(self, text: str, column: int) -> int:
        """The column after ``text`` that starts at ``column``."""
        for character in STYLE.sub("", text):
            column += TAB - column % TAB if character == "\t" else get_character_cell_size(character)
        return column
