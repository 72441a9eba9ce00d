"""Read JSON files, and rows from JSONL files, JSON arrays and tables.

All problems raise a FileError that names the file and the line.

Stricter than ``json``: NaN, Infinity, numbers beyond a float and too deep nesting are errors.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, TypeVar

from anabranch.errors import FileError

__all__ = [
    "has_rows",
    "is_number",
    "is_whole",
    "open_text",
    "parse_json",
    "parse_object",
    "read_json",
    "read_lines",
    "read_rows",
    "read_text",
    "read_whole",
    "rows_made",
    "shown",
]

LARGEST = 1 << 28  # maximum bytes of a file that is read at once, and characters of a line
INT64 = 1 << 63
GZIP = b"\x1f\x8b"
# kinds of files that are not UTF-8 text, by their first bytes
KINDS = {
    b"\xff\xfe": "in UTF-16",
    b"\xfe\xff": "in UTF-16",
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ": "compressed with xz",
    b"\x28\xb5\x2f\xfd": "compressed with Zstandard",
    b"SQLite format 3": "a database",
    GZIP: "gzipped twice",
}
T = TypeVar("T")
SHOWN = 10  # numbers of unusable rows in a message
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
TABLES = {".csv": ",", ".tsv": "\t"}


def is_whole(value: Any, low: int = -INT64, high: int = INT64 - 1) -> bool:
    """True if a JSON value is an integer between ``low`` and ``high``, and not true or false."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value: Any, low: float = -math.inf, high: float = math.inf) -> bool:
    """True if a JSON value is a finite number between ``low`` and ``high``, and not true or false."""
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
    value: dict[str, Any] = parse_object(read_text(path, advice, error=error), str(path), advice, error=error)
    return value


def open_text(path: Path, newline: str | None = None) -> TextIO:
    """Open a UTF-8 text file, gzipped or not. Raises FileError for any other kind of file, by its first bytes."""
    with path.open("rb") as file:
        whole = None if file.seekable() else file.read()  # a pipe can be read only once
        packed = (file.read(2) if whole is None else whole[:2]) == GZIP
    source: Any = path if whole is None else io.BytesIO(whole)
    opened: Any = source if whole is not None and not packed else (gzip.open if packed else open)(source, "rb")
    try:
        first = opened.read(512)
        opened.seek(0)
    except BaseException:
        opened.close()
        raise
    kind = next((kind for start, kind in KINDS.items() if first.startswith(start)), "")
    if first[257:262] == b"ustar":
        kind = "a tar archive"
    elif not kind and b"\0" in first[:2] and first.strip(b"\0"):
        kind = "in UTF-16, or no text"
    if kind:
        opened.close()
        raise FileError(f"{path} cannot be read as UTF-8 text: it is {kind}; save it in UTF-8, gzipped if you like")
    return io.TextIOWrapper(opened, "utf-8-sig", newline=newline)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn the errors of reading a text file into a FileError."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise FileError(f"{path} cannot be read as UTF-8 text ({error.reason}); save it in UTF-8") from error
    except (OSError, EOFError, zlib.error) as error:
        raise FileError(
            f"{path} cannot be read ({getattr(error, 'strerror', None) or error}); copy it again"
        ) from error


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number (from 1) and text of each non-blank line of a file, gzipped or not. Raises FileError."""
    number = 0
    try:
        with _readable(path), open_text(path) as file:
            while line := str(file.readline(LARGEST + 1)):
                number += 1
                if len(line) > LARGEST:
                    raise FileError(f"line {number} of {path} is longer than {LARGEST >> 20} MiB; split the file")
                if line.strip():
                    yield number, line
    except FileError as error:
        if not isinstance(error.__cause__, UnicodeDecodeError):
            raise
        raise FileError(
            f"{path} cannot be read as UTF-8 text (line {number + 1} or after: {error.__cause__.reason}); save it in "
            "UTF-8"
        ) from error.__cause__


def read_whole(path: Path) -> str:
    """The text of a file, gzipped or not. Raises FileError."""
    with _readable(path), open_text(path) as file:
        text = file.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise FileError(f"{path} is longer than {LARGEST >> 20} MiB; split it")
    return text


def has_rows(path: Path) -> bool:
    """True if a file holds rows (``read_rows``) rather than text: by its name, or if it begins with JSON objects.

    Raises FileError.
    """
    if _suffix(path) in (*JSON_SUFFIXES, *TABLES):
        return True
    _, first = next(read_lines(path), (1, ""))
    try:
        if first.lstrip().startswith("["):
            rows = parse_json(read_whole(path))
            return isinstance(rows, list) and bool(rows) and all(isinstance(row, dict) for row in rows)
        return first.lstrip().startswith("{") and isinstance(parse_json(first), dict)
    except ValueError:
        return False


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line number and JSON object of each row of a file, gzipped or not. Raises FileError.

    The file is JSONL, an array of JSON objects (then numbers count them), or a table with a line of names on top: comma
    or tab separated, named .csv or .tsv.
    """
    if delimiter := TABLES.get(_suffix(path)):
        yield from _table(path, delimiter)
        return
    first = True
    for number, line in read_lines(path):
        if first and line.lstrip().startswith("["):
            yield from _array(path)
            return
        advice = "write one object a line, or an array of objects" if first else "correct or delete the line"
        yield number, parse_object(line, f"line {number} of {path}", advice)
        first = False


def rows_made(path: Path, make: Callable[[int, dict[str, Any]], T]) -> list[T]:
    """Convert each row with ``make``, which gets the row and its number.

    Raises FileError that describes the first row that ``make`` refuses by a FileError, and names the others.
    """
    made: list[T] = []
    faults: list[tuple[int, FileError]] = []
    for number, row in read_rows(path):
        try:
            made.append(make(number, row))
        except FileError as error:
            faults.append((number, error))
    if faults:
        others = [str(number) for number, _ in faults[1:]]
        named = ", ".join(others[:SHOWN]) + (", ..." if len(others) > SHOWN else "")
        more = f"; {len(others):,} more of {len(made) + len(faults):,} rows are unusable: {named}" if others else ""
        raise FileError(f"{faults[0][1]}{more}") from faults[0][1]
    return made


def _suffix(path: Path) -> str:
    """The last suffix of a file's name in lower case, without ``.gz``."""
    return next((suffix.lower() for suffix in reversed(path.suffixes) if suffix.lower() != ".gz"), "")


def _array(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        rows = parse_json(read_whole(path))
    except ValueError as error:
        raise FileError(
            f"{path} starts like a JSON array and is not JSON ({error}); write an array of objects, or one a line"
        ) from error
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise FileError(f"item {number} of {path} is not a JSON object; write an array of objects, or one a line")
        yield number, row


def _table(path: Path, delimiter: str) -> Iterator[tuple[int, dict[str, Any]]]:
    with _readable(path), open_text(path, newline="") as file:
        rows = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            names = next(rows, [])
            if len(set(names)) < len(names):
                raise FileError(f"line 1 of {path} names a column twice; give each column its own name")
            for cells in rows:
                if not cells:
                    continue
                if len(cells) != len(names):
                    raise FileError(
                        f"line {rows.line_num} of {path} has {len(cells)} cells, and line 1 names {len(names)} "
                        "columns; correct the line"
                    )
                yield rows.line_num, dict(zip(names, cells, strict=True))
        except csv.Error as error:
            raise FileError(f"line {rows.line_num} of {path} cannot be read ({error}); correct the line") from error
