"""Call the compiled kernels on torch tensors.

``library()`` loads them once per process (``selection`` chooses an instruction set, ``build`` finds or compiles its
library); it is None if they cannot run, and ``shortfall()`` says why. C functions are called by the methods of
``Library`` and by the bindings of methods with their own C++ (``Library.function``), which check every tensor, count
and type. Each C function checks its arguments again. Invalid calls raise AssertionError; a lack of memory raises
OutOfMemoryError.

M rows, D width, N outputs.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.errors import DeviceError, InputError, OutOfMemoryError, PerformanceWarning
from anabranch.native import build, selection
from anabranch.native.arguments import (
    BLOCK,
    IN_FILE_FORMATS,
    KINDS,
    STORED_TYPES,
    address,
    packable,
    require,
    row_kind,
    rows_for,
    scores,
)
from anabranch.native.openmp import set_openmp_threads
from anabranch.native.stored import FUNCTIONS as STORED_FUNCTIONS
from anabranch.native.stored import StoredWeights
from anabranch.native.structs import (
    LAST,
    Cross,
    Ends,
    Layer,
    Layers,
    LowRank,
    Packed,
    RaggedBatch,
    Rider,
    Screen,
    Shape,
    StreamLayer,
    Table,
    Taps,
    layout,
)
from anabranch.support.forks import renewed_after_fork
from anabranch.support.log import LOGGER, warn

__all__ = [
    "BLOCK",
    "KINDS",
    "MAX_EMBEDDING_WIDTH",
    "STORED_TYPES",
    "Cross",
    "Ends",
    "Layer",
    "Layers",
    "Library",
    "LowRank",
    "Packed",
    "RaggedBatch",
    "Rider",
    "Screen",
    "Shape",
    "StreamLayer",
    "Table",
    "Taps",
    "forget",
    "library",
    "packed",
    "shortfall",
    "why_not",
]

MAX_EMBEDDING_WIDTH = 8192  # of rows that kernels read embeddings into
NO_MEMORY = -1  # returned by C functions; other numbers below 0 refuse an argument
MAX_THREADS = 1024
PAGE = 2**21  # bytes of a large page
ARENA = 2**26  # bytes that packed weights share

_INT, _LONG, _FLOAT, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
# arguments of the functions that return a status
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "runner": (_INT, ctypes.POINTER(_POINTER)),
    "packed_bytes": (ctypes.POINTER(Packed), ctypes.POINTER(_LONG)),
    "pack": (ctypes.POINTER(Packed), _POINTER, _POINTER, _POINTER),
    "copy_outputs": (ctypes.POINTER(Packed), _POINTER, _INT, ctypes.POINTER(Packed), _INT),
    "linear": (_INT, _POINTER, _POINTER, _INT, ctypes.POINTER(Packed), _POINTER, _POINTER),
    "norm": (_INT, _POINTER, _LONG, _INT, _POINTER, _POINTER, _INT, _FLOAT, _POINTER),
    "best": (_POINTER, _LONG, _INT, _INT, _POINTER, _POINTER),
    "choose": (
        *(_INT, _POINTER, _POINTER, _INT, ctypes.POINTER(Packed)),
        *(_POINTER, ctypes.POINTER(Screen), _POINTER),
    ),
    "draw": (_POINTER, _POINTER, _INT, _INT, _FLOAT, _POINTER, _POINTER),
    "layers": (
        *(_INT, _POINTER, ctypes.POINTER(Shape), _POINTER, _INT),
        *(ctypes.POINTER(RaggedBatch), ctypes.POINTER(Ends), ctypes.POINTER(Rider), ctypes.POINTER(Taps)),
    ),
    **STORED_FUNCTIONS,
    "move": (_POINTER, _POINTER, _INT, _INT, _LONG, _LONG, _LONG, _LONG, _POINTER, _INT),
}

_AS_IT_IS = nullcontext()  # within another ``single_threaded``


class Library(StoredWeights):
    """The compiled kernels and their thread pool, with as many threads as torch.

    Scores that are not finite: ``choose`` and ``draw`` return -1 for a row whose largest score is not finite or that
    has a NaN; ``best`` ignores such scores.
    """

    def __init__(self, c: ctypes.CDLL) -> None:
        self._c = c
        c.anabranch_instruction_set.restype = c.anabranch_message.restype = ctypes.c_char_p
        self.check_layout("layout", LAST)
        for name, arguments in _FUNCTIONS.items():
            self.function(name, arguments)
        c.anabranch_advise.argtypes, c.anabranch_advise.restype = (_POINTER, _LONG), None
        self._mine = threading.local()  # ``threads``: torch's count in this thread before ``single_threaded``
        self._free = torch.empty(0, dtype=torch.uint8)
        self.after_fork()
        renewed_after_fork(self)

    def function(self, name: str, arguments: tuple[Any, ...]) -> Callable[..., int]:
        """The C function ``anabranch_NAME`` with these ctypes arguments, which returns a status or a number.

        It raises DeviceError or AssertionError. If it takes a runner, the ``lock`` must be held.
        """
        function: Any = getattr(self._c, f"anabranch_{name}")
        function.argtypes, function.restype = arguments, self._checked
        return function  # type: ignore[no-any-return]

    def check_layout(self, name: str, last: tuple[tuple[type[ctypes.Structure], str], ...]) -> None:
        """Compare structs with what the C function ``anabranch_NAME`` lists; AssertionError if they differ."""
        function, count = getattr(self._c, f"anabranch_{name}"), _INT()
        function.restype = ctypes.POINTER(ctypes.c_int32)
        numbers = function(ctypes.byref(count))
        theirs, ours = [numbers[i] for i in range(count.value)], layout(last)
        require(theirs == ours, "structs of the compiled kernels differ from Python's: {}, {}", theirs, ours)

    def _call(self, name: str, *arguments: object) -> int:
        """Call the C function ``anabranch_NAME``."""
        return int(getattr(self._c, f"anabranch_{name}")(*arguments))

    def after_fork(self) -> None:
        """Drop lock and thread pools: the parent's threads do not exist in a child process."""
        self.lock = threading.Lock()  # one call at a time: threads and their scratch memory are shared
        self._runners: dict[int, int] = {}

    def _checked(self, status: int) -> int:
        """The return value of a C function. Raises if it is an error."""
        if status >= 0:
            return status
        message = self._c.anabranch_message().decode(errors="replace")
        if status == NO_MEMORY:
            raise OutOfMemoryError(
                f"the native kernels ran out of memory ({message}); use fewer rows or a shorter context"
            )
        raise AssertionError(f"the native kernels rejected a call: {message}")

    def single_threaded(self) -> AbstractContextManager[None]:
        """Restrict torch to one thread in the calling thread, since torch's workers would spin on the kernels' cores.

        Other threads, including new ones, are not affected.
        """
        return _AS_IT_IS if getattr(self._mine, "threads", 0) else self._restricted()

    @contextmanager
    def _restricted(self) -> Iterator[None]:
        threads, set_threads = torch.get_num_threads(), set_openmp_threads()
        if threads == 1 or set_threads is None:
            yield
            return
        self._mine.threads = threads
        set_threads(1)
        try:
            yield
        finally:
            self._mine.threads = 0
            set_threads(threads)

    def runner(self) -> int:
        """The C++ thread pool with as many threads as torch, or as the system allows, and its memory.

        ``lock`` must be held from here to the end of the C function that takes it.
        """
        count = min(getattr(self._mine, "threads", 0) or torch.get_num_threads(), MAX_THREADS)
        if count not in self._runners:
            runner = _POINTER()
            started = self._c.anabranch_runner(count, ctypes.byref(runner))
            if started < count:
                warn(
                    f"the native kernels could start only {started} of {count} threads; "
                    "raise the limit (ulimit -u) or use fewer threads",
                    PerformanceWarning,
                    stacklevel=2,
                )
            assert runner.value is not None
            self._runners[count] = runner.value
        return self._runners[count]

    @property
    def instruction_set(self) -> str:
        """One of ``recipe.INSTRUCTION_SETS``."""
        return str(self._c.anabranch_instruction_set().decode())

    @property
    def expands(self) -> bool:
        """True if compact weights are multiplied faster than bf16 ones; with AVX2, expanding them takes too long."""
        return not self.instruction_set.startswith("avx2")

    def pack(
        self, kind: str, weight: Tensor, scale: Tensor | None = None, least: Tensor | None = None
    ) -> tuple[Packed, Tensor]:
        """Pack a weight [N, D] in blocks of 32 outputs, the last one padded; the second value is its memory.

        ``weight`` has the dtype given by ``kind`` (in bfloat16, D must be even), or is uint8 with quantised values (D a
        multiple of 32) and has the ``scale`` and ``least`` of ``model.quantize``. A "compact" weight is given like an
        int4 one, and is the bf16 weight that this rounds to.
        """
        packable(kind, weight, scale, least)
        outputs, width = weight.shape
        tensors = [None if x is None else x.detach().cpu().contiguous() for x in (weight, scale, least)]
        packed = Packed(None, outputs, width, KINDS[kind])
        memory = self.allocate(self._packed_bytes(packed))
        packed.data = memory.data_ptr()
        self._c.anabranch_pack(ctypes.byref(packed), *(None if x is None else x.data_ptr() for x in tensors))
        return packed, memory

    def room(self, like: Packed, outputs: int) -> tuple[Packed, Tensor]:
        """A packed weight of zeros with the format and width of another; the second value is its memory.

        A stored weight has the format of the other one's first block.
        """
        for name in IN_FILE_FORMATS:
            if like.kind == KINDS[name]:
                kind = ctypes.c_int32.from_address(like.data or 0).value
                return self.stored([kind] * -(-outputs // BLOCK), outputs, like.width, kind=name)
        packed = Packed(None, outputs, like.width, like.kind)
        memory = torch.zeros(self._packed_bytes(packed), dtype=torch.uint8)
        packed.data = memory.data_ptr()
        return packed, memory

    def _packed_bytes(self, packed: Packed) -> int:
        size = _LONG()
        self._c.anabranch_packed_bytes(ctypes.byref(packed), ctypes.byref(size))
        return size.value

    def copy_outputs(self, source: Packed, outputs: NDArray[np.int64], to: Packed, first: int) -> None:
        """Copy outputs of a packed weight, not in four bits, to another of its format, from output ``first`` on."""
        outputs = np.ascontiguousarray(outputs, np.int64)
        self._c.anabranch_copy_outputs(ctypes.byref(source), address(outputs), len(outputs), ctypes.byref(to), first)

    def large(self, size: int) -> Tensor:
        """Allocate bytes, if possible in large pages, which are read up to twice as fast. Raises DeviceError."""
        try:
            whole = torch.empty(size + PAGE, dtype=torch.uint8)
        except RuntimeError as error:
            raise DeviceError(
                f"{size:,} bytes of memory cannot be allocated; use fewer rows, a shorter context or a smaller model"
            ) from error
        start = -whole.data_ptr() % PAGE
        self._c.anabranch_advise(whole[start:].data_ptr(), size)
        return whole[start : start + size]

    def allocate(self, size: int) -> Tensor:
        """Allocate ``size`` bytes in large pages shared by packed weights; freed memory is not reused."""
        if size < PAGE // 8:
            return torch.empty(size, dtype=torch.uint8)
        with self.lock:
            if len(self._free) < size:
                # pages are allocated on the first write, so unused ones cost nothing
                self._free = self.large(max(ARENA, size))
            taken, self._free = self._free[:size], self._free[size + -size % 64 :]
            return taken

    def linear(self, x_MD: Tensor, packed: Packed, bias_N: Tensor | None) -> Tensor:
        """Rows times a packed weight, plus a float32 bias: float32 [M, N].

        Rows have the weight's dtype, or for a quantised weight bf16 or float32.
        """
        x_MD, bias = rows_for(packed, x_MD, bias_N)
        y = torch.empty(len(x_MD), packed.outputs)
        with self.lock:
            self._c.anabranch_linear(
                *(row_kind(x_MD), self.runner(), x_MD.data_ptr(), len(x_MD), ctypes.byref(packed), bias, y.data_ptr())
            )
        return y

    def norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        dtype: torch.dtype,
        *,
        bias: Tensor | None = None,
        layer: bool = False,
    ) -> Tensor:
        """RMS norm or LayerNorm (``layer``) of float32 rows [..., D] by a float32 weight and bias, as ``dtype``."""
        width = x.shape[-1]
        require(x.dtype == torch.float32 and x.is_cpu, "rows to norm are float32 on the CPU")
        require(weight.dtype == torch.float32 and weight.shape == (width,), "a norm's weight is not float32 [D]")
        require(width > 0 and width % BLOCK == 0, "a norm's width {} is not a multiple of {}", width, BLOCK)
        if bias is not None:
            require(bias.dtype == torch.float32 and bias.shape == (width,), "a norm's bias is not float32 [D]")
        x, weight, bias = x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous()
        y = torch.empty(x.shape, dtype=dtype)
        of_rows = row_kind(y), x.data_ptr(), x.numel() // width, width
        added = None if bias is None else bias.data_ptr()
        self._c.anabranch_norm(*of_rows, weight.data_ptr(), added, int(layer), eps, y.data_ptr())
        return y

    def best(self, z_MN: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The ``count`` largest log probabilities of float32 scores [M, N], descending, and their indices [M, count].

        Scores that are not finite are ignored; if there are too few others, the rest is -inf at index 0.
        """
        z_MN = scores(z_MN)
        require(count >= 1, "count must be at least 1, got {}", count)
        values, places = torch.empty(len(z_MN), count), torch.empty(len(z_MN), count, dtype=torch.long)
        self._c.anabranch_best(z_MN.data_ptr(), *z_MN.shape, count, values.data_ptr(), places.data_ptr())
        return values, places

    def choose(self, x_MD: Tensor, packed: Packed, bias_N: Tensor | None, screen: Screen | None = None) -> Tensor:
        """The first index of the largest entry of each row of ``linear``: int64 [M]. The scores are not stored.

        -1 for a row whose largest score is not finite, or that has a NaN. With a ``screen`` of the weight, and then
        without a bias, it is found in less time.
        """
        x_MD, bias = rows_for(packed, x_MD, bias_N)
        places = torch.empty(len(x_MD), dtype=torch.long)
        with self.lock:
            self._c.anabranch_choose(
                *(row_kind(x_MD), self.runner(), x_MD.data_ptr(), len(x_MD), ctypes.byref(packed), bias),
                *(None if screen is None else ctypes.byref(screen), places.data_ptr()),
            )
        return places

    def draw(self, z_MN: Tensor, temperature: float, keys_M: NDArray[np.uint64]) -> Tensor:
        """Sample from rows of float32 scores [M, N]: argmax of score / temperature + ``sampling.gumbels``, int64 [M].

        -1 for a row whose largest score is not finite, or that has a NaN.
        """
        z_MN, keys_M = scores(z_MN), np.ascontiguousarray(keys_M, np.uint64)
        require(keys_M.shape == (len(z_MN),), "{} keys for {} rows", keys_M.shape, len(z_MN))
        require(temperature > 0, "scores are drawn at temperature {}", temperature)
        places = torch.empty(len(z_MN), dtype=torch.long)
        with self.lock:
            self._c.anabranch_draw(
                *(self.runner(), z_MN.data_ptr(), *z_MN.shape, temperature, address(keys_M), places.data_ptr())
            )
        return places

    def layers(
        self,
        shape: Shape,
        layers: Layers,
        batch: RaggedBatch,
        ends: Ends | None = None,
        rider: Rider | None = None,
        taps: Taps | None = None,
    ) -> None:
        """Run layers over ``batch.x`` in place; keys and values are written after the committed ones.

        The cache is float32 if the weights are, else bf16. Either all weights of a layer are quantised or none. With
        ``ends`` the pass starts with tokens and ends with the last norm and, if requested, with tokens, and a ``rider``
        may take part.
        """
        require(len(layers) > 0, "a pass has no layers")
        with self.lock:
            self._c.anabranch_layers(
                *(layers[0].qkv.kind, self.runner(), ctypes.byref(shape), layers, len(layers), ctypes.byref(batch)),
                *(None if each is None else ctypes.byref(each) for each in (ends, rider, taps)),
            )

    def move(
        self, keys: Tensor, values: Tensor, layers: range, slot: int, start: int, nodes: NDArray[np.int64]
    ) -> None:
        """Copy start + nodes[i] to start + i in one row and some layers of a cache [layers, rows, K, C, E].

        ``nodes`` are in ascending order.
        """
        same = (keys.shape, keys.stride(), keys.dtype) == (values.shape, values.stride(), values.dtype)
        require(same and keys.dim() == 5 and keys.is_cpu and values.is_cpu, "keys and values differ")
        whole = keys.stride(4) == 1 and keys.stride(3) == keys.shape[4]
        require(whole and keys.stride(2) == keys.shape[3] * keys.shape[4], "the cache's heads are not contiguous")
        inside = 0 <= layers.start <= layers.stop <= len(keys) and layers.step == 1 and 0 <= slot < keys.shape[1]
        require(inside, "row {} of layers {} is not in a cache of {}", slot, layers, keys.shape)
        nodes = np.ascontiguousarray(nodes, np.int64)
        size = keys.element_size()
        layer, row, head, token, _ = (size * stride for stride in keys.stride())
        first = layers.start * layer + slot * row
        self._c.anabranch_move(
            *(keys.data_ptr() + first, values.data_ptr() + first, len(layers), keys.shape[2], layer, head, token),
            *(start, address(nodes), len(nodes)),
        )


@dataclass(frozen=True)
class _Found:
    library: Library | None
    shortfall: selection.Shortfall | None
    packed: bool = False


class _Finding:
    """The lock to look for the kernels with."""

    def __init__(self) -> None:
        self.after_fork()

    def after_fork(self) -> None:
        self.lock = threading.Lock()


_finding = renewed_after_fork(_Finding())
_found: _Found | None = None


def library() -> Library | None:
    """The kernels, compiled if necessary; None if they are not available.

    ANABRANCH_KERNELS=none disables them, and the name of an instruction set requires it. Raises InputError for other
    values, and where the required instruction set cannot be used.
    """
    return _look().library


def packed() -> bool:
    """True if the kernels came with the package; False if they were compiled on this machine, or there are none."""
    return _look().packed


def shortfall() -> selection.Shortfall | None:
    """The reason why these kernels, or none, are used; None if they are the fastest that the processor supports."""
    return _look().shortfall


def why_not() -> str:
    """The reason why ``library()`` is None; empty if it is not."""
    result = _look()
    return "" if result.shortfall is None or result.library is not None else result.shortfall.why


def forget() -> None:
    """Discard the result of ``library()``, so that the next call looks for the kernels again."""
    global _found
    with _finding.lock:
        _found = None


def _look() -> _Found:
    global _found
    with _finding.lock:
        if _found is None:
            _found = _find()
        return _found


def _find() -> _Found:
    if (lacking := selection.unfit()) is not None:
        return _Found(None, lacking)
    failures: dict[str, build.BuildError] = {}
    for name in selection.instruction_sets():
        try:
            opened = build.opened(build.compiler_flags(name), tiles=name == "amx")
        except build.BuildError as failed:
            failures[name] = failed
            continue
        LOGGER.info("the native kernels use %s", name)
        lacking = selection.shortfall_of(name, failures, opened.not_kept)
        return _Found(Library(opened.library), lacking, opened.packed)
    first = next(iter(failures.values()))
    if selection.forced():
        raise InputError(f"ANABRANCH_KERNELS is {selection.forced()}, but {first.why}; {first.advice or 'unset it'}")
    LOGGER.info("there are no native kernels: %s", first.why)
    return _Found(None, selection.Shortfall(f"the native kernels are missing: {first.why}", first.advice))
