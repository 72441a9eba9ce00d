"""Progress of long commands on standard error: two live lines on a terminal, otherwise a line every 30 seconds."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from anabranch.cli import show
from anabranch.support.interrupt import INTERRUPTED

if TYPE_CHECKING:
    from anabranch.train import Progress

__all__ = ["FirstRate", "Screen", "clock", "resumable", "screen", "silent", "stored_step"]

FIRST = 3  # steps after which the time of a training is estimated
EVERY = 30.0  # seconds between lines outside a terminal


class Screen:
    """The output of progress. ``live`` is None where lines cannot be updated: a pipe, a file, a dumb terminal."""

    def __init__(self, console: Console, live: Live | None) -> None:
        self.console, self.live = console, live
        self._next = 0.0

    def show(self, first: str, second: str, *, plain: str, now: bool = False) -> None:
        """Update the two lines, or print ``plain`` if the last line is old enough or ``now`` is set."""
        if self.live is not None:
            self.live.update(Text(f"{first}\n{second}", no_wrap=True, overflow="ellipsis"))
        elif now or time.monotonic() >= self._next:
            self.say(plain)
            self._next = time.monotonic() + EVERY

    def keep(self) -> None:
        """Leave the two lines on the screen and start new ones below."""
        if self.live is not None:
            self.console.print(self.live.renderable)
            self.live.update(Text(""))

    def say(self, line: str) -> None:
        """Print a permanent line above the live ones."""
        self.console.print(line, soft_wrap=self.live is None, highlight=False, markup=False)


class FirstRate:
    """Says once, after the first steps of a run, how long all of it takes at their rate."""

    def __init__(self, shown: Screen) -> None:
        self.shown, self.steps = shown, 0

    def see(self, now: Progress) -> None:
        """Count a step."""
        self.steps += 1
        if self.steps == FIRST:
            rate = f"{now.positions_per_second:,.0f} tokens/s in the first {FIRST} steps"
            self.shown.say(f"{rate}: about {clock(now.seconds_left)} for the other {now.steps - now.step:,}")


@contextmanager
def screen() -> Iterator[Screen]:
    """A screen on standard error; warnings of the package are printed above the live lines."""
    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield Screen(console, None)
        return
    with Live(console=console, refresh_per_second=4) as live:
        show.consoles.append(console)
        try:
            yield Screen(console, live)
        finally:
            show.consoles.remove(console)


@contextmanager
def silent() -> Iterator[Screen]:
    """A screen that shows nothing: of a process that works beside another one."""
    yield Screen(Console(quiet=True), None)


@contextmanager
def resumable(run: Path | None = None) -> Iterator[None]:
    """On Ctrl-C, say which command resumes, and exit with the status of an interrupted program.

    run  the folder of a training's checkpoint, whose step is said too
    """
    try:
        yield
    except KeyboardInterrupt:
        words = ["anabranch", *(word for word in sys.argv[1:] if word != "--no-resume")]
        step = stored_step(run)
        after = f" after step {step:,}" if step else ""
        typer.echo(f"stopped{after}; the same command resumes from here: {shlex.join(words)}", err=True)
        raise typer.Exit(INTERRUPTED) from None


def stored_step(run: Path | None) -> int:
    """The step of the checkpoint in a run's folder; 0 without one."""
    from anabranch.train.checkpoint import read_checkpoint

    record = None if run is None else read_checkpoint(run)
    return 0 if record is None else int(record["step"])


def clock(seconds: float) -> str:
    """Hours, minutes and seconds: "1:02:03", "2:03"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
