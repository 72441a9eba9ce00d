"""Standard streams that are closed, full, or read by a process that has ended."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import TextIO

__all__ = ["BROKEN_PIPE", "prepare", "settle", "unwritable"]

BROKEN_PIPE = 141  # exit status, as in shells: 128 + the number of SIGPIPE
STDOUT, STDERR = 1, 2


class _Forgiving(io.TextIOWrapper):
    """Standard error: what it cannot take is lost, since there is nowhere else to say so."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


class _Watched(io.TextIOWrapper):
    """Standard output, with the first error that it met: what could not be written may be gone from its buffer."""

    failed: OSError | None = None

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self.failed = self.failed or error
            raise

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self.failed = self.failed or error
            raise


def _as(kind: type[io.TextIOWrapper], stream: TextIO) -> io.TextIOWrapper:
    """The same stream as one of another kind."""
    assert isinstance(stream, io.TextIOWrapper)
    encoding, line_buffering = stream.encoding, stream.line_buffering
    return kind(stream.detach(), encoding, "replace", line_buffering=line_buffering)


def _opened(number: int) -> TextIO:
    return open(number, "w", encoding="utf-8", closefd=False)


def prepare() -> None:
    """Replace streams that are closed, and let standard error fail in silence.

    Closed descriptors are taken first: a file opened later would otherwise get what is printed.
    """
    for number, mode in ((0, os.O_RDONLY), (STDOUT, os.O_RDONLY), (STDERR, os.O_WRONLY)):  # to print on 1 is to fail
        try:
            os.fstat(number)
        except OSError:
            taken = os.open(os.devnull, mode)
            if taken != number:
                os.dup2(taken, number)
                os.close(taken)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    # not where they were replaced by others, as in tests
    if sys.stdout is sys.__stdout__:
        sys.stdout = _as(_Watched, sys.stdout or _opened(STDOUT))
    if sys.stderr is sys.__stderr__:
        sys.stderr = _as(_Forgiving, sys.stderr or _opened(STDERR))


def unwritable() -> OSError | None:
    """The error with which standard output refused what was printed; None if it did not."""
    try:
        sys.stdout.flush()
    except OSError as error:
        return error
    stdout = getattr(sys.stdout, "wrapped", sys.stdout)  # click wraps it after a broken pipe
    return stdout.failed if isinstance(stdout, _Watched) else None


def settle(code: int) -> tuple[int, str]:
    """The exit status of a command that ended with ``code``, and what to complain of, after all output is written.

    A reader that has ended, as ``head`` does, is nothing to complain of.
    """
    error = unwritable()
    if error is None:
        return code, ""
    with suppress(OSError, io.UnsupportedOperation):  # the interpreter flushes it once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:
        return BROKEN_PIPE, ""
    why = "it is closed" if error.errno == errno.EBADF else error.strerror
    return code or 1, f"standard output cannot be written ({why}); what was printed is lost"
