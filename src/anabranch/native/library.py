"""Call the compiled kernels on torch tensors.

``library()`` loads them once a process (``build`` finds or compiles them); where they cannot run it is None, and
``shortfall()`` says why. The methods of ``Library`` are the only callers of the C functions. They check every tensor,
count and type before a call, and each C function checks its arguments again; a call that breaks the contract raises
AssertionError, and one for which the system lacks memory or threads DeviceError.

M rows, D width, N outputs.
"""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.errors import DeviceError, PerformanceWarning
from anabranch.native import build
from anabranch.native.structs import Draft, Ends, Entry, Layer, Packed, Shape, Step, Table, layout

__all__ = [
    "BLOCK",
    "KINDS",
    "WIDEST",
    "Draft",
    "Ends",
    "Entry",
    "Layer",
    "Library",
    "Nodes",
    "Packed",
    "Shape",
    "Step",
    "Table",
    "forget",
    "library",
    "shortfall",
    "why_not",
]

BLOCK = 32
WIDEST = 8192  # of the rows that the kernels read embeddings into
KINDS = {"bfloat16": 0, "float32": 1, "int8": 2, "int4": 3}  # of packed weights
STATUSES = {"memory": -1, "threads": -2}  # of the C functions; others below 0 refuse an argument
MOST_THREADS = 1024
PAGE = 2**21
ARENA = 2**26

Layers: TypeAlias = ctypes.Array[Layer]
# tokens, parents and depths of a tree's nodes and their joint log probabilities
Nodes: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]

_INT, _LONG, _FLOAT, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
# arguments of the functions that return a status
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "runner": (_INT, ctypes.POINTER(_POINTER)),
    "packed_bytes": (ctypes.POINTER(Packed), ctypes.POINTER(_LONG)),
    "pack": (ctypes.POINTER(Packed), _POINTER, _POINTER, _POINTER),
    "linear": (_INT, _POINTER, _POINTER, _INT, ctypes.POINTER(Packed), _POINTER, _POINTER),
    "norm": (_INT, _POINTER, _LONG, _INT, _POINTER, _FLOAT, _POINTER),
    "best": (_POINTER, _LONG, _INT, _INT, _POINTER, _POINTER),
    "choose": (_INT, _POINTER, _POINTER, _INT, ctypes.POINTER(Packed), _POINTER, _POINTER),
    "draw": (_POINTER, _POINTER, _INT, _INT, _FLOAT, _POINTER, _POINTER),
    "draft": (_INT, _POINTER, ctypes.POINTER(Draft), _POINTER, _LONG, _POINTER, _POINTER, _POINTER, _POINTER),
    "layers": (
        *(_INT, _POINTER, ctypes.POINTER(Shape), _POINTER, _INT),
        *(ctypes.POINTER(Step), ctypes.POINTER(Ends), _POINTER, _INT),
    ),
    "trail": (
        *(_INT, _POINTER, ctypes.POINTER(Shape), _POINTER, _INT),
        *(ctypes.POINTER(Step), ctypes.POINTER(Entry), _POINTER),
    ),
    "move": (_POINTER, _POINTER, _INT, _INT, _LONG, _LONG, _LONG, _LONG, _POINTER, _INT),
}


