"""Tables that a method drafts from: built once from token ids, stored in a folder, memory-mapped for decoding.

    FOLDER/tables.json    method, tokenizer, source of the data, and the dtype, length and checksum of each array
    FOLDER/NAME.npy       one one-dimensional array per file

Tables are not adapters. An adapter holds weights for one target and is read as a whole; tables hold token ids, serve
every target with the same tokenizer and may be larger than memory. The drafter's setting ``data`` names the folder.
Opening takes constant time: headers and a sample of each file are checked (``checksum``). Lookups must therefore
tolerate any array content; wrong content lowers acceptance but never changes the text.

A folder is built next to its destination and renamed when complete.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from anabranch.drafting.settings import TreeSettings
from anabranch.errors import CapabilityError, FileError, InputError, one_line
from anabranch.learning.recipe import Training
from anabranch.model.decoder import Decoder
from anabranch.model.load import tokenizer_of
from anabranch.model.text import fingerprint as fingerprint_of
from anabranch.support.files import cache_home
from anabranch.support.jsonfiles import is_whole, read_json, shown

__all__ = [
    "ArrayWriter",
    "Documents",
    "OpenTables",
    "Report",
    "TableSettings",
    "Tables",
    "Tokenizer",
    "build_tables",
    "check_free",
    "checksum",
    "default_folder",
    "find_tables",
    "open_tables",
    "write_array",
]

RECORD = "tables.json"
FORMAT, VERSION = "anabranch tables", 1
HEADER = 128  # bytes of an .npy file before its data; numpy pads headers of arrays of one dimension to this
MEMORY = 512  # MB that a build uses at most, unless another bound is given
SAMPLES, SAMPLE = 64, 4096  # blocks of a file that its checksum covers, and their bytes
_identities: WeakKeyDictionary[Decoder, str] = WeakKeyDictionary()  # by target: listing a vocabulary takes a while

Documents = Iterable[NDArray[np.int64]]
"""Texts as token ids [n], each small enough for memory. No n-gram or match crosses two documents."""
Report = Callable[[str], None]
"""Receives a progress line from time to time."""


@dataclass(frozen=True)
class Tables:
    """The tables of a method, as part of its entry.

    method    its name
    command   ``anabranch train COMMAND`` builds them
    training  what they are
    build     (documents, vocabulary size, empty folder, bytes of memory to use besides one document, report): writes
              arrays (``ArrayWriter``) into the folder and returns facts for the record: JSON values, "tokens" among
              them. Raises InputError
    """

    method: str
    command: str
    training: Training
    build: Callable[[Documents, int, Path, int, Report], dict[str, Any]]


@dataclass(frozen=True)
class Tokenizer:
    """The model's name for messages, the tokenizer's ``model.text.fingerprint``, and the size of the vocabulary."""

    name: str
    fingerprint: str
    vocab_size: int


@dataclass(frozen=True)
class OpenTables:
    """The memory-mapped arrays of a folder by name, the facts that its build returned, and the vocabulary size."""

    arrays: dict[str, NDArray[Any]]
    facts: dict[str, Any]
    vocab_size: int


@dataclass(frozen=True)
class TableSettings(TreeSettings):
    """Settings shared by drafters with tables.

    data   folder of the tables; empty: the default folder of this tokenizer
    tree   best (the most probable nodes), auto (best, sized by the load), or a number: best with that many nodes
    nodes  node budget, root included
    """

    paths = ("data",)
    nodes: int = 16
    data: str = ""


class ArrayWriter:
    """Writes a one-dimensional .npy file piece by piece; the length need not be known in advance."""

    def __init__(self, folder: Path, name: str, dtype: str) -> None:
        self.dtype = np.dtype(dtype)
        self.length = 0
        self._file = open(folder / f"{name}.npy", "wb")  # noqa: SIM115 - closed by ``close``
        self._file.write(bytes(HEADER))

    def append(self, values: NDArray[Any]) -> None:
        """Add values, converted to the file's type; they must fit."""
        self._file.write(values.astype(self.dtype, copy=False).tobytes())
        self.length += len(values)

    def close(self) -> None:
        """Write the header and close the file."""
        self._file.seek(0)
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, header)
        assert self._file.tell() == HEADER, "numpy pads headers to this length"
        self._file.close()

    def __enter__(self) -> ArrayWriter:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()


def write_array(folder: Path, name: str, dtype: str, values: NDArray[Any]) -> None:
    """Write a one-dimensional .npy file."""
    with ArrayWriter(folder, name, dtype) as out:
        out.append(values)


def default_folder(command: str, fingerprint: str) -> Path:
    """Default folder of tables, by command and tokenizer."""
    return cache_home() / "tables" / command / fingerprint[:16]


def check_free(folder: Path, *, force: bool) -> None:
    """Check that tables may be written to ``folder``; ``force`` replaces earlier ones. Raises FileError."""
    if folder.exists() and not folder.is_dir():
        raise FileError(f"{folder} is a file; give --out a folder")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / RECORD).is_file():
        raise FileError(f"{folder} holds other files; give --out a new folder")
    if not force:
        raise FileError(f"{folder} holds tables already; give another --out, or --force to replace them")


