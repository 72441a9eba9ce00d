"""Locks between processes that would write the same files."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from anabranch.errors import FileError
from anabranch.support.log import LOGGER

__all__ = ["alone"]

LOCKLESS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # what file systems without locks say


@contextmanager
def alone(lock: Path, *, busy: str, failed: str, advice: str) -> Iterator[None]:
    """Hold a lock file while the block runs; the empty file is left behind.

    On a file system without locks, a warning is logged and the block runs without one.

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
    except (OSError, NotImplementedError) as error:  # the latter by older versions of filelock
        if isinstance(error, OSError) and error.errno not in LOCKLESS:
            raise FileError(f"{failed} ({error.strerror}); {advice}") from error
        LOGGER.warning("%s: its file system has no locks, so let no other process write there", lock)
    try:
        yield
    finally:
        held.release()
