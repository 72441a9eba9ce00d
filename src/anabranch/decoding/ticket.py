"""Requests that were submitted to a scheduler, and whose prompt is read next."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from anabranch.decoding.engine import Request, Step
from anabranch.drafting.drafter import Drafter

__all__ = ["Order", "Ticket", "lending"]

T = TypeVar("T")
_arrivals = itertools.count()


class Host(Protocol):
    """A scheduler, as its tickets use it."""

    def lent(self) -> AbstractContextManager[None]:
        """Lend this thread's turn to other threads while a user's function runs in a tick."""

    def cancel(self, ticket: Ticket) -> None:
        """End a request."""

    def advance(self, ticket: Ticket) -> bool:
        """Decode until a request has steps, or has ended; returns whether there is anything to take."""


@dataclass(eq=False)
class Ticket:
    """A request that was submitted.

    host             the scheduler that decodes it
    key, priority    who asks, and how urgent it is (``Order``)
    arrival          earlier requests have smaller numbers
    used             the drafter of its row: ``drafter``, or the one chosen when it joined
    seconds          spent in ticks while it had a row
    prefill_seconds  of these, until its prompt was read
    reused           prompt tokens whose keys and values were copied from an earlier text
    error            why it ended early
    emitted          tokens of its steps so far
    expected         prompt tokens to read, as far as known while it waits; None: not looked up yet
    """

    request: Request
    drafter: Drafter
    host: Host
    key: str = ""
    priority: int = 0
    arrival: int = field(default_factory=lambda: next(_arrivals))
    used: Drafter | None = None
    row: int | None = None
    done: bool = False
    cancelled: bool = False
    error: BaseException | None = None
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    reused: int = 0
    steps: deque[Step] = field(default_factory=deque)
    emitted: list[int] = field(default_factory=list)
    expected: int | None = None

    @property
    def remaining(self) -> Request:
        """The rest of the request; differs from it only where an error of others took its row away."""
        if not self.emitted:
            return self.request
        return replace(
            self.request,
            prompt_ids=[*self.request.prompt_ids, *self.emitted],
            max_new_tokens=self.request.max_new_tokens - len(self.emitted),
            emitted=self.request.emitted + len(self.emitted),
            on_prompt=None,
        )


def lending(ticket: Ticket) -> Request:
    """The request of a ticket with functions that lend the turn of the thread that calls them."""

    def lend(function: Callable[..., T]) -> Callable[..., T]:
        def call(*arguments: object) -> T:
            with ticket.host.lent():
                return function(*arguments)

        return call

    request = ticket.request
    sampling, on_prompt = request.sampling, request.on_prompt
    if sampling.processors:
        sampling = replace(sampling, processors=tuple(map(lend, sampling.processors)))
    elif on_prompt is None:
        return request
    return replace(request, sampling=sampling, on_prompt=None if on_prompt is None else lend(on_prompt))


OLDEST = 4  # a long prompt takes at most so many times as long as by itself, and a short one waits one chunk more


class Order:
    """Chooses among requests, and counts the tokens of each key.

    Requests of a higher priority come first. Among equals it is the turn of the key that was served least, in tokens
    read and emitted: the virtual token counter of Sheng et al. (OSDI 2024). Among a key's requests, the prompt with the
    fewest tokens left comes first, so that a short one does not wait for a long one. Every fourth turn is that of the
    request that came first, whatever its priority, key and length: nobody waits forever.
    """

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._turn = 0

    def arrived(self, key: str, present: Iterable[str]) -> None:
        """A request of ``key`` came; ``present`` are the keys of the requests that were there already.

        A key that was away begins with the least counter of those present: idle time is not saved up.
        """
        counters = {each: self._served.get(each, 0) for each in present}
        if not counters:
            self._served = {key: 0}
            return
        lowest = min(counters.values())
        counters.setdefault(key, max(self._served.get(key, 0), lowest))
        # a counter of somebody who is away matters as long as it is ahead
        self._served = counters | {k: n for k, n in self._served.items() if k not in counters and n > lowest}

    def serve(self, key: str, tokens: int) -> None:
        """Count tokens that were read or emitted for a key."""
        self._served[key] = self._served.get(key, 0) + tokens

    def choose(self, tickets: Collection[Ticket], unread: Callable[[Ticket], int]) -> Ticket:
        """The request whose prompt is read next; ``unread`` returns how many tokens are left."""
        self._turn += 1
        if self._turn % OLDEST == 0:
            return min(tickets, key=lambda ticket: ticket.arrival)

        def rank(ticket: Ticket) -> tuple[int, int, int, int]:
            return -ticket.priority, self._served.get(ticket.key, 0), unread(ticket), ticket.arrival

        return min(tickets, key=rank)
