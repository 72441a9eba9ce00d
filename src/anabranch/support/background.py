"""Worker threads that decode for asyncio without blocking the event loop.

The scheduler batches the requests of concurrent calls.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from anabranch.support.forks import renewed_after_fork

__all__ = ["Worker"]

T = TypeVar("T")
THREADS = 32  # maximum number of concurrent calls


class Worker:
    """Threads that start with the first calls; each uses as many CPU threads as the thread that made the first call."""

    def __init__(self) -> None:
        self.after_fork()
        renewed_after_fork(self)

    def after_fork(self) -> None:
        """Drop the threads, which do not exist in a child process."""
        self._executor: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def _started(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._executor is None:
                # torch's number of CPU threads is set per thread
                self._executor = ThreadPoolExecutor(
                    THREADS, "anabranch", initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
                )
            return self._executor

    async def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` in a worker thread and await its result. Not run if cancelled while it is queued."""
        return await asyncio.wrap_future(self._started().submit(function))

    async def iterate(self, start: Callable[[], Generator[T, None, None]]) -> AsyncGenerator[T, None]:
        """Yield the items of the generator that ``start`` creates; closing or cancelling this one closes it too."""
        items = await self.call(start)
        try:
            while True:
                item = await self.call(lambda: next(items, None))  # StopIteration cannot pass through a future
                if item is None:
                    return
                yield item
        finally:
            # after a call that may still be running; shielded, so that a second cancellation does not dequeue it
            await asyncio.shield(asyncio.wrap_future(self._started().submit(items.close)))

    def close(self) -> None:
        """Stop the threads once their calls are done."""
        with self._lock:
            if self._executor is not None:
                self._executor.shutdown(wait=False)
                self._executor = None
