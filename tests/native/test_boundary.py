"""The boundary of the kernels: refused calls, scores that are not numbers, no memory, threads, forks."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from test_kernels import BASE, FORMS, adapter_for, cache, decoder, needs_kernels, packed, stack_in, tokens

from anabranch.decoding.engine import Engine, Request
from anabranch.methods.streams.draft import StreamDraft, StreamSettings
from anabranch.methods.streams.kernels import TrailEntry
from anabranch.methods.streams.native import NativeTrail
from anabranch.model.config import EncoderConfig
from anabranch.model.encoder import Memory, Source
from anabranch.model.native_linear import NativeLinear, SelectedOutputs
from anabranch.model.native_terms import Term
from anabranch.model.pack import packed_like
from anabranch.model.quantize import QuantizedWeight
from anabranch.model.riding import NativeRider, Side
from anabranch.native import library as native
from anabranch.native import structs
from anabranch.sampling import position_keys
from children import in_child

NAN, INF = math.nan, math.inf
SANITIZED = "ANABRANCH_SANITIZED" in os.environ  # which limits of a process's memory cannot bear

pytestmark = needs_kernels


def kernels() -> native.Library:
    found = native.library()
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_products_of_every_width(dtype: torch.dtype) -> None:
    """As low ranks and root widths may be: packing bf16 weights of odd width wrote past their block."""
    torch.manual_seed(0)
    for width in range(1, 41):
        weight, x = torch.randn(33, width).to(dtype), torch.randn(3, width).to(dtype)
        linear = NativeLinear(weight, None, wide=True)
        torch.testing.assert_close(linear(x), x.float() @ weight.float().T, rtol=1e-4, atol=1e-3)
        assert torch.equal(linear.choose(x), linear(x).argmax(1))
        assert torch.equal(linear.dense(), weight)
        assert torch.equal(linear.rows(torch.tensor([32, 0])), weight[[32, 0]])


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_packed_like_takes_every_rank(dtype: torch.dtype, kind: Literal["int8", "int4"]) -> None:
    torch.manual_seed(0)
    like = NativeLinear(torch.randn(32, 32).to(dtype), None)
    for rank in (*range(1, 41), 64):
        for shape in ((rank, 64), (64, rank)):
            weight, x = torch.randn(*shape).to(dtype), torch.randn(2, shape[1]).to(dtype)
            made = packed_like(like, weight, None, kind)
            wanted = x.float() @ weight.float().T
            assert (made(x).float() - wanted).abs().max() < 0.3 * wanted.std() + 0.3


def wide_weight(form: str) -> NativeLinear:
    weight = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))
    if form == "float32":
        return NativeLinear(weight, None, wide=True)
    if form == "int8":
        return NativeLinear(QuantizedWeight.of(weight.bfloat16(), "int8"), None, wide=True)
    return NativeLinear(weight.bfloat16(), None, wide=True, screen=True)


@pytest.mark.parametrize("form", ["bfloat16", "float32", "int8"])
def test_selected_outputs_are_those_of_the_whole_weight(form: str) -> None:
    """As many as need more memory several times; of a bf16 weight they are those of its int8 copy."""
    source = wide_weight(form)
    found = SelectedOutputs.of(source)
    assert found is not None
    x, ids = torch.randn(3, 64).to(source.dtype), torch.randperm(4096)[:150].numpy()
    for first, last in itertools.pairwise((0, 1, 2, 31, 33, 64, 65, 150)):
        found.add(ids[first:last])
        assert found(x).shape == (3, last)
    if form == "bfloat16":
        copy = QuantizedWeight.of(source.rows(torch.from_numpy(ids)), "int8")
        assert torch.equal(found(x), NativeLinear(copy, None, wide=True)(x))
    else:
        assert torch.equal(found(x), source(x)[:, ids])


def test_outputs_are_selected_only_where_they_can_be_copied() -> None:
    weight = torch.randn(64, 64).bfloat16()
    assert SelectedOutputs.of(torch.nn.Linear(64, 64)) is None
    assert SelectedOutputs.of(NativeLinear(weight, None)) is None, "it has no int8 copy"
    assert SelectedOutputs.of(NativeLinear(weight.float(), torch.zeros(64))) is None, "it has a bias"
    assert SelectedOutputs.of(NativeLinear(QuantizedWeight.of(weight, "int4"), None)) is None


@pytest.mark.parametrize("rank", [1, 5, 32])
def test_adapters_of_odd_ranks_decode(rank: int) -> None:
    from anabranch.decoding.engine import Engine, Request
    from anabranch.methods.streams.drafter import StreamDrafter

    model = packed(BASE, "bfloat16")
    adapter = adapter_for(model, conditioning="path", conditioning_rank=rank, root_width=rank)
    engine = Engine(model, StreamDrafter(model, adapter, StreamSettings(nodes=8)), capacity=128)
    engine.add(Request(tokens(9), 12, stop_ids=frozenset()))
    assert sum(len(step.tokens) for step in engine.run()) == 12


def test_wrong_tensors_are_refused() -> None:
    """Before a call, and by the C side: memory beyond a tensor is never touched."""
    k = kernels()
    weight, memory = k.pack("bfloat16", torch.randn(40, 64).bfloat16())
    x, z, keys = torch.randn(3, 64).bfloat16(), torch.randn(3, 50), np.zeros(3, np.uint64)
    bad = [
        lambda: k.pack("bfloat16", torch.randn(8, 5).bfloat16()),
        lambda: k.pack("bfloat16", torch.randn(8, 6)),
        lambda: k.pack("int7", torch.randn(8, 6)),
        lambda: k.pack("float32", torch.randn(0, 6)),
        lambda: k.pack("int8", torch.zeros(8, 33, dtype=torch.uint8), torch.ones(8)),
        lambda: k.pack("int8", torch.zeros(8, 32, dtype=torch.uint8), torch.ones(7)),
        lambda: k.pack("int8", torch.zeros(8, 32, dtype=torch.uint8)),
        lambda: k.pack("int4", torch.zeros(8, 32, dtype=torch.uint8), torch.ones(8, 1).half()),
        lambda: k.copy_outputs(weight, np.array([40]), k.room(weight, 2)[0], 0),
        lambda: k.copy_outputs(weight, np.array([-1]), k.room(weight, 2)[0], 0),
        lambda: k.copy_outputs(weight, np.array([3, 4]), k.room(weight, 2)[0], 1),
        lambda: k.copy_outputs(weight, np.array([3]), structs.Packed(weight.data, 40, 64, 3), 0),
        lambda: k.linear(x[:, :62], weight, None),
        lambda: k.linear(x.float(), weight, None),
        lambda: k.linear(x.half(), weight, None),
        lambda: k.linear(x[0], weight, None),
        lambda: k.linear(x, weight, torch.zeros(39)),
        lambda: k.linear(x, weight, torch.zeros(40).bfloat16()),
        lambda: k.linear(x, structs.Packed(weight.data, 40, 64, 9), None),
        lambda: k.linear(x, structs.Packed(None, 40, 64, 0), None),
        lambda: k.choose(x[:, :62], weight, None),
        lambda: k.norm(torch.randn(2, 33), torch.ones(33), 1e-6, torch.float32),
        lambda: k.norm(torch.randn(2, 32), torch.ones(31), 1e-6, torch.float32),
        lambda: k.norm(torch.randn(2, 32), torch.ones(32), 1e-6, torch.float16),
        lambda: k.best(z.double(), 4),
        lambda: k.best(z, 0),
        lambda: k.best(torch.empty(3, 0), 4),
        lambda: k.draw(z, 0.0, keys),
        lambda: k.draw(z, 1.0, keys[:2]),
        lambda: k.draw(z.bfloat16(), 1.0, keys),
        lambda: k.gumbels(*torch.zeros(3, 4).int()),
    ]
    for call in bad:
        with pytest.raises(AssertionError):
            call()
    assert len(memory) == 2 * 64 * 64


def refused(status: int) -> str:
    """The message of the C side."""
    assert status == -2
    return kernels()._c.anabranch_message().decode()


def test_the_c_side_refuses_by_itself() -> None:
    c = ctypes.CDLL(kernels()._c._name)  # without the checks of Python
    kernels()._c.anabranch_message.restype = ctypes.c_char_p
    size, room = ctypes.c_int64(), torch.zeros(4096)
    at = ctypes.c_void_p(room.data_ptr())
    assert "odd width" in refused(
        c.anabranch_packed_bytes(ctypes.byref(structs.Packed(None, 8, 5, 0)), ctypes.byref(size))
    )
    assert "odd width" in refused(
        c.anabranch_pack(ctypes.byref(structs.Packed(room.data_ptr(), 8, 5, 0)), at, None, None)
    )
    assert "multiple of 32" in refused(
        c.anabranch_pack(ctypes.byref(structs.Packed(room.data_ptr(), 8, 40, 3)), at, at, at)
    )
    assert "null" in refused(c.anabranch_pack(ctypes.byref(structs.Packed(room.data_ptr(), 8, 32, 3)), at, at, None))
    assert "null" in refused(c.anabranch_linear(0, None, None, 1, None, None, None))
    assert "threads" in refused(c.anabranch_runner(0, ctypes.byref(ctypes.c_void_p())))
    assert "whole blocks" in refused(c.anabranch_norm(1, at, ctypes.c_int64(1), 40, at, None, 0, ctypes.c_float(0), at))
    nodes = np.array([2, 2], np.int64)
    move = [ctypes.c_int64(n) for n in (0, 1024, 64, 3)]
    assert "ascend" in refused(c.anabranch_move(at, at, 1, 1, *move, ctypes.c_void_p(nodes.ctypes.data), 2))
    nodes[1] = 13  # of a capacity of 16, behind 3
    assert "beyond" in refused(c.anabranch_move(at, at, 1, 1, *move, ctypes.c_void_p(nodes.ctypes.data), 2))


def test_passes_that_do_not_fit_are_refused() -> None:
    """Tokens, trees, lengths and sizes that would be read or written outside of their tensors."""
    model = packed(BASE, "bfloat16")
    memory = cache(model)
    stack, x = stack_in(model), torch.zeros(4, BASE.hidden_size)

    def run(lengths: list[int], parents: list[int], shape: dict[str, int] | None = None, **step: int) -> None:
        made = stack.step(lengths, [4], np.array(parents), 300, x)
        for name, value in step.items():
            setattr(made.native, name, value)
        sizes, layers, batch = stack.ready(memory, 0, 0, BASE.num_layers, made)
        sizes = structs.Shape.from_buffer_copy(sizes)
        for name, value in (shape or {}).items():
            setattr(sizes, name, value)
        stack.kernels.layers(sizes, layers, batch)

    chain = [-1, 0, 1, 2]
    run([10], chain)
    run([252], chain)
    for lengths, parents, shape, step, why in (
        ([253], chain, {}, {}, "the cache is too small"),
        ([-1], chain, {}, {}, "the cache is too small"),
        ([10], [-1, 1, 1, 2], {}, {}, "parent"),
        ([10], [-2, 0, 1, 2], {}, {}, "parent"),
        ([10], chain, {}, {"positions": 13}, "rotary"),
        ([10], chain, {}, {"nodes": 0}, "no rows"),
        ([10], chain, {}, {"cos": None}, "null"),
        ([10], chain, {"rope_dim": 16}, {}, "rotations"),
        ([10], chain, {"rope_dim": 256}, {}, "rotation tables"),
        ([10], chain, {"activation": 4}, {}, "activation"),
        ([10], chain, {"e": 48}, {}, "channels"),
        ([10], chain, {"e": 160}, {}, "channels"),
        ([10], chain, {"d": 60}, {}, "multiple of 32"),
        ([10], chain, {"d": 96}, {}, "wrong size"),
        ([10], chain, {"inner": 128}, {}, "wrong size"),
        ([10], chain, {"heads": 3}, {}, "key heads"),
        ([10], chain, {"kv_heads": 0}, {}, "key heads"),
        ([10], chain, {"wiring": 3}, {}, "wiring"),
        ([10], chain, {"biases": x.data_ptr()}, {}, "biases"),
        ([0], chain, {}, {"whole": 1}, "see each other"),
    ):
        with pytest.raises(AssertionError, match=why):
            run(lengths, parents, shape, **step)
    for token in (BASE.vocab_size, -1):
        with pytest.raises(AssertionError, match="vocabulary"):
            stack.through(np.array([1, token]), stack.step([3], [2], None, 300), memory, 0, need="tokens")
    for prefill, parents, why in (
        ([1, 1], chain, "counts of prompt tokens"),
        ([-1], chain, "more prefill nodes"),
        ([4], chain, "no output"),
        ([2], [-1, -1, 1, 2], "not a chain"),
        ([2], [-1, 0, 0, 2], "not a chain"),
    ):
        inputs = stack.step([3], [4], np.array(parents), 300)
        with pytest.raises(AssertionError, match=why):
            stack.through(np.array(tokens(4)), inputs, memory, 0, need="tokens", prefill=prefill)
    moves = [(range(9), 0, 0, [1]), (range(3), 1, 0, [1]), (range(3), 0, 255, [1]), (range(3), 0, 0, [2, 1])]
    for layers, slot, start, nodes in moves:
        with pytest.raises(AssertionError):
            kernels().move(memory.keys, memory.values, layers, slot, start, np.array(nodes))
    with pytest.raises(AssertionError, match="differ"):
        kernels().move(memory.keys, memory.values[:2], range(3), 0, 0, np.array([1]))


def test_sources_that_do_not_fit_are_refused() -> None:
    model = packed(replace(BASE, encoder=EncoderConfig(replace(BASE, position="none"), start=(0,))), "bfloat16")
    memory, stack, x = cache(model, rows=2), stack_in(model), torch.zeros(4, BASE.hidden_size)
    source = model.encode(Source([1, 2, 3]))

    def run(counts: list[int], sources: list[Memory | None], **changed: object) -> None:
        step = stack.step([10, 10], counts, None, 300, x, sources=sources)
        for name, value in changed.items():
            setattr(step.native, name, value)
        stack.run(x, step, memory, 0, 0, BASE.num_layers)

    run([4, 0], [source, None])
    run([1, 3], [source, source])
    for counts, sources, changed, why in (
        ([1, 3], [source, None], {}, "a row has no source"),
        ([4, 0], [source, None], {"sizes": None}, "a pass has no sources"),
        ([4, 0], [source, None], {"source_keys": None}, "a pass has no sources"),
    ):
        with pytest.raises(AssertionError, match=why):
            run(counts, sources, **changed)


def test_riders_that_do_not_fit_are_refused() -> None:
    model = packed(BASE, "bfloat16")
    memory, stack, d = cache(model), stack_in(model), BASE.hidden_size
    term = Term(torch.ones(8, d), torch.ones(d, 8))
    sides = [Side(mlp=term, replaces=True)] * 2
    rider = NativeRider("bfloat16", start=1, streams=2, embeddings=torch.ones(2, d), init=term, sides=sides, exit=term)

    def run(length: int = 10, keep: int = 0, **changed: int | None) -> None:
        call = rider.limited(ride=True, keep=keep, least=-math.inf).call([4], d, torch.bfloat16)
        for name, value in changed.items():
            setattr(call.native.streams if name == "count" else call.native, name, value)
        step = stack.step([length], [4], np.array([-1, 0, 0, 1]), 300)
        hidden, _, _ = stack.through(np.array(tokens(4)), step, memory, 0, need="tokens", rider=call)
        assert len(hidden) == sum(call.counts)

    for keep in (0, 3):
        run(keep=keep)
    run(244)
    run(247, keep=3)
    for changed, why in (
        ({"length": 245}, "the cache is too small"),
        ({"length": 248, "keep": 3}, "the cache is too small"),
        ({"start": 3}, "at no layer"),
        ({"start": -1}, "at no layer"),
        ({"count": -1}, "number of streams"),
        ({"states": None}, "no room for its streams"),
        ({"keep": 3, "kept": None}, "no room for the kept nodes"),
        ({"least": 0.5}, "keeps no nodes"),
    ):
        with pytest.raises(AssertionError, match=why):
            run(**changed)  # type: ignore[arg-type]
    wrong = NativeRider("float32", start=1, streams=2, init=term)
    with pytest.raises(AssertionError, match="different types"):
        stack.through(
            *(np.array(tokens(4)), stack.step([9], [4], None, 300), memory, 0),
            need="tokens",
            rider=wrong.call([4], d, torch.bfloat16),
        )


def test_rows_of_a_pass_that_do_not_fit_are_refused() -> None:
    """Each batch row has nodes of its own, which neither overlap nor leave the pass."""
    model = packed(BASE, "bfloat16")
    memory, stack, x = cache(model, rows=3), stack_in(model), torch.zeros(4, BASE.hidden_size)

    def run(behind: list[int], bounds: list[int], above: list[int] | None = None, **step: int) -> None:
        made = stack.step(behind, [2, 0, 2], None if above is None else np.array(above), 300, x)
        starts = np.array(bounds, np.int64)
        made.native.starts = starts.ctypes.data
        for name, value in step.items():
            setattr(made.native, name, value)
        stack.kernels.layers(*stack.ready(memory, 0, 0, BASE.num_layers, made))

    run([10, 256, 254], [0, 2, 2, 4])
    run([10, 0, 9], [0, 2, 2, 4], trailing=1)  # the row between them takes no part
    for lengths, starts, parents, step, why in (
        ([10, 0, 10], [1, 2, 2, 4], None, {}, "node 0"),
        ([10, 0, 10], [0, 3, 2, 4], None, {}, "overlap"),
        ([10, 0, 10], [0, -1, 2, 4], None, {}, "overlap"),
        ([10, 0, 10], [0, 2, 2, 3], None, {}, "number of nodes"),
        ([10, 0, 10], [0, 2, 2, 2**40], None, {}, "too many nodes"),
        ([10, 0, 10], [0, 2, 2, 4], None, {"nodes": 5}, "number of nodes"),
        ([10, 0, 10], [0, 2, 2, 4], None, {"starts": None}, "null"),
        ([10, 0, 255], [0, 2, 2, 4], None, {}, "the cache is too small"),
        ([10, 257, 10], [0, 2, 2, 4], None, {}, "the cache is too small"),
        ([10, 256, 10], [0, 2, 3, 4], None, {}, "the cache is too small"),
        ([0, 0, 10], [0, 2, 2, 4], None, {"trailing": 1}, "the cache is too small"),
        ([10, 0, 10], [0, 2, 2, 4], [-1, 0, 1, 0], {}, "parent"),
    ):
        with pytest.raises(AssertionError, match=why):
            run(lengths, starts, parents, **step)


def test_streams_that_do_not_fit_are_refused() -> None:
    model = packed(BASE, "bfloat16")
    trail = NativeTrail(model, adapter_for(model, conditioning="path", conditioning_rank=8, root_width=32), 2)
    memory, main = cache(model, rows=2), torch.zeros(6, BASE.hidden_size)
    states = torch.empty(4, BASE.hidden_size, dtype=torch.bfloat16)

    def run(counts: list[int], nodes: list[int], emitted: list[int], **entry: int) -> None:
        chosen, words = np.array(nodes), np.array(emitted)
        begin = TrailEntry.from_buffer_copy(trail._entry)
        begin.main, begin.rows, begin.nodes, begin.emitted = main.data_ptr(), 6, chosen.ctypes.data, words.ctypes.data
        for name, value in entry.items():
            setattr(begin, name, value)
        step = trail.stack.step([5, 9], counts, None, 300, trailing=True)
        ready = trail.stack.ready(memory, 0, trail.stack.first, BASE.num_layers, step)
        trail._kernels.trail(*ready, begin, states[: sum(counts)])

    run([2, 2], [0, 5], [3, 4])
    run([2, 0], [5, 99], [3, -1])  # what stands for a row without streams is not read
    for counts, nodes, emitted, entry, why in (
        ([2, 2], [0, 6], [3, 4], {}, "not in the pass"),
        ([2, 2], [-1, 5], [3, 4], {}, "not in the pass"),
        ([2, 2], [0, 5], [3, BASE.vocab_size], {}, "vocabulary"),
        ([3, 1], [0, 5], [3, 4], {"streams_count": 2}, "too many streams"),
        ([2, 2], [0, 5], [3, 4], {"main": None}, "null"),
    ):
        with pytest.raises(AssertionError, match=why):
            run(counts, nodes, emitted, **entry)


@pytest.mark.parametrize("count", [1, 4, 16, 17, 40])
@pytest.mark.parametrize("width", [1, 7, 16, 33, 100, 1000])
def test_best_leaves_out_what_is_not_finite(width: int, count: int) -> None:
    torch.manual_seed(width)
    clean = torch.randn(width)
    rows = [clean]
    for strange in (NAN, -INF, INF):
        for places in ([0], [width - 1], [*range(0, width, 3)], [*range(width - 1)], [*range(width)]):
            row = clean.clone()
            row[places] = strange
            rows.append(row)
    z = torch.stack(rows)
    values, places_ = kernels().best(z, count)
    for row, value, place in zip(z, values, places_, strict=True):
        finite = torch.where(row.isfinite(), row, -INF)
        have = min(count, int(row.isfinite().sum()))
        wanted = finite.log_softmax(0).topk(have) if have else (torch.empty(0), torch.empty(0, dtype=torch.long))
        torch.testing.assert_close(value[:have], wanted[0], rtol=1e-5, atol=1e-5)
        assert torch.equal(finite[place[:have]], finite[wanted[1]])
        assert bool((value[have:] == -INF).all())
        assert bool((place[have:] == 0).all())


@pytest.mark.parametrize("width", [1, 33, 1500])
def test_draw_marks_rows_without_a_largest_score(width: int) -> None:
    torch.manual_seed(width)
    clean = torch.randn(width)
    rows, wanted = [clean], [False]
    for strange in (NAN, -INF, INF):
        for places in ([0], [width - 1], [*range(width)]):
            row = clean.clone()
            row[places] = strange
            rows.append(row)
            wanted.append(strange != -INF or len(places) == width)
    keys = position_keys(1, range(len(rows)))
    wanted = [bad or not bool(row.isfinite().any()) for bad, row in zip(wanted, rows, strict=True)]
    assert (kernels().draw(torch.stack(rows), 0.7, keys) == -1).tolist() == wanted


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("outputs", [1, 33, 1000])
def test_choose_marks_rows_without_a_largest_score(outputs: int, form: str) -> None:
    """A NaN in the rows, in one weight, in the bias; +inf and -inf."""
    torch.manual_seed(outputs)
    dtype = torch.float32 if form == "float32" else torch.bfloat16
    weight, x = torch.randn(outputs, 64).to(dtype), torch.randn(3, 64).to(dtype)

    def linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> NativeLinear:
        quantized = form in ("int8", "int4")
        return NativeLinear(QuantizedWeight.of(weight, form) if quantized else weight, bias, wide=True)

    plain = linear(weight)
    assert torch.equal(plain.choose(x), plain(x).argmax(1))
    for place in (0, 40, 63):
        strange = x.clone()
        strange[1, place] = NAN
        assert plain.choose(strange).tolist()[1] == -1
        assert torch.equal(plain.choose(strange)[[0, 2]], plain.choose(x)[[0, 2]])
    strange = x.clone()
    strange[1, 40] = INF
    assert plain.choose(strange).tolist()[1] == -1
    broken = weight.clone()
    broken[outputs // 2, 3] = NAN
    assert linear(broken).choose(x).tolist() == [-1] * 3
    for value, wanted in ((NAN, True), (INF, True), (-INF, outputs == 1)):
        bias = torch.zeros(outputs)
        bias[-1] = value
        assert (linear(weight, bias).choose(x) == -1).tolist() == [wanted] * 3
    assert linear(weight, torch.full((outputs,), -INF)).choose(x).tolist() == [-1] * 3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("where", ["qkv", "out", "up", "down", "norm_in"])
def test_weights_with_a_nan_choose_nothing(where: str, form: str) -> None:
    from anabranch.model.pack import pack_decoder
    from anabranch.model.quantize import quantize_decoder

    model = decoder(BASE, torch.float32 if form == "float32" else torch.bfloat16)
    weight = getattr(model.blocks[1].mlp if where in ("up", "down") else model.blocks[1], where).weight
    weight.view(-1)[weight.numel() // 2 + 3] = NAN
    if form in ("int8", "int4"):
        quantize_decoder(model, form)
    assert pack_decoder(model)
    stack = stack_in(model)
    step = stack.step([0], [5], None, 300)
    _, chosen, _ = stack.through(np.array(tokens(5)), step, cache(model), 0, need="tokens")
    assert chosen[-1] == -1


def draft_of(form: str, options: StreamSettings) -> StreamDraft:
    model = packed(BASE, form)
    adapter = adapter_for(model, torch.arange(0, 64, 3), conditioning="path", conditioning_rank=32, root_width=32)
    return StreamDraft(model, adapter, options)


@pytest.mark.parametrize("form", FORMS)
def test_drafts_of_nan_are_the_root_alone(form: str) -> None:
    draft = draft_of(form, StreamSettings(nodes=24))
    states = torch.randn(draft.depth, BASE.hidden_size).to(draft.target.dtype)
    whole = draft.native(states, 5, None, None)
    assert whole.size > 1
    states[1, 7] = NAN
    tree = draft.native(states, 5, None, None)
    assert tree.tokens[0] == 5
    assert tree.depths.max() <= 1
    states[:] = NAN
    assert draft.native(states, 5, None, None).tokens.tolist() == [5]
    with pytest.raises(AssertionError, match="root"):
        draft.native(states, -1, None, None)


def test_a_huge_frontier_is_that_of_all_nodes() -> None:
    draft = draft_of("bfloat16", StreamSettings(nodes=12, frontier=12))
    states = torch.randn(draft.depth, BASE.hidden_size).bfloat16()
    wanted = draft.native(states, 5, None, None)
    draft.native._config.frontier = 2**31 - 1
    found = draft.native(states, 5, None, None)
    assert found.tokens.tolist() == wanted.tokens.tolist()
    draft.native._config.nodes = 2**31 - 1
    with pytest.raises(AssertionError, match="depth or nodes are out of range"):
        kernels()._c.anabranch_draft(
            *(
                draft.native._config.head.kind,
                kernels().runner(),
                ctypes.byref(draft.native._config),
                states.data_ptr(),
                5,
            ),
            *([wanted.tokens.ctypes.data] * 4),
        )


def in_a_process(code: str, **environment: str) -> str:
    """Output of a program that starts with the kernels loaded; a crash fails the test."""
    begin = "import ctypes, os, resource, sys, threading, time, warnings\nimport numpy as np, torch\n"
    begin += "from anabranch.native import library as native\nkernels = native.library()\n"
    begin += "def limit(more):\n"
    begin += "    used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
    begin += "    resource.setrlimit(resource.RLIMIT_AS, (used + more, used + more))\n"
    done = subprocess.run(
        [sys.executable, "-c", begin + code], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout.strip()


@pytest.mark.thorough
@pytest.mark.skipif(SANITIZED, reason="sanitizers need memory of their own")
def test_without_memory() -> None:
    """It ended the process: a C++ exception crossed the C boundary."""
    code = """
