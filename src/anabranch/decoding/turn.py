"""The turn to run a target's passes, which one thread has at a time and lends while it waits for a user's function."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from anabranch.support.forks import renewed_after_fork

__all__ = ["Turn"]


class Turn:
    """A lock, ``with turn:``, that its owner can lend (``with turn.lent():``).

    Released only by its owner: Ctrl-C may arrive while a thread waits to take it back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        renewed_after_fork(self)

    def after_fork(self) -> None:
        """Take it from a thread that does not exist in a child."""
        if self._owner != threading.get_ident():
            self._lock, self._owner = threading.Lock(), None

    def __enter__(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._owner == threading.get_ident():
            self._owner = None
            self._lock.release()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let other threads, or calls within this one, have the turn inside the block."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()
