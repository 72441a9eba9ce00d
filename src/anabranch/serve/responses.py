"""``/v1/responses``, as Codex speaks it: conversations with functions, whole or streamed; nothing is stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from sse_starlette.event import ServerSentEvent
from starlette.responses import Response

from anabranch.decoding.generation import Generation
from anabranch.serve.blocks import Block, Blocks, Change
from anabranch.serve.conversation import joined_text, template_messages
from anabranch.serve.failures import FAILURES, STREAMS, RequestError, failure_of, in_form
from anabranch.serve.fields import Items, Sampling
from anabranch.serve.service import Call, Service
from anabranch.serve.turns import Turn, prepared, style
from anabranch.serve.usage import speculation, usage
from anabranch.serve.wire import answered, encoded
from anabranch.serve.worker import Answer

__all__ = ["router"]

router = APIRouter(responses=FAILURES)
PATH = "/v1/responses"
SKIPPED = ("reasoning",)  # items of a conversation that its prompt does not have


class ResponsesBody(Sampling):
    """A request for a response."""

    input: str | Items[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: Items[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    include: Items[str] | None = None

    def turn(self) -> Turn:
        """The conversation. Raises RequestError."""
        given = self.tool_choice or "auto"
        choice: Any = (
            given if isinstance(given, str) else given.get("name") if given.get("type") == "function" else None
        )
        if not isinstance(choice, str):
            raise RequestError(400, f"tool_choice must name a function, got {given!r}", param="tool_choice")
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        if not items:
            raise RequestError(400, "input is empty; give a text or at least one item", param="input")
        spoken = [{"role": "system", "content": self.instructions}] if self.instructions else []
        messages = template_messages(_messages(spoken, items))
        return Turn(messages, self._tools()[0], choice, single=self.parallel_tool_calls is False)

    def extras(self) -> Iterator[tuple[str, Any]]:
        """As for other bodies, with the tools that are no functions and what no answer here includes."""
        yield from super().extras()
        yield from ((f"tools[{kind}]", True) for kind in self._tools()[1])
        yield from ((f"include[{name}]", True) for name in self.include or ())

    def _tools(self) -> tuple[list[dict[str, Any]], list[str]]:
        """The functions in the form of chat completions, and the kinds of other tools."""
        functions: list[dict[str, Any]] = []
        others: list[str] = []
        for tool in self.tools or ():
            if tool.get("type") != "function":
                others.append(str(tool.get("type")))
                continue
            if not isinstance(tool.get("name"), str) or not isinstance(tool.get("parameters") or {}, dict):
                raise RequestError(400, f"a function must have a name and parameters, got {tool!r}", param="tools")
            function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name)}
            functions.append({"type": "function", "function": function})
        return functions, others


def _messages(spoken: Sequence[dict[str, Any]], items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The items of a conversation as messages: calls belong to the assistant's message before them."""
    messages = list(spoken)
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": joined_text(item.get("content"), "input")})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            said = joined_text(item.get("output"), "input")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": said})
        elif kind not in SKIPPED:
            raise RequestError(400, f"input has an item of type {kind!r}, which is not supported", param="input")
    return messages


@router.post(PATH, responses=STREAMS)
async def responses(body: ResponsesBody, request: Request) -> Response:
    """Answer a conversation."""
    return await answered(request, body, _call, _Written)


def _call(service: Service, body: ResponsesBody, turn: Turn) -> Call:
    if body.n not in (None, 1):
        raise RequestError(400, f"n={body.n} is not supported here; send several requests", param="n")
    form = ("text.format", (body.text or {}).get("format"))
    return prepared(service, turn, body, most=body.max_output_tokens, form=form)


