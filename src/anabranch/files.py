"""Writing files so that a reader sees the old one or the new one, never half of it."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_atomically"]


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
