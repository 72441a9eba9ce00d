"""The coroutines of ``Model``: the same results, a free event loop, turns, errors and cancelling."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import torch

from anabranch.api import Model
from anabranch.decoding.generation import Chunk
from anabranch.errors import InputError
from toy_text import toy_model

MESSAGES = [{"role": "user", "content": "the thing"}]


@pytest.fixture(scope="module")
def model() -> Model:
    return toy_model()


async def tokens_of(chunks: AsyncGenerator[Chunk, None]) -> list[int]:
    return [token async for chunk in chunks for token in chunk.token_ids]


def test_the_same_tokens_as_without_asyncio(model: Model) -> None:
    async def run() -> list[list[int]]:
        one = await model.agenerate("the thing", max_new_tokens=12)
        many = await model.agenerate(["the thing", "a"], max_new_tokens=12)
        answer = await model.achat(MESSAGES, max_new_tokens=12)
        streams = [
            model.astream("the thing", max_new_tokens=12),
            model.achat_stream(MESSAGES, max_new_tokens=12),
            model.astream("a", max_new_tokens=12),
        ]
        together = await asyncio.gather(*map(tokens_of, streams))
        return [one.token_ids, many[1].token_ids, answer.token_ids, *together]

    thing, a = (model.generate(prompt, max_new_tokens=12).token_ids for prompt in ("the thing", "a"))
    answer = model.chat(MESSAGES, max_new_tokens=12).token_ids
    assert [t for chunk in model.chat_stream(MESSAGES, max_new_tokens=12) for t in chunk.token_ids] == answer
    assert asyncio.run(run()) == [thing, a, answer, thing, answer, a]


def test_the_event_loop_stays_free(model: Model) -> None:
    """The decoding waits for something that only the loop can do."""
    seen: list[str] = []

    async def run() -> None:
        loop, turn = asyncio.get_running_loop(), threading.Event()

        def wait(tokens: Any, logits: torch.Tensor) -> torch.Tensor:
            seen.append(threading.current_thread().name)
            loop.call_soon_threadsafe(turn.set)
            assert turn.wait(300), "the loop never ran"
            return logits

        await model.agenerate("the", max_new_tokens=2, processors=[wait])

    asyncio.run(run())
    assert seen
    assert all(name.startswith("anabranch") for name in seen)


def test_errors_reach_whoever_awaits(model: Model) -> None:
    def broken(tokens: Any, logits: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("of the user's own")

    async def run() -> None:
        with pytest.raises(InputError, match="max_new_tokens"):
            await model.agenerate("the", max_new_tokens=0)
        with pytest.raises(InputError, match="one prompt at a time"):
            await tokens_of(model.astream(["a", "b"]))
        with pytest.raises(InputError, match="conversation is empty"):
            await model.achat([])
        with pytest.raises(RuntimeError, match="of the user's own"):
            await model.agenerate("the", processors=[broken])
        with pytest.raises(RuntimeError, match="of the user's own"):
            await tokens_of(model.astream("the", processors=[broken]))
        assert (await model.agenerate("the", max_new_tokens=3)).stats.tokens == 3

    asyncio.run(run())
    assert not model._scheduler.busy


def test_a_closed_stream_frees_its_row(model: Model) -> None:
    async def run() -> None:
        chunks = model.astream("the thing", max_new_tokens=40)
        await anext(chunks)
        assert model._scheduler.busy
        await chunks.aclose()
        assert not model._scheduler.busy

    asyncio.run(run())


@pytest.mark.parametrize("method", ["agenerate", "astream"])
def test_a_cancelled_call_stops_and_frees_its_row(model: Model, method: str) -> None:
    calls: list[int] = []

    async def run() -> int:
        loop, begun, cancelled = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

        def slow(tokens: Any, logits: torch.Tensor) -> torch.Tensor:
            calls.append(len(tokens))
            loop.call_soon_threadsafe(begun.set)
            assert cancelled.wait(300)
            return logits

        options: Any = {"max_new_tokens": 60, "processors": [slow], "drafter": "none", "ignore_eos": True}

        async def decode() -> None:
            if method == "agenerate":
                await model.agenerate("the", **options)
            else:
                await tokens_of(model.astream("the", **options))

        task = asyncio.create_task(decode())
        await begun.wait()
        waiting = asyncio.create_task(model.agenerate("a", max_new_tokens=3, drafter="none"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()  # impatient callers do
        cancelled.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        return (await waiting).stats.tokens

    assert asyncio.run(run()) == 3, "who waited has its turn"
    assert len(calls) < 10
    asyncio.run(model.agenerate("a", max_new_tokens=1))  # the row is freed in its turn, so before this
    assert not model._scheduler.busy


def test_a_call_cancelled_while_it_waits_for_a_step_of_others_ends_after_it(model: Model) -> None:
    ran: list[int] = []

    async def run() -> None:
        loop, begun, go = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

        def hold(tokens: Any, logits: torch.Tensor) -> torch.Tensor:
            loop.call_soon_threadsafe(begun.set)
            assert go.wait(300)
            return logits

        def note(tokens: Any, logits: torch.Tensor) -> torch.Tensor:
            ran.append(len(tokens))
            return logits

        first = asyncio.create_task(model.agenerate("the", max_new_tokens=1, processors=[hold]))
        await begun.wait()
        second = asyncio.create_task(model.agenerate("the", max_new_tokens=30, processors=[note]))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        go.set()
        await first

    asyncio.run(run())
    assert len(ran) < 5


def test_the_worker_decodes_with_the_threads_of_its_caller(restored_threads: int) -> None:
    seen: list[int] = []

    def note(tokens: Any, logits: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return logits

    torch.set_num_threads(restored_threads + 1)
    with toy_model() as model:
        asyncio.run(model.agenerate("the", max_new_tokens=1, processors=[note]))
    assert set(seen) == {restored_threads + 1}


def test_a_model_is_closed_once_and_for_all() -> None:
    with toy_model() as model:
        asyncio.run(model.agenerate("the", max_new_tokens=2))
        assert repr(model).startswith("Model('toy', adapter='3 streams through the top 2 layers, ")
    assert repr(model) == "Model(closed)"
    for call in (lambda: model.generate("the"), lambda: model.stream("the"), lambda: model.chat(MESSAGES)):
        with pytest.raises(InputError, match="this model is closed; load it again"):
            call()
    with pytest.raises(InputError, match="closed"):
        asyncio.run(model.agenerate("the"))
    model.close()
