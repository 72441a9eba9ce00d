"""``/v1/messages`` and ``/v1/messages/count_tokens``, as Anthropic's API has them and Claude Code speaks it."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field
from sse_starlette.event import ServerSentEvent
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from anabranch.declared import Keywords
from anabranch.decoding.generation import Generation
from anabranch.serve.blocks import Block, Blocks, Change
from anabranch.serve.conversation import joined_text, template_messages
from anabranch.serve.failures import FAILURES, STREAMS, RequestError, failure_of, in_form
from anabranch.serve.fields import Items, Sampling
from anabranch.serve.foreign import FOREIGN, PROMPT, Foreign
from anabranch.serve.service import Call, Service, ignored
from anabranch.serve.turns import Turn, prepared, prompt_of, style
from anabranch.serve.usage import stop_string, usage
from anabranch.serve.wire import Json, answered, encoded
from anabranch.serve.worker import Answer

__all__ = ["router", "system_of"]

router = APIRouter(responses=FAILURES)
PATH = "/v1/messages"
BILLING = "x-anthropic-billing-header"  # a system line of Claude Code that differs in every request


class CountBody(Sampling):
    """A conversation whose tokens are counted."""

    foreign: ClassVar[Mapping[str, Foreign]] = PROMPT

    messages: Items[dict[str, Any]] = Field(min_length=1)
    system: str | Items[dict[str, Any]] | None = None
    stop_sequences: Items[str] | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None

    def turn(self) -> Turn:
        """The conversation. Raises RequestError."""
        choice = self.tool_choice or {}
        kind = str(choice.get("type", "auto"))
        named = {"any": "required", "tool": str(choice.get("name"))}.get(kind, kind)
        system = system_of(self.system)
        spoken = [{"role": "system", "content": system}] if system else []
        messages = template_messages(spoken + [each for message in self.messages for each in _messages(message)])
        tools, _ = self._tools()
        return Turn(messages, tools, named, single=bool(choice.get("disable_parallel_tool_use")))

    def extras(self) -> Iterator[tuple[str, Any]]:
        """As for other bodies, with the tools that a server of Anthropic's would run."""
        yield from super().extras()
        yield from ((f"tools[{kind}]", True) for kind in self._tools()[1])

    def _tools(self) -> tuple[list[dict[str, Any]], list[str]]:
        """The functions in OpenAI's form, and the kinds of other tools."""
        functions: list[dict[str, Any]] = []
        others: list[str] = []
        for tool in self.tools or ():
            if tool.get("type") not in (None, "custom"):
                others.append(str(tool["type"]))
                continue
            if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema") or {}, dict):
                raise RequestError(400, f"a tool must have a name and an input_schema, got {tool!r}", param="tools")
            function = {"name": tool["name"], "description": tool.get("description") or ""}
            function |= {"parameters": tool.get("input_schema")} | ({"strict": True} if tool.get("strict") else {})
            functions.append({"type": "function", "function": function})
        return functions, others


class MessagesBody(CountBody):
    """A request for a message."""

    foreign = FOREIGN

    max_tokens: int = Field(ge=1)


def system_of(given: str | Sequence[Mapping[str, Any]] | None) -> str:
    """The system message without the line that changes with every request, so that prefixes are found again."""
    if isinstance(given, str):
        return "\n".join(line for line in given.split("\n") if not line.startswith(BILLING))
    kept = [part for part in given or () if not str(part.get("text", "")).startswith(BILLING)]
    return joined_text(kept, "system")


