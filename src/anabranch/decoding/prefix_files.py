"""Blocks of kept texts on disk, so that conversations survive a restart.

A block is a safetensors file with its keys and values as the cache stores them. Its name is a hash of everything that
they depend on: the model as it is loaded and computed, the drafter's model if they are of one, the rotations, and all
tokens up to its last one. So a file of
another model, form of weights, cache or version is never looked at, and a name that is there is the right block. A
checksum tells whether the file is whole.

Files are written in a thread of their own, renamed into place, and never read by half; where that fails, decoding goes
on without them. The least recently used ones go first.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from anabranch.drafting.kept import Family
from anabranch.errors import PerformanceWarning
from anabranch.support.files import check_folder, keep_recent, write_atomically
from anabranch.support.log import LOGGER, warn

__all__ = ["PrefixFiles", "StoredBlock"]

FORMAT = "anabranch prefix 2"
PENDING = 2**28  # bytes that wait to be written at most; further blocks are not stored
Stored = tuple[Tensor, Tensor]


class StoredBlock(NamedTuple):
    """A block that is on disk: its name, that of the block before it, its family and its tokens."""

    name: str
    parent: str
    family: Family
    tokens: tuple[int, ...]


class PrefixFiles:
    """Blocks of one model in a folder that other models and processes may use too.

    identity  of the model as it is loaded and computed
    most      bytes of all files in the folder, those of other models included

    Raises FileError where the folder cannot be written.
    """

    def __init__(self, folder: Path, identity: str, most: int) -> None:
        check_folder(folder, "kept texts", "folder")
        self.folder, self.most = folder, most
        self._own = folder / hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
        self._own.mkdir(parents=True, exist_ok=True, mode=0o700)  # texts of users
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="anabranch-prefixes")
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._pending = 0
        self._failed = self._warned = False

    def name(self, parent: str, family: Family, tokens: Sequence[int]) -> str:
        """The name of the block of ``tokens`` that follows another one; the first follows ""."""
        text = f"{self._own.name} {family.drafts} {family.rotations} {parent} {' '.join(map(str, tokens))}"
        return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()

    # -- reading ----------------------------------------------------------------------------------------
    def blocks(self) -> Iterator[StoredBlock]:
        """All blocks of this model. Files that are something else are left alone."""
        for path in sorted(self._own.glob("*.safetensors")):
            try:
                with safe_open(path, "pt") as opened:
                    facts = opened.metadata() or {}
                family = Family(None, int(facts["rotations"]), facts["drafts"])
                block = StoredBlock(path.stem, facts["parent"], family, tuple(map(int, facts["tokens"].split())))
            except (OSError, SafetensorError, KeyError, ValueError) as error:
                self._warn(path, error)
                continue
            if facts.get("format") == FORMAT and self.name(block.parent, family, block.tokens) == path.stem:
                yield block
            else:
                self._warn(path, "it holds something else")

    def load(self, name: str, like: Stored) -> Stored | None:
        """The keys and values of a block, of the shape and type of ``like``; None where they cannot be read."""
        path = self._path(name)
        try:
            with safe_open(path, "pt") as opened:
                whole = int((opened.metadata() or {})["checksum"])
                stored = opened.get_tensor("keys").clone(), opened.get_tensor("values").clone()
        except FileNotFoundError:
            return None  # another process needed the space
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            self._warn(path, error)
            return None
        if _checksum(stored) != whole or any(
            (a.shape, a.dtype) != (b.shape, b.dtype) for a, b in zip(stored, like, strict=True)
        ):
            self._warn(path, "its content has changed")
            return None
        return stored

    def _warn(self, path: Path, why: object) -> None:
        if not self._warned:
            warn(f"{path} and maybe other kept texts are ignored: {why}; delete {self._own}", PerformanceWarning)
            self._warned = True

    def _path(self, name: str) -> Path:
        return self._own / f"{name}.safetensors"

    # -- writing ----------------------------------------------------------------------------------------
    def store(self, block: StoredBlock, stored: Stored) -> bool:
        """Store a block soon; returns False where that will not happen."""
        size = sum(part.nbytes for part in stored)
        with self._lock:
            if self._failed or self._pending + size > PENDING or os.getpid() != self._process:
                return False
            self._pending += size
        self._writer.submit(self._write, block, stored, size)
        return True

    def used(self, names: Sequence[str]) -> None:
        """A text was used: of its blocks, those at its end go first when there are too many."""
        if names and os.getpid() == self._process:
            self._writer.submit(self._touch, names, time.time_ns())

    def remove(self, name: str) -> None:
        """Delete a block."""
        if os.getpid() == self._process:
            self._writer.submit(self._path(name).unlink, missing_ok=True)

    def close(self) -> None:
        """Wait for what is being written."""
        if os.getpid() == self._process:
            self._writer.shutdown()

    def _write(self, block: StoredBlock, stored: Stored, size: int) -> None:
        try:
            if self._failed:
                return
            facts = {
                "format": FORMAT, "parent": block.parent,
                "rotations": str(block.family.rotations), "drafts": block.family.drafts,
                "tokens": " ".join(map(str, block.tokens)), "checksum": str(_checksum(stored)),
            }  # fmt: skip
            parts = {name: part.cpu().contiguous() for name, part in zip(("keys", "values"), stored, strict=True)}
            write_atomically(self._path(block.name), save(parts, facts))
            keep_recent(self.folder.glob("*/*.safetensors"), self.most)
        except OSError as error:
            self._failed = True
            LOGGER.warning("texts are no longer kept on disk: %s", error)
        finally:
            with self._lock:
                self._pending -= size

    def _touch(self, names: Sequence[str], now: int) -> None:
        for place, name in enumerate(names):
            with suppress(OSError):
                os.utime(self._path(name), ns=(now, now - place))


def _checksum(stored: Stored) -> int:
    """Checksum of the bytes of keys and values."""
    count = 0
    for part in stored:
        count = zlib.crc32(part.cpu().contiguous().view(torch.uint8).numpy().data, count)
    return count
