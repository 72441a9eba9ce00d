"""Text wrapped between words while it arrives."""

from __future__ import annotations

import fcntl
import random
import re
import struct
import subprocess
import sys
import termios
import textwrap

import pyte
import pytest
from terminals import ESCAPES, Terminal

from anabranch.cli.wrapping import Wrapper

TEXT = (
    "The quick brown fox jumps  over the lazy dog, supercalifragilisticexpialidocious!\n"
    "    an indented line of code, which is long\n\n"
    "今日は、良い天気ですね。「そうですね」と答えた。 mixed 中文 text, naïve café. 👍 end\ttab   "
)


def fed(text: str, width: int, seed: int) -> str:
    """The text wrapped, given in pieces of random lengths."""
    draw, wrapper, shown, at = random.Random(seed), Wrapper(lambda: width), "", 0
    while at < len(text):
        size = draw.randint(1, 6)
        shown += wrapper.add(text[at : at + size])
        at += size
    return shown + wrapper.finish()


@pytest.mark.parametrize("width", [1, 2, 3, 7, 10, 20, 40, 79, 80, 200])
def test_no_word_is_broken_and_nothing_is_lost(width: int) -> None:
    shown = fed(TEXT, width, seed=0)
    assert all(fed(TEXT, width, seed) == shown for seed in range(1, 20))
    assert re.sub(r"\s", "", shown) == re.sub(r"\s", "", TEXT)
    screen = pyte.Screen(width, 400)
    pyte.Stream(screen).feed(shown.replace("\n", "\r\n"))
    rows = [row.rstrip() for row in screen.display]
    if width > 2:  # the terminal itself never wraps
        rendered = [line.rstrip() for line in shown.expandtabs().split("\n")]
        assert len(rendered) == screen.cursor.y + 1
    for word in TEXT.split():
        if word.isascii() and len(word) <= width:
            assert any(re.search(rf"(^|\s){re.escape(word)}(\s|$)", row) for row in rows), word


def test_punctuation_stays_with_the_character_before_it() -> None:
    assert fed("今日は、良い天気", 6, 0) == "今日\nは、良\nい天気"
    assert fed("「はい」と「いや」", 10, 0) == "「はい」と\n「いや」"


def test_a_word_is_shown_as_soon_as_it_ends() -> None:
    wrapper = Wrapper(lambda: 20)
    assert [wrapper.add(piece) for piece in ("Hel", "lo", " wor", "ld", "!\n", "Bye")] == [
        *("", "", "Hello", "", " world!\n", "")
    ]
    assert wrapper.finish() == "Bye"


def test_styles_take_no_columns() -> None:
    styled = "\x1b[32mgreen words\x1b[0m and \x1b[36mcyan\x1b[0m ones"
    shown = fed(styled, 12, 0)
    assert ESCAPES.sub("", shown) == fed(ESCAPES.sub("", styled), 12, 0) == "green words\nand cyan\nones"
    assert re.findall(r"\x1b\[\d+m", shown) == re.findall(r"\x1b\[\d+m", styled)


def test_the_width_may_change_in_the_middle() -> None:
    width = 20
    wrapper = Wrapper(lambda: width)
    shown = wrapper.add("one two three four five ")
    width = 10
    shown += wrapper.add("six seven eight nine ten") + wrapper.finish()
    assert shown == "one two three four\nfive six\nseven\neight nine\nten"


def test_an_emoji_of_several_characters_is_not_broken() -> None:
    family = "👩\u200d👩\u200d👧"
    assert fed(f"one {family} two", 8, 0) == f"one\n{family}\ntwo"


SHOWN = """
import sys
from anabranch.cli import show
from types import SimpleNamespace

TEXT = "The quick brown fox jumps over the lazy dog and goes home"

def chunks():
    for at in range(0, len(TEXT), 3):
        yield SimpleNamespace(text=TEXT[at : at + 3], result=None)

print()
show.show(chunks())
"""


@pytest.mark.parametrize("columns", [20, 33])
def test_streamed_text_wraps_on_a_terminal_and_not_in_a_pipe(columns: int) -> None:
    text = "The quick brown fox jumps over the lazy dog and goes home"
    with Terminal([], columns=columns, code=SHOWN) as terminal:
        shown = terminal.ended().strip()
    assert shown == textwrap.fill(text, columns)
    piped = subprocess.run([sys.executable, "-c", SHOWN], capture_output=True, text=True, check=True)
    assert piped.stdout.strip() == text


def test_resizing_the_terminal_counts() -> None:
    code = (
        "import sys, time\n"
        "from anabranch.cli.wrapping import Wrapper, columns_of\n"
        "w = Wrapper(lambda: columns_of(sys.stdout))\n"
        "print(w.add('one two three four '), flush=True)\n"
        "input()\n"
        "print(w.add('five six seven eight nine ten eleven') + w.finish(), flush=True)\n"
    )
    with Terminal([], columns=40, code=code) as terminal:
        terminal.expect("four")
        fcntl.ioctl(terminal._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 12, 0, 0))
        terminal.send("\n")
        shown = terminal.ended()
    assert max(len(line) for line in shown.split("\n")) <= 12
    assert " ".join(shown.split()) == "five six seven eight nine ten eleven"
