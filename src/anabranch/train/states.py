"""The frozen target's states of a run's examples, computed once and kept for later epochs and evaluations.

On a CPU they are in one file in the run's folder, which is mapped, so that they need not fit into memory and a resumed
run finds them:

    RUN/states      magic and key | a mark for each example | the rows of each example, aligned

or FOLDER/states-KEY, which trainings on the same examples share. The key is a digest of the target, of how its states
are computed and stored, and of all examples, and the file has its full size from the beginning. The mark of an example
is a checksum of its rows, written after them: rows that were written by half, or damaged, are computed again. On a GPU
the states stay in its memory, as they are.

    exact   in the type that they were computed in
    int8    8 bits a value, and a float32 scale for every 64 values of a row (docs/training.md has what that costs)

B rows of the batch, T text length, K kv heads, E head width, D model width.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import mmap
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from anabranch.errors import FileError
from anabranch.learning.examples import Batch, Example
from anabranch.learning.target import RunTarget, TargetStates
from anabranch.model.decoder import Decoder
from anabranch.support.log import LOGGER
from anabranch.train.data import digest

__all__ = ["Form", "KeptStates"]

Form: TypeAlias = Literal["exact", "int8"]
NAME = "states"
VERSION, MAGIC = 1, b"anabranch states\n"
GROUP = 64  # values of a row that share a scale
ALIGNED = 64


@dataclass(frozen=True)
class _Layout:
    """The states of an example of T tokens: the target's rows [n, D], then keys and values of layers [K, T, E].

    Beside keys and values, an encoder-decoder target has the encoder's output [S, D'].

    hidden   rows of width D: after the last norm, and before each tapped layer
    pairs    layers whose keys and values are kept
    encoder  the width of the encoder's output; 0: there is none
    started  rows begin at the last prompt token
    dtype    of the pass that computes them
    """

    hidden: int
    width: int
    pairs: int
    heads: int
    head_width: int
    encoder: int
    started: bool
    dtype: torch.dtype

    def shapes(self, example: Example) -> list[tuple[int, ...]]:
        """The shapes of an example's tensors."""
        rows = len(example) - (len(example.prompt_ids) - 1 if self.started else 0)
        pairs: list[tuple[int, ...]] = [(self.heads, len(example), self.head_width)] * (2 * self.pairs)
        assert example.encoded is not None or not self.encoder, "a pass has read the sources"
        sources = [] if example.encoded is None or not self.encoder else [(example.encoded.positions, self.encoder)]
        return [(rows, self.width)] * self.hidden + pairs + sources

    def split(self, states: TargetStates, batch: Batch, row: int) -> list[Tensor]:
        """The tensors of a row of a batch."""
        length, first = int(batch.lengths_B[row]), int(batch.starts_B[row]) if self.started else 0
        hidden = [states.hidden_BTD, *states.taps.values()]
        pairs = [part for pair in states.keys_values for part in pair]
        sources = [states.encoded[row]] if self.encoder else []
        return [x[row, first:length] for x in hidden] + [x[row, :, :length] for x in pairs] + sources

    def joined(
        self, rows: Sequence[Sequence[Tensor]], batch: Batch, taps: Sequence[int], dtype: torch.dtype
    ) -> TargetStates:
        """The states of a batch in some type; they are zero where there are none."""
        (b, t), device = batch.tokens_BT.shape, rows[0][0].device
        shapes = [(b, t, self.width)] * self.hidden + [(b, self.heads, t, self.head_width)] * (2 * self.pairs)
        whole = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        for row, parts in enumerate(rows):
            length, first = int(batch.lengths_B[row]), int(batch.starts_B[row]) if self.started else 0
            for n, (x, part) in enumerate(zip(whole, parts[: len(whole)], strict=True)):
                if n < self.hidden:
                    x[row, first:length] = part
                else:
                    x[row, :, :length] = part
        hidden, pairs = whole[: self.hidden], whole[self.hidden :]
        return TargetStates(
            hidden[0],
            dict(zip(taps, hidden[1:], strict=True)),
            list(zip(pairs[::2], pairs[1::2], strict=True)),
            [parts[-1].to(dtype) for parts in rows] if self.encoder else (),
        )


class _Store(Protocol):
    """Places of the tensors of examples, by the number of the example."""

    def read(self, number: int) -> list[Tensor] | None:
        """The tensors of an example; None if they have to be computed."""

    def write(self, number: int, tensors: Sequence[Tensor]) -> None:
        """Keep the tensors of an example."""


