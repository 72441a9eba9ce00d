"""Whether a folder and the libraries in it can have been written by nobody but this user and root, as ssh asks.

A library is code that runs with this user's rights, so one that others could have put there is not loaded.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ["distrust", "is_private"]


def distrust(folder: Path) -> str:
    """Which part of an existing folder's path others can write; empty if none.

    Symbolic links are followed, and the folders that they are in count, too. In a folder with the sticky bit, such as
    /tmp, others cannot replace what is not theirs.
    """
    named = Path(os.path.abspath(folder))
    for path in dict.fromkeys((named, *named.parents, named.resolve(), *named.resolve().parents)):
        found = path.lstat()
        if not _own(found):
            return f"{path} belongs to another user"
        if stat.S_ISLNK(found.st_mode) or (path != named.resolve() and found.st_mode & stat.S_ISVTX):
            continue
        if _shared(found):
            return f"others can write {path}"
    return ""


def is_private(path: Path) -> bool:
    """Whether a path is a file, not a link, that nobody but this user and root can write."""
    found = path.lstat()
    return stat.S_ISREG(found.st_mode) and _own(found) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _own(found: os.stat_result) -> bool:
    return found.st_uid in (0, os.geteuid())


def _shared(found: os.stat_result) -> bool:
    """Whether others can write; a user's own group, which has the user's number, has no other members."""
    group = bool(found.st_mode & stat.S_IWGRP) and found.st_gid != found.st_uid
    return group or bool(found.st_mode & stat.S_IWOTH)
