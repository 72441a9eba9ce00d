"""A Ray Serve application: replicas of the server, behind gateways that route, retry and stream.

    client -> Ray's proxy -> Gateway -- the replica of the request's session or prefix --> Replica (serve.app)

``serve run anabranch.integrations.ray_serve:build model=default replicas=2`` starts it; docs/serving.md describes it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, RayServeException, ReplicaUnavailableError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message

from anabranch.serve.failures import RequestError, failure_of, in_form
from anabranch.serve.messages import system_of
from anabranch.serve.settings import Settings
from anabranch.serve.wire import Json, encoded

__all__ = ["Config", "Gateway", "Replica", "build", "routing_key"]

LOG = logging.getLogger("anabranch.serve")
LOST = (RayActorError, ReplicaUnavailableError)  # the replica has died, or cannot be reached
ATTEMPTS = 3  # replicas that a request is sent to at most
PREFIX = 1024  # characters of a prompt's text, or tokens, by which it is routed
SCOPE = ("method", "scheme", "path", "raw_path", "query_string", "headers", "client", "server", "http_version")
ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"


class Config(BaseModel):
    """The application. ``loading`` has more arguments of ``anabranch.load``, ``settings`` the server's settings.

    replicas  a number, or Ray's autoscaling configuration, such as {"min_replicas": 1, "max_replicas": 8,
              "target_ongoing_requests": 8}; requests that decode and that wait for a replica count as ongoing
    cpus      of each replica, which are its threads, and ``gpus``
    """

    model_config = ConfigDict(extra="forbid")

    model: str = "default"
    loading: dict[str, Any] = Field(default_factory=dict)
    settings: Settings = Field(default_factory=Settings)
    replicas: int | dict[str, Any] = 1
    gateways: int = 1
    cpus: float = 1
    gpus: float = 0


def build(args: Mapping[str, Any] | Config) -> serve.Application:
    """The application of a ``Config``, or of its fields, as ``serve run`` and ``serve deploy`` give them.

    Raises pydantic's ValidationError, and what ``Settings`` raise when a replica starts.
    """
    config = args if isinstance(args, Config) else Config.model_validate(args)
    settings = config.settings
    fixed = isinstance(config.replicas, int)
    replica = serve.deployment(Replica).options(
        **({"num_replicas": config.replicas} if fixed else {"autoscaling_config": config.replicas}),
        ray_actor_options={"num_cpus": config.cpus, "num_gpus": config.gpus},
        # what a replica has no row for waits in a gateway, from where it can go to any of them
        max_ongoing_requests=settings.rows,
        max_queued_requests=max(1, settings.queue),
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        graceful_shutdown_timeout_s=settings.drain_seconds,
    )
    gateway = serve.deployment(Gateway).options(
        num_replicas=config.gateways,
        ray_actor_options={"num_cpus": 0.1},
        max_ongoing_requests=1_000_000,  # each waits for a replica, where the limits are
        graceful_shutdown_timeout_s=settings.drain_seconds,
    )
    return gateway.bind(replica.bind({"name": config.model, **config.loading}, settings), settings.max_body)


@dataclass(frozen=True)
class Asked:
    """A request, as it travels to a replica."""

    scope: dict[str, Any]
    body: bytes


def routing_key(headers: Mapping[str, str], body: bytes) -> str:
    """The session of a request, or a digest of how its prompt begins; "": it may go anywhere.

    A conversation begins with its system message and its first user's, so all of its turns have the same key.
    """
    if session := headers.get("x-session-id"):
        return session
    try:
        fields = json.loads(body)
        if session := fields.get("prompt_cache_key"):
            return str(session)
        said = next((fields[name] for name in ("messages", "input", "prompt") if fields.get(name)), "")
        opening: list[Any] = [fields.get("instructions"), system_of(fields.get("system"))]
        if isinstance(said, list) and isinstance(said[0], dict):
            first = next((place for place, turn in enumerate(said) if turn.get("role") == "user"), 0)
            opening += said[:first]
            said = json.dumps(said[first])
        text = json.dumps([*opening, said[:PREFIX]])
    except (ValueError, AttributeError, TypeError, LookupError, RequestError):  # the replica says what is wrong
        return ""
    return hashlib.sha256(text.encode()).hexdigest()


class Gateway:
    """Sends each request to a replica, and to another one if that is lost before the response begins."""

    def __init__(self, replicas: Any, max_body: int) -> None:
        self._replicas, self._max_body = replicas.options(stream=True, method_name="answer"), max_body

    async def __call__(self, request: Request) -> Response:
        """Answer a request with what one replica answers."""
        path = request.url.path
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > self._max_body:
                break  # the replica refuses it
        asked = Asked({name: request.scope[name] for name in SCOPE if name in request.scope}, body)
        parts = self._parts(asked, routing_key(request.headers, body))
        try:
            start, *messages = await anext(parts)
        except Exception as error:
            failure = _failure(error)
            return Json(in_form(failure, path), failure.status, headers=failure.headers)
        response = StreamingResponse(_body(messages, parts, path), start["status"])
        response.raw_headers = start["headers"]
        return response

    async def _parts(self, asked: Asked, key: str) -> AsyncGenerator[Sequence[Message], None]:
        """The parts of a response by one replica. Raises what it raises, or what Ray raises where it is lost."""
        replicas, begun = self._replicas.options(session_id=key), False
        for left in reversed(range(ATTEMPTS)):
            answer = replicas.remote(asked)
            try:
                async for part in answer:
                    begun = True
                    yield part
                return
            except LOST as error:
                if begun or not left:
                    raise
                LOG.warning("a replica was lost (%s); its request is sent to another one", type(error).__name__)
            finally:
                answer.cancel()  # if the client has gone; no effect after the end


async def _body(
    messages: Sequence[Message], parts: AsyncGenerator[Sequence[Message], None], path: str
) -> AsyncIterator[bytes]:
    """The bytes of a response; a stream of events whose replica is lost ends with an error."""
    try:
        for message in messages:
            yield message.get("body", b"")
        async for part in parts:
            for message in part:
                yield message.get("body", b"")
    except (RayError, RayServeException) as error:
        said = encoded(in_form(_failure(error), path))
        name = "" if path in ("/v1/chat/completions", "/v1/completions") else "event: error\n"
        yield f"{name}data: {said}\n\n".encode()
    finally:
        await parts.aclose()


def _failure(error: Exception) -> RequestError:
    if isinstance(error, BackPressureError):
        return RequestError(503, "too many requests wait already; try again later", retry=1)
    if isinstance(error, LOST):
        return RequestError(503, "the replica that answered was lost; send the request again", retry=1)
    LOG.error("a request failed", exc_info=error)
    return failure_of(error)


class Replica:
    """The server's application in an actor of its own, with a model of its own."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, loading: Mapping[str, Any], settings: Settings
    ) -> None:
        from anabranch.api import load
        from anabranch.serve.app import create_app

        self._model = load(**loading)
        self._app = create_app(self._model, settings)
        self._running = self._app.router.lifespan_context(self._app)
        await self._running.__aenter__()
        self._name = f"{socket.gethostname()}:{os.getpid()}".encode()

    async def __del__(self) -> None:
        """End decoding, after Ray has drained the replica."""
        await self._running.__aexit__(None, None, None)
        self._model.close()

    def check_health(self) -> None:
        """Raise RuntimeError if the replica cannot decode any more; Ray then starts another one."""
        if self._app.state.service.worker.broken is not None:
            raise RuntimeError("decoding ended by an error of the program")

    async def answer(self, asked: Asked) -> AsyncGenerator[Sequence[Message], None]:
        """The ASGI messages of a response, none before the first bytes of its body."""
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        given, gone = False, asyncio.Event()

        async def receive() -> Message:
            nonlocal given
            if given:
                await gone.wait()
                return {"type": "http.disconnect"}
            given = True
            return {"type": "http.request", "body": asked.body, "more_body": False}

        scope = {"type": "http", "asgi": {"version": "3.0"}, "root_path": "", **asked.scope}
        task = asyncio.ensure_future(self._app(scope, receive, sent.put))
        task.add_done_callback(lambda _: sent.put_nowait(None))
        part: list[Message] = []
        try:
            while (message := await sent.get()) is not None:
                if message["type"] == "http.response.start":
                    # Ray's proxy gives the response the request's id, which is the one that the log has here
                    kept = [header for header in message["headers"] if header[0] != b"x-request-id"]
                    message["headers"] = [*kept, (b"x-anabranch-replica", self._name)]
                part.append(message)
                if message.get("body"):
                    yield part
                    part = []
            if part:
                yield part
            await task
        finally:
            gone.set()
            await asyncio.wait([task])
