"""Decoding without blocking an event loop: worker threads, to which coroutines hand their calls.

Calls that run at the same time are decoded together: the scheduler batches what their threads submit.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

__all__ = ["Worker"]

T = TypeVar("T")
THREADS = 32  # calls that decode together at most


class Worker:
    """Threads that start with the first calls; each decodes with as many CPU threads as the thread that made this."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def _started(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._executor is None:
                # torch's number of threads belongs to the thread that set it
                self._executor = ThreadPoolExecutor(
                    THREADS, "anabranch", initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
                )
            return self._executor

    async def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` and await what it returns or raises. Cancelled while it waits, it never runs."""
        return await asyncio.wrap_future(self._started().submit(function))

    async def iterate(self, start: Callable[[], Generator[T, None, None]]) -> AsyncGenerator[T, None]:
        """The items of the generator that ``start`` makes. It is closed when this one is closed or cancelled."""
        items = await self.call(start)
        try:
            while True:
                item = await self.call(lambda: next(items, None))  # StopIteration cannot pass through a future
                if item is None:
                    return
                yield item
        finally:
            # behind the call that may still run; a second cancellation must not take it out of the queue
            await asyncio.shield(asyncio.wrap_future(self._started().submit(items.close)))

    def close(self) -> None:
        """End the thread once its calls are done."""
        with self._lock:
            if self._executor is not None:
                self._executor.shutdown(wait=False)
                self._executor = None
