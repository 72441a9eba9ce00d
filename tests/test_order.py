"""Whose prompt is read next, who gets the next row, and what a server needs of the scheduler."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch import Tensor

from anabranch.decoding import ticks
from anabranch.decoding.batch import CHUNK
from anabranch.decoding.engine import Request
from anabranch.decoding.order import OLDEST, Order
from anabranch.decoding.scheduler import Scheduler, Ticket
from anabranch.errors import InputError, OverloadedError
from anabranch.methods import make_drafter
from anabranch.methods.none import NoDrafter
from anabranch.model.decoder import Decoder
from anabranch.sampling import SamplingParams
from small import decode, prompt, request, small, small_adapter

PLAIN = NoDrafter()


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(ticks, "CHUNK", 8)
    monkeypatch.setattr(ticks, "SHARED_CHUNK", 8)
    return 8


def watched(length: int, seed: int, new: int = 5) -> tuple[Request, list[int]]:
    """A request, and how many tokens of its prompt were read after each chunk."""
    read: list[int] = []
    return replace(request(length, seed, new), on_prompt=lambda done, total: read.append(done)), read


def finish(scheduler: Scheduler) -> None:
    for _ in range(1000):
        if not scheduler.busy:
            return
        scheduler.tick()
    raise AssertionError("a request is never served")


def exact(target: Decoder, tickets: Sequence[Ticket]) -> bool:
    wanted, _ = decode(target, [ticket.request for ticket in tickets])
    return [ticket.emitted for ticket in tickets] == wanted


# -- several prompts in turn ----------------------------------------------------------------------------------
def test_a_short_prompt_does_not_wait_for_a_long_one(short_chunks: int) -> None:
    target = small()
    scheduler = Scheduler(target, prefix_bytes=0)
    asked, read = watched(80, 1)
    long = scheduler.submit(asked, PLAIN)
    scheduler.tick()
    short = scheduler.submit(request(7, 2, 5), PLAIN)
    before = len(read)
    while not short.emitted:
        scheduler.tick()
    assert len(read) - before <= 1
    assert not long.emitted
    finish(scheduler)
    assert exact(target, [long, short])


def test_a_long_prompt_does_not_wait_forever_for_short_ones(short_chunks: int) -> None:
    target = small()
    scheduler = Scheduler(target, rows=3, prefix_bytes=0)
    long = scheduler.submit(request(80, 1, 3), PLAIN)
    shorts: list[Ticket] = []
    passes = 0
    while not long.emitted:
        shorts.append(scheduler.submit(request(8, passes, 1), PLAIN))
        scheduler.tick()
        passes += 1
    assert passes <= OLDEST * 10 + 2
    assert sum(bool(short.emitted) for short in shorts) > passes // 2
    finish(scheduler)
    assert exact(target, [long, *shorts])


@pytest.mark.parametrize("case", ["llama", "gemma2"])
def test_prompts_that_overtake_each_other_change_nothing(case: str, short_chunks: int) -> None:
    """A row that is ready before one that joined earlier takes its place in the cache."""
    target = small(case)
    adapter = small_adapter(target)
    scheduler = Scheduler(target)
    specs = ("streams:tree=6", "none", "prompt_lookup:tokens=4", "streams:tree=auto+prompt_lookup", "suffix")
    warm = SamplingParams(temperature=0.9, seed=3)
    asked = [request(length, length, 12, sampling=warm) for length in (60, 41, 30, 17, 3)]
    tickets: list[Ticket] = []
    for each, spec in zip(asked, specs, strict=True):
        tickets.append(scheduler.submit(each, make_drafter(spec, target, adapter)))
        scheduler.tick()
        assert scheduler.engine is not None
    assert len(scheduler.engine.reading) > 1
    finish(scheduler)
    assert exact(target, tickets)


def test_prompts_that_come_together_share_their_beginning(short_chunks: int) -> None:
    """They are read one after another, so that the second finds what the first has read."""
    target = small()
    scheduler = Scheduler(target)
    common = prompt(40, 1)
    tickets = [scheduler.submit(Request([*common, *prompt(5, seed)], 6), PLAIN) for seed in (2, 3, 4)]
    finish(scheduler)
    reused = sorted(ticket.reused for ticket in tickets)
    assert reused[0] == 0
    assert reused[1] >= 40
    assert exact(target, tickets)


def test_cancelling_while_several_prompts_are_read(short_chunks: int) -> None:
    target = small()
    for victim in range(3):
        scheduler = Scheduler(target)
        tickets = []
        for n, length in enumerate((70, 50, 30)):
            tickets.append(scheduler.submit(request(length, n, 6), PLAIN))
            scheduler.tick()
        assert scheduler.engine is not None
        assert len(scheduler.engine.reading) == 3
        scheduler.cancel(tickets[victim])
        assert len(scheduler.engine.reading) == 2
        finish(scheduler)
        others = [ticket for ticket in tickets if ticket is not tickets[victim]]
        assert exact(target, others)
        assert tickets[victim].emitted == []


def test_a_request_that_is_cancelled_during_a_read_has_no_step(short_chunks: int) -> None:
    target = small()
    scheduler = Scheduler(target)
    first = scheduler.submit(request(4, 1, 20), PLAIN)
    scheduler.tick()
    before = len(first.emitted)
    asked, _ = watched(20, 2)
    scheduler.submit(replace(asked, on_prompt=lambda *_: scheduler.cancel(first)), PLAIN)
    scheduler.tick()
    assert first.done
    assert len(first.emitted) == before


def test_chunks_are_as_long_as_a_time_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    target = small()
    monkeypatch.setattr(type(target.backend), "ragged", True)
    scheduler = Scheduler(target)
    assert scheduler._budget() == ticks.SHARED_CHUNK, "nothing was timed yet"
    scheduler._pace = ticks.READ_SECONDS / 100
    assert scheduler._budget() == 100
    scheduler.submit(request(4, 1, 20), PLAIN)
    scheduler.tick()
    scheduler._pace = ticks.SHARED_SECONDS / 40
    assert scheduler._budget() == 40, "while others decode"
    scheduler._pace = 1e-9
    assert scheduler._budget() == CHUNK
    scheduler._pace = 1e9
    assert scheduler._budget() == ticks.LEAST


# -- priority and fairness --------------------------------------------------------------------------------------
def served(scheduler: Scheduler, tickets: Sequence[Ticket]) -> list[int]:
    """The places of the tickets in the order in which they began."""
    began: list[int] = []
    while scheduler.busy:
        for ticket, _ in scheduler.tick():
            if (place := tickets.index(ticket)) not in began:
                began.append(place)
    return began


def test_a_higher_priority_comes_first() -> None:
    scheduler = Scheduler(small(), rows=1)
    tickets = [scheduler.submit(request(4, n, 2), PLAIN, priority=n) for n in range(3)]
    assert served(scheduler, tickets) == [2, 1, 0]


def test_a_key_with_many_requests_leaves_others_their_share() -> None:
    scheduler = Scheduler(small(), rows=1)
    many = [scheduler.submit(request(4, n, 6), PLAIN, key="many") for n in range(8)]
    scheduler.tick()
    few = [scheduler.submit(request(4, n, 6), PLAIN, key="few") for n in range(2)]
    order = served(scheduler, [*many, *few])
    assert max(order.index(8), order.index(9)) <= 5


def test_a_key_that_was_away_saved_nothing_up() -> None:
    order = Order()
    order.arrived("a", [])
    order.serve("a", 1000)
    order.arrived("b", ["a"])
    tickets = [Ticket(request(4, n, 2), PLAIN, Scheduler(small()), key) for n, key in enumerate("ab")]
    assert order.choose(tickets, lambda _: 1) is tickets[0], "they begin alike, and a came first"
    order.serve("a", 1)
    assert order.choose(tickets, lambda _: 1) is tickets[1]
    order.arrived("c", [])
    assert order._served == {"c": 0}, "nobody is owed anything where nobody waits"


def test_a_full_queue_refuses_requests() -> None:
    scheduler = Scheduler(small(), rows=1, queue=2)
    tickets = [scheduler.submit(request(4, 1, 8), PLAIN)]
    scheduler.tick()
    tickets += [scheduler.submit(request(4, n, 2), PLAIN) for n in range(2)]
    with pytest.raises(OverloadedError, match="2 requests are waiting already; try again later"):
        scheduler.submit(request(4, 1, 2), PLAIN)
    finish(scheduler)
    assert all(ticket.emitted for ticket in tickets)
    assert scheduler.submit(request(4, 1, 2), PLAIN)


# -- a thread that serves ---------------------------------------------------------------------------------------
class Serving:
    """A thread that runs the ticks, as a server has one."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self._until = scheduler, threading.Event()
        self._thread = threading.Thread(target=scheduler.serve, args=(self._until,))

    def __enter__(self) -> Serving:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._until.set()
        self.scheduler.wake()
        self._thread.join(60)
        assert not self._thread.is_alive()


