"""Pictures of a terminal for the documentation: the real commands, with real keys, in a pseudo-terminal.

    python research/terminal_pictures.py drafts chat training --columns 80
    python research/terminal_pictures.py chat --columns 60 --out /tmp/pictures --text
    python research/terminal_pictures.py recording

Each scene runs in an empty folder, and its keys are typed; pyte emulates the screen, and rich draws it as SVG.
``--text`` also prints the screen. ``recording`` plays plain decoding and `generate --compare` in turns and draws
both as one animated SVG. Needs pyte (the extra ``test``) and a POSIX system.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import json
import os
import pty
import re
import select
import shlex
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pyte
from pyte.screens import Char
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.color import ColorParseError
from rich.console import Console
from rich.style import Style
from rich.text import Text

from screen_recording import Recorded, animation

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
PROGRAM = [sys.executable, "-c", "from anabranch.cli import main; main()"]
PROMPT = r"^> *$"
LONGEST = 900.0  # seconds after which a scene fails
# rich's template loads its font from a server; the reader's own font is good enough
LOCAL_FONTS = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
TOPICS = ("the moon", "bread", "a river", "the wind", "glass", "salt", "a bridge", "the violin")
FORMS = ("Tell me about {} in a few sentences.", "Write a short poem about {}.", "List five facts about {}.")
PROMPTS = "".join(json.dumps({"prompt": form.format(topic)}) + "\n" for topic in TOPICS for form in FORMS)
ASKED = ("generate", "Explain why the sky is blue.", "--max-new-tokens", "96")
RECORDING = {  # one above the other in the animated picture
    "plain decoding": (*ASKED, "--drafter", "none"),
    "speculative decoding, tokens coloured by what drafted them": (
        *ASKED,
        "--drafter",
        "streams:tree=8",
        "--show-drafts",
        "--compare",
    ),
}
TAKES = 5  # of each command of the recording
SHIPPED = Path(__file__).resolve().parents[1] / "src" / "anabranch" / "adapters" / "shipped" / "smollm2-135m-instruct"


@dataclass(frozen=True)
class Scene:
    """A command, and (pattern, keys) pairs: the keys are typed once the cursor's line matches the pattern.

    before  commands that run first and are not shown
    lines   height of the screen; lines that stay empty are not drawn
    """

    title: str
    command: Sequence[str]
    keys: Sequence[tuple[str, str]] = ()
    before: Sequence[Sequence[str]] = ()
    lines: int = 60


SCENES = {
    "drafts": Scene(
        "anabranch generate --show-drafts",
        ("generate", "Explain why the sky is blue.", "--show-drafts", "--max-new-tokens", "80"),
    ),
    "chat": Scene(
        "anabranch chat",
        ("chat",),
        (
            (PROMPT, "Why is the sky blue? Answer in two sentences.\r"),
            (PROMPT, "/stast\r"),
            (PROMPT, "/stats\r"),
            (PROMPT, "/system Answer like a pirate.\r"),
            (PROMPT, "And why is it red\x1b\rin the evening?\r"),
            (PROMPT, "/help\r"),
            (PROMPT, "\x04"),
        ),
    ),
    "training": Scene(
        "anabranch train streams",
        (
            *("train", "streams", "--out", "adapter", "--answers", "answers.jsonl", "--init", str(SHIPPED)),
            *("--epochs", "4", "--warmup", "2", "--lr", "1e-4", "--batch-tokens", "512", "--held-out", "6"),
            *("--evaluate-every", "4"),
        ),
        before=(
            ("train", "answers", "--prompts", "prompts.jsonl", "--out", "answers.jsonl", "--max-new-tokens", "96"),
        ),
    ),
}


class Player:
    """A command in a pseudo-terminal, and its screen."""

    def __init__(self, command: Sequence[str], *, columns: int, lines: int, folder: Path) -> None:
        self.screen = pyte.Screen(columns, lines)
        self.recorded: Recorded = {}
        self._stream = pyte.ByteStream(self.screen)
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.chdir(folder)
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
            # no cursor position requests: nothing answers them here
            os.environ.update(TERM="xterm-256color", COLORTERM="", PROMPT_TOOLKIT_NO_CPR="1")
            os.execvp(PROGRAM[0], [*PROGRAM, *command])
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def play(self, keys: Sequence[tuple[str, str]]) -> int:
        """Type the keys and wait for the end; returns the exit status."""
        left, ends = list(keys), time.monotonic() + LONGEST
        while time.monotonic() < ends:
            ready, _, _ = select.select([self._fd], [], [], 0.3)
            if ready:
                try:
                    data = os.read(self._fd, 65536)
                except OSError:  # the command has ended
                    break
                if not data:
                    break
                self._stream.feed(data)
                self._record()
            elif left and re.search(left[0][0], self.screen.display[self.screen.cursor.y]):
                os.write(self._fd, left.pop(0)[1].encode())
        else:
            raise SystemExit(f"the scene did not end within {LONGEST:.0f} s; the screen is\n{self.text()}")
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def _record(self) -> None:
        """Note the time at which each cell of the lines that changed took its present character."""
        now = time.monotonic()
        for y in self.screen.dirty:
            for x in range(self.screen.columns):
                char = self.screen.buffer[y][x]
                if (y, x) not in self.recorded or self.recorded[y, x][1] != char:
                    self.recorded[y, x] = now, char
        self.screen.dirty.clear()

    def text(self) -> str:
        """The text on the screen."""
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    def drawing(self, title: str) -> str:
        """The screen as SVG."""
        height = len(self.text().splitlines())
        console = Console(record=True, width=self.screen.columns, file=io.StringIO(), force_terminal=True)
        for y in range(height):
            row = self.screen.buffer[y]
            line = Text(no_wrap=True, end="")
            for style, run in groupby((row[x] for x in range(self.screen.columns)), key=_style):
                line.append("".join(char.data for char in run), style)
            line.rstrip()
            console.print(line)
        return console.export_svg(title=title, code_format=LOCAL_FONTS, unique_id=re.sub(r"\W", "-", title))


def _style(char: Char) -> Style:
    def colour(name: str) -> str | None:
        if name == "default":
            return None
        name = {"brown": "yellow", "brightbrown": "bright_yellow"}.get(name, name)
        return f"#{name}" if re.fullmatch("[0-9a-f]{6}", name) else re.sub("^bright(?!_)", "bright_", name)

    try:
        return Style(
            color=colour(char.fg), bgcolor=colour(char.bg), bold=char.bold, italic=char.italics, reverse=char.reverse
        )
    except ColorParseError:
        return Style(bold=char.bold)


def play(name: str, scene: Scene, *, columns: int, out: Path, show: bool) -> None:
    """Run a scene in an empty folder and write its picture."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "prompts.jsonl").write_text(PROMPTS, encoding="utf-8")
        for command in scene.before:
            player = Player(command, columns=columns, lines=scene.lines, folder=Path(folder))
            if player.play(()):
                raise SystemExit(f"'anabranch {' '.join(command)}' failed:\n{player.text()}")
        player = Player(scene.command, columns=columns, lines=scene.lines, folder=Path(folder))
        if player.play(scene.keys):
            raise SystemExit(f"'anabranch {' '.join(scene.command)}' failed:\n{player.text()}")
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.svg"
    path.write_text(player.drawing(scene.title), encoding="utf-8")
    if show:
        print(player.text())
    print(f"{path} is written")


