"""Ctrl-C and SIGTERM: both end a run with cleanup, and not while state is inconsistent."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["INTERRUPTED", "TERMINATED", "Terminated", "shielded", "sigterm_raises"]

# exit statuses, as in shells: 128 + the number of the signal
INTERRUPTED, TERMINATED = 130, 143
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM; a KeyboardInterrupt, so that cleanup is that of Ctrl-C."""


@contextmanager
def sigterm_raises() -> Iterator[list[int]]:
    """Raise ``Terminated`` in the main thread on SIGTERM inside the block, unless the process ignores the signal.

    Yields the list of signals received so far.
    """
    received: list[int] = []
    before = signal.getsignal(signal.SIGTERM)
    # only the main thread can set handlers, and one that is not Python's (None) could not be restored
    if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_IGN):
        yield received
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def shielded() -> Iterator[list[int]]:
    """Defer Ctrl-C and SIGTERM until the end of the block, then deliver the first of them.

    Yields the list of signals received so far.

    An optimizer stopped half-way has updated only some of the weights, which a resume cannot repair. Signals that are
    ignored, or that end the process without running Python code, are not deferred.
    """
    if threading.current_thread() is not threading.main_thread():  # signals reach the main thread only
        yield []
        return
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    held: list[int] = []
    try:
        for number in handlers:
            signal.signal(number, lambda number, _: held.append(number))
        yield held
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if held:
            handlers[held[0]](held[0], None)
