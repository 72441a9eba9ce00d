"""Packed weights kept in the user's cache directory, so that the next load reads them instead of packing again.

    folder/<name>-<key>.packed      a file for each model, never changed: written under another name, then renamed

    parts, each aligned to a page | facts as JSON: parts by name, and whatever the loader wants to know | trailer

They are read into large pages, over which a pass is faster than over the small pages of a mapped file (docs/log.md).

The key is a digest of the model files' sizes, times and some of their bytes, and of the layout of packed weights. An
entry that is cut, damaged or of another version is not used and is replaced. Nothing here is an error for the user: if
an entry cannot be written, the model is packed again at the next load.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import struct
import threading
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from anabranch.support.files import cache_home, keep_recent
from anabranch.support.log import LOGGER
from anabranch.support.memory import zeroed

__all__ = ["PackedFile", "PackedWriter", "key_of"]

VERSION = 1
MOST = 20 * 10**9  # bytes of all entries; the ones that were used least recently are removed
SHARE = 0.5  # of the free space that an entry may take
LEFTOVER_S = 3600.0  # age from which the temporary file of a load that was killed is removed
SAMPLES, SAMPLED = 64, 4096  # places and bytes of a model file that are part of the key
HEAD = 1 << 23  # bytes at the start of a model file that are part of the key: its metadata
CHUNK = 1 << 26  # bytes of a read
SUFFIX = ".packed"
_TRAILER = struct.Struct("<QQI12s")
_MAGIC = b"anabranch  1"


def key_of(files: Sequence[Path], layout: str) -> str:
    """The key of a model in these files, packed in this layout. Raises OSError."""
    digest = hashlib.sha256(f"{VERSION} {layout}".encode())
    for path in files:
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            digest.update(f"{stat.st_size} {stat.st_mtime_ns}".encode())
            digest.update(file.read(HEAD))
            for i in range(SAMPLES):
                file.seek(stat.st_size * i // SAMPLES)
                digest.update(file.read(SAMPLED))
    return digest.hexdigest()[:32]


def _folder() -> Path:
    return cache_home() / "packed"


def _path(files: Sequence[Path], key: str) -> Path:
    return _folder() / f"{files[0].stem[:80]}-{key}{SUFFIX}"


class PackedFile:
    """An entry: its ``facts``, and parts of ``nbytes`` bytes in all."""

    def __init__(self, path: Path, facts: Mapping[str, Any], nbytes: int) -> None:
        self._path, self.facts, self.nbytes = path, facts, nbytes

    @staticmethod
    def find(files: Sequence[Path], key: str) -> PackedFile | None:
        """The entry of a key; None if there is none that is whole."""
        path = _path(files, key)
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(size - _TRAILER.size)
                start, length, check, magic = _TRAILER.unpack(file.read(_TRAILER.size))
                if magic != _MAGIC or start + length + _TRAILER.size != size:
                    raise ValueError("cut")
                file.seek(start)
                raw = file.read(length)
                if zlib.crc32(raw) != check:
                    raise ValueError("damaged")
            facts = json.loads(raw)
            for at, nbytes in facts["parts"].values():
                if at < 0 or at % mmap.PAGESIZE or nbytes < 1 or at + nbytes > start:
                    raise ValueError("damaged")
            with suppress(OSError):
                os.utime(path)  # most recently used
        except FileNotFoundError:
            return None
        except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
            LOGGER.info("the packed weights in %s are not used: %s", path, error)
            return None
        return PackedFile(path, facts, start)

    def parts(self) -> dict[str, Tensor]:
        """Read all parts by name, uint8 in one memory. Raises OSError, and ValueError if the file is cut."""
        memory = zeroed(self.nbytes)
        left = memoryview(memory.numpy().data)
        with self._path.open("rb", buffering=0) as file:
            while left:
                if not (count := file.readinto(left[:CHUNK])):
                    raise ValueError("cut")
                left = left[count:]
        return {name: memory[at : at + nbytes] for name, (at, nbytes) in self.facts["parts"].items()}

    def remove(self) -> None:
        """Delete the entry."""
        with suppress(OSError):
            self._path.unlink()


class PackedWriter:
    """Writes an entry, part by part; after a failure (``failed``) it ignores the rest."""

    def __init__(self, files: Sequence[Path], key: str, nbytes: int) -> None:
        self._path = _path(files, key)
        self._staged = self._path.with_name(f".{self._path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        self._parts: dict[str, tuple[int, int]] = {}
        self._file: BinaryIO | None = None
        self.failed = ""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _clean(self._path.parent, MOST - nbytes)
            free = shutil.disk_usage(self._path.parent).free
            if nbytes > SHARE * free or nbytes > MOST:
                self._fail(f"they take {nbytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")
                return
            self._file = self._staged.open("wb")
        except OSError as error:
            self._fail(error.strerror or str(error))

    def add(self, name: str, pieces: Iterable[NDArray[np.uint8]]) -> None:
        """Write a part, in pieces."""
        if self._file is None:
            return
        try:
            at = -(-self._file.tell() // mmap.PAGESIZE) * mmap.PAGESIZE
            self._file.seek(at)
            for piece in pieces:
                self._file.write(np.ascontiguousarray(piece).data)
            self._parts[name] = (at, self._file.tell() - at)
        except OSError as error:
            self._fail(error.strerror or str(error))

    def commit(self, facts: Mapping[str, Any]) -> None:
        """Complete the entry."""
        if self._file is None:
            return
        try:
            start, raw = self._file.tell(), json.dumps({**facts, "parts": self._parts}).encode()
            self._file.write(raw + _TRAILER.pack(start, len(raw), zlib.crc32(raw), _MAGIC))
            self._file.close()
            os.replace(self._staged, self._path)
        except OSError as error:
            self._fail(error.strerror or str(error))
        else:
            self._file = None

    def discard(self) -> None:
        """Remove what is not complete."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None
        with suppress(OSError):
            self._staged.unlink(missing_ok=True)

    def _fail(self, why: str) -> None:
        self.failed = why
        LOGGER.info("the packed weights are not kept in %s: %s", self._path.parent, why)
        self.discard()


def _clean(folder: Path, most: int) -> None:
    """Remove leftovers, and the entries that were used least recently, until the others have at most ``most`` bytes."""
    for path in folder.glob(".*.tmp"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > LEFTOVER_S:
                path.unlink()
    keep_recent(folder.glob(f"*{SUFFIX}"), most)
