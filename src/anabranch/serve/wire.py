"""Responses: JSON, streams of server-sent events, and whole answers whose client may go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Protocol

from fastapi import Request
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import AppStatus, EventSourceResponse
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from anabranch.decoding.generation import Generation
from anabranch.decoding.scoring import Score
from anabranch.serve.failures import RequestError, in_form
from anabranch.serve.service import Call, Service
from anabranch.serve.turns import Turn
from anabranch.serve.worker import Answer

__all__ = ["Json", "Written", "answered", "begun", "encoded", "event_stream", "failed", "whole"]

JOINED = 64  # events at most: after a pause of its client an answer has many, and others are to have their turn

# uvicorn waits for streams that run, up to its time limit; sse-starlette would cut them at once
AppStatus.enable_automatic_graceful_drain = False


def encoded(value: Any) -> str:
    """A value as JSON in one line, with the characters that UTF-8 does not have replaced."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace").decode()


class Json(Response):
    """A JSON response."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return encoded(content).encode()


def failed(failure: RequestError, path: str, **headers: str) -> Json:
    """The response to a request that is not served, in the form of the interface that ``path`` belongs to."""
    return Json(in_form(failure, path), failure.status, headers={**failure.headers, **headers})


class Written(Protocol):
    """The response to one request of a conversation, in the form of an interface."""

    def stream(self, answer: Answer) -> AsyncGenerator[ServerSentEvent, None]:
        """The events of the response that is streamed."""

    def whole(self, results: list[Generation]) -> dict[str, Any]:
        """The response that is not streamed."""


async def answered(
    request: Request,
    body: Any,
    prepare: Callable[[Service, Any, Turn], Call],
    write: Callable[[Service, Any, Turn, Call], Written],
) -> Response:
    """Answer the conversation of a request's body. Raises what ``prepare`` and decoding raise."""
    service: Service = request.app.state.service
    turn = body.turn()
    call, answer = await begun(request, lambda: prepare(service, body, turn))
    written = write(service, body, turn, call)
    if body.stream:
        return event_stream(written.stream(answer), answer, service, call.headers)
    results, _ = await whole(request, answer)
    return Json(written.whole(results), headers=call.headers)


async def begun(request: Request, prepare: Callable[[], Call]) -> tuple[Call, Answer]:
    """Prepare a call and queue it, both in one thread of the pool: decoding does not wait for the event loop's turn.

    Raises what ``prepare`` and ``Service.begin`` raise.
    """

    def begin() -> tuple[Call, Answer]:
        request.state.call = call = prepare()
        return call, request.app.state.service.begin(call, request.state.key)

    return await run_in_threadpool(begin)


def event_stream(
    events: AsyncGenerator[ServerSentEvent, None], answer: Answer, service: Service, headers: Mapping[str, str]
) -> EventSourceResponse:
    """A stream of the events of an answer, with comments while there are none, as when a prompt is read.

    It ends, and ``events`` is closed, when the client goes away or reads nothing for too long.
    """
    return EventSourceResponse(
        _joined(events, answer),
        headers=headers,
        sep="\n",
        ping=service.settings.keep_alive,
        ping_message_factory=lambda: ServerSentEvent(comment="keep-alive"),
        send_timeout=service.settings.send_seconds,
    )


async def _joined(events: AsyncGenerator[ServerSentEvent, None], answer: Answer) -> AsyncIterator[bytes]:
    """Events that are ready at the same time, as one part of the body each: sending takes longer than writing them."""
    parts: list[bytes] = []
    async with aclosing(events):
        async for event in events:
            parts.append(event.encode())
            if (answer.left and answer.events.empty()) or len(parts) == JOINED:
                yield b"".join(parts)
                parts.clear()
    if parts:
        yield b"".join(parts)


async def whole(request: Request, answer: Answer) -> tuple[list[Generation], list[Score]]:
    """The results of an answer's sequences and texts, in order.

    Raises what ended it, and RequestError after cancelling it if the client goes away.
    """
    reading = asyncio.ensure_future(_results(answer))
    leaving = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((reading, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            raise RequestError(499, "the client has gone")
        return reading.result()
    finally:
        for task in (reading, leaving):
            task.cancel()
        await asyncio.gather(reading, leaving, return_exceptions=True)


async def _results(answer: Answer) -> tuple[list[Generation], list[Score]]:
    results: dict[int, Generation] = {}
    scores: dict[int, Score] = {}
    with answer:
        async for event in answer:
            if event.score is not None:
                scores[event.part] = event.score
            elif event.chunk is not None and event.chunk.result is not None:
                results[event.part] = event.chunk.result
    return [results[part] for part in sorted(results)], [scores[part] for part in sorted(scores)]


async def _gone(request: Request) -> None:
    """Wait until the client has gone; its body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
