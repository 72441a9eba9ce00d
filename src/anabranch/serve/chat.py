"""``/v1/chat/completions``, as OpenAI's API has it."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from sse_starlette.event import ServerSentEvent
from starlette.responses import Response

from anabranch.declared import Keywords
from anabranch.decoding.generation import Chunk, Generation
from anabranch.serve.conversation import template_messages, tools_of
from anabranch.serve.failures import FAILURES, STREAMS, RequestError, failure_of, in_form
from anabranch.serve.fields import Items, Sampling
from anabranch.serve.service import Call, Service
from anabranch.serve.steps import Extension, StepWriter
from anabranch.serve.toolcalls import Piece
from anabranch.serve.turns import Turn, prepared, style
from anabranch.serve.usage import chat_log_probs, speculation, stop_string, usage
from anabranch.serve.wire import answered, encoded
from anabranch.serve.worker import Answer

__all__ = ["router"]

router = APIRouter(responses=FAILURES)
PATH = "/v1/chat/completions"


class ChatBody(Sampling):
    """A request for a chat completion."""

    messages: Items[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Items[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = Field(None, description="whether the tokenizer adds BOS to the template's text")
    anabranch: Extension | None = Field(None, description="options that only this server has")

    @property
    def with_steps(self) -> bool:
        """Return whether chunks have the steps of decoding."""
        return self.anabranch is not None and bool(self.anabranch.steps)

    def turn(self) -> Turn:
        """The conversation. Raises RequestError."""
        if self.add_generation_prompt is False and not self.continue_final_message:
            raise RequestError(400, "add_generation_prompt=false is not supported", param="add_generation_prompt")
        return Turn(
            template_messages(self.messages),
            tools_of(self.tools),
            _choice_of(self.tool_choice),
            single=self.parallel_tool_calls is False,
            variables=self.chat_template_kwargs or {},
            resumes=self.continue_final_message,
            special=bool(self.add_special_tokens),
        )


def _choice_of(given: str | dict[str, Any] | None) -> str:
    """A request's tool choice: "auto", "none", "required" or a function's name. Raises RequestError."""
    if not isinstance(given, dict):
        return given or "auto"
    function = given.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise RequestError(400, f"tool_choice must name a function, got {given!r}", param="tool_choice")
    return name


@router.post(PATH, responses=STREAMS)
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    return await answered(request, body, _call, _Written)


def _call(service: Service, body: ChatBody, turn: Turn) -> Call:
    extra: Keywords = {}
    if body.logprobs:
        extra = {"log_probs": True, "top_log_probs": body.top_logprobs or 0}
    elif body.top_logprobs:
        raise RequestError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    if body.with_steps and not body.stream:
        raise RequestError(400, "anabranch.steps needs stream=true", param="anabranch")
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return prepared(service, turn, body, most=most, extra=extra)


class _Written:
    """The response to one request."""

    def __init__(self, service: Service, body: ChatBody, turn: Turn, call: Call) -> None:
        self.service, self.body, self.turn, self.call = service, body, turn, call
        self.style = style(service) if turn.offered else None
        self.id, self.created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        self.sent = 0  # tokens of the events so far

    def _head(self, kind: str) -> dict[str, Any]:
        model = self.body.model or self.service.names[0]
        return {"id": self.id, "object": kind, "created": self.created, "model": model}

    def _log_probs(self, part: Chunk | Generation) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        shown = self.body.top_logprobs or 0
        tokenizer = self.service.model.tokenizer
        return chat_log_probs(tokenizer, part.token_ids, part.log_probs, part.top_log_probs, shown)

    # -- whole ---------------------------------------------------------------------------------------------
    def whole(self, results: list[Generation]) -> dict[str, Any]:
        """The response that is not streamed."""
        choices = [self._choice(index, result) for index, result in enumerate(results)]
        return {
            **self._head("chat.completion"),
            "choices": choices,
            "usage": usage(self.call),
            "metrics": speculation(self.call),
        }

    def _choice(self, index: int, result: Generation) -> dict[str, Any]:
        reader = self.turn.reader(self.style)
        pieces = [*reader.feed(result.text), *reader.finish()]
        text = "".join(piece.text for piece in pieces if piece.call is None)
        message: dict[str, Any] = {"role": "assistant", "content": text or None if reader.calls else text}
        calls: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            if piece.call is not None and piece.name is not None:
                made = {"name": piece.name, "arguments": ""}
                calls[piece.call] = {"id": piece.id, "type": "function", "function": made}
            if piece.call is not None:
                calls[piece.call]["function"]["arguments"] += piece.text
        if calls:
            message["tool_calls"] = [calls[each] for each in sorted(calls)]
        return {
            "index": index,
            "message": message,
            "logprobs": self._log_probs(result),
            "finish_reason": _reason(result, reader.calls),
            "stop_reason": stop_string(result),
        }

    # -- streamed ------------------------------------------------------------------------------------------
    async def stream(self, answer: Answer) -> AsyncGenerator[ServerSentEvent, None]:
        """The events of the response that is streamed; an error is the last but one."""
        readers = [self.turn.reader(self.style) for _ in self.call.jobs]
        tokenizer, steps = self.service.model.tokenizer, self.body.with_steps
        writers = [StepWriter(tokenizer, job.stop) for job in self.call.jobs] if steps else None
        begun: set[int] = set()
        try:
            with answer:
                async for event in answer:
                    chunk, part = event.chunk, event.part
                    assert chunk is not None
                    self.sent += len(chunk.token_ids)
                    pieces = readers[part].feed(chunk.text) + ([] if chunk.result is None else readers[part].finish())
                    more: dict[str, Any] = {}  # of the first event
                    if self.body.logprobs:
                        more["logprobs"] = self._log_probs(chunk)
                    if writers is not None:
                        more["anabranch"] = {"step": writers[part].add(chunk)}
                    for delta in [_delta(piece) for piece in pieces] or ([{"content": ""}] if more else []):
                        first = {} if part in begun else {"role": "assistant"}
                        begun.add(part)
                        yield self._chunk(part, {**first, **delta}, more)
                        more = {}
                    if chunk.result is not None:
                        first = {} if part in begun else {"role": "assistant", "content": ""}
                        yield self._chunk(part, first, self._end(chunk.result, readers[part].calls))
            if self.body.stream_options is not None and self.body.stream_options.include_usage:
                head = {**self._head("chat.completion.chunk"), "choices": []}
                yield _event({**head, "usage": usage(self.call), "metrics": speculation(self.call)})
        except Exception as error:
            yield _event(in_form(failure_of(error), PATH))
        yield ServerSentEvent("[DONE]", sep="\n")

    def _end(self, result: Generation, calls: int) -> dict[str, Any]:
        ended: dict[str, Any] = {"finish_reason": _reason(result, calls), "stop_reason": stop_string(result)}
        if self.body.with_steps:
            ended["anabranch"] = {"stats": result.stats.to_dict(), "drafter": result.drafter}
        return ended

    def _chunk(self, part: int, delta: dict[str, Any], more: dict[str, Any]) -> ServerSentEvent:
        choice = {"index": part, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        options = self.body.stream_options
        if options is not None and options.include_usage:
            chunk["usage"] = usage(self.call, self.sent) if options.continuous_usage_stats else None
        return _event(chunk)


def _event(value: dict[str, Any]) -> ServerSentEvent:
    return ServerSentEvent(encoded(value), sep="\n")


def _delta(piece: Piece) -> dict[str, Any]:
    if piece.call is None:
        return {"content": piece.text}
    made: dict[str, Any] = {"index": piece.call, "function": {"arguments": piece.text}}
    if piece.name is not None:
        made |= {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": piece.text}}
    return {"tool_calls": [made]}


def _reason(result: Generation, calls: int) -> str:
    return "tool_calls" if calls and result.finish_reason == "stop" else result.finish_reason
