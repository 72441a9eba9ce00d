"""JSONL files that a run appends to, one line per finished item, and that a later run resumes.

Beside a file of training data is a small one that says which target wrote it and how; a run with other settings is
refused. A killed run may leave an incomplete last line, which the next one removes.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from anabranch.errors import FileError
from anabranch.support.files import write_atomically
from anabranch.support.interrupt import shielded
from anabranch.support.jsonfiles import parse_json, read_json

__all__ = ["agree", "append", "begin", "records", "repair", "settings_path"]

# the beginning of every line
_BEGINNING = b'{"id": '


def settings_path(out: Path) -> Path:
    """The small file beside ``out`` that says which target wrote it and how."""
    return out.with_name(f"{out.name}.settings.json")


def agree(out: Path, settings: dict[str, Any]) -> None:
    """Check that a file was started with the same settings. Raises FileError that names the difference."""
    path = settings_path(out)
    if _is_new(out) or not path.is_file():
        return  # for example, part of another file: its settings are unknown
    stored = read_json(path, f"delete it and {out} to start over")
    if stored != settings:
        name = next(key for key in {**settings, **stored} if stored.get(key) != settings.get(key))
        raise FileError(
            f"{out} was started with {name} {stored.get(name)!r}, got {settings.get(name)!r}; use that, or write to "
            "another file"
        )


def records(out: Path, check: Callable[[Any], None], what: str) -> Iterator[Any]:
    """The complete lines of a file as JSON values; does not change the file.

    ``check`` raises ValueError, KeyError or TypeError for a line that is not ``what``, which becomes a FileError.
    """
    if _is_new(out):
        return
    whole, torn = _torn(out.read_bytes())
    lines = whole.split(b"\n")
    known = False
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line)
            check(record)
        except (ValueError, KeyError, TypeError) as error:
            raise _foreign(out, number, what) from error
        known = True
        yield record
    # only our own runs leave an incomplete line, after complete lines or after the settings file, written first
    if torn.strip() and not (torn.startswith(_BEGINNING[: len(torn)]) and (known or settings_path(out).is_file())):
        raise _foreign(out, len(lines), what)


def begin(out: Path, settings: dict[str, Any], what: str) -> None:
    """Write the settings of a new file; remove an incomplete last line of an existing one, which has been checked."""
    if _is_new(out):
        try:
            write_atomically(settings_path(out), json.dumps(settings, indent=2) + "\n")
        except OSError as error:
            raise FileError(f"{what} cannot be written to {out} ({error.strerror}); choose another --out") from error
    else:
        repair(out)


def repair(out: Path) -> None:
    """Remove an incomplete last line of a file, which has been checked."""
    whole, torn = _torn(out.read_bytes())
    if torn:
        os.truncate(out, len(whole))
    elif whole and not whole.endswith(b"\n"):
        with out.open("ab") as file:
            file.write(b"\n")


def append(out: Path, record: Mapping[str, Any]) -> None:
    """Write one line, which starts with the id, whole or not at all; a signal waits until it is complete.

    Raises FileError if there is no room for it.
    """
    assert next(iter(record)) == "id"
    line = json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with shielded(), out.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                with suppress(OSError):  # what is no file on a disk
                    file.truncate(size)
                raise
    except OSError as error:
        raise FileError(
            f"{out} cannot be written to ({error.strerror}); its lines so far are kept, and the same command continues "
            "once there is room"
        ) from error


def _is_new(out: Path) -> bool:
    return not out.is_file() or out.stat().st_size == 0


def _torn(data: bytes) -> tuple[bytes, bytes]:
    """A file's complete lines, and the incomplete last line that a killed run leaves."""
    end = data.rfind(b"\n") + 1
    try:
        parse_json(data[end:])
    except ValueError:
        return data[:end], data[end:]
    return data, b""


def _foreign(out: Path, number: int, what: str) -> FileError:
    return FileError(
        f"line {number} of {out} is not {what}; if the others are, delete that line, else give --out another file"
    )
