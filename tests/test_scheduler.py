"""Scheduling: turns, chunks, shared passes, cancelling, errors, threads, prefixes, a cache that grows."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from anabranch.api import DRAFTERS
from anabranch.control.controller import Controller
from anabranch.control.costs import Costs, PassCosts, StepCosts
from anabranch.decoding import scheduler as module
from anabranch.decoding import ticks as ticking
from anabranch.decoding.engine import Engine, Request
from anabranch.decoding.generation import Chunk
from anabranch.decoding.scheduler import Scheduler, Ticket
from anabranch.drafting.drafter import Row
from anabranch.errors import CapabilityError, InputError, NumericsError
from anabranch.methods import Drafter, Needs, make_drafter
from anabranch.methods.none import NoDrafter
from anabranch.model import cache as caches
from anabranch.model.backends import GraphBackend
from anabranch.model.decoder import Decoder
from anabranch.model.kernel_use import native_for, why_not_native
from anabranch.model.pack import pack_decoder
from anabranch.model.passes import PassResult
from anabranch.model.weights import build_decoder
from anabranch.native import library as native
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree
from small import RICH, SOME_CASES, WIDE, prompt, randomise, request, small, small_adapter
from toy_text import toy_model

PLAIN = NoDrafter()
SPECS = (
    "none",
    "prompt_lookup:tokens=4",
    "streams:tree=6",
    "streams:tree=product,k=2",
    "streams:tree=auto",
    "streams:tree=6+prompt_lookup",
    "streams:tree=auto+prompt_lookup",
    "prompt_lookup:tokens=auto,matches=3",
    "suffix:nodes=auto,threshold=0.0",
    "lookahead:window=4,ngram=4",
    "streams:tree=auto,placement=trail+lookahead:window=3,ngram=3",
    "streams:tree=8,prune=5",
)


def alone(target: Decoder, asked: Request, drafter: Drafter = PLAIN) -> list[int]:
    scheduler = Scheduler(target, prefix_bytes=0)
    return [token for step in scheduler.steps(scheduler.submit(asked, drafter)) for token in step.tokens]


def finish(scheduler: Scheduler) -> None:
    while scheduler.busy:
        scheduler.tick()


def flat(target: Decoder) -> Controller:
    """A controller for which drafts cost nothing, so adaptive drafters draft."""
    return Controller(Costs(PassCosts(StepCosts((1, 100), (1.0, 1.001)))), ragged=target.ragged)


# -- turns ------------------------------------------------------------------------------------------------------
def test_no_more_rows_than_there_are_and_all_are_served() -> None:
    target = small()
    scheduler = Scheduler(target, rows=2)
    tickets = [scheduler.submit(request(n, n, n), PLAIN) for n in (3, 20, 2, 9, 1)]
    most = 0
    while scheduler.busy:
        scheduler.tick()
        most = max(most, 0 if scheduler.engine is None else scheduler.engine.active)
    assert most == 2
    assert [ticket.emitted for ticket in tickets] == [alone(target, t.request) for t in tickets]


def test_a_long_prompt_delays_its_neighbours_by_one_chunk_a_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticking, "SHARED_CHUNK", 8)
    target = small()
    scheduler = Scheduler(target, prefix_bytes=0)
    first = scheduler.submit(request(3, 1, 40), PLAIN)
    scheduler.tick()
    read: list[tuple[int, int]] = []
    long = scheduler.submit(replace(request(70, 2, 5), on_prompt=lambda *at: read.append(at)), PLAIN)
    ticks = 0
    while not long.emitted:
        before = len(read)
        steps = scheduler.tick()
        ticks += 1
        assert first in [ticket for ticket, _ in steps], "the neighbour has a step in every tick"
        assert len(read) - before <= 1, "one chunk a tick"
    assert read == [(min(8 * n, 69), 69) for n in range(1, 10)]
    assert ticks == len(read)
    finish(scheduler)
    assert (first.emitted, long.emitted) == (alone(target, first.request), alone(target, long.request))


def test_cancelling_frees_a_row_at_once() -> None:
    target = small()
    scheduler = Scheduler(target, rows=1)
    first, second = (scheduler.submit(request(4, n, 30), PLAIN) for n in (1, 2))
    scheduler.tick()
    assert scheduler.engine is not None
    scheduler.cancel(first)
    assert (first.done, scheduler.engine.active) == (True, 0)
    assert [ticket for ticket, _ in scheduler.tick()] == [second]
    third = scheduler.submit(request(4, 3, 30), PLAIN)
    scheduler.cancel(third)  # while it waits
    scheduler.cancel(third)
    finish(scheduler)
    assert third.emitted == []
    assert second.emitted == alone(target, second.request)


def test_cancelling_a_prompt_that_is_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticking, "SHARED_CHUNK", 4)
    target = small()
    scheduler = Scheduler(target)
    first = scheduler.submit(request(3, 1, 20), PLAIN)
    scheduler.tick()
    long = scheduler.submit(request(50, 2, 5), PLAIN)
    scheduler.tick()
    assert scheduler.engine is not None
    assert scheduler.engine.reading
    scheduler.cancel(long)
    assert (scheduler.engine.active, scheduler.engine.reading) == (1, [])
    finish(scheduler)
    assert first.emitted == alone(target, first.request)


# -- shared passes ------------------------------------------------------------------------------------------------
def mixed() -> list[Request]:
    sampled = SamplingParams(temperature=0.9, top_p=0.95, seed=3)
    return [
        request(9, 1, 18),
        request(1, 2, 7, sampling=sampled),
        request(14, 3, 12, sampling=replace(sampled, repetition_penalty=1.3)),
        request(5, 4, 15, log_probs=True),
        request(20, 5, 9),
        request(7, 6, 11, sampling=sampled),
        request(30, 7, 6),
        request(6, 9, 12, sampling=sampled, log_probs=True),
        request(8, 10, 16),
        request(11, 11, 14, sampling=sampled),
        request(4, 12, 13, sampling=replace(sampled, repetition_penalty=1.3)),
        request(2, 8, 20, sampling=sampled),
    ]


@pytest.mark.parametrize("case", ["llama", "gemma2", pytest.param("gpt2", marks=pytest.mark.thorough)])
def test_rows_of_all_kinds_together_decode_as_each_alone(case: str) -> None:
    target = small(case)
    adapter = small_adapter(target)
    scheduler = Scheduler(target, controller=flat(target), prefix_bytes=0)
    drafters = [make_drafter(spec, target, adapter) for spec in SPECS]
    tickets = [scheduler.submit(asked, drafter) for asked, drafter in zip(mixed(), drafters, strict=True)]
    chain = make_drafter("streams:tree=chain", target, adapter)
    last = scheduler._waiting.pop()  # pruning rides in the pass, so this row waits for the others
    by_rejection = request(6, 9, 14, sampling=SamplingParams(temperature=1.0, seed=5), rule="rejection")
    tickets.append(scheduler.submit(by_rejection, chain))
    scheduler._waiting.append(last)
    shared = 0
    while scheduler.busy:
        steps = scheduler.tick()
        shared = max(shared, len({ticket.drafter for ticket, _ in steps}))
    assert shared > 4
    for ticket in tickets[:-1]:
        assert ticket.emitted == alone(target, ticket.request)
    assert tickets[-1].emitted == alone(target, by_rejection, chain)


def native_target() -> tuple[Decoder, Decoder]:
    """Targets of sizes that the native kernels take: float32 in PyTorch, and packed in bfloat16."""
    plain = build_decoder(WIDE, device="cpu")
    randomise(plain, seed=1)
    packed = build_decoder(WIDE, device="cpu")
    packed.load_state_dict(plain.state_dict())
    packed.to(torch.bfloat16)
    if not native_for(packed):
        pytest.skip(why_not_native(packed))
    assert pack_decoder(packed)
    return plain, packed


def test_rows_of_all_kinds_together_decode_as_each_alone_in_native_bfloat16() -> None:
    """The kernels' results of a row do not depend on the others, nor on how many nodes a pass has."""
    _, target = native_target()
    adapter = small_adapter(target, replace(RICH, conditioning_rank=32, root_width=32)).to(torch.bfloat16)
    scheduler = Scheduler(target, controller=flat(target), prefix_bytes=0)
    drafters = [make_drafter(spec, target, adapter) for spec in SPECS]
    tickets = [scheduler.submit(asked, drafter) for asked, drafter in zip(mixed(), drafters, strict=True)]
    finish(scheduler)
    for ticket, drafter in zip(tickets, drafters, strict=True):
        assert ticket.emitted == alone(target, ticket.request, drafter)
        assert ticket.emitted == alone(target, ticket.request)