x, (weight, memory) = torch.zeros(1, 64), kernels.pack("int8", torch.zeros(32, 64, dtype=torch.uint8), torch.ones(32))
kernels.linear(x, weight, None)
limit(2**28)
many = 2**24 - 1
try:
    kernels._c.anabranch_linear(1, kernels.runner(), x.data_ptr(), many, ctypes.byref(weight), None, x.data_ptr())
except Exception as error:
    print(type(error).__name__, error)
try:
    kernels.large(2**40)
except Exception as error:
    print(type(error).__name__, error)
print(kernels.linear(x, weight, None).shape)
"""
    first, second, third = in_a_process(code).splitlines()
    assert first.startswith("OutOfMemoryError the native kernels ran out of memory")
    assert second.startswith("DeviceError 1,099,511,627,776 bytes of memory cannot be allocated")
    assert third == "torch.Size([1, 32])"


@pytest.mark.thorough
@pytest.mark.skipif(SANITIZED, reason="sanitizers need memory of their own")
def test_with_fewer_threads_than_requested() -> None:
    """Room for some of the threads' stacks: the pool has fewer, its products are the same, and it says so."""
    code = """
weight, memory = kernels.pack("float32", torch.randn(320, 64))
x = torch.randn(3, 64)
torch.set_num_threads(1)
wanted = kernels.linear(x, weight, None)
torch.set_num_threads(64)
threading.stack_size(0)
limit(2**28)
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    print(torch.equal(kernels.linear(x, weight, None), wanted))
print([str(w.message) for w in found])
"""
    same, warned = in_a_process(f"resource.setrlimit(resource.RLIMIT_STACK, (2**26, -1))\n{code}").splitlines()
    assert same == "True"
    assert "of 64 threads; raise the limit" in warned