def build_tables(
    tables: Tables,
    documents: Documents,
    folder: Path,
    *,
    tokenizer: Tokenizer,
    memory: int | None = None,
    made: Mapping[str, Any] | None = None,
    report: Report = lambda line: None,
) -> dict[str, Any]:
    """Build tables and put them in ``folder``, in place of tables that are there; returns their record.

    memory  MB to use at most, besides one document; None: ``MEMORY``
    made    where they come from (command, files, licences), for the record

    A build that fails leaves nothing behind. Raises FileError if the folder cannot be written, and whatever ``build``
    and ``documents`` raise.
    """
    megabytes = MEMORY if memory is None else memory
    if megabytes < 1:
        raise InputError(f"memory must be at least 1 MB, got {megabytes}")
    check_free(folder, force=True)
    work: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        staged = work / "new"
        staged.mkdir()
        facts = tables.build(documents, tokenizer.vocab_size, staged, megabytes << 20, report)
        record = {
            "format": FORMAT,
            "version": VERSION,
            "method": tables.method,
            "tokenizer": asdict(tokenizer),
            "facts": facts,
            "arrays": {path.stem: _described(path) for path in sorted(staged.glob("*.npy"))},
            "made": dict(made or {}),
        }
        (staged / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        _replace(folder, staged, work / "old")
    except OSError as error:
        raise FileError(
            f"the tables cannot be written to {folder} ({error.strerror}); free some space, or choose another folder"
        ) from error
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
    return record


def _replace(folder: Path, new: Path, old: Path) -> None:
    """Rename ``new`` to ``folder``; an existing folder is moved to ``old`` and restored if that fails."""
    if folder.exists():
        folder.rename(old)
    try:
        new.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise


def _described(path: Path) -> dict[str, Any]:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    return {"dtype": array.dtype.str, "length": len(array), "sample_sha256": checksum(path)}


def checksum(path: Path) -> str:
    """SHA-256 over a file's size and 64 evenly spaced blocks of 4 KiB, including the first and the last.

    Covers files of up to 256 KiB completely. Detects truncated, swapped and rewritten files, but not every flipped bit.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= SAMPLES * SAMPLE:
            digest.update(file.read())
        else:
            for place in np.linspace(0, size - SAMPLE, SAMPLES).astype(int).tolist():
                file.seek(place)
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def find_tables(tables: Tables, target: Decoder, data: str) -> OpenTables:
    """The tables that the setting ``data`` selects for a target; see ``TableSettings``.

    Raises CapabilityError if there are none, and FileError as ``open_tables`` does.
    """
    identity = _identity(target)
    if data:
        folder = Path(data).expanduser()
    elif identity is not None and (default_folder(tables.command, identity) / RECORD).is_file():
        folder = default_folder(tables.command, identity)
    else:
        raise CapabilityError(
            f"the drafter {tables.method!r} needs {tables.training.title} for this target's tokenizer, and there is "
            f"none; build it with 'anabranch train {tables.command} --text FILE', or give data=FOLDER"
        )
    return open_tables(tables, folder, identity, target.config.vocab_size)


def _identity(target: Decoder) -> str | None:
    """The fingerprint of a target's tokenizer; None where the target was not loaded from files."""
    if target not in _identities and (tokenizer := tokenizer_of(target)) is not None:
        _identities[target] = fingerprint_of(tokenizer)
    return _identities.get(target)


def open_tables(tables: Tables, folder: Path, fingerprint: str | None, vocab_size: int) -> OpenTables:
    """Memory-map the arrays of a folder.

    fingerprint  of the target's tokenizer; None: unknown, so only the size of the vocabulary is compared

    Raises FileError if the folder or a file is missing, truncated or changed, or belongs to another method or
    tokenizer.
    """
    again = f"copy it again, or build it with 'anabranch train {tables.command}'"
    if not (folder / RECORD).is_file():
        what = "has no tables.json" if folder.is_dir() else "does not exist"
        raise FileError(
            f"the folder {folder} {what}; give data= {tables.training.title}, see 'anabranch train {tables.command}'"
        )
    record = read_json(folder / RECORD, again)
    if record.get("format") != FORMAT or record.get("version") != VERSION:
        raise FileError(
            f"{folder / RECORD} has the format {shown(record.get('format'))} version {shown(record.get('version'))}, "
            f"and this anabranch reads {FORMAT!r} version {VERSION}; {again}"
        )
    if record.get("method") != tables.method:
        raise FileError(
            f"the tables in {folder} are for the drafter {shown(record.get('method'))}, got {tables.method!r} to read "
            f"them; give data= {tables.training.title}"
        )
    tokenizer, facts, arrays = (record.get(name) for name in ("tokenizer", "facts", "arrays"))
    if not (isinstance(tokenizer, dict) and isinstance(facts, dict) and isinstance(arrays, dict)):
        raise FileError(f"{folder / RECORD} lacks 'tokenizer', 'facts' or 'arrays'; {again}")
    same = tokenizer.get("vocab_size") == vocab_size
    if not same or (fingerprint is not None and tokenizer.get("fingerprint") != fingerprint):
        raise FileError(
            f"the tables in {folder} were built with the tokenizer of {shown(tokenizer.get('name'))}, which is not "
            f"this target's; build them for this target with 'anabranch train {tables.command}'"
        )
    return OpenTables({name: _mapped(folder, name, arrays[name], again) for name in arrays}, facts, vocab_size)


def _mapped(folder: Path, name: str, described: Any, again: str) -> NDArray[Any]:
    path = folder / f"{Path(name).name}.npy"
    if not isinstance(described, dict) or not is_whole(described.get("length"), 0):
        raise FileError(f"{folder / RECORD} does not describe {shown(name)}; {again}")
    try:
        intact = checksum(path) == described.get("sample_sha256")
        array: NDArray[Any] | None = np.load(path, mmap_mode="r", allow_pickle=False) if intact else None
    except FileNotFoundError as error:
        raise FileError(f"the folder {folder} has no {path.name}; its copy is incomplete, {again}") from error
    except (OSError, ValueError, EOFError) as error:
        raise FileError(f"{path} cannot be read ({one_line(error)}); {again}") from error
    if array is None or array.shape != (described["length"],) or array.dtype.str != described.get("dtype"):
        raise FileError(f"{path} is truncated or was changed since it was built; {again}")
    return array
