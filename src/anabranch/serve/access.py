"""Before a handler runs: request ids and the log, API keys, and the limits of a request's body.

Plain ASGI: a response passes through unchanged, so streams and the client's going away reach the handlers.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders, State
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anabranch.serve.failures import RequestError, failure_of
from anabranch.serve.service import Call
from anabranch.serve.wire import failed

__all__ = ["LOG", "Access", "Body", "Log", "LogLines"]

LOG = logging.getLogger("anabranch.serve")
FIELDS = "anabranch_fields"  # attribute of records
OPEN = frozenset(("/", "/health", "/v1/models", "/metrics", "/openapi.json"))
PAGE = "/page/"  # the files of the page, which asks for the key itself
# times the limit that is read of a larger body: closing a connection on which data arrive can lose the response
READ_ON = 4
ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")


class LogLines(logging.Formatter):
    """Records as lines of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """One line: time, level, message, and the fields of a request."""
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False).encode("utf-8", "replace").decode()


class Log:
    """Gives each request an id, which the response and the log line have, and answers what no handler caught.

    tokenizer  where lines have the texts of prompts and answers
    """

    def __init__(self, app: ASGIApp, *, tokenizer: Any = None) -> None:
        self.app, self.tokenizer = app, tokenizer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        key = given if ID.fullmatch(given) else uuid.uuid4().hex
        status, began = 0, time.monotonic()

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = key
            await send(message)

        scope.setdefault("state", {})
        try:
            await self.app(scope, receive, sending)
        except Exception as error:
            LOG.exception("a request failed", extra={FIELDS: {"request_id": key}})
            if not status:
                await failed(failure_of(error), scope["path"])(scope, receive, sending)
        finally:
            fields = {
                "request_id": key,
                "method": scope["method"],
                "path": scope["path"],
                "status": status or 499,
                "seconds": round(time.monotonic() - began, 4),
                **self._of_call(State(scope["state"])),
            }
            LOG.info("request", extra={FIELDS: fields})

    def _of_call(self, state: State) -> dict[str, Any]:
        call: Call | None = getattr(state, "call", None)
        traced = {"trace_id": state.trace} if hasattr(state, "trace") else {}
        unused = list((getattr(state, "unused", ()) if call is None else call.unused)[:32])
        named = {"ignored": unused} if unused else {}
        if call is None:
            return traced | named
        outputs = [job.output for job in call.jobs if job.output is not None]
        fields: dict[str, Any] = {
            **traced,
            "prompt_tokens": sum(map(len, call.prompts)),
            "completion_tokens": sum(len(output.tokens) for output in outputs),
            "steps": sum(output.stats.steps for output in outputs),
            **named,
        }
        if self.tokenizer is not None and outputs:
            fields["prompts"] = [self.tokenizer.decode(ids) for ids in call.prompts]
            fields["answers"] = [output.detokenizer.text for output in outputs]
        return fields


class Access:
    """Lets only requests with an API key through, but for paths that tell nothing of others; no keys: everyone.

    The request's ``state.key`` says whose it is, for fairness: the number of the key, or the client's address.
    """

    def __init__(self, app: ASGIApp, *, keys: Sequence[bytes]) -> None:
        self.app, self.keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it with status 401."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        open_to_all = not self.keys or path in OPEN or path.startswith(PAGE) or scope["method"] == "OPTIONS"
        number = self._number(Headers(scope=scope))
        client = scope.get("client")
        scope["state"]["key"] = (client[0] if client else "") if number is None else f"key {number}"
        if number is None and not open_to_all:
            failure = RequestError(401, "a valid API key is needed, as a bearer token", code="invalid_api_key")
            await failed(failure, scope["path"])(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _number(self, headers: Headers) -> int | None:
        """Return the number of the key that a request has; None: it has none of them."""
        kind, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        data = given.encode("latin-1", "replace")
        # all keys are compared, and in constant time, so that the time tells nothing of them
        equal = [hmac.compare_digest(data, key) for key in self.keys]
        return equal.index(True) if any(equal) else None


class Body:
    """Reads the body before the handler, up to ``size`` bytes and for ``seconds``."""

    def __init__(self, app: ASGIApp, *, size: int, seconds: float) -> None:
        self.app, self.size, self.seconds = app, size, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it with status 413 or 408."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self.app(scope, receive, send)
            return
        try:
            body = await asyncio.wait_for(self._read(Headers(scope=scope), receive), self.seconds)
        except (RequestError, asyncio.TimeoutError) as error:
            late = RequestError(408, f"the request did not arrive within {self.seconds:g} seconds; send it faster")
            failure = error if isinstance(error, RequestError) else late
            # what is still to come is not read
            await failed(failure, scope["path"], Connection="close")(scope, receive, send)
            return
        if body is None:
            return
        given = False

        async def receiving() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, receiving, send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """The body; None if the client has gone. Raises RequestError for one that is too large."""
        large = RequestError(413, f"a request may have {self.size:,} bytes; send less", code="request_too_large")
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > READ_ON * self.size:
            raise large
        parts: list[bytes] = []
        size, more = 0, True
        while more and size <= READ_ON * self.size:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            size, more = size + len(message.get("body", b"")), message.get("more_body", False)
            if size <= self.size:
                parts.append(message.get("body", b""))
        if size > self.size:
            raise large
        return b"".join(parts)