def _messages(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One message in OpenAI's form: results of tools are messages of their own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise RequestError(400, f"the role of a message must be user or assistant, got {role!r}", param="messages")
    if not isinstance(content, list):
        return [{"role": role, "content": joined_text(content)}]
    results: list[dict[str, Any]] = []
    texts: list[Any] = []
    calls: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "tool_use":
            function = {"name": part.get("name"), "arguments": json.dumps(part.get("input") or {}, ensure_ascii=False)}
            calls.append({"id": part.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            said = joined_text(part.get("content"))
            results.append({"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": said})
        elif kind not in ("thinking", "redacted_thinking"):  # a model is not shown its earlier thoughts
            texts.append(part)
    spoken: dict[str, Any] = {"role": role, "content": joined_text(texts)}
    if calls:
        spoken["tool_calls"] = calls
    return [*results, *([spoken] if texts or calls or not results else [])]


@router.post(PATH + "/count_tokens")
async def count_tokens(body: CountBody, request: Request) -> Response:
    """Count the tokens of a conversation."""
    service: Service = request.app.state.service
    request.state.unused = unused = body.unused()
    ids = await run_in_threadpool(prompt_of, service, body.turn())
    return Json({"input_tokens": len(ids)}, headers=ignored(unused))


@router.post(PATH, responses=STREAMS)
async def messages(body: MessagesBody, request: Request) -> Response:
    """Answer a conversation."""
    return await answered(request, body, _call, _Written)


def _call(service: Service, body: MessagesBody, turn: Turn) -> Call:
    if body.n not in (None, 1):
        raise RequestError(400, f"n={body.n} is not supported here; send several requests", param="n")
    extra: Keywords = {"stop": body.stop_sequences} if body.stop_sequences else {}
    if body.stop_sequences and body.stop not in (None, [], body.stop_sequences):
        raise RequestError(
            400, "stop and stop_sequences both say where the answer ends; give one of them", param="stop_sequences"
        )
    form = body.output_format or (body.output_config or {}).get("format")
    return prepared(service, turn, body, most=body.max_tokens, form=("output_config.format", form), extra=extra)


class _Written:
    """The response to one request."""

    def __init__(self, service: Service, body: MessagesBody, turn: Turn, call: Call) -> None:
        self.model, self.call = body.model or service.names[0], call
        self.reader = turn.reader(style(service) if turn.offered else None)
        self.blocks = Blocks()
        self.id = f"msg_{uuid.uuid4().hex[:24]}"

    def _head(self, **more: Any) -> dict[str, Any]:
        message = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return {**message, "content": [], "stop_reason": None, "stop_sequence": None, **more}

    def _usage(self) -> dict[str, Any]:
        counts = usage(self.call)
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": counts["completion_tokens"],
        }

    def _ending(self, result: Generation) -> dict[str, Any]:
        stop = stop_string(result)
        if result.finish_reason == "length":
            reason = "max_tokens"
        elif stop is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self.reader.calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": stop}

    def whole(self, results: list[Generation]) -> dict[str, Any]:
        """The response that is not streamed."""
        (result,) = results
        pieces = [*self.reader.feed(result.text), *self.reader.finish()]
        list(self.blocks.feed(pieces))
        content = [_content(block, block.text, block.arguments) for block in self.blocks.all]
        return self._head(content=content, usage=self._usage(), **self._ending(result))

    async def stream(self, answer: Answer) -> AsyncGenerator[ServerSentEvent, None]:
        """The events of the response that is streamed; an error is the last."""
        start = {**self._usage(), "output_tokens": 0}
        yield _event("message_start", message=self._head(usage=start))
        yield _event("ping")
        try:
            with answer:
                async for event in answer:
                    chunk = event.chunk
                    assert chunk is not None
                    for change in self.blocks.feed(self.reader.feed(chunk.text)):
                        yield _changed(change)
                    if chunk.result is None:
                        continue
                    for change in (*self.blocks.feed(self.reader.finish()), *self.blocks.finish()):
                        yield _changed(change)
                    yield _event("message_delta", delta=self._ending(chunk.result), usage=self._usage())
            yield _event("message_stop")
        except Exception as error:
            yield ServerSentEvent(encoded(in_form(failure_of(error), PATH)), event="error", sep="\n")


def _content(block: Block, text: str, arguments: Any) -> dict[str, Any]:
    if block.name is None:
        return {"type": "text", "text": text}
    made = (block.id or "").replace("call_", "toolu_")
    return {"type": "tool_use", "id": made, "name": block.name, "input": arguments}


def _changed(change: Change) -> ServerSentEvent:
    index = change.block.index
    if change.kind == "open":
        return _event("content_block_start", index=index, content_block=_content(change.block, "", {}))
    if change.kind == "close":
        return _event("content_block_stop", index=index)
    if change.block.name is None:
        delta = {"type": "text_delta", "text": change.text}
    else:
        delta = {"type": "input_json_delta", "partial_json": change.text}
    return _event("content_block_delta", index=index, delta=delta)


def _event(kind: str, **values: Any) -> ServerSentEvent:
    return ServerSentEvent(encoded({"type": kind, **values}), event=kind, sep="\n")