def record(*, columns: int, out: Path) -> None:
    """Play the commands of ``RECORDING`` in turns; draw the take of median speed of each as ``recording.svg``."""
    takes: dict[str, list[tuple[float, Recorded]]] = {title: [] for title in RECORDING}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(TAKES):
            for title, command in RECORDING.items():
                player = Player(command, columns=columns, lines=24, folder=Path(folder))
                if player.play(()) or (rate := re.search(r"([\d.]+) tokens/s", player.text())) is None:
                    raise SystemExit(f"'anabranch {' '.join(command)}' failed:\n{player.text()}")
                takes[title].append((float(rate[1]), player.recorded))
    panes = []
    for title, command in RECORDING.items():
        ranked = sorted(takes[title], key=lambda take: take[0])
        panes.append((f"anabranch {shlex.join(command)}", title, ranked[TAKES // 2][1]))
    path = out / "recording.svg"
    path.write_text(animation(panes, columns=columns), encoding="utf-8")
    print(f"{path} is written")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenes", nargs="+", choices=[*SCENES, "recording"])
    parser.add_argument("--columns", type=int, default=80, help="width of the terminal")
    parser.add_argument("--out", type=Path, default=PICTURES, help="folder for the pictures")
    parser.add_argument("--text", action="store_true", help="print the screen too")
    arguments = parser.parse_args()
    for name in arguments.scenes:
        if name == "recording":
            record(columns=arguments.columns, out=arguments.out)
            continue
        play(name, SCENES[name], columns=arguments.columns, out=arguments.out, show=arguments.text)


if __name__ == "__main__":
    main()