class Library:
    """The compiled kernels with their threads, as many as torch uses.

    Scores that are not finite: ``choose`` and ``draw`` return -1 for a row whose largest score is not finite or that
    has a NaN, so that NaN never becomes a token; ``best`` and ``draft`` leave such scores out.
    """

    def __init__(self, c: ctypes.CDLL) -> None:
        self._c = c
        c.anabranch_form.restype = c.anabranch_message.restype = ctypes.c_char_p
        c.anabranch_layout.restype = ctypes.POINTER(ctypes.c_int32)
        count = _INT()
        numbers = c.anabranch_layout(ctypes.byref(count))
        found = [numbers[i] for i in range(count.value)]
        _require(found == layout(), "structs of the compiled kernels differ from structs.py: {}, {}", found, layout())
        for name, arguments in _FUNCTIONS.items():
            function = getattr(c, f"anabranch_{name}")
            function.argtypes, function.restype = arguments, self._checked
        c.anabranch_advise.argtypes, c.anabranch_advise.restype = (_POINTER, _LONG), None
        self._mine = threading.local()  # ``threads``: what this thread's torch had before ``alone``
        self._free = torch.empty(0, dtype=torch.uint8)
        self._begin()
        _alive.add(self)

    def _begin(self) -> None:
        """A lock that nobody holds and no threads: also in the child of a fork, which has neither."""
        self._lock = threading.Lock()  # one pass at a time: the threads and their scratch memory are shared
        self._runners: dict[int, int] = {}

    def _checked(self, status: int) -> int:
        """What an entry returned, if that is no error."""
        if status >= 0:
            return status
        message = self._c.anabranch_message().decode(errors="replace")
        if status == STATUSES["memory"]:
            raise DeviceError(f"the native kernels ran out of memory ({message}); use fewer rows or a shorter context")
        if status == STATUSES["threads"]:
            raise DeviceError(f"the native kernels could not start a thread ({message}); raise the limit (ulimit -u)")
        raise AssertionError(f"the native kernels refused a call: {message}")

    @contextmanager
    def alone(self) -> Iterator[None]:
        """This thread's torch keeps to one thread meanwhile: its others would spin where the kernels' want to run.

        Other threads keep their count, and so do those that start meanwhile.
        """
        threads, set_threads = torch.get_num_threads(), _openmp()
        if threads == 1 or set_threads is None:  # 1: also within another ``alone``
            yield
            return
        self._mine.threads = threads
        set_threads(1)
        try:
            yield
        finally:
            self._mine.threads = 0
            set_threads(threads)

    def _run(self) -> int:
        """Threads as many as torch has, or as the system grants. To be called with the lock held."""
        count = min(getattr(self._mine, "threads", 0) or torch.get_num_threads(), MOST_THREADS)
        if count not in self._runners:
            runner = _POINTER()
            started = self._c.anabranch_runner(count, ctypes.byref(runner))
            if started < count:
                warnings.warn(
                    f"the system let the native kernels start {started} of {count} threads; "
                    "raise the limit (ulimit -u) or ask for fewer threads",
                    PerformanceWarning,
                    stacklevel=2,
                )
            assert runner.value is not None
            self._runners[count] = runner.value
        return self._runners[count]

    @property
    def form(self) -> str:
        """One of ``build.FORMS``."""
        return str(self._c.anabranch_form().decode())

    def pack(
        self, kind: str, weight: Tensor, scale: Tensor | None = None, least: Tensor | None = None
    ) -> tuple[Packed, Tensor]:
        """A weight [N, D] in blocks of 32 outputs (the last one padded) and the memory that it lies in.

        ``weight`` is of the type that ``kind`` names, in bfloat16 with D even; or quantised values, uint8, D in whole
        groups of 32, with ``scale`` and ``least`` as ``model.quantize`` has them.
        """
        _require(kind in KINDS, "{} is no kind of packed weight", kind)
        _require(weight.dim() == 2 and weight.numel() > 0, "a weight to pack has the shape {}", weight.shape)
        outputs, width = weight.shape
        plain = kind in ("bfloat16", "float32")
        _require(weight.dtype == (getattr(torch, kind) if plain else torch.uint8), "{} is not {}", weight.dtype, kind)
        _require(
            width % {"bfloat16": 2, "float32": 1}.get(kind, BLOCK) == 0, "{} of width {} cannot be packed", kind, width
        )
        groups = (outputs, width // BLOCK)
        for given, wanted in (
            (scale, None if plain else ((outputs,), torch.float32) if kind == "int8" else (groups, torch.float16)),
            (least, (groups, torch.float16) if kind == "int4" else None),
        ):
            fits = (
                given is None if wanted is None else given is not None and (tuple(given.shape), given.dtype) == wanted
            )
            _require(fits, "scales of {} weights are not {}", kind, wanted)
        tensors = [None if x is None else x.detach().cpu().contiguous() for x in (weight, scale, least)]
        packed, size = Packed(None, outputs, width, KINDS[kind]), _LONG()
        self._c.anabranch_packed_bytes(ctypes.byref(packed), ctypes.byref(size))
        memory = self._room(size.value)
        packed.data = memory.data_ptr()
        self._c.anabranch_pack(ctypes.byref(packed), *(None if x is None else x.data_ptr() for x in tensors))
        return packed, memory

    def large(self, size: int) -> Tensor:
        """``size`` bytes that the system may back with large pages, which are read up to twice as fast.

        Raises DeviceError where there is no such memory.
        """
        try:
            whole = torch.empty(size + PAGE, dtype=torch.uint8)
        except RuntimeError as error:
            raise DeviceError(
                f"{size:,} bytes of memory cannot be had; use fewer rows, a shorter context or a smaller model"
            ) from error
        start = -whole.data_ptr() % PAGE
        self._c.anabranch_advise(whole[start:].data_ptr(), size)
        return whole[start : start + size]

    def _room(self, size: int) -> Tensor:
        """Memory for ``size`` bytes in large pages; lasting pieces share them."""
        if size < PAGE // 8:
            return torch.empty(size, dtype=torch.uint8)
        with self._lock:
            if len(self._free) < size:
                # pages are only taken when written to: what is left over at the end costs nothing
                self._free = self.large(max(ARENA, size))
            taken, self._free = self._free[:size], self._free[size + -size % 64 :]
            return taken

    def linear(self, x_MD: Tensor, packed: Packed, bias_N: Tensor | None) -> Tensor:
        """Rows times a packed weight, plus a float32 bias: float32 [M, N].

        Rows are of the weight's type; for a quantised one bf16 or float32.
        """
        x_MD, bias = _rows(x_MD, packed, bias_N)
        y = torch.empty(len(x_MD), packed.outputs)
        with self._lock:
            self._c.anabranch_linear(
                *(_kind(x_MD), self._run(), x_MD.data_ptr(), len(x_MD), ctypes.byref(packed), bias, y.data_ptr())
            )
        return y

    def norm(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """RMS norm of float32 rows [..., D] by a float32 weight, as ``dtype``."""
        width = x.shape[-1]
        _require(x.dtype == torch.float32 and x.is_cpu, "rows to norm are float32 on the CPU")
        _require(weight.dtype == torch.float32 and weight.shape == (width,), "a norm's weight is not float32 [D]")
        _require(width > 0 and width % BLOCK == 0, "a norm's width {} is no multiple of {}", width, BLOCK)
        x, weight = x.contiguous(), weight.contiguous()
        y = torch.empty(x.shape, dtype=dtype)
        self._c.anabranch_norm(_kind(y), x.data_ptr(), x.numel() // width, width, weight.data_ptr(), eps, y.data_ptr())
        return y

    def best(self, z_MN: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The ``count`` largest log probabilities of float32 scores [M, N], falling, and their places [M, count].

        Scores that are not finite are left out; where fewer are finite, -inf at place 0 follows.
        """
        z_MN = _scores(z_MN)
        _require(count >= 1, "the {} best scores are asked for", count)
        values, places = torch.empty(len(z_MN), count), torch.empty(len(z_MN), count, dtype=torch.long)
        self._c.anabranch_best(z_MN.data_ptr(), *z_MN.shape, count, values.data_ptr(), places.data_ptr())
        return values, places

    def choose(self, x_MD: Tensor, packed: Packed, bias_N: Tensor | None) -> Tensor:
        """Where the largest entry of each row of ``linear`` first stands: int64 [M]. The scores are not kept.

        -1 for a row whose largest score is not finite, or that has a NaN.
        """
        x_MD, bias = _rows(x_MD, packed, bias_N)
        places = torch.empty(len(x_MD), dtype=torch.long)
        with self._lock:
            self._c.anabranch_choose(
                *(_kind(x_MD), self._run(), x_MD.data_ptr(), len(x_MD), ctypes.byref(packed), bias, places.data_ptr())
            )
        return places

    def draw(self, z_MN: Tensor, temperature: float, keys_M: NDArray[np.uint64]) -> Tensor:
        """The largest of each row of float32 scores [M, N] / temperature + ``sampling.gumbels``: int64 [M].

        -1 for a row whose largest score is not finite, or that has a NaN.
        """
        z_MN, keys_M = _scores(z_MN), np.ascontiguousarray(keys_M, np.uint64)
        _require(keys_M.shape == (len(z_MN),), "{} keys for {} rows", keys_M.shape, len(z_MN))
        _require(temperature > 0, "scores are drawn at temperature {}", temperature)
        places = torch.empty(len(z_MN), dtype=torch.long)
        with self._lock:
            self._c.anabranch_draw(
                *(self._run(), z_MN.data_ptr(), *z_MN.shape, temperature, keys_M.ctypes.data, places.data_ptr())
            )
        return places

    def draft(self, how: Draft, states_SD: Tensor, root: int) -> Nodes:
        """A tree's nodes, breadth first, the root among them; the root alone where no score is finite.

        States and embeddings are float32 where the weights are, else bf16.
        """
        dtype = torch.float32 if how.head.kind == KINDS["float32"] else torch.bfloat16
        _require(
            states_SD.dtype == dtype and states_SD.is_cpu, "stream states of {} are not {}", states_SD.dtype, dtype
        )
        deep = states_SD.dim() == 2 and len(states_SD) >= how.depth and states_SD.shape[1] == how.d
        _require(deep, "stream states {} are not {} of width {}", states_SD.shape, how.depth, how.d)
        _require(how.nodes >= 1, "a draft of {} nodes", how.nodes)
        states_SD = states_SD.contiguous()
        integers, joints = np.empty((3, how.nodes), np.int64), np.empty(how.nodes, np.float32)
        tokens, parents, depths = integers
        with self._lock:
            n = self._c.anabranch_draft(
                *(how.head.kind, self._run(), ctypes.byref(how), states_SD.data_ptr(), root),
                *(tokens.ctypes.data, parents.ctypes.data, depths.ctypes.data, joints.ctypes.data),
            )
        return tokens[:n], parents[:n], depths[:n], joints[:n]

    def layers(
        self,
        shape: Shape,
        layers: Layers,
        step: Step,
        ends: Ends | None = None,
        tap: Tensor | None = None,
        tapped: int = 0,
    ) -> None:
        """Run layers over ``step.x`` in place; keys and values are written behind the committed ones.

        The cache is float32 where the weights are, else bf16. All of a layer's weights are quantised, or none is.
        With ``ends`` the pass is a whole one, from tokens to tokens. ``tap`` takes the rows as they are before layer
        ``tapped`` of these.
        """
        _require(len(layers) > 0, "a pass has no layers")
        if tap is not None:
            _filled(tap, step.nodes * shape.d, torch.float32)
        with self._lock:
            self._c.anabranch_layers(
                *(layers[0].qkv.kind, self._run(), ctypes.byref(shape), layers, len(layers), ctypes.byref(step)),
                *(None if ends is None else ctypes.byref(ends), None if tap is None else tap.data_ptr(), tapped),
            )

    def trail(self, shape: Shape, layers: Layers, step: Step, entry: Entry, states: Tensor) -> None:
        """Streams from the main rows that they trail, through ``layers`` and the last norm, into ``states``."""
        _require(len(layers) > 0, "streams have no layers")
        kind = layers[0].qkv.kind
        dtype = torch.float32 if kind == KINDS["float32"] else torch.bfloat16
        _filled(states, step.nodes * shape.d, dtype)
        with self._lock:
            self._c.anabranch_trail(
                *(kind, self._run(), ctypes.byref(shape), layers, len(layers)),
                *(ctypes.byref(step), ctypes.byref(entry), states.data_ptr()),
            )

    def move(
        self, keys: Tensor, values: Tensor, layers: range, slot: int, start: int, nodes: NDArray[np.int64]
    ) -> None:
        """In a cache [layers, rows, K, C, E], one row and some layers of it: start + nodes[i] goes to start + i; nodes
        ascend.
        """
        same = (keys.shape, keys.stride(), keys.dtype) == (values.shape, values.stride(), values.dtype)
        _require(same and keys.dim() == 5 and keys.is_cpu and values.is_cpu, "keys and values differ")
        whole = keys.stride(4) == 1 and keys.stride(3) == keys.shape[4]
        _require(whole and keys.stride(2) == keys.shape[3] * keys.shape[4], "the cache's heads are not contiguous")
        inside = 0 <= layers.start <= layers.stop <= len(keys) and layers.step == 1 and 0 <= slot < keys.shape[1]
        _require(inside, "row {} of layers {} is not in a cache of {}", slot, layers, keys.shape)
        nodes = np.ascontiguousarray(nodes, np.int64)
        size = keys.element_size()
        layer, row, head, token, _ = (size * stride for stride in keys.stride())
        first = layers.start * layer + slot * row
        self._c.anabranch_move(
            *(keys.data_ptr() + first, values.data_ptr() + first, len(layers), keys.shape[2], layer, head, token),
            *(start, nodes.ctypes.data, len(nodes)),
        )


def _require(holds: bool, what: str, *values: object) -> None:
    """As ``assert``, which python -O leaves out: beyond this, memory is at stake.

    ``values`` fill the braces of ``what``, which is only formatted where it is said: these checks run in every step.
    """
    if not holds:
        raise AssertionError(what.format(*values))


def _kind(x: Tensor) -> int:
    kind = KINDS.get(str(x.dtype).removeprefix("torch."))
    _require(kind in (0, 1), "rows of {} are neither bfloat16 nor float32", x.dtype)
    return kind or 0


def _rows(x_MD: Tensor, packed: Packed, bias_N: Tensor | None) -> tuple[Tensor, int | None]:
    """Rows for a packed weight, and the address of its bias."""
    kind = _kind(x_MD)
    _require(x_MD.is_cpu and x_MD.dim() == 2, "rows {} on {}", x_MD.shape, x_MD.device)
    _require(x_MD.shape[1] == packed.width, "rows of width {} for a weight of width {}", x_MD.shape[1], packed.width)
    _require(packed.kind in (kind, 2, 3), "rows of {} for a weight of kind {}", x_MD.dtype, packed.kind)
    if bias_N is None:
        return x_MD.contiguous(), None
    _filled(bias_N, packed.outputs, torch.float32)
    return x_MD.contiguous(), bias_N.data_ptr()


def _scores(z_MN: Tensor) -> Tensor:
    _require(z_MN.dtype == torch.float32 and z_MN.is_cpu, "scores of {} on {}", z_MN.dtype, z_MN.device)
    _require(z_MN.dim() == 2 and z_MN.shape[1] > 0, "scores {}", z_MN.shape)
    return z_MN.contiguous()


def _filled(x: Tensor, count: int, dtype: torch.dtype) -> None:
    """``x`` is contiguous memory of ``count`` values of a type."""
    fits = x.is_cpu and x.is_contiguous() and x.dtype == dtype and x.numel() == count
    _require(fits, "a tensor {} of {} where {} values of {} are needed", x.shape, x.dtype, count, dtype)


@lru_cache(maxsize=1)
def _openmp() -> Callable[[int], None] | None:
    """``omp_set_num_threads`` of torch's OpenMP, which is about the calling thread alone; None where torch has none.

    ``torch.set_num_threads`` also sets what threads begin with that start later.
    """
    try:
        set_threads = ctypes.CDLL(None).omp_set_num_threads
    except AttributeError:
        return None
    set_threads.argtypes, set_threads.restype = (_INT,), None
    before = torch.get_num_threads()
    set_threads(before + 1)
    works = torch.get_num_threads() == before + 1  # another OpenMP than torch's does nothing
    set_threads(before)
    return set_threads if works else None


@dataclass(frozen=True)
class _Found:
    library: Library | None
    shortfall: build.Shortfall | None


_alive: weakref.WeakSet[Library] = weakref.WeakSet()
_finding = threading.Lock()
_found: _Found | None = None


def _after_fork() -> None:
    """Locks that a thread of the parent held would stay locked in the child, where that thread does not exist."""
    global _finding
    _finding = threading.Lock()
    for alive in _alive:
        alive._begin()


os.register_at_fork(after_in_child=_after_fork)


def library() -> Library | None:
    """The kernels, compiled if need be; None where they cannot be had.

    ANABRANCH_NATIVE=0 switches them off, and the name of a form takes none that is better. Raises InputError for
    another value.
    """
    return _look().library


def shortfall() -> build.Shortfall | None:
    """Why these kernels, or none, run on this machine; None where they are the best that its processor can run."""
    return _look().shortfall


def why_not() -> str:
    """Why ``library()`` is None; empty where it is not."""
    found = _look()
    return "" if found.shortfall is None or found.library is not None else found.shortfall.why


def forget() -> None:
    """Look for the kernels anew at the next call."""
    global _found
    with _finding:
        _found = None


def _look() -> _Found:
    global _found
    with _finding:
        if _found is None:
            _found = _find()
        return _found


def _find() -> _Found:
    if (lacking := build.unfit()) is not None:
        return _Found(None, lacking)
    failures: dict[str, build.BuildError] = {}
    for form in build.forms():
        try:
            opened = build.opened((*build.FLAGS, *build.FORMS[form][1]))
        except build.BuildError as failed:
            failures[form] = failed
            continue
        return _Found(Library(opened.library), build.shortfall_of(form, failures, opened.not_kept))
    first = next(iter(failures.values()))
    return _Found(None, build.Shortfall(f"the native kernels are missing: {first.why}", first.advice))
