"""Read JSON and JSONL files. All problems raise a FileError that names the file and the line.

Stricter than ``json``: NaN, Infinity, numbers beyond a float and too deep nesting are errors.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from anabranch.errors import FileError

__all__ = [
    "is_number",
    "is_whole",
    "parse_json",
    "parse_object",
    "read_json",
    "read_lines",
    "read_rows",
    "read_text",
    "shown",
]

LARGEST = 1 << 28  # maximum bytes of a file that is read at once, and characters of a line
INT64 = 1 << 63


def is_whole(value: Any, low: int = -INT64, high: int = INT64 - 1) -> bool:
    """Whether a JSON value is an integer between ``low`` and ``high``; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value: Any, low: float = -math.inf, high: float = math.inf) -> bool:
    """Whether a JSON value is a finite number between ``low`` and ``high``; true and false are not."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value) and low <= value <= high
    except OverflowError:  # an integer beyond a float
        return False


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text. Raises ValueError with a short reason."""
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        return json.loads(text.rstrip(), parse_constant=_refuse_constant, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}" if "\n" in str(text).strip() else f"column {error.colno}"
        raise ValueError(f"{error.msg} at {place}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:  # Python's message for integers with thousands of digits is too technical
        raise ValueError(str(error) if "digits" not in str(error) else "it has a number that is too long") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it has the value {name}")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"it has a number that is too large: {text[:20]}")
    return value


def shown(value: Any, longest: int = 60) -> str:
    """A value in one line of limited length, for messages."""
    try:
        text = " ".join(repr(value).split())
    except (RecursionError, ValueError):  # deep nesting, and integers with thousands of digits
        return f"a {type(value).__name__} that is too large to show"
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def parse_object(text: str | bytes, where: str, advice: str = "", *, error: type[FileError] = FileError) -> Any:
    """Parse the JSON object in ``text``. Raises ``error``: "WHERE is not JSON (why); ADVICE"."""
    tail = f"; {advice}" if advice else ""
    try:
        value = parse_json(text)
    except ValueError as reason:
        raise error(f"{where} is not JSON ({reason}){tail}") from reason
    if not isinstance(value, dict):
        raise error(f"{where} is not a JSON object{tail}")
    return value


def read_text(path: Path, advice: str, *, error: type[FileError] = FileError) -> str:
    """Read a file as UTF-8 text. Raises ``error`` with ``advice``."""
    try:
        if path.stat().st_size > LARGEST:
            raise error(f"{path} is larger than {LARGEST >> 20} MiB; {advice}")
        return path.read_text(encoding="utf-8-sig")
    except OSError as reason:
        raise error(f"{path} cannot be read ({reason.strerror}); {advice}") from reason
    except UnicodeDecodeError as reason:
        raise error(f"{path} cannot be read as UTF-8 text (byte {reason.start}); {advice}") from reason


def read_json(path: Path, advice: str, *, error: type[FileError] = FileError) -> dict[str, Any]:
    """Read a file with a JSON object. Raises ``error``, with ``advice`` as the end of the message."""
    found: dict[str, Any] = parse_object(read_text(path, advice, error=error), str(path), advice, error=error)
    return found


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number (from 1) and text of each non-blank line of a file, gzipped or not. Raises FileError."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            number = 0
            while line := str(file.readline(LARGEST + 1)):
                number += 1
                if len(line) > LARGEST:
                    raise FileError(f"line {number} of {path} is longer than {LARGEST >> 20} MiB; split the file")
                if line.strip():
                    yield number, line
    except UnicodeDecodeError as error:
        raise FileError(
            f"{path} cannot be read as UTF-8 text (line {number + 1} or after: {error.reason}); copy it again"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise FileError(
            f"{path} cannot be read ({getattr(error, 'strerror', None) or error}); copy it again"
        ) from error


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line number and JSON object of each line of a JSONL file, gzipped or not. Raises FileError."""
    for number, line in read_lines(path):
        yield number, parse_object(line, f"line {number} of {path}", "correct or delete the line")
