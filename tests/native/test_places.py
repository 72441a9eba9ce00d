"""Rows of the kernels' cache stay where they are in memory while others join, become ready and leave."""

from __future__ import annotations

import pytest
from test_kernels import BASE, CACHED, adapter_for, decoder, needs_kernels, packed, tokens
from torch import Tensor

from anabranch.decoding.engine import Request
from anabranch.decoding.scheduler import Scheduler, Ticket
from anabranch.decoding.ticks import Ticks
from anabranch.errors import OutOfMemoryError
from anabranch.methods import make_drafter
from anabranch.model import cache as caches
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder

pytestmark = needs_kernels
SPECS = ("none", "prompt_lookup:tokens=4", "streams:tree=6", "streams:tree=6,placement=ride", "quantized_draft")


def request(length: int, seed: int, new: int) -> Request:
    return Request(tokens(length, seed), max_new_tokens=new)


def run(scheduler: Scheduler, target: Decoder, spec: str, asked: list[Request]) -> list[Ticket]:
    """Submit requests tick by tick, and decode until nothing is left."""
    drafter = make_drafter(spec, target, adapter_for(target))
    tickets = []
    for each in asked:
        tickets.append(scheduler.submit(each, drafter))
        scheduler.tick()
    while scheduler.busy:
        scheduler.tick()
    return tickets


@pytest.mark.parametrize("form", ["bfloat16", "bfloat16" + CACHED])
@pytest.mark.parametrize("spec", SPECS)
def test_no_row_is_copied_while_others_come_and_go(spec: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short prompts join behind a long one, overtake it, and leave before it is read."""
    target = packed(BASE, form)
    asked = [request(200, 1, 9), *(request(12 + n, n, 4 + n) for n in range(2, 6))]
    alone = [run(Scheduler(target, prefix_bytes=0), target, spec, [each])[0].emitted for each in asked]
    monkeypatch.setattr(Ticks, "_chunk", lambda self, tokens: 16)
    places: list[list[int]] = []
    swap = Cache.swap

    def watched(cache: Cache, one: int, other: int) -> None:
        swap(cache, one, other)
        places.append(list(cache.places[: cache.rows]))

    monkeypatch.setattr(Cache, "swap", watched)
    for copies in ("fork", "taken", "put"):
        monkeypatch.setattr(Cache, copies, lambda *_: pytest.fail("a row was copied"))
    scheduler = Scheduler(target, prefix_bytes=0)
    tickets = run(scheduler, target, spec, asked)
    assert [ticket.emitted for ticket in tickets] == alone
    assert any(each[0] != 0 for each in places), "the first slot has another row than the first"
    assert scheduler.engine is not None
    assert scheduler.engine.cache.rows > 1


def test_a_text_that_is_short_for_its_row_is_in_small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    target = packed(BASE, "bfloat16")
    large: dict[int, bool] = {}
    expect = Cache.expect

    def watched(cache: Cache, slot: int, tokens: int) -> None:
        def chosen(memory: Tensor, *, large: bool) -> None:
            assert memory.is_contiguous()
            assert memory.data_ptr() == cache.of_rows(0, slice(slot, slot + 1), 1)[len(sizes)].data_ptr()
            sizes.append(large)

        sizes: list[bool] = []
        monkeypatch.setattr(caches, "choose_pages", chosen)
        expect(cache, slot, tokens)
        assert len(set(sizes)) == 1
        large[slot] = sizes[0]

    monkeypatch.setattr(Cache, "expect", watched)
    run(Scheduler(target), target, "none", [request(200, 1, 9), request(12, 2, 4)])
    assert large == {0: True, 1: False}


def test_rows_are_added_where_addresses_are_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache stays the same one, counts what is in use, and is copied where memory is too short to reserve any."""
    target = packed(BASE, "bfloat16")
    small = target.new_cache(1, 64)
    assert small.resized(5, 64) is small
    assert (small.rows, small.keys.shape[1]) == (5, 5)
    assert small.nbytes == 5 * 64 * small.token_bytes
    assert small.resized(5, 128) is not small
    assert small.resized(caches.RESERVED + 1, 64) is not small
    monkeypatch.setattr(caches, "free_memory", lambda device=None: 2 * 3 * 64 * small.token_bytes)
    short = target.new_cache(1, 64)
    assert short.resized(3, 64) is short
    assert short.resized(4, 64) is not short
    again = target.new_cache(1, 64)
    monkeypatch.setattr(caches, "free_memory", lambda device=None: 64 * small.token_bytes)
    monkeypatch.setattr(caches, "SMALL", 0)
    monkeypatch.setattr(caches, "HEADROOM", 0)
    assert again.resized(2, 64) is again
    monkeypatch.setattr(caches, "free_memory", lambda device=None: 0)
    with pytest.raises(OutOfMemoryError, match=r"1 row\(s\) of 64 tokens"):
        again.resized(3, 64)
    assert again.rows == 2


def test_other_caches_swap_in_memory() -> None:
    model = decoder(BASE)
    memory = model.new_cache(2, 64)
    assert memory.resized(3, 64) is not memory
    memory.add_row()
    memory.add_row()
    memory.keys[:, 0, :, :3], memory.lengths[:] = 1.0, [3, 0]
    memory.swap(0, 1)
    assert memory.keys[:, 1, :, :3].eq(1).all()
    assert list(memory.places) == [0, 1]