def test_rows_of_different_riders_wait_for_each_other() -> None:
    target = small()
    adapter = small_adapter(target)
    riding, other = (make_drafter(f"streams:tree={n},placement=ride", target, adapter) for n in (6, 4))
    scheduler = Scheduler(target)
    tickets = [scheduler.submit(request(5, n, 10), drafter) for n, drafter in enumerate((riding, other, riding, PLAIN))]
    while scheduler.busy:
        assert len({ticket.drafter.needs.rider for ticket, _ in scheduler.tick()}) <= 1
    assert [ticket.emitted for ticket in tickets] == [alone(target, ticket.request) for ticket in tickets]


def test_rows_of_two_adapters_of_one_method_share_passes() -> None:
    target = small()
    one, two = small_adapter(target), small_adapter(target)
    randomise(two, seed=9)
    drafters = [make_drafter("streams:tree=6", target, adapter) for adapter in (one, two)]
    scheduler = Scheduler(target)
    tickets = [scheduler.submit(request(5, n, 12), drafters[n % 2]) for n in range(4)]
    shared = 0
    while scheduler.busy:
        shared = max(shared, len({ticket.drafter for ticket, _ in scheduler.tick()}))
    assert shared == 2
    assert [ticket.emitted for ticket in tickets] == [alone(target, ticket.request) for ticket in tickets]