class _InMemory:
    """Keeps tensors where they are."""

    def __init__(self) -> None:
        self._kept: dict[int, list[Tensor]] = {}

    def read(self, number: int) -> list[Tensor] | None:
        """The tensors of an example."""
        return self._kept.get(number)

    def write(self, number: int, tensors: Sequence[Tensor]) -> None:
        """Keep copies, since the tensors are parts of larger ones."""
        self._kept[number] = [x.clone() for x in tensors]


class _InFile:
    """Keeps tensors in a mapped file; ``key`` is all that its content depends on."""

    def __init__(
        self, path: Path, key: str, layout: _Layout, examples: Sequence[Example], form: Form, say: Callable[[str], None]
    ) -> None:
        self._layout, self._examples, self._form = layout, examples, form
        head = len(MAGIC) + len(key)
        self._marks = _aligned(head)
        self._at = [_aligned(self._marks + 4 * len(examples))]
        for example in examples:
            self._at.append(_aligned(self._at[-1] + sum(self._nbytes(shape) for shape in layout.shapes(example))))
        wanted = MAGIC + key.encode()
        if not _is_whole(path, wanted, self._at[-1]):
            say(f"the target's states are kept in {self._at[-1] / 1e9:.2f} GB of {path}")
            _create(path, wanted, self._at[-1])
        try:
            with path.open("r+b") as file:
                self._pages = mmap.mmap(file.fileno(), self._at[-1])
        except (OSError, ValueError) as error:
            raise FileError(f"{path} cannot be mapped ({error}); use --keep-states none") from error

    def _nbytes(self, shape: Sequence[int]) -> int:
        """The bytes of a tensor."""
        count = math.prod(shape)
        if self._form == "exact":
            return _aligned(count * self._layout.dtype.itemsize)
        return _aligned(count) + _aligned(4 * count // _group(shape[-1]))

    def _mark(self, number: int) -> np.ndarray:
        return np.frombuffer(self._pages, np.uint32, 1, self._marks + 4 * number)

    def _sum(self, number: int) -> int:
        """A checksum of the rows of an example that is never 0."""
        rows = memoryview(self._pages)[self._at[number] : self._at[number + 1]]
        return zlib.crc32(rows) or 1

    def _tensor(self, dtype: torch.dtype, shape: Sequence[int], at: int) -> Tensor:
        return torch.frombuffer(self._pages, dtype=dtype, count=math.prod(shape), offset=at).view(*shape)

    def read(self, number: int) -> list[Tensor] | None:
        """The tensors of an example; None if they are not there, or damaged."""
        mark = int(self._mark(number)[0])
        if not mark or mark != self._sum(number):
            return None
        tensors, at = [], self._at[number]
        for shape in self._layout.shapes(self._examples[number]):
            if self._form == "exact":
                tensors.append(self._tensor(self._layout.dtype, shape, at))
            else:
                groups = (*shape[:-1], shape[-1] // _group(shape[-1]))
                values = self._tensor(torch.int8, (*groups, -1 if 0 in groups else shape[-1] // groups[-1]), at)
                scale = self._tensor(torch.float32, groups, at + _aligned(math.prod(shape)))
                tensors.append((values * scale[..., None]).view(shape))
            at += self._nbytes(shape)
        return tensors

    def write(self, number: int, tensors: Sequence[Tensor]) -> None:
        """Write the tensors of an example, then its mark."""
        self._mark(number)[0] = 0
        at = self._at[number]
        for x in tensors:
            shape = x.shape
            if self._form == "exact":
                self._tensor(self._layout.dtype, shape, at).copy_(x)
            else:
                grouped = x.float().reshape(*shape[:-1], -1, _group(shape[-1]))
                scale = grouped.abs().amax(-1).clamp(min=1e-30) / 127
                self._tensor(torch.int8, grouped.shape, at).copy_((grouped / scale[..., None]).round_())
                self._tensor(torch.float32, scale.shape, at + _aligned(x.numel())).copy_(scale)
            at += self._nbytes(shape)
        self._mark(number)[0] = self._sum(number)


class KeptStates:
    """Keeps the states of the examples of a run in ``folder``.

    shared    other runs use the folder too, so that the file stays when the run ends
    identity  what the states depend on besides the examples: the target, and how its pass is computed
    say       receives a line with the size of a file before it is written
    """

    def __init__(
        self,
        folder: Path,
        target: Decoder,
        examples: Sequence[Example],
        *,
        identity: str,
        form: Form,
        shared: bool = False,
        say: Callable[[str], None] = LOGGER.info,
    ) -> None:
        self._path, self._target, self._examples, self._form = folder / NAME, target, examples, form
        self._identity, self._shared, self._say = identity, shared, say
        self._numbers = {_name(example): n for n, example in enumerate(examples)}
        self._store: _Store | None = None
        self._layout: _Layout | None = None

    def keeping(self, run: RunTarget, *, dtype: torch.dtype | None = None, started: bool = False) -> RunTarget:
        """``run``, but for examples whose states are known. Raises FileError if the disk is full.

        dtype    of the pass that ``run`` makes, which has no more digits than that; None: the target's
        started  main rows are read from each row's last prompt token on only
        """
        wanted = self._target.dtype
        computed = wanted if dtype is None else dtype

        @torch.no_grad()
        def kept(batch: Batch, *, taps: Sequence[int] = (), keys_from: int | None = None) -> TargetStates:
            numbers = self._of(batch)
            if numbers is None:
                return run(batch, taps=taps, keys_from=keys_from)
            store, layout = self._opened(taps, keys_from, computed, started=started)
            rows = [store.read(number) for number in numbers]
            if any(row is None for row in rows):
                states = run(batch, taps=taps, keys_from=keys_from)
                for row, number in enumerate(numbers):
                    if rows[row] is None:
                        store.write(number, layout.split(states, batch, row))
                        rows[row] = store.read(number)  # as it will be read in later epochs
            return layout.joined([row for row in rows if row is not None], batch, taps, wanted)

        return kept

    def _of(self, batch: Batch) -> list[int] | None:
        """The numbers of a batch's examples; None if it has others."""
        numbers = []
        for row, (length, start) in enumerate(zip(batch.lengths_B.tolist(), batch.starts_B.tolist(), strict=True)):
            ids = batch.tokens_BT[row, :length].tolist()
            source = batch.encoded[row] if batch.encoded else None
            number = self._numbers.get(_name(Example(tuple(ids[: start + 1]), tuple(ids[start + 1 :]), encoded=source)))
            if number is None:
                return None
            numbers.append(number)
        return numbers

    def _opened(
        self, taps: Sequence[int], keys_from: int | None, dtype: torch.dtype, *, started: bool
    ) -> tuple[_Store, _Layout]:
        config = self._target.config
        pairs = 0 if keys_from is None else config.num_layers - keys_from
        encoder = 0 if config.encoder is None or not pairs else config.encoder.layers.hidden_size
        shape = 1 + len(taps), config.hidden_size, pairs, config.num_kv_heads, config.head_dim, encoder
        layout = _Layout(*shape, started, dtype)
        if self._store is None:
            self._layout = layout
            if self._target.device.type == "cpu":
                what = (VERSION, self._identity, self._form, tuple(taps), keys_from, layout, digest(self._examples))
                key = hashlib.sha256(repr(what).encode()).hexdigest()
                if self._shared:
                    self._path = self._path.with_name(f"{NAME}-{key[:16]}")
                self._store = _InFile(self._path, key, layout, self._examples, self._form, self._say)
            else:
                self._store = _InMemory()
        assert layout == self._layout, "an objective reads the same states of all batches"
        return self._store, layout

    def remove(self) -> None:
        """Keep no more states, and delete the file unless it is shared; those that are in use stay valid."""
        self._store, self._numbers = None, {}
        if not self._shared:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)


def _name(example: Example) -> bytes:
    """The identity of an example."""
    asked = example.question
    return hashlib.sha256(np.array([len(asked), *asked, *example.answer_ids]).tobytes()).digest()


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _group(width: int) -> int:
    """Values that share a scale: a divisor of the width."""
    return math.gcd(width, GROUP)


def _is_whole(path: Path, wanted: bytes, size: int) -> bool:
    """Return whether a file begins as ``wanted`` and has this size."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size == size and file.read(len(wanted)) == wanted
    except OSError:
        return False


def _create(path: Path, wanted: bytes, size: int) -> None:
    """Make a file of this size that begins as ``wanted`` and has no rows, unless another process of the run just did.

    Raises FileError if the disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent):
            if _is_whole(path, wanted, size):
                return
            path.unlink(missing_ok=True)  # the states of another run, which may still be mapped, and need the space
            try:
                with path.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, size)
                    file.write(wanted)
            except OSError:
                path.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise FileError(
            f"{path.parent} cannot hold {size / 1e9:.2f} GB of the target's states ({error.strerror}); "
            "free some space, or use --keep-states none"
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, for which the processes of a run wait in turn."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
