"""Whose prompt is read next, and who gets the next row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from anabranch.decoding import ticks
from anabranch.decoding.engine import Request
from anabranch.decoding.scheduler import Scheduler, Ticket
from anabranch.decoding.ticket import OLDEST, Order
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


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    """A scheduler that times its passes; what it learns from them is not kept."""
    target = small()
    monkeypatch.setattr(type(target.backend), "ragged", True)
    scheduler = Scheduler(target, prefix_bytes=0)
    scheduler._paces = Unchanging()
    return scheduler


class Unchanging(dict[int, float]):
    def __setitem__(self, order: int, pace: float) -> None:
        """Keep what is there."""


def test_chunks_are_as_long_as_a_time_allows(timed: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticks, "CHUNK", 80)
    monkeypatch.setattr(ticks, "SHARED_CHUNK", 30)

    def first_chunk() -> int:
        asked, read = watched(90, 1)
        ticket = timed.submit(asked, PLAIN)
        timed.tick()
        timed.cancel(ticket)
        return read[0]

    assert first_chunk() == 30, "nothing was timed yet"
    timed._paces = Unchanging({0: ticks.READ_SECONDS / 70})
    assert first_chunk() == 70
    timed._paces = Unchanging({0: 1e-9})
    assert first_chunk() == 80
    timed._paces = Unchanging({0: 1e9})
    assert first_chunk() == ticks.LEAST
    timed.submit(request(4, 1, 20), PLAIN)
    timed.tick()
    timed._paces = Unchanging({0: ticks.SHARED_SECONDS / 40})
    assert first_chunk() == 40, "while others decode"


def test_a_prompt_that_is_read_does_not_wait_for_a_whole_tick_of_reading(timed: Scheduler) -> None:
    timed._paces = Unchanging({0: ticks.READ_SECONDS / 60})
    asked, read = watched(80, 1)
    timed.submit(asked, PLAIN)
    short = timed.submit(request(7, 2, 5), PLAIN)
    timed.tick()
    assert short.emitted
    assert not read, "nobody decoded before, so its first token comes at once"
    timed._paces = Unchanging({0: ticks.SHARED_SECONDS / 30})
    timed.tick()
    assert read == [30], "while others decode"
    finish(timed)
    assert exact(timed.target, [short])


def test_a_token_behind_a_long_text_counts_for_more(timed: Scheduler) -> None:
    """A chunk takes as long however much was read before it."""
    timed._paces = Unchanging({0: ticks.READ_SECONDS / 40, 6: ticks.READ_SECONDS / 20})
    asked, read = watched(90, 1)
    timed.submit(asked, PLAIN)
    timed.tick()
    timed.tick()
    assert read == [40, 60]


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