# -- errors of one request ------------------------------------------------------------------------------------------
class OfTheUserError(Exception):
    pass


def fails(*_: object) -> Tensor:
    raise OfTheUserError


def not_a_number(tokens: Sequence[int], logits: Tensor) -> Tensor:
    return logits.index_fill(-1, torch.tensor([3]), float("nan"))


BROKEN: dict[str, tuple[Request, type[Exception]]] = {
    "on_prompt": (replace(request(30, 7, 9), on_prompt=fails), OfTheUserError),
    "processor": (request(6, 7, 9, sampling=SamplingParams(processors=(fails,))), OfTheUserError),
    "numbers": (request(6, 7, 9, sampling=SamplingParams(processors=(not_a_number,))), NumericsError),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("spec", ["none", "streams:tree=6", "prompt_lookup"])
def test_an_error_of_one_request_leaves_the_others_untouched(name: str, spec: str) -> None:
    target = small()
    drafter = make_drafter(spec, target, small_adapter(target))
    sampled = SamplingParams(temperature=0.8, seed=2, repetition_penalty=1.2)
    scheduler = Scheduler(target)
    others = [scheduler.submit(request(4 + n, n, 20, sampling=sampled), drafter) for n in range(2)]
    for _ in range(3):
        scheduler.tick()
    asked, kind = BROKEN[name]
    bad = scheduler.submit(asked, drafter)
    others.append(scheduler.submit(request(9, 9, 12), drafter))
    finish(scheduler)
    with pytest.raises(kind):
        list(scheduler.ready(bad))
    assert [ticket.error for ticket in others] == [None] * 3
    assert [ticket.emitted for ticket in others] == [alone(target, ticket.request) for ticket in others]


def test_refused_requests_leave_the_others_untouched() -> None:
    target = small()
    scheduler = Scheduler(target)
    ticket = scheduler.submit(request(4, 1, 20), PLAIN)
    scheduler.tick()
    for bad in (Request([], 3), Request([99], 3), Request([1], 0), Request(prompt(96), 3)):
        with pytest.raises(InputError):
            scheduler.submit(bad, PLAIN)
    with pytest.raises(CapabilityError, match="rejection"):
        scheduler.submit(request(3, 1, 3, rule="rejection"), make_drafter("prompt_lookup", target))
    finish(scheduler)
    assert ticket.emitted == alone(target, ticket.request)


def test_a_step_that_fails_for_all_ends_all_and_the_scheduler_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    target = small()
    scheduler = Scheduler(target)
    tickets = [scheduler.submit(request(4, n, 20), PLAIN) for n in range(2)]
    scheduler.tick()
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_step", fails)
        scheduler.tick()
    assert all(isinstance(ticket.error, OfTheUserError) for ticket in tickets)
    assert not scheduler.busy
    again = scheduler.submit(tickets[0].request, PLAIN)
    finish(scheduler)
    assert again.emitted == alone(target, again.request)


# -- threads ---------------------------------------------------------------------------------------------------------
def in_threads(work: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()


@pytest.mark.thorough
def test_several_calls_at_once_give_what_each_gives_alone() -> None:
    model = toy_model()
    prompts = ("the thing", "a", "another prompt, longer than both", "the river")
    specs = ("streams:tree=8", "none", "prompt_lookup", "streams:tree=auto")
    wanted = {p: model.generate(p, max_new_tokens=16, drafter="none").token_ids for p in prompts}
    found: list[tuple[str, list[int]]] = []

    def work(spec: str) -> Callable[[], None]:
        def calls() -> None:
            for p in prompts:
                found.append((p, model.generate(p, max_new_tokens=16, drafter=spec).token_ids))
                (one, _) = model.generate([p, "a"], max_new_tokens=16, drafter=spec)
                found.append((p, one.token_ids))

        return calls

    in_threads([work(spec) for spec in specs])
    assert len(found) == 2 * len(prompts) * len(specs)
    assert all(tokens == wanted[p] for p, tokens in found)
    assert not model._scheduler.busy


@pytest.mark.parametrize("where", ["step", "read"])
def test_ctrl_c_in_one_thread_ends_the_call_of_that_thread_only(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted step leaves rows half changed: the others begin again from what they have emitted."""
    target = small()
    scheduler = Scheduler(target)
    sampled = SamplingParams(temperature=0.8, seed=4)
    first = scheduler.submit(request(4, 1, 20), PLAIN)
    other = scheduler.submit(request(9, 2, 20, sampling=sampled), PLAIN)
    for _ in range(4):
        scheduler.tick()
    if where == "read":
        late = scheduler.submit(request(30, 3, 8), PLAIN)
    steps = scheduler.steps(first)
    heard = [next(steps)]
    taken = list(scheduler.ready(first))
    with monkeypatch.context() as patch:
        if where == "step":
            patch.setattr(NoDrafter, "observe", mock.Mock(side_effect=KeyboardInterrupt))
        else:
            patch.setattr("anabranch.model.cache.Cache.commit", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            scheduler.advance(first)
    assert heard
    assert taken
    scheduler.cancel(first)
    assert first.done
    list(scheduler.steps(other))
    assert other.emitted == alone(target, other.request)
    if where == "read":
        list(scheduler.steps(late))
        assert late.emitted == alone(target, late.request)
    assert not scheduler.busy


@pytest.mark.thorough
def test_streams_in_turns_and_calls_between_them() -> None:
    model = toy_model()
    texts, specs = ("the thing", "a river of the"), ("streams:tree=8", "none", "prompt_lookup")
    wanted = [model.generate(text, max_new_tokens=16).token_ids for text in texts]
    streams = [model.stream(text, max_new_tokens=16) for text in texts]
    heard: list[list[int]] = [[], []]
    going = True
    while going:
        going = False
        for tokens, chunks in zip(heard, streams, strict=True):
            chunk = next(chunks, None)
            if isinstance(chunk, Chunk):
                going = True
                tokens += chunk.token_ids
            for spec in specs:
                assert model.generate(texts[0], max_new_tokens=16, drafter=spec).token_ids == wanted[0]
    assert heard == wanted


def test_closing_ends_calls_of_other_threads_with_an_error() -> None:
    model = toy_model()
    begun, go, found = threading.Event(), threading.Event(), list[BaseException]()

    def hold(tokens: Sequence[int], logits: Tensor) -> Tensor:
        begun.set()
        assert go.wait(300)
        return logits

    def work() -> None:
        try:
            model.generate("the", max_new_tokens=50, processors=[hold])
        except InputError as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(300)
    model.close()
    go.set()
    thread.join(300)
    assert not thread.is_alive()
    assert [str(error) for error in found] == ["the model was closed while it decoded; load it again"]


# -- prompts that begin alike -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", SOME_CASES)
@pytest.mark.parametrize("spec", ["none", "streams:tree=6", "streams:tree=8,prune=5", "prompt_lookup"])
def test_a_prompt_that_begins_like_an_earlier_text_is_read_from_where_it_differs(case: str, spec: str) -> None:
    target = small(case)
    drafter = make_drafter(spec, target, small_adapter(target))
    scheduler = Scheduler(target)
    first = scheduler.submit(request(24, 1, 10), drafter)
    finish(scheduler)
    text = [*first.request.prompt_ids, *first.emitted]
    turns = [
        ([*text, *prompt(6, 8)], len(text) - 1),  # the next turn of a conversation: all but the last token is kept
        ([*text[:20], *[t % 15 + 3 for t in text[20:26]]], None),
        (text[:24], 23),  # the same prompt again: its last token is the root
        (prompt(24, 5), 0),
    ]
    for ids, reused in turns:
        read: list[tuple[int, int]] = []
        ticket = scheduler.submit(Request(ids, 12, on_prompt=lambda *at, read=read: read.append(at)), drafter)
        finish(scheduler)
        assert ticket.emitted == alone(target, Request(ids, 12))
        if reused is not None:
            assert ticket.reused == reused
            assert bool(read) == (reused < len(ids) - 1)
        else:
            assert ticket.reused >= 20


def test_a_row_in_use_is_copied() -> None:
    target = small()
    scheduler = Scheduler(target, prefix_bytes=2**20)
    first = scheduler.submit(request(30, 1, 25), PLAIN)
    for _ in range(5):
        scheduler.tick()
    second = scheduler.submit(Request([*first.request.prompt_ids, *first.emitted[:3], 4, 5], 12), PLAIN)
    scheduler.tick()
    assert second.reused >= 33
    finish(scheduler)
    for ticket in (first, second):
        assert ticket.emitted == alone(target, ticket.request)


class Reader(NoDrafter):
    """Wants to see every prompt token."""

    needs = Needs(prompt=True)

    def __init__(self) -> None:
        self.seen = 0

    def read(self, row: Row, result: PassResult, start: int) -> None:
        self.seen += result.counts_B[0]

    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        return [DraftTree.root(row.root) for row in rows]


def test_a_drafter_that_needs_the_prompt_sees_all_of_it() -> None:
    target, reader = small(), Reader()
    scheduler = Scheduler(target)
    for times in (1, 2):
        ticket = scheduler.submit(request(30, 1, 5), reader)
        finish(scheduler)
        assert ticket.reused == 0
        assert reader.seen == 29 * times
        assert ticket.emitted == alone(target, ticket.request)


@pytest.mark.parametrize("case", SOME_CASES)
def test_the_first_step_reads_the_end_of_the_prompt(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a prompt of a few tokens takes no pass of its own, and one that is longer takes one pass less."""
    monkeypatch.setattr(ticking, "CHUNK", 16)
    target = small(case)
    for length, own in ((2, 0), (17, 0), (18, 1), (50, 3)):
        asked = request(length, 1, 6)
        whole = Engine(target)
        whole.add(asked)
        scheduler = Scheduler(target, prefix_bytes=0)
        ticket = scheduler.submit(asked, PLAIN)
        with mock.patch.object(target.backend, "run", wraps=target.backend.run) as passes:
            finish(scheduler)
        steps = [*ticket.steps]
        assert [step.read for step in steps] == [length - 1 - 16 * own] + [0] * (len(steps) - 1)
        assert passes.call_count == own + len(steps)
        assert ticket.emitted == [token for step in whole.run() for token in step.tokens]
        assert 0 < ticket.prefill_seconds < ticket.seconds


def test_a_prompt_whose_reading_is_watched_is_read_before_the_first_step() -> None:
    target, told = small(), list[tuple[int, int]]()
    scheduler = Scheduler(target)
    ticket = scheduler.submit(replace(request(30, 1, 5), on_prompt=lambda *at: told.append(at)), PLAIN)
    finish(scheduler)
    assert told == [(29, 29)]
    assert [step.read for step in ticket.steps] == [0] * len(ticket.steps)


def test_kept_texts_stay_within_their_memory() -> None:
    target = small()
    probe = Scheduler(target)
    probe.submit(request(30, 1, 5), PLAIN)
    finish(probe)
    assert probe.engine is not None
    bound = 100 * probe.engine.cache.token_bytes
    scheduler = Scheduler(target, prefix_bytes=bound)
    for seed in range(6):
        scheduler.submit(request(30, seed, 5), PLAIN)
        finish(scheduler)
        assert 0 < scheduler.prefixes.nbytes <= bound
    recent, old = (scheduler.submit(request(30, seed, 5), PLAIN) for seed in (5, 0))
    finish(scheduler)
    assert recent.reused == 29
    assert old.reused == 0, "the least recently used went"
    none_kept = Scheduler(target, prefix_bytes=0)
    for _ in range(2):
        ticket = none_kept.submit(request(30, 1, 5), PLAIN)
        finish(none_kept)
        assert ticket.reused == 0


# -- the cache --------------------------------------------------------------------------------------------------------
def test_the_cache_grows_while_rows_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "MIN_CAPACITY", 16)
    monkeypatch.setattr(ticking, "AHEAD", 1)
    target = small()
    adapter = small_adapter(target)
    scheduler = Scheduler(target)
    tickets: list[Ticket] = []
    sizes = []
    for n, spec in ((4, "none"), (12, "streams:tree=12"), (30, "prompt_lookup"), (60, "streams:tree=4")):
        tickets.append(scheduler.submit(request(n, n, 25), make_drafter(spec, target, adapter)))
        scheduler.tick()
        assert scheduler.engine is not None
        sizes.append((scheduler.engine.cache.rows, scheduler.engine.cache.capacity))
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 4
    finish(scheduler)
    assert [ticket.emitted for ticket in tickets] == [alone(target, ticket.request) for ticket in tickets]


def test_a_large_cache_is_freed_after_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(small())
    scheduler.submit(request(10, 1, 6), PLAIN)
    scheduler.tick()
    monkeypatch.setattr(module, "POSITIONS", 1)
    scheduler.settle()
    assert scheduler.engine is not None, "a row is in use"
    finish(scheduler)
    cache = weakref.ref(scheduler.engine.cache)
    scheduler.settle()
    gc.collect()
    assert scheduler.engine is None
    assert cache() is None


def test_captured_steps_keep_their_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    target = small()
    monkeypatch.setattr(module, "POSITIONS", 0)
    scheduler = Scheduler(target)
    scheduler.submit(request(10, 1, 6), PLAIN)
    finish(scheduler)
    monkeypatch.setattr(target, "backend", GraphBackend(lambda compute, inputs: (lambda: None, compute(*inputs))))
    scheduler.settle()
    assert scheduler.engine is not None


# -- one model, many specifications ------------------------------------------------------------------------------------
def test_many_specifications_share_one_cache_and_few_drafters_are_kept() -> None:
    model = toy_model()
    wanted = model.generate("the thing", max_new_tokens=6).token_ids
    engine = model._scheduler.engine
    for n in range(2, 3 * DRAFTERS):
        assert model.generate("the thing", max_new_tokens=6, drafter=f"streams:tree={n}").token_ids == wanted
        assert model._scheduler.engine is engine
    assert len(model._drafters) == DRAFTERS
    kept = model.drafter_of(f"streams:tree={3 * DRAFTERS - 1}")
    assert kept is model.drafter_of(f"streams:nodes={3 * DRAFTERS - 1}"), "the same settings, written otherwise"


def test_rows_leave_nothing_with_their_drafter() -> None:
    target = small()
    drafter = make_drafter("streams:tree=6+prompt_lookup", target, small_adapter(target))
    scheduler = Scheduler(target)
    rows: list[Row] = []
    with mock.patch.object(Engine, "_drop", autospec=True, side_effect=Engine._drop) as drop:
        for n in range(3):
            scheduler.submit(request(4, n, 8), drafter)
        scheduler.tick()
        assert scheduler.engine is not None
        rows += [member.row for member in scheduler.engine._members]
        finish(scheduler)
    assert drop.call_count == 3
    assert [row.state for row in rows] == [{}] * len(rows)


def test_weights_are_packed_once_for_all_drafters() -> None:
    target = small()
    adapter = small_adapter(target)
    specs = ("streams:tree=4", "streams:tree=9", "streams:tree=chain", "streams:tree=9,condition=no")
    heads = {id(make_drafter(spec, target, adapter).tree.head) for spec in specs}  # type: ignore[attr-defined]
    assert len(heads) == 1


def test_trailing_layers_are_packed_once_for_all_drafters() -> None:
    _, target = native_target()
    adapter = small_adapter(target, replace(RICH, conditioning_rank=32, root_width=32)).to(torch.bfloat16)
    kernels = native.library()
    assert kernels is not None
    make_drafter("streams:tree=3", target, adapter)
    with mock.patch.object(kernels, "pack", side_effect=AssertionError("packed again")):
        for spec in ("streams:tree=8", "streams:tree=chain", "streams:tree=12,depth=2+prompt_lookup"):
            make_drafter(spec, target, adapter)


def test_a_closed_model_holds_no_cache() -> None:
    model = toy_model()
    model.generate("the thing", max_new_tokens=4)
    assert model._scheduler.engine is not None
    cache = weakref.ref(model._scheduler.engine.cache)
    model.close()
    gc.collect()
    assert cache() is None


def test_a_prompt_that_leaves_its_neighbours_no_room_is_read_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are padded to the widest one, or whose cache is nearly full."""
    target = small()
    monkeypatch.setattr(type(target.backend), "ragged", True)
    scheduler = Scheduler(target, prefix_bytes=0)
    monkeypatch.setattr(caches, "MIN_CAPACITY", 64)
    monkeypatch.setattr(ticking, "AHEAD", 23)
    first = scheduler.submit(request(30, 1, 30), PLAIN)
    for _ in range(4):
        scheduler.tick()
    second = scheduler.submit(request(40, 2, 5), PLAIN)
    finish(scheduler)
    assert [step.read for step in first.steps][:1] == [29]
    assert [step.read for step in second.steps] == [0] * len(second.steps)
    assert (first.emitted, second.emitted) == (alone(target, first.request), alone(target, second.request))
