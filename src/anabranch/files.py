"""Where files are kept, and writing them so that a reader sees the old one or the new one, never half of it."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from platformdirs import user_cache_dir

__all__ = ["cache_home", "shown_command", "write_atomically"]


def cache_home() -> Path:
    """The folder for everything kept between runs: ``$ANABRANCH_HOME``, else the user's cache directory."""
    if chosen := os.environ.get("ANABRANCH_HOME"):
        return Path(chosen).expanduser()
    return Path(user_cache_dir("anabranch", appauthor=False))


def shown_command(*words: str) -> str:
    """A command for result files, which go to other machines: of absolute paths the last part."""
    return shlex.join(Path(word).name if Path(word).is_absolute() else word for word in words)


def write_atomically(path: Path, data: str | bytes) -> None:
    """Write ``data`` beside ``path`` and move it into place; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if isinstance(data, str):
            staged.write_text(data, encoding="utf-8")
        else:
            staged.write_bytes(data)
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)
