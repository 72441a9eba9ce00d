"""Engines of one model: one cache for all drafters, large caches freed, streams undisturbed."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace
from unittest import mock

import pytest
import torch

from anabranch import pool
from anabranch.engine import Engine, Request
from anabranch.generation import Chunk
from anabranch.methods import make_drafter
from anabranch.model.config import RopeConfig
from anabranch.model.graphs import Graphs
from anabranch.model.pack import pack_decoder
from anabranch.model.stack import native_for, why_not_native
from anabranch.model.weights import build_decoder
from anabranch.native import library as native
from anabranch.pool import DRAFTERS, EnginePool
from small import LLAMA, RICH, prompt, randomise, small, small_adapter
from toy_text import toy_model


def taken(engines: EnginePool, spec: str, length: int = 10, *, rows: int = 1) -> Engine:
    return engines.take(spec, [Request(prompt(length), 6)] * rows, rows=rows)


@pytest.fixture
def engines() -> EnginePool:
    target = small()
    adapter = small_adapter(target)
    return EnginePool(target, lambda spec: make_drafter(spec, target, adapter))


def test_all_drafters_share_one_cache(engines: EnginePool) -> None:
    first = taken(engines, "streams:tree=8")
    assert taken(engines, "streams:tree=8", 5) is first
    second = taken(engines, "none")
    assert second.drafter is not first.drafter
    assert second.cache is first.cache
    assert taken(engines, "streams:tree=8").cache is first.cache
    assert taken(engines, "streams:tree=8").drafter is first.drafter


def test_a_cache_grows_and_holds_no_more_rows_than_asked_for(engines: EnginePool) -> None:
    one = taken(engines, "none")
    three = taken(engines, "none", rows=3)
    assert three.cache is not one.cache
    assert three.cache.rows == three.rows == 3
    again = taken(engines, "none", rows=2)
    assert again.cache is three.cache
    assert again.rows == 2


def test_few_drafters_are_kept(engines: EnginePool) -> None:
    kept = [engines.drafter(f"prompt_lookup:tokens={n}") for n in range(1, DRAFTERS + 1)]
    assert engines.drafter("prompt_lookup:tokens=1") is kept[0]
    engines.drafter("none")
    assert engines.drafter("prompt_lookup:tokens=1") is kept[0]
    assert engines.drafter("prompt_lookup:tokens=2") is not kept[1]


def test_a_large_cache_is_freed_after_the_call(engines: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = taken(engines, "none")
    engines.settle()
    assert engines.last is engine
    monkeypatch.setattr(pool, "POSITIONS", engine.capacity - 1)
    engine.add(Request(prompt(10), 6))
    engines.settle()
    assert engines.last is engine, "somebody still reads from it"
    engine.clear()
    engines.settle()
    assert engines.last is None


def test_recorded_steps_keep_their_cache(engines: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "POSITIONS", 0)
    monkeypatch.setattr(engines.target, "recorder", lambda compute, inputs: (lambda: None, compute(*inputs)))
    engine = taken(engines, "none")
    assert isinstance(engine.cache.graphs, Graphs)
    engines.settle()
    assert engines.last is engine


def test_a_busy_engine_is_left_to_its_stream(engines: EnginePool) -> None:
    busy = taken(engines, "none")
    busy.add(Request(prompt(10), 6))
    other = taken(engines, "none")
    assert other is not busy
    assert other.cache is not busy.cache
    busy.clear()
    assert taken(engines, "none") is other, "the busy one went with its stream"


def test_weights_are_packed_once_for_all_drafters() -> None:
    target = small()
    adapter = small_adapter(target)
    specs = ("streams:tree=4", "streams:tree=9", "streams:tree=chain", "streams:tree=9,condition=no")
    heads = {id(make_drafter(spec, target, adapter).tree.head) for spec in specs}  # type: ignore[attr-defined]
    assert len(heads) == 1


def test_trailing_layers_are_packed_once_for_all_drafters() -> None:
    wide = replace(
        LLAMA, hidden_size=64, num_heads=2, num_kv_heads=1, head_dim=32, intermediate_size=64,
        rope=RopeConfig(dim=32, max_positions=96),
    )  # fmt: skip
    target = build_decoder(wide, device="cpu")
    randomise(target, seed=1)
    adapter = small_adapter(target, replace(RICH, conditioning_rank=32, root_width=32))
    target.to(torch.bfloat16)
    if not native_for(target):
        pytest.skip(why_not_native(target))
    assert pack_decoder(target)
    kernels = native.library()
    assert kernels is not None
    make_drafter("streams:tree=3", target, adapter.to(torch.bfloat16))
    with mock.patch.object(kernels, "pack", side_effect=AssertionError("packed again")):
        for spec in ("streams:tree=8", "streams:tree=chain", "streams:tree=12,depth=2+prompt_lookup"):
            make_drafter(spec, target, adapter)


def test_streams_of_one_drafter_in_turns_and_calls_of_others_between_them() -> None:
    model = toy_model()
    texts, specs = ("the thing", "a river of the"), ("streams:tree=8", "none", "prompt_lookup")
    alone = [model.generate(text, max_new_tokens=16).token_ids for text in texts]
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
                assert model.generate(texts[0], max_new_tokens=16, drafter=spec).token_ids == alone[0]
    assert heard == alone


def test_threads_with_different_drafters() -> None:
    model = toy_model()
    wanted = model.generate("the thing", max_new_tokens=16).token_ids
    specs = ("streams:tree=8", "none", "prompt_lookup", "streams:tree=3")
    found: list[list[int]] = []

    def work(spec: str) -> None:
        found.extend(model.generate("the thing", max_new_tokens=16, drafter=spec).token_ids for _ in range(5))

    threads = [threading.Thread(target=work, args=(spec,)) for spec in specs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [wanted] * 20


def test_a_closed_pool_holds_nothing(engines: EnginePool) -> None:
    cache = weakref.ref(taken(engines, "streams").cache)
    engines.close()
    gc.collect()
    assert cache() is None
    assert not hasattr(engines, "target")
