"""Ctrl-C between two states of a training, never inside one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["shielded"]


@contextmanager
def shielded() -> Iterator[None]:
    """Hold Ctrl-C back until the block is done, then deliver it.

    An optimizer that is stopped half-way has moved some weights and not others, which no resume can repair.
    """
    before = signal.getsignal(signal.SIGINT)
    # signals reach the main thread only, and a process that ignores Ctrl-C goes on ignoring it
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    held: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            before(*held[0])
