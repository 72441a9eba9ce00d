"""Ticks: one engine, the requests that wait for it, and what is read and decoded next.

A tick reads prompts for as long as one chunk of a prompt may take, and decodes one step of all rows that are ready.
Whose prompt is read next is chosen chunk by chunk (``Order``), among the rows that are being read and the requests that
wait; a request gets its row with its first chunk. So nobody waits for neighbours' prompts longer than a chunk or two
take, and rows are held up no longer than ``SHARED_SECONDS``. A request that cannot share a pass with the rows in use
(``Engine.fits``), or for which memory does not suffice now, waits until they are done, and nobody joins before it.

The cache grows with the texts. Where memory does not suffice, kept texts are dropped first; then the newest rows give
theirs up, wait, and are read again as prompts. The longest text that a request may become has to fit by itself.

Prompts that begin like an earlier text are read from where they differ: the keys and values of rows that left are kept
(``Prefixes``).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch

from anabranch.control.controller import Controller
from anabranch.decoding.batch import CHUNK, Member
from anabranch.decoding.engine import Engine, Step
from anabranch.decoding.prefixes import Prefixes
from anabranch.decoding.ticket import Order, Ticket
from anabranch.drafting.drafter import Drafter
from anabranch.drafting.kept import Family
from anabranch.errors import OutOfMemoryError
from anabranch.model.decoder import Decoder
from anabranch.support.memory import free_memory

__all__ = ["KEPT_SHARE", "Ticks", "kept_bytes"]

SHARED_CHUNK = 64  # tokens of a prompt read at a time on a CPU while others decode, where passes are not timed
LEAST = 16  # tokens that a pass counts as at least: one over fewer takes as long
READ_SECONDS = 0.08  # that reading takes at a time while nobody decodes: a prompt that comes now waits once or twice
SHARED_SECONDS = 0.05  # the same while others decode, whose next tokens wait
SHORTEST = 16  # tokens that a shared beginning must have to be copied
AHEAD = 256  # tokens that a row has room for when it joins, besides those that it begins with
PREFIX_BYTES = 2**26
KEPT_SHARE = 0.25  # of the free memory, for texts that ended, in programs that hold conversations


def kept_bytes(target: Decoder, memory: float | None) -> int:
    """Memory for the keys and values of texts that ended.

    memory  bytes, or below 1 a share of the free memory; None, or a share where the system does not say what is free:
            64 MiB, or an eighth of the weights if more
    """
    if memory is not None and 0 < memory < 1:
        free = free_memory(target.device)
        memory = None if free is None else memory * free
    if memory is None:
        return max(PREFIX_BYTES, sum(parameter.nbytes for parameter in target.parameters()) // 8)
    return int(memory)


class Ticks:
    """Decodes requests together, up to ``rows`` at a time. ``_tick`` is run by one thread at a time.

    rows          the most rows in use; the cache grows as they are needed
    controller    sizes the drafts of adaptive drafters
    prefix_bytes  memory for the keys and values of texts that ended; None: 64 MiB, or an eighth of the weights if more;
                  0: none are kept
    """

    _mutex: threading.Lock  # held where requests come and go, and never during a pass

    def __init__(self, target: Decoder, *, rows: int, controller: Controller | None, prefix_bytes: int | None) -> None:
        self.target, self.rows = target, rows
        self._most = rows  # for which memory suffices
        self.prefixes = Prefixes(kept_bytes(target, prefix_bytes))
        self._controller = controller
        self.engine: Engine | None = None
        self._order = Order()
        self._waiting: deque[Ticket] = deque()
        self._running: dict[int, Ticket] = {}
        self._held: Ticket | None = None  # the request that could not join yet, before which no other one does
        self._full = False  # whether it could not join in this tick
        self._paces: dict[int, float] = {}  # seconds a token of passes over prompts, by binary order of the context

    def use(self, controller: Controller) -> None:
        """Leave adaptive drafts to another controller."""
        self._controller = controller
        if self.engine is not None:
            self.engine.use(controller)

    @property
    def busy(self) -> bool:
        """Return whether anything is waiting or decoding."""
        return bool(self._waiting or self._running)

    # -- a tick -----------------------------------------------------------------------------------------
    def _run_tick(self) -> list[tuple[Ticket, Step]]:
        """Read prompts, decode a step, and hand out what there is to requests."""
        began = time.perf_counter()
        with self._mutex:
            self._sweep()
        self._read_prompts(began)
        with self._mutex:
            self._sweep()
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
        reading = set() if self.engine is None else {*self.engine.reading}
        for row, ticket in self._running.items():
            ticket.seconds += seconds
            if row in reading:
                ticket.prefill_seconds = ticket.seconds
        self._hand_out(steps)
        return steps

    def _hand_out(self, steps: list[tuple[Ticket, Step]]) -> None:
        with self._mutex:
            for ticket, step in steps:
                ticket.steps.append(step)
                ticket.emitted += step.tokens
                self._order.serve(ticket.key, len(step.tokens) + step.read)
                if step.read:
                    ticket.prefill_seconds = ticket.seconds - step.timings.total
                if step.finish is not None:
                    ticket.done = True
                    del self._running[step.row]
            if not self.busy:
                self._most = self.rows

    def _sweep(self) -> None:
        """Let cancelled requests go. To be called by whoever ticks, or with the mutex held and nobody ticking."""
        for ticket in [ticket for ticket in (*self._waiting, *self._running.values()) if ticket.cancelled]:
            ticket.done = True
            with suppress(ValueError):
                self._waiting.remove(ticket)
            if ticket.row is not None and self._running.pop(ticket.row, None) is not None:
                assert self.engine is not None
                self.engine.remove(ticket.row)

    # -- prompts ----------------------------------------------------------------------------------------
    def _read_prompts(self, began: float) -> None:
        """Read prompts, chunk by chunk, until the time of this tick is used up, or the first row is ready.

        On a GPU a step over many rows takes little longer than over few, so that rows should join at once.
        """
        spent, self._full, alone = 0.0, False, not self._decodes
        while (left := self._allowed() - spent) > 0 and (ticket := self._next()) is not None:
            pace = self._pace(ticket)
            if spent and left < LEAST * pace and self.target.ragged:
                return  # any pass would take longer
            spent += pace * self._read(ticket, self._chunk(left / pace), began)
            if alone and self._decodes and self.target.ragged:
                return  # its first token waits for no other prompt
            engine = self.engine
            if spent and engine is not None and engine.unread and not self.target.ragged:
                return  # the others would be padded to the width of a prompt

    @property
    def _decodes(self) -> bool:
        """Return whether a row takes part in steps."""
        return self.engine is not None and self.engine.active > len(self.engine.reading)

    def _allowed(self) -> float:
        """Return the seconds for which this tick reads prompts; tokens where passes are not timed.

        Native passes are timed and may end anywhere in a prompt: their results do not depend on it. Elsewhere a prompt
        is cut at the same places each time.
        """
        if self.target.ragged:
            return SHARED_SECONDS if self._decodes else READ_SECONDS
        return SHARED_CHUNK if self._decodes and self.target.device.type == "cpu" else CHUNK

    def _pace(self, ticket: Ticket) -> float:
        """Return the seconds that a token of a request's prompt takes, which are more the longer the text is already.

        They are those of the last pass at the nearest binary order of the context; 1 where passes are not timed.
        """
        if not self.target.ragged:
            return 1.0
        if not self._paces:
            return READ_SECONDS / SHARED_CHUNK
        order = self._order_of(ticket)
        return self._paces[min(self._paces, key=lambda known: abs(known - order))]

    def _chunk(self, tokens: float) -> int:
        """Return how many tokens one pass reads where there is time for so many."""
        return max(LEAST, min(CHUNK, int(tokens))) if self.target.ragged else int(tokens)

    def _order_of(self, ticket: Ticket) -> int:
        """Return the binary order of the tokens that a request's row has read."""
        return max(0, len(ticket.remaining.prompt_ids) - self._left(ticket)).bit_length()

    def _next(self) -> Ticket | None:
        """The request whose prompt is read next, which has a row now."""
        while True:
            reading = [] if self.engine is None else [self._running[row] for row in self.engine.reading]
            with self._mutex:
                waiting = self._joining()
            if not (reading or waiting):
                return None
            ticket = self._order.choose([*reading, *waiting], self._left)
            if ticket.row is not None or self._admit(ticket):
                return ticket

    def _joining(self) -> list[Ticket]:
        """The waiting requests of which one may get a row now."""
        if self._full or not self._waiting or (self.engine is not None and self.engine.active >= self._most):
            return []
        if self._held is not None and self._held in self._waiting:
            return [self._held]
        again = [ticket for ticket in self._waiting if ticket.seconds]  # they had a row before
        return again[:1] or [*self._waiting]

    def _left(self, ticket: Ticket) -> int:
        """Return how many tokens of a request's source and prompt are to be read."""
        if ticket.row is not None:
            assert self.engine is not None
            return self.engine.left(ticket.row)
        if ticket.expected is None:
            prompt = ticket.request.prompt_ids
            new = len(prompt) - self.prefixes.find(self._family(ticket), prompt)
            ticket.expected = new + self.target.source_size(ticket.request.source)
        return ticket.expected

    def _read(self, ticket: Ticket, tokens: int, began: float) -> int:
        """Read a chunk of a prompt; returns how many tokens it counts as."""
        engine, row, order = self.engine, ticket.row, self._order_of(ticket)
        assert engine is not None
        assert row is not None
        before, start = engine.tokens_read, time.perf_counter()
        try:
            count = engine.read(row, tokens)
        except BaseException as error:
            del self._running[row]
            engine.remove(row)  # unless it has left already
            if engine.at_fault is None and engine.active and _is_short(error):
                self._most = engine.active
                self._again([ticket])
            elif engine.at_fault is None and not isinstance(error, Exception):
                self._again([ticket])
            else:
                self._end(ticket, error)
            if self._for_this_thread(error):
                raise
            return tokens
        now, read = time.perf_counter(), engine.tokens_read - before
        if row not in engine.reading:
            ticket.prefill_seconds = ticket.seconds + now - began
        if not read:
            return count  # the pass of the next step reads them, and counts them then
        if read >= LEAST:
            self._paces[order] = (now - start) / read
        self._order.serve(ticket.key, read)
        return max(read, LEAST)

    # -- rows -------------------------------------------------------------------------------------------
    def _admit(self, ticket: Ticket) -> bool:
        """Give a waiting request a row; returns whether it has one. ``_held`` where it has to wait for others."""
        try:
            engine = self._engine_for(ticket)
            if engine is None:
                self._held, self._full = ticket, True
                return False
            assert ticket.used is not None
            engine.cache.expect(engine.cache.count, self._tokens(ticket))
            reused = self._reuse(engine, ticket, ticket.used)
            rides = self.target.ragged or not engine.active
            ticket.row = engine.join(ticket.remaining, ticket.used, known=reused, rides=rides)
        except Exception as error:
            with self._mutex:
                self._waiting.remove(ticket)
            self._end(ticket, error)
            return False
        if not ticket.emitted:
            ticket.reused = reused
        with self._mutex:
            self._waiting.remove(ticket)
            self._running[ticket.row] = ticket
        return True

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
                if self.prefixes.nbytes:
                    self.prefixes.clear()
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
    def _family(self, ticket: Ticket) -> Family:
        request = ticket.remaining
        length = len(request.prompt_ids)
        rope = self.target.rope()
        return Family(request.lora, rope.key(rope.prompt(length - request.emitted, length)))

    def _keep(self, member: Member, slot: int) -> None:
        """Keep the keys and values of a row that leaves, the target's last: they may take the memory of drafters'."""
        assert self.engine is not None
        cache, length = self.engine.cache, self.engine.sharable(slot)
        if length >= SHORTEST and self.prefixes.most:
            family = Family(member.request.lora, self.target.rope().key(cache.prompts[slot]))
            member.drafter.keep(member.row, length, self.prefixes, family)
            self.prefixes.keep(family, member.row.tokens[:length], cache, slot)

    def _reuse(self, engine: Engine, ticket: Ticket, drafter: Drafter) -> int:
        """Copy the longest beginning that a kept text, or a row in use, shares with a prompt; returns its length."""
        request = ticket.remaining
        if not self.prefixes.most or request.source is not None:
            return 0
        prompt, family = list(request.prompt_ids), self._family(ticket)
        drafter.recall(prompt, self.prefixes, family)
        most = min(len(prompt) - 1, drafter.needs.recalled(prompt, family.lora))
        if self.target.rider is not None:  # what was emitted has rows of the target's own, which no kept text has
            most = min(most, len(prompt) - 1 - request.emitted)
        if not most:
            return 0
        slot = engine.cache.count
        live, source = engine.longest_shared(prompt[:most], family.lora, family.rotations)
        if max(live, self.prefixes.find(family, prompt[:most])) < SHORTEST:
            return 0
        if live >= self.prefixes.find(family, prompt[:most]):
            engine.cache.fork(source, slot, live)
            return live
        return self.prefixes.copy(family, prompt[:most], engine.cache, slot)

    # -- errors ------------------------------------------------------------------------------------------
    def _end(self, ticket: Ticket, error: BaseException) -> None:
        with self._mutex:
            ticket.error, ticket.done = _as_ours(error, self.target.device), True

    def _for_this_thread(self, error: BaseException) -> bool:
        """Return whether an error ends the call that ticks, too: Ctrl-C, not what another call's function raised."""
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
            self.prefixes.clear()
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


def _is_short(error: BaseException) -> bool:
    """Return whether memory did not suffice, which fewer rows may mend."""
    return isinstance(error, (OutOfMemoryError, torch.OutOfMemoryError))


def _as_ours(error: BaseException, device: torch.device) -> BaseException:
    """The error of a request; PyTorch's for a lack of memory becomes ours."""
    if isinstance(error, torch.OutOfMemoryError):
        made = OutOfMemoryError(
            f"{device} has no memory left for this; use a shorter prompt, fewer rows, a smaller tree or device='cpu'"
        )
        made.__cause__ = error
        return made
    return error
