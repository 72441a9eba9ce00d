"""Locks between processes that would write the same files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from anabranch.errors import FileError

__all__ = ["alone"]


@contextmanager
def alone(lock: Path, *, busy: str, failed: str, advice: str) -> Iterator[None]:
    """Hold the lock file meanwhile, which stays behind, empty.

    busy            the message where another process holds it
    failed, advice  what cannot be written where the lock file cannot, and what to do

    Raises FileError with one of these.
    """
    held = FileLock(lock, timeout=0)
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        held.acquire()
    except Timeout as error:
        raise FileError(busy) from error
    except OSError as error:
        raise FileError(f"{failed} ({error.strerror}); {advice}") from error
    try:
        yield
    finally:
        held.release()