def test_nobody_keeps_a_wrong_count_of_threads(restored_threads: int) -> None:
    """Torch's count is each thread's own: one that starts while another decodes has all of them, for life."""
    seen = list[int]()
    torch.set_num_threads(3)
    meet, part = threading.Barrier(2, timeout=300), threading.Barrier(2, timeout=300)

    def decode() -> None:
        with kernels().single_threaded():
            seen.append(torch.get_num_threads())
            meet.wait()
            part.wait()
        seen.append(torch.get_num_threads())

    def born() -> None:
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=decode)
    thread.start()
    meet.wait()
    assert torch.get_num_threads() == 3
    late = threading.Thread(target=born)
    late.start()
    late.join()
    with kernels().single_threaded(), kernels().single_threaded():  # overlapping the other thread's
        assert torch.get_num_threads() == 1
        part.wait()
        thread.join()
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3
    assert seen == [1, 3, 3]


def test_the_kernels_keep_their_threads_meanwhile(restored_threads: int) -> None:
    k = kernels()
    torch.set_num_threads(2)
    with k.single_threaded(), k.lock:
        k.runner()
    assert 2 in k._runners


def confine(cpus: set[int]) -> None:
    """Let all threads of this process run on ``cpus``."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # a thread of another test may end now
            os.sched_setaffinity(int(thread), cpus)


def test_threads_without_cpus_are_left_out_and_tried_again(restored_threads: int) -> None:
    """Two threads on one CPU: soon one of them does everything, later both share again, and texts are the same."""
    model = packed(BASE, "bfloat16")
    cpus = os.sched_getaffinity(0)

    def text() -> list[int]:
        engine = Engine(model, None, rows=1, capacity=100)
        engine.add(Request(tokens(5, 5), 24))
        return [token for step in engine.run() for token in step.tokens]

    def shared() -> bool:
        """True if another thread worked while this one used 50 ms of its CPU; torch's would spin."""
        mine, others = time.thread_time(), time.process_time() - time.thread_time()
        with kernels().single_threaded():
            while time.thread_time() < mine + 0.05:
                assert text() == wanted
        return time.process_time() - time.thread_time() - others > 0.005

    try:
        torch.set_num_threads(1)
        wanted = text()
        torch.set_num_threads(2)
        confine({min(cpus)})
        for expected in (True, False, True):
            assert any(shared() == expected for _ in range(100)), expected
    finally:
        confine(cpus)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_forked_child_holds_no_locks() -> None:
    """Another thread may decode while a process forks."""
    k = kernels()
    weight, _memory = k.pack("float32", torch.eye(32))
    x = torch.randn(1, 32)
    k.linear(x, weight, None)
    with k.lock, native._kernels.lock:
        in_child(lambda: torch.equal(k.linear(x, weight, None), x) and native.library() is k)
