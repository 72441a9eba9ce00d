"""Whose prompt is read next.

Requests of a higher priority come first. Among equals it is the turn of the key that was served least, in tokens read
and emitted: the virtual token counter of Sheng et al. (OSDI 2024). Among a key's requests, the prompt with the fewest
tokens left comes first, so that a short one does not wait for a long one. Every fourth turn is that of the request that
came first, whatever its priority, key and length: nobody waits forever.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from anabranch.decoding.ticket import Ticket

__all__ = ["Order"]

OLDEST = 4  # a long prompt takes at most so many times as long as by itself, and a short one waits one chunk more


class Order:
    """Chooses among requests. Counts the tokens of each key meanwhile."""

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