class Listener:
    """Collects the tokens of a request as they are reported."""

    def __init__(self, scheduler: Scheduler, asked: Request) -> None:
        self.event = threading.Event()
        self.scheduler, self.tokens = scheduler, list[int]()
        self.ticket = scheduler.submit(asked, PLAIN, on_event=self.event.set)

    def all(self) -> list[int]:
        while not self.ticket.done or self.ticket.steps:
            assert self.event.wait(60)
            self.event.clear()
            self.tokens += [token for step in self.scheduler.ready(self.ticket) for token in step.tokens]
        return self.tokens


def test_a_thread_serves_requests_of_others() -> None:
    target = small()
    scheduler = Scheduler(target)
    asked = [request(5 + n, n, 10) for n in range(4)]
    with Serving(scheduler):
        listeners = [Listener(scheduler, each) for each in asked]
        assert [each.all() for each in listeners] == decode(target, asked)[0]
        again = Listener(scheduler, asked[0])  # after it was idle
        direct = scheduler.submit(asked[1], PLAIN)  # and beside a caller that waits by itself
        assert [token for step in scheduler.steps(direct) for token in step.tokens] == listeners[1].tokens
        assert again.all() == listeners[0].tokens


def test_errors_and_closing_are_reported() -> None:
    def fails(tokens: Sequence[int], logits: Tensor) -> Tensor:
        raise RuntimeError("of the user")

    scheduler = Scheduler(small())
    with Serving(scheduler):
        broken = Listener(scheduler, request(4, 1, 5, sampling=SamplingParams(processors=(fails,))))
        with pytest.raises(RuntimeError, match="of the user"):
            broken.all()
        endless = Listener(scheduler, request(4, 1, 90))
        assert endless.event.wait(60)
        scheduler.close()
        with pytest.raises(InputError, match="closed"):
            endless.all()


def test_requests_of_a_server_stay_with_it_while_a_users_function_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other calls go to the second scheduler then, which nobody would run for a server's."""
    target = small()
    scheduler = Scheduler(target)
    begun, go = threading.Event(), threading.Event()

    def hold(tokens: Sequence[int], logits: Tensor) -> Tensor:
        begun.set()
        assert go.wait(60)
        return logits

    with Serving(scheduler):
        slow = Listener(scheduler, request(4, 1, 2, sampling=SamplingParams(processors=(hold,))))
        assert begun.wait(60)
        waiting = Listener(scheduler, request(6, 2, 5))
        direct = scheduler.submit(request(6, 3, 5), PLAIN)
        assert len([token for step in scheduler.steps(direct) for token in step.tokens]) == 5
        assert waiting.ticket.host is scheduler
        go.set()
        assert len(slow.all()) == 2
        assert waiting.all() == decode(target, [waiting.ticket.request])[0][0]
