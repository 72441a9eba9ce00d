"""Forked child processes in tests."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

SECONDS = 300  # a deadlock takes longer


def in_child(call: Callable[[], bool]) -> None:
    """Check that a call returns True in a forked child process, in time."""
    _wait(_started(call))


def together(*calls: Callable[[], bool]) -> None:
    """Check that calls in child processes that run at once return True, in time."""
    for child in [_started(call) for call in calls]:
        _wait(child)


def _started(call: Callable[[], bool]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if call() else 2
        finally:
            os._exit(code)
    return child


def _wait(child: int) -> None:
    deadline = time.monotonic() + SECONDS
    while not (done := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child waits for threads or locks of its parent")
        time.sleep(0.005)
    assert os.waitstatus_to_exitcode(done[1]) == 0
