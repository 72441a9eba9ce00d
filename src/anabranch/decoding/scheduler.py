"""Scheduling of requests: one scheduler above one engine, for every caller of a model (``Ticks``).

Safe for threads: any thread may submit, cancel and wait, and whoever waits runs the ticks for all.

A tick calls users' functions, logits processors and ``on_prompt``, and these may call the model again, or wait for a
thread that does. Such calls are served by a second scheduler, in plain decoding: the first one is in the middle of a
step. While a user's function runs, its thread lends its ``Turn`` to run passes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from anabranch.control.controller import Controller
from anabranch.decoding.engine import Engine, Request, Step
from anabranch.decoding.prefixes import Prefixes
from anabranch.decoding.ticket import Ticket, lending
from anabranch.decoding.ticks import Ticks
from anabranch.drafting.drafter import Drafter
from anabranch.errors import InputError, OutOfMemoryError
from anabranch.methods.none import NoDrafter
from anabranch.model.cache import HEADROOM, MIN_CAPACITY, SMALL, room_for
from anabranch.model.decoder import Decoder
from anabranch.support.forks import renewed_after_fork
from anabranch.support.memory import free_memory, give_back
from anabranch.support.plain_torch import plain_torch

__all__ = ["Scheduler", "Ticket", "Turn"]


class Turn:
    """A lock, ``with turn:``, that its owner can lend (``with turn.lent():``).

    Released only by its owner: Ctrl-C may arrive while a thread waits to take it back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        renewed_after_fork(self)

    def after_fork(self) -> None:
        """Take it from a thread that does not exist in a child."""
        if self._owner != threading.get_ident():
            self._lock, self._owner = threading.Lock(), None

    def __enter__(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._owner == threading.get_ident():
            self._owner = None
            self._lock.release()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let other threads, or calls within this one, have the turn inside the block."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()


ROWS = 64  # at a time at most, unless told otherwise
POSITIONS = 8 * (MIN_CAPACITY + 64)  # of all rows that an idle cache may hold: 8 rows of the smallest capacity
CLOSED = "the model was closed while it decoded; load it again"
PATIENCE = 0.1  # seconds in one user's function after which calls that wait for it are served by the second scheduler
DEPTH = 8  # schedulers above one target: calls within users' functions within calls


class Scheduler(Ticks):
    """Decodes the requests of all threads together, up to ``rows`` at a time.

    The arguments are those of ``Ticks``.
    """

    def __init__(
        self,
        target: Decoder,
        *,
        rows: int = ROWS,
        controller: Controller | None = None,
        prefix_bytes: int | None = None,
    ) -> None:
        super().__init__(target, rows=rows, controller=controller, prefix_bytes=prefix_bytes)
        self._ticker: int | None = None  # the thread that runs a tick
        self._calls = 0  # of users' functions so far
        self._calling = False  # whether the tick waits for one
        self._turn = Turn()
        self._depth = 1
        self._second: Scheduler | None = None  # for calls that cannot wait for the tick
        self._closed = False
        self.after_fork()
        renewed_after_fork(self)

    def after_fork(self) -> None:
        """Replace the lock, and end what a thread was decoding that does not exist in a forked child."""
        self._mutex = threading.Lock()
        self._ticked = threading.Condition(self._mutex)
        if self._ticker not in (None, threading.get_ident()):
            self._ticker = None
            self._shut("this process was forked while another thread decoded; ask again")

    def limit(self, rows: int) -> None:
        """Decode at most ``rows`` requests at a time from now on; call before requests come."""
        assert not self.busy, "requests are in progress"
        self.rows = self._most = rows

    def keep(self, prefixes: Prefixes) -> None:
        """Keep texts there from now on; call before requests come."""
        assert not self.busy, "requests are in progress"
        self.prefixes.close()
        self.prefixes = prefixes

    @property
    def waiting(self) -> int:
        """The number of requests that have no row yet."""
        return len(self._waiting)

    # -- requests come and go ---------------------------------------------------------------------------
    def submit(
        self,
        request: Request,
        drafter: Drafter,
        *,
        checked: bool = False,
        key: str = "",
        priority: int = 0,
    ) -> Ticket:
        """Queue a request. Raises what ``check`` raises, unless that was called before (``checked``).

        key       whose request it is: keys are served alike (``Order``)
        priority  requests of a higher one come first
        """
        if not checked:
            self.check(request, drafter)
        with self._mutex:
            if self._closed:
                raise InputError("this model is closed; load it again")
            second = self._second_here() if self._ticker == threading.get_ident() else None
            if second is None:
                self._order.arrived(key, (each.key for each in (*self._waiting, *self._running.values())))
                ticket = Ticket(request, drafter, self, key, priority)
                ticket.request = lending(ticket)
                self._waiting.append(ticket)
                return ticket
        return second.submit(request, NoDrafter(), checked=True)

    def cancel(self, ticket: Ticket) -> None:
        """End a request; its row is free at once, or after the step that is running."""
        with self._mutex:
            if ticket.done:
                return
            ticket.cancelled = True
            if ticket.host is self:
                if self._ticker is None:
                    self._sweep()
                return
        ticket.host.cancel(ticket)

    def check(self, request: Request, drafter: Drafter) -> None:
        """Raise InputError, CapabilityError or OutOfMemoryError if ``request`` cannot be served."""
        target, engine = self.target, self.engine
        Engine.refuse(target, request, drafter)
        tokens = min(len(request.prompt_ids) + request.max_new_tokens, target.config.max_positions)
        each = target.token_bytes
        needed = room_for(tokens) * each
        if needed <= SMALL or (free := free_memory(target.device)) is None:
            return
        # others' rows will be done, and kept texts go
        free += self.prefixes.nbytes + (0 if engine is None else engine.cache.nbytes)
        if needed > (room := max(0, free - HEADROOM)):
            raise OutOfMemoryError(
                f"a text of {tokens:,} tokens (prompt and max_new_tokens) needs a cache of {needed / 2**30:.2f} GiB on "
                f"{target.device}, where {room / 2**30:.2f} GiB are free, enough for {room // each:,} tokens; lower "
                "max_new_tokens, shorten the prompt or use a smaller model"
            )

    def steps(self, ticket: Ticket) -> Iterator[Step]:
        """The steps of a request as they are decoded, by this thread or another one that waits.

        Raises what ended it early: NumericsError, DeviceError, or what its ``on_prompt`` raised.
        """
        while self.advance(ticket):
            yield from self.ready(ticket)

    def ready(self, ticket: Ticket) -> Iterator[Step]:
        """The steps of a request that nobody has taken yet. Raises what ended it early."""
        while ticket.steps:
            yield ticket.steps.popleft()
        if ticket.error is not None:
            raise ticket.error

    def advance(self, ticket: Ticket) -> bool:
        """Decode until a request has steps, or has ended; returns whether there is anything to take.

        Raises InputError where this thread's tick would have to go on for that.
        """
        while ticket.host is self:
            with self._mutex:
                self._wait(ticket)
                if ticket.steps or ticket.done:
                    return bool(ticket.steps or ticket.error)
                if ticket.host is not self:
                    break
                self._ticker = threading.get_ident()
            self._tick()
        return ticket.host.advance(ticket)

    def _wait(self, ticket: Ticket) -> None:
        """Wait until a request has steps, has ended, is served elsewhere, or nobody ticks; with the mutex held."""
        while self._ticker is not None and ticket.host is self and not ticket.steps and not ticket.done:
            calls, within = self._calls, self._ticker == threading.get_ident()
            if within and ticket.row is not None:
                raise InputError(
                    "a logits processor or callback cannot continue a text that is decoded together with its own; "
                    "finish one before the other"
                )
            if within or (not self._ticked.wait(PATIENCE) and self._calling and self._calls == calls):
                self._hand_over()

    def tick(self) -> list[tuple[Ticket, Step]]:
        """Run one tick and return its steps; for a caller that submits and reads all requests itself."""
        assert self._ticker is None, "another thread is decoding; use steps"
        self._ticker = threading.get_ident()
        return self._tick()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While no tick of this scheduler runs: for passes of other kinds over its target."""
        with self._turn, plain_torch():
            yield

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Lend this thread's turn to other threads while a user's function runs in a tick."""
        self._calls += 1
        self._calling = True
        try:
            with self._turn.lent():
                yield
        finally:
            self._calling = False

    def _second_here(self) -> Scheduler:
        """The scheduler for calls of this thread while its tick runs a user's function; call with the mutex held."""
        if not self._calling:
            raise InputError("a drafter cannot call the model that it drafts for; load it a second time")
        if self._second is None:
            if self._depth >= DEPTH:
                raise InputError(
                    f"logits processors or callbacks call the model {DEPTH} levels deep; let them call it without "
                    "themselves"
                )
            self._second = Scheduler(self.target, rows=self.rows, prefix_bytes=0)
            self._second._turn, self._second._depth = self._turn, self._depth + 1
        return self._second

    def _hand_over(self) -> None:
        """Let the second scheduler serve all waiting requests; with the mutex held."""
        if not self._waiting:
            return
        second = self._second_here()
        for ticket in self._waiting:
            ticket.host, ticket.drafter = second, NoDrafter()
        with second._mutex:
            second._waiting.extend(self._waiting)
        self._waiting.clear()
        self._ticked.notify_all()

    def reserve(self, drafter: Drafter, tokens: int) -> None:
        """Allocate the cache of an idle scheduler for all its rows, of ``tokens`` tokens each, before requests come.

        Raises DeviceError where memory does not suffice.
        """
        assert not self.busy, "requests are in progress"
        self._allocate(self.rows, tokens, drafter)

    def _tick(self) -> list[tuple[Ticket, Step]]:
        """A tick of the thread that is ``_ticker``."""
        try:
            with self._turn, plain_torch():
                return self._run_tick()
        finally:
            with self._mutex:
                self._ticker = None
                if self._closed:
                    self._shut()
                self._ticked.notify_all()

    def settle(self) -> None:
        """Free the cache if it is large and idle, except where captured graphs depend on it."""
        with self._mutex:
            if self._ticker is None and self._second is not None and not self._second.busy:
                self._second = None
            engine = self.engine
            if self._ticker is not None or engine is None or self.busy or self.target.backend.capture is not None:
                return
            if engine.cache.rows * engine.cache.capacity > POSITIONS:
                self._drop_cache()
                del engine
                give_back()

    def close(self) -> None:
        """End all requests with InputError and free the cache and kept texts, after the tick that is running."""
        with self._mutex:
            self._closed = True
            if self._second is not None:
                self._second.close()
            if self._ticker is None:
                self._shut()

    def _shut(self, why: str = CLOSED) -> None:
        """End all requests and free everything, with the mutex held and nobody ticking."""
        for ticket in (*self._waiting, *self._running.values()):
            ticket.error = InputError(why)
            ticket.done = True
        self._waiting.clear()
        self._running.clear()
        self.prefixes.close()
        self.engine = self._second = None
