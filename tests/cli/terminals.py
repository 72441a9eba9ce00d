"""A command in a pseudo-terminal: keys go in, what it shows comes out."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

PROGRAM = [sys.executable, "-c", "from anabranch.cli import main; main()"]
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][A-Z0-9]|[=>78])")


class Terminal:
    """Runs a command of anabranch; also a context manager, which ends what still runs."""

    def __init__(
        self,
        arguments: Sequence[object],
        *,
        columns: int = 80,
        env: Mapping[str, str] | None = None,
        code: str = PROGRAM[-1],
    ) -> None:
        self.seen, self.code = "", -1
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            own = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
            plain = {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", "OMP_NUM_THREADS": "1"}
            os.execvpe(PROGRAM[0], [*PROGRAM[:2], code, *map(str, arguments)], {**own, **plain, **(env or {})})
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

    def send(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def expect(self, text: str, *, seconds: float = 300) -> str:
        """Read until ``text`` was shown since the last call; returns all that was, without escape sequences."""
        ends = time.monotonic() + seconds
        while True:
            shown = ESCAPES.sub("", self.seen).replace("\r", "")
            if text in shown:
                end = shown.index(text) + len(text)
                self.seen = shown[end:]
                return shown[:end]
            assert time.monotonic() < ends, f"{text!r} did not come; shown was {shown!r}"
            ready, _, _ = select.select([self._fd], [], [], 0.2)
            if ready:
                raw = self._take()
                assert raw is not None, f"ended before {text!r}; shown was {shown!r}"
                self.seen += raw

    def ended(self, *, seconds: float = 300) -> str:
        """Wait for the end; returns what was shown since the last ``expect`` and sets ``code``."""
        ends = time.monotonic() + seconds
        while True:
            assert time.monotonic() < ends, f"it does not end; shown was {self.seen!r}"
            ready, _, _ = select.select([self._fd], [], [], 0.2)
            if ready:
                raw = self._take()
                if raw is None:
                    break
                self.seen += raw
        self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.pid = 0
        return ESCAPES.sub("", self.seen).replace("\r", "")

    def _take(self) -> str | None:
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # the other end is closed
            return None
        return data.decode("utf-8", "replace") if data else None

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._fd)
