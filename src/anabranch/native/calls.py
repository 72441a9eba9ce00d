"""Calls of C functions of the compiled kernels: their errors, threads and memory."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor

from anabranch.errors import DeviceError, OutOfMemoryError, PerformanceWarning
from anabranch.native.structs import functions
from anabranch.support.forks import renewed_after_fork
from anabranch.support.log import warn

__all__ = ["Calls", "set_openmp_threads"]

NO_MEMORY = -1  # returned by C functions; other numbers below 0 refuse an argument
MAX_THREADS = 1024
PAGE = 2**21  # bytes of a large page
ARENA = 2**26  # bytes that packed weights share
_AS_IT_IS = nullcontext()  # within another ``single_threaded``


@lru_cache(maxsize=1)
def set_openmp_threads() -> Callable[[int], None] | None:
    """``omp_set_num_threads`` of torch's OpenMP, which affects only the calling thread; None if torch has no OpenMP.

    ``torch.set_num_threads`` would also affect threads that start later.
    """
    try:
        set_threads = ctypes.CDLL(None).omp_set_num_threads
    except AttributeError:
        return None
    set_threads.argtypes, set_threads.restype = (ctypes.c_int,), None
    before = torch.get_num_threads()
    set_threads(before + 1)
    works = torch.get_num_threads() == before + 1  # no effect if the library is not the one that torch uses
    set_threads(before)
    return set_threads if works else None


class Calls:
    """A loaded library: its functions, a pool of as many threads as torch has, and memory for packed weights."""

    def __init__(self, c: ctypes.CDLL) -> None:
        self._c = c
        c.anabranch_message.restype = c.anabranch_instruction_set.restype = ctypes.c_char_p
        c.anabranch_advise.argtypes, c.anabranch_advise.restype = (ctypes.c_void_p, ctypes.c_int64), None
        for name, arguments in functions().items():
            function = getattr(c, f"anabranch_{name}")
            function.argtypes, function.restype = arguments, self._checked
        self._mine = threading.local()  # ``threads``: torch's count in this thread before ``single_threaded``
        self._free = torch.empty(0, dtype=torch.uint8)
        self.after_fork()
        renewed_after_fork(self)

    def function(self, name: str) -> Callable[..., int]:
        """The C function ``anabranch_NAME``, which returns a status or a number.

        It raises DeviceError or AssertionError. If it takes a runner, the ``lock`` must be held.
        """
        return getattr(self._c, f"anabranch_{name}")  # type: ignore[no-any-return]

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
            runner = ctypes.c_void_p()
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
