"""The engines of one model: many drafter specifications, one KV cache.

A drafter is cheap once its adapter's weights are packed; a cache is not. So a few drafters are kept by specification,
and the engine of the last call leaves its cache to the next one. A cache of many positions is freed after the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from anabranch.engine import Engine, Request
from anabranch.memory import give_back
from anabranch.methods.base import Drafter
from anabranch.model.decoder import Decoder

__all__ = ["EnginePool"]

MIN_CAPACITY = 512
DRAFTERS = 8  # kept, the ones used last
POSITIONS = 8 * (MIN_CAPACITY + 64)  # of all rows that an idle cache may hold: 8 rows of the smallest capacity


class EnginePool:
    """Hands out idle engines for one target. Not locked: callers take turns.

    make  builds the drafter of a specification
    """

    def __init__(self, target: Decoder, make: Callable[[str], Drafter]) -> None:
        self.target, self._make = target, make
        self._drafters: dict[str, Drafter] = {}
        self.last: Engine | None = None  # whose cache the next engine gets, unless it still decodes

    def drafter(self, spec: str) -> Drafter:
        """The drafter of a specification, built where it is not among those kept."""
        drafter = self._drafters.pop(spec, None) or self._make(spec)
        while len(self._drafters) >= DRAFTERS:
            del self._drafters[next(iter(self._drafters))]
        self._drafters[spec] = drafter
        return drafter

    def take(self, spec: str, requests: Sequence[Request], *, rows: int) -> Engine:
        """An idle engine that drafts as ``spec`` says and has room for ``rows`` of the requests at a time.

        Raises what the drafter raises that cannot be built, and DeviceError where memory does not suffice.
        """
        limit = self.target.config.max_positions
        wanted = min(limit, max(len(request.prompt_ids) + request.max_new_tokens for request in requests))
        drafter = self.drafter(spec)
        # an engine that still decodes belongs to the stream that reads it and goes with that
        last = None if self.last is None or self.last.active else self.last
        if last is not None and last.drafter is drafter and last.rows == rows and last.capacity >= wanted:
            return last
        cache = None if last is None else last.cache
        if cache is not None and (cache.rows < rows or cache.capacity < wanted + drafter.room):
            cache = None
        self.last = last = None  # a cache that is too small goes before the larger one comes
        capacity = min(limit, max(MIN_CAPACITY, 1 << (wanted - 1).bit_length()))
        self.last = Engine(self.target, drafter, rows=rows, capacity=capacity, cache=cache)
        return self.last

    def settle(self) -> None:
        """Free the cache of the last call if it is large, except where recorded steps (CUDA graphs) depend on it."""
        last = self.last
        if last is None or last.active or self.target.recorder is not None:
            return
        if last.cache.rows * last.cache.capacity > POSITIONS:
            self.last = last = None
            give_back()

    def close(self) -> None:
        """Let go of the target, the drafters and the cache; nothing can be taken any more."""
        self.last = None
        self._drafters.clear()
        del self.target, self._make
