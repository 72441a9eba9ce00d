"""Ctrl-C and SIGTERM: both end a run in the same orderly way, and neither while state is half changed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["INTERRUPTED", "TERMINATED", "Terminated", "shielded", "sigterm_raises"]

# exit statuses, as shells have them: 128 + the number of the signal
INTERRUPTED, TERMINATED = 130, 143
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """SIGTERM was received: what cleans up after Ctrl-C cleans up after this too."""


@contextmanager
def sigterm_raises() -> Iterator[list[int]]:
    """Raise ``Terminated`` in the main thread on SIGTERM inside the block, unless the process ignores the signal.

    Yields the list of signals received so far.
    """
    received: list[int] = []
    before = signal.getsignal(signal.SIGTERM)
    # handlers belong to the main thread, and one that is not Python's (None) could not be put back
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
def shielded() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back until the block is done, then deliver the first of them.

    An optimizer that is stopped half-way has updated some weights and not others, which no resume can repair. A signal
    that the process ignores, or that ends it without running any Python, stays as it is.
    """
    if threading.current_thread() is not threading.main_thread():  # signals reach the main thread only
        yield
        return
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    held: list[tuple[int, FrameType | None]] = []
    try:
        for number in handlers:
            signal.signal(number, lambda *arrived: held.append(arrived))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if held:
            handlers[held[0][0]](*held[0])
