"""Requests that were submitted to a scheduler."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from anabranch.decoding.engine import Request, Step
from anabranch.drafting.drafter import Drafter

__all__ = ["Ticket", "lending"]

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
