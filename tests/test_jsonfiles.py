"""Every way a JSON file can be wrong is one FileError that names the file and, where there are lines, the line."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import pytest

from anabranch.errors import AdapterError, FileError
from anabranch.support.jsonfiles import is_number, is_whole, parse_json, read_json, read_rows

DEEP = "[" * 200_000
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not JSON"),
    "half": (b'{"a": ', "not JSON"),
    "NaN": (b'{"a": NaN}', "the value NaN"),
    "infinity": (b'{"a": [-Infinity]}', "the value -Infinity"),
    "a number beyond a float": (b'{"a": 1e999}', "too large: 1e999"),
    "a number of many digits": (b'{"a": ' + b"9" * 5000 + b"}", "too long"),
    "deep nesting": (DEEP.encode(), "nested too deeply"),
    "deep objects": (b'{"a":' * 200_000, "nested too deeply"),
    "a list": (b"[1]", "not a JSON object"),
    "a byte that is no text": (b'{"a": "\xff"}', "cannot be read as UTF-8"),
    "null bytes": (b"\x00\x00", "not JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_objects(name: str, tmp_path: Path) -> None:
    content, words = BAD[name]
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(AdapterError, match=words) as caught:
        read_json(path, "copy it again", error=AdapterError)
    assert str(caught.value).startswith(str(path))
    assert str(caught.value).endswith("; copy it again")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [name for name in BAD if name != "empty"])
@pytest.mark.parametrize("packed", [False, True])
def test_bad_lines(name: str, packed: bool, tmp_path: Path) -> None:
    content, words = BAD[name]
    path = tmp_path / ("a.jsonl.gz" if packed else "a.jsonl")
    whole = b'{"a": 1}\n\n' + content + b"\n"
    path.write_bytes(gzip.compress(whole) if packed else whole)
    with pytest.raises(FileError, match=words) as caught:
        list(read_rows(path))
    assert str(path) in str(caught.value)
    assert "line" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_file_and_a_broken_archive(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"cannot be read \(No such file"):
        read_json(tmp_path / "none", "give another")
    with pytest.raises(FileError, match="cannot be read"):
        list(read_rows(tmp_path))
    path = tmp_path / "a.jsonl.gz"
    packed = bytearray(gzip.compress(b'{"a": 1}\n' * 1000))
    path.write_bytes(packed[:-9])
    with pytest.raises(FileError, match="cannot be read"):
        list(read_rows(path))
    packed[12:20] = b"\xff" * 8
    path.write_bytes(packed)
    with pytest.raises(FileError, match="cannot be read"):
        list(read_rows(path))


def test_lines_are_numbered_and_blank_ones_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\ufeff{"a": 1}\n\n{"a": "\u2028"}', encoding="utf-8")
    assert list(read_rows(path)) == [(1, {"a": 1}), (3, {"a": "\u2028"})]


def test_numbers() -> None:
    assert is_whole(3, 1, 5)
    assert not any(is_whole(value, 1, 5) for value in (0, 6, True, 3.0, "3", None, 10**30))
    assert is_number(3)
    assert is_number(-0.5)
    assert not any(is_number(value) for value in (True, "3", None, float("nan"), float("inf"), 10**400))
    assert parse_json(b"\xef\xbb\xbf[1]") == [1]


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ('{"a": 1}\n'.encode("utf-16"), "in UTF-16"),
        ('{"a": 1}\n'.encode("utf-16-be"), "in UTF-16, or no text"),
        (gzip.compress(gzip.compress(b"{}")), "gzipped twice"),
        (gzip.compress(b"a" * 257 + b"ustar"), "a tar archive"),
        (b"PK\x03\x04" + b"\x00" * 40, "a zip archive"),
        (b"PAR1" + b"\x00" * 40, "a Parquet file"),
    ],
    ids=itertools.count(),
)
def test_files_of_other_kinds_are_named(content: bytes, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(FileError, match=f"cannot be read as UTF-8 text: it is {kind}; save it in UTF-8"):
        list(read_rows(path))


def test_rows_of_arrays_and_tables(tmp_path: Path) -> None:
    rows = [(1, {"a": "x, y", "b": "1"}), (2, {"a": 'say "z"\nthen', "b": ""})]
    path = tmp_path / "a.json"
    path.write_text(json.dumps([row for _, row in rows], indent=2), encoding="utf-8")
    assert list(read_rows(path)) == rows
    path = tmp_path / "a.csv"
    path.write_bytes(b'a,b\r\n"x, y",1\r\n"say ""z""\nthen",\r\n')
    assert [row for _, row in read_rows(path)] == [row for _, row in rows]
    for content, message in ((b"a,b\n1\n", "line 2 .* has 1 cells"), (b"a,a\n1,2\n", "line 1 .* names a column twice")):
        path.write_bytes(content)
        with pytest.raises(FileError, match=message):
            list(read_rows(path))
    for text, message in (("[{}, 3]", "item 2"), ("[{},", "is not JSON")):
        (tmp_path / "b.json").write_text(text, encoding="utf-8")
        with pytest.raises(FileError, match=message):
            list(read_rows(tmp_path / "b.json"))