class _Written:
    """The response to one request."""

    def __init__(self, service: Service, body: ResponsesBody, turn: Turn, call: Call) -> None:
        self.body, self.call = body, call
        self.reader = turn.reader(style(service) if turn.offered else None)
        self.blocks = Blocks()
        self.model = body.model or service.names[0]
        self.id, self.created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._events = 0
        self._ids: list[str] = []  # of the items, by block

    def _state(self, status: str, **more: Any) -> dict[str, Any]:
        body = self.body
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": {},
            "model": self.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
            **more,
        }

    def _ended(self, result: Generation) -> dict[str, Any]:
        """The whole response."""
        counts = usage(self.call)
        cut = result.finish_reason == "length"
        return self._state(
            "incomplete" if cut else "completed",
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            output=[self._item(block, self._status(block, result)) for block in self.blocks.all],
            usage={
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": counts["prompt_tokens_details"]["cached_tokens"]},
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counts["total_tokens"],
            },
            metrics=speculation(self.call),
        )

    def _status(self, block: Block, result: Generation | None) -> str:
        """The status of an item that has ended: the last one of an answer that was cut is incomplete."""
        cut = result is not None and result.finish_reason == "length" and block is self.blocks.all[-1]
        return "incomplete" if cut else "completed"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        while len(self._ids) <= block.index:
            self._ids.append(uuid.uuid4().hex)
        key, done = self._ids[block.index], status != "in_progress"
        if block.name is not None:
            call = {"call_id": block.id, "name": block.name, "arguments": block.text if done else ""}
            return {"id": f"fc_{key}", "type": "function_call", "status": status, **call}
        content = [_part(block.text)] if done else []
        return {"id": f"msg_{key}", "type": "message", "status": status, "role": "assistant", "content": content}

    def whole(self, results: list[Generation]) -> dict[str, Any]:
        """The response that is not streamed."""
        (result,) = results
        list(self.blocks.feed([*self.reader.feed(result.text), *self.reader.finish()]))
        return self._ended(result)

    async def stream(self, answer: Answer) -> AsyncGenerator[ServerSentEvent, None]:
        """The events of the response that is streamed; an error is the last."""
        yield self._event("response.created", response=self._state("in_progress"))
        yield self._event("response.in_progress", response=self._state("in_progress"))
        try:
            with answer:
                async for event in answer:
                    chunk = event.chunk
                    assert chunk is not None
                    for change in self.blocks.feed(self.reader.feed(chunk.text)):
                        for made in self._changed(change):
                            yield made
                    if chunk.result is None:
                        continue
                    for change in (*self.blocks.feed(self.reader.finish()), *self.blocks.finish()):
                        for made in self._changed(change, chunk.result):
                            yield made
                    ended = self._ended(chunk.result)
                    yield self._event(f"response.{ended['status']}", response=ended)
        except Exception as error:
            failure = failure_of(error)
            said = {"code": failure.code or in_form(failure, PATH)["error"]["type"], "message": str(failure)}
            yield self._event("response.failed", response=self._state("failed", error=said))

    def _changed(self, change: Change, result: Generation | None = None) -> Iterator[ServerSentEvent]:
        block, index = change.block, change.block.index
        item = self._item(block, self._status(block, result) if change.kind == "close" else "in_progress")
        place = {"item_id": item["id"], "output_index": index}
        within = {**place, "content_index": 0}
        if change.kind == "open":
            yield self._event("response.output_item.added", output_index=index, item=item)
            if block.name is None:
                yield self._event("response.content_part.added", **within, part=_part(""))
        elif change.kind == "grow" and block.name is None:
            yield self._event("response.output_text.delta", **within, delta=change.text, logprobs=[])
        elif change.kind == "grow":
            yield self._event("response.function_call_arguments.delta", **place, delta=change.text)
        else:
            if block.name is None:
                yield self._event("response.output_text.done", **within, text=block.text, logprobs=[])
                yield self._event("response.content_part.done", **within, part=_part(block.text))
            else:
                done = {"name": block.name, "arguments": block.text}
                yield self._event("response.function_call_arguments.done", **place, **done)
            yield self._event("response.output_item.done", output_index=index, item=item)

    def _event(self, kind: str, **values: Any) -> ServerSentEvent:
        self._events += 1
        event = {"type": kind, "sequence_number": self._events - 1, **values}
        return ServerSentEvent(encoded(event), event=kind, sep="\n")


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
