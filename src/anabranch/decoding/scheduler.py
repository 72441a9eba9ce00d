"""Who decodes when: one scheduler above one engine, for every caller of a model.

A tick: admit the next waiting request (first come, first served), read one chunk of one prompt, decode one step of all
rows that are ready; on a GPU, short prompts share the chunk. So nobody waits for neighbours' prompts longer than one
chunk takes. A request that cannot share a
pass with the rows in use (``Engine.fits``) waits until they are done, and so do those behind it.

The cache grows with the texts. Where memory does not suffice, kept texts are dropped first; then the newest rows give
theirs up, wait, and are read again as prompts. The longest text that a request may become has to fit by itself.

Prompts that begin like an earlier text are read from where they differ: the keys and values of rows that left are kept,
the most recently used ones, up to ``prefix_bytes``.

Safe for threads: any thread may submit, cancel and wait, and whoever waits runs the ticks for all.

A tick calls users' functions, logits processors and ``on_prompt``, and these may call the model again, or wait for a
thread that does. Such calls are served by a second scheduler, in plain decoding: the first one is in the middle of a
step. While a user's function runs, its thread lends its ``Turn`` to run passes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from anabranch.control.controller import Controller
from anabranch.decoding.batch import CHUNK, Member
from anabranch.decoding.engine import Engine, Request, Step
from anabranch.decoding.turn import Turn
from anabranch.drafting.drafter import Drafter
from anabranch.errors import InputError, OutOfMemoryError
from anabranch.methods.none import NoDrafter
from anabranch.model.cache import HEADROOM, MIN_CAPACITY, SMALL, room_for, shared_length
from anabranch.model.decoder import Decoder
from anabranch.support.forks import renewed_after_fork
from anabranch.support.memory import free_memory, give_back
from anabranch.support.plain_torch import plain_torch

__all__ = ["Scheduler", "Ticket"]

ROWS = 64  # at a time at most, unless told otherwise
SHARED_CHUNK = 64  # tokens of a prompt read at a time on a CPU while others decode
SHORTEST = 16  # tokens that a shared beginning must have to be copied
AHEAD = 256  # tokens that a row has room for when it joins, besides those that it begins with
POSITIONS = 8 * (MIN_CAPACITY + 64)  # of all rows that an idle cache may hold: 8 rows of the smallest capacity
PREFIX_BYTES = 2**26
CLOSED = "the model was closed while it decoded; load it again"
PATIENCE = 0.1  # seconds in one user's function after which calls that wait for it are served by the second scheduler
DEPTH = 8  # schedulers above one target: calls within users' functions within calls

T = TypeVar("T")


@dataclass(eq=False)
class Ticket:
    """A request that was submitted.

    host             what decodes it
    used             the drafter of its row: ``drafter``, or the one chosen when it joined
    seconds          spent in ticks while it had a row
    prefill_seconds  of these, until its prompt was read
    reused           prompt tokens whose keys and values were copied from an earlier text
    error            why it ended early
    emitted          tokens of its steps so far
    """

    request: Request
    drafter: Drafter
    host: Scheduler
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

    @property
    def remaining(self) -> Request:
        """What is left of the request; differs from it only where an error of others took its row away."""
        if not self.emitted:
            return self.request
        return replace(
            self.request,
            prompt_ids=[*self.request.prompt_ids, *self.emitted],
            max_new_tokens=self.request.max_new_tokens - len(self.emitted),
            emitted=self.request.emitted + len(self.emitted),
            on_prompt=None,
        )


@dataclass(eq=False)
class _Prefix:
    """Keys and values [layers, K, n, E] of a text of n tokens, decoded with a LoRA or None.

    rotations  the key of their rotations (``Rope.key``)
    """

    tokens: list[int]
    lora: str | None
    rotations: int
    keys: Tensor
    values: Tensor

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


class Scheduler:
    """Decodes requests together, up to ``rows`` at a time.

    rows          the most rows in use; the cache grows as they are needed
    controller    sizes the drafts of adaptive drafters
    prefix_bytes  memory for the keys and values of texts that ended; None: 64 MiB, or an eighth of the weights if more;
                  0: none are kept
    """

    def __init__(
        self,
        target: Decoder,
        *,
        rows: int = ROWS,
        controller: Controller | None = None,
        prefix_bytes: int | None = None,
    ) -> None:
        self.target, self.rows = target, rows
        self._most = rows  # for which memory suffices
        weights = sum(parameter.nbytes for parameter in target.parameters())
        self.prefix_bytes = max(PREFIX_BYTES, weights // 8) if prefix_bytes is None else prefix_bytes
        self._controller = controller
        self.engine: Engine | None = None
        self._waiting: deque[Ticket] = deque()
        self._running: dict[int, Ticket] = {}
        self._prefixes: list[_Prefix] = []  # the most recently used one last
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

    def use(self, controller: Controller) -> None:
        """Leave adaptive drafts to another controller."""
        self._controller = controller
        if self.engine is not None:
            self.engine.use(controller)

    def limit(self, rows: int) -> None:
        """Decode at most ``rows`` requests at a time from now on; call before requests come."""
        assert not self.busy, "requests are in progress"
        self.rows = self._most = rows

    @property
    def waiting(self) -> int:
        """The number of requests that have no row yet."""
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether anything is waiting or decoding."""
        return bool(self._waiting or self._running)

    # -- requests come and go ---------------------------------------------------------------------------
    def submit(self, request: Request, drafter: Drafter, *, checked: bool = False) -> Ticket:
        """Queue a request. Raises what ``check`` raises, unless that was called before (``checked``)."""
        if not checked:
            self.check(request, drafter)
        with self._mutex:
            if self._closed:
                raise InputError("this model is closed; load it again")
            second = self._second_here() if self._ticker == threading.get_ident() else None
            if second is None:
                ticket = Ticket(request, drafter, self)
                ticket.request = _lending(ticket)
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

    def _sweep(self) -> None:
        """Let cancelled requests go. To be called by whoever ticks, or with the mutex held and nobody ticking."""
        for ticket in [ticket for ticket in (*self._waiting, *self._running.values()) if ticket.cancelled]:
            ticket.done = True
            with suppress(ValueError):
                self._waiting.remove(ticket)
            if ticket.row is not None and self._running.pop(ticket.row, None) is not None:
                assert self.engine is not None
                self.engine.remove(ticket.row)

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
        free += sum(prefix.nbytes for prefix in self._prefixes) + (0 if engine is None else engine.cache.nbytes)
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
    def _lent(self) -> Iterator[None]:
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

    # -- a tick -----------------------------------------------------------------------------------------
    def _tick(self) -> list[tuple[Ticket, Step]]:
        """A tick of the thread that is ``_ticker``."""
        try:
            with self._turn, plain_torch():
                return self._ticked_steps()
        finally:
            with self._mutex:
                self._ticker = None
                if self._closed:
                    self._shut()
                self._ticked.notify_all()

    def _ticked_steps(self) -> list[tuple[Ticket, Step]]:
        began = time.perf_counter()
        with self._mutex:
            self._sweep()
        reading = self._read_prompts()
        steps: list[tuple[Ticket, Step]] = []
        if self.engine is not None:
            try:
                self._make_room()
                steps = [] if self.engine is None else [(self._running[s.row], s) for s in self.engine.step()]
            except BaseException as error:
                self._fail(error)
                if self._for_this_thread(error):
                    raise
        seconds = time.perf_counter() - began
        for ticket in {*self._running.values()}:
            ticket.seconds += seconds
            if ticket is reading:
                ticket.prefill_seconds = ticket.seconds
        with self._mutex:
            for ticket, step in steps:
                ticket.steps.append(step)
                ticket.emitted += step.tokens
                if step.read:
                    ticket.prefill_seconds = ticket.seconds - step.timings.total
                if step.finish is not None:
                    ticket.done = True
                    del self._running[step.row]
            if not self.busy:
                self._most = self.rows
        return steps

    def _read_prompts(self) -> Ticket | None:
        """Read a chunk of one prompt; on a GPU, whole short prompts one after another up to a chunk of tokens.

        There a step over many rows takes little longer than over few, so that rows should join at once. Returns the
        request whose prompt is not read yet.
        """
        before = 0 if self.engine is None else self.engine.tokens_read
        reading = self._admit_and_read()
        while self.target.device.type != "cpu" and (engine := self.engine) is not None and self._waiting:
            active = engine.active
            if reading is not None or engine.unread or engine.tokens_read - before >= CHUNK:
                break
            reading = self._admit_and_read()
            if self.engine is not engine or engine.active == active:
                break
        return reading

    def _admit_and_read(self) -> Ticket | None:
        """Read a chunk of the prompt whose turn it is; returns its request."""
        if self.engine is None or self.engine.reading is None:
            self._admit()
        engine = self.engine
        if engine is None or engine.reading is None:
            return None
        ticket = self._running[engine.reading]
        alone = engine.active == 1 or self.target.device.type != "cpu"
        began = time.perf_counter()
        try:
            engine.read(CHUNK if alone else SHARED_CHUNK)
        except BaseException as error:
            assert ticket.row is not None
            del self._running[ticket.row]
            if engine.at_fault is None and engine.active and _is_short(error):
                self._most = engine.active
                self._again([ticket])
            elif engine.at_fault is None and not isinstance(error, Exception):
                self._again([ticket])
            else:
                self._end(ticket, error)
            if self._for_this_thread(error):
                raise
            return None
        if engine.active == 1 or engine.reading is None:
            ticket.prefill_seconds = ticket.seconds + time.perf_counter() - began
        return ticket if engine.reading is not None else None

    def _admit(self) -> None:
        """Give the next waiting request a row, if there is one that it can share a pass with."""
        while self._waiting:
            ticket = self._waiting[0]
            try:
                engine = self._engine_for(ticket)
                if engine is None:
                    return
                assert ticket.used is not None
                reused = self._reuse(engine, ticket, ticket.used)
                shared = SHARED_CHUNK if self.target.ragged else 0  # others would be padded to its width
                prefill = shared if engine.active else CHUNK
                ticket.row = engine.join(ticket.remaining, ticket.used, known=reused, prefill=prefill)
            except Exception as error:
                with self._mutex:
                    self._waiting.popleft()
                self._end(ticket, error)
                continue
            if not ticket.emitted:
                ticket.reused = reused
            with self._mutex:
                self._waiting.popleft()
                self._running[ticket.row] = ticket
            if engine.reading is not None or engine.unread:
                return

    def _engine_for(self, ticket: Ticket) -> Engine | None:
        """The engine with room for a request, whose drafter is chosen; None where it has to wait."""
        tokens, fresh = self._tokens(ticket), self.engine is None
        if fresh:
            made = partial(self._allocate, tokens=tokens, drafter=ticket.drafter)
            self._with_memory(made, min(self._most, len(self._waiting)), least=1)
        engine = self.engine
        assert engine is not None
        if engine.active >= self._most:
            return None
        rows = min(self._most, engine.active + len(self._waiting))
        ticket.used = engine.choose_drafter(ticket.drafter, ticket.request, rows)
        if not engine.fits(ticket.used):
            return None
        if not (engine.active or fresh or engine.has_room(rows, tokens, ticket.used)):
            del engine  # a cache that is too small goes before the larger one comes
            self._drop_cache()
            return self._engine_for(ticket)
        try:
            reserve = partial(engine.reserve, tokens=tokens, drafter=ticket.used)
            self._with_memory(reserve, rows, least=engine.active + 1)
        except OutOfMemoryError:
            if not engine.active:
                raise
            return None  # until others are done
        return engine

    def _tokens(self, ticket: Ticket) -> int:
        """The tokens for which a row has room when it joins: some more than there are.

        Captured graphs depend on where the cache lies, so that it has room for all that may come.
        """
        now, whole = len(ticket.remaining.prompt_ids), len(ticket.request.prompt_ids) + ticket.request.max_new_tokens
        return whole if self.target.backend.capture is not None else min(whole, now + AHEAD)

    def _with_memory(self, allocate: Callable[[int], None], rows: int, *, least: int) -> None:
        """Allocate for ``rows`` rows. Where memory does not suffice, kept texts go, then there are fewer rows.

        Raises OutOfMemoryError where it does not suffice for ``least`` rows.
        """
        while True:
            try:
                return allocate(rows)
            except OutOfMemoryError:
                if self._prefixes:
                    self._prefixes.clear()
                elif rows > least:
                    rows = max(least, rows // 2)
                else:
                    raise

    def _make_room(self) -> None:
        """Let the cache grow for the next step. Where memory does not suffice, the newest rows wait for the others."""
        engine = self.engine
        while engine is not None and engine.active:
            try:
                self._with_memory(lambda _: engine.make_room(), 1, least=1)
            except OutOfMemoryError:
                self._again([self._running.pop(engine.withdraw())])
                if not engine.active:
                    self._drop_cache()  # the only row goes on in a larger cache, which comes after this one has gone
            else:
                return

    def _allocate(self, rows: int, tokens: int, drafter: Drafter) -> None:
        self.engine = Engine(
            self.target,
            rows=rows,
            capacity=tokens,
            longest=self.target.config.max_positions,
            margin=drafter.margin,
            controller=self._controller,
            on_leave=self._keep,
        )

    def _drop_cache(self) -> None:
        """Let the engine go; what was learned of costs stays."""
        assert self.engine is not None
        self._controller = self.engine.learned
        self.engine = None

    # -- what is kept ------------------------------------------------------------------------------------
    def _keep(self, member: Member, slot: int) -> None:
        """Keep the keys and values of a row that leaves."""
        assert self.engine is not None
        cache = self.engine.cache
        length = self.engine.sharable(slot)
        if length < SHORTEST or not self.prefix_bytes:
            return
        per_token = cache.token_bytes
        if length * per_token > self.prefix_bytes:
            return
        tokens, lora = member.row.tokens[:length], member.request.lora
        rotations = self.target.rope().key(cache.prompts[slot])
        # a text that continues a kept one replaces it
        self._prefixes = [
            p for p in self._prefixes if (p.lora, p.rotations, p.tokens) != (lora, rotations, tokens[: len(p.tokens)])
        ]
        kept = sum(prefix.nbytes for prefix in self._prefixes) + length * per_token
        while kept > self.prefix_bytes:
            kept -= self._prefixes.pop(0).nbytes
        self._prefixes.append(_Prefix(tokens, lora, rotations, *cache.taken(slot, length)))

    def _reuse(self, engine: Engine, ticket: Ticket, drafter: Drafter) -> int:
        """Copy the longest beginning that a kept text, or a row in use, shares with a prompt; returns its length."""
        request = ticket.remaining
        prompt = list(request.prompt_ids)
        slot, most = engine.cache.count, min(len(prompt) - 1, drafter.recalls(prompt))
        if self.target.rider is not None:  # what was emitted has rows of the target's own, which no kept text has
            most = min(most, len(prompt) - 1 - request.emitted)
        if not most or not self.prefix_bytes:
            return 0
        best, source = 0, None
        lora, rotations = ticket.request.lora, self.target.rope().key(engine.rotated_for(request))
        for prefix in (p for p in self._prefixes if (p.lora, p.rotations) == (lora, rotations)):
            shared = min(most, shared_length(prefix.tokens, prompt))
            if shared >= max(best, 1):
                best, source = shared, prefix
        live, from_slot = engine.longest_shared(prompt[:most], lora, rotations)
        if max(best, live) < SHORTEST:
            return 0
        if live >= best:
            engine.cache.fork(from_slot, slot, live)
            return live
        assert source is not None
        self._prefixes.remove(source)
        self._prefixes.append(source)
        engine.cache.put(slot, source.keys[:, :, :best], source.values[:, :, :best])
        return best

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
        self._prefixes.clear()
        self.engine = self._second = None

    # -- errors ------------------------------------------------------------------------------------------
    def _end(self, ticket: Ticket, error: BaseException) -> None:
        with self._mutex:
            ticket.error, ticket.done = _told(error, self.target.device), True

    def _for_this_thread(self, error: BaseException) -> bool:
        """Whether an error ends the call that ticks, too: Ctrl-C, not what another call's function raised."""
        if isinstance(error, Exception):
            return False
        return isinstance(error, KeyboardInterrupt) or self.engine is None or self.engine.at_fault is None

    def _fail(self, error: BaseException) -> None:
        """A step failed, so no row's cache is to be trusted.

        Where one row's own functions or numbers are at fault, or decoding was interrupted, the others begin again from
        what they have emitted.
        """
        assert self.engine is not None
        culprit = self.engine.at_fault
        self.engine.clear()
        running = dict(self._running)
        self._running.clear()
        if culprit is None and len(running) > 1 and _is_short(error):
            self._most = len(running) // 2
            self._prefixes.clear()
            self._drop_cache()
        elif culprit is None and isinstance(error, Exception):
            for ticket in running.values():
                self._end(ticket, error)
            return
        if culprit is not None:
            self._end(running.pop(culprit), error)
        self._again(list(running.values()))

    def _again(self, tickets: list[Ticket]) -> None:
        """Queue tickets that lost their rows before all others, in their order."""
        with self._mutex:
            for ticket in tickets:
                ticket.row = None
            self._waiting.extendleft(reversed(tickets))


def _lending(ticket: Ticket) -> Request:
    """The request of a ticket with functions that lend the turn of the thread that calls them."""

    def lending(function: Callable[..., T]) -> Callable[..., T]:
        def call(*arguments: object) -> T:
            with ticket.host._lent():
                return function(*arguments)

        return call

    request = ticket.request
    sampling, on_prompt = request.sampling, request.on_prompt
    if sampling.processors:
        sampling = replace(sampling, processors=tuple(map(lending, sampling.processors)))
    elif on_prompt is None:
        return request
    return replace(request, sampling=sampling, on_prompt=None if on_prompt is None else lending(on_prompt))


def _is_short(error: BaseException) -> bool:
    """Whether memory did not suffice, which fewer rows may mend."""
    return isinstance(error, (OutOfMemoryError, torch.OutOfMemoryError))


def _told(error: BaseException, device: torch.device) -> BaseException:
    if isinstance(error, torch.OutOfMemoryError):
        made = OutOfMemoryError(
            f"{device} has no memory left for this; use a shorter prompt, fewer rows, a smaller tree or device='cpu'"
        )
        made.__cause__ = error
        return made
    return error
