"""``/v1/completions``, as OpenAI's API has it: prompts as text or token ids, one or several."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from sse_starlette.event import ServerSentEvent
from starlette.responses import Response

from anabranch.decoding.generation import Generation
from anabranch.decoding.scoring import Score
from anabranch.prompts import read_prompts
from anabranch.serve.failures import FAILURES, STREAMS, RequestError, failure_of, in_form
from anabranch.serve.fields import Items, Sampling
from anabranch.serve.jobs import ScoreJob
from anabranch.serve.service import Call, Service
from anabranch.serve.usage import completion_log_probs, scored, speculation, stop_string, usage
from anabranch.serve.wire import Json, begun, encoded, event_stream, whole
from anabranch.serve.worker import Answer

__all__ = ["router"]

router = APIRouter(responses=FAILURES)
PATH = "/v1/completions"
NEW = 16  # tokens of an answer whose request gives no limit, as in OpenAI's API


class CompletionBody(Sampling):
    """A request for a completion."""

    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    max_tokens: int | None = Field(None, ge=0)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    add_special_tokens: bool | None = Field(None, description="whether texts begin with BOS, where the model has one")


@router.post(PATH, responses=STREAMS)
async def completions(body: CompletionBody, request: Request) -> Response:
    """Continue prompts."""
    service: Service = request.app.state.service
    call, answer = await begun(request, lambda: _call(service, body))
    written = _Written(service, body, call)
    if body.stream:
        return event_stream(written.stream(answer), answer, service, call.headers)
    results, scores = await whole(request, answer)
    return Json(written.completion(results, scores), headers=call.headers)


def _call(service: Service, body: CompletionBody) -> Call:
    model, unused = service.choice(body.model), body.unused()
    special = body.add_special_tokens is not False
    _, prompts = read_prompts(body.prompt, service.model.tokenizer, add_special_tokens=special)
    keywords, n = body.keywords(service.model.target.generation), body.n or 1
    if body.logprobs is not None:
        keywords |= {"log_probs": True, "top_log_probs": body.logprobs}
    most = NEW if body.max_tokens is None else body.max_tokens
    scores = []
    if body.echo and body.logprobs is not None:
        if body.stream:
            raise RequestError(400, "echo with logprobs cannot be streamed; leave stream out", param="echo")
        scores = [ScoreJob(ids, service.lora_of(model), body.logprobs) for ids in prompts]
    if most:
        whole, priority = not body.stream, body.priority or 0
        jobs = service.jobs(prompts, keywords, model=model, most=most, n=n, whole=whole, priority=priority)
    elif body.echo and not body.stream:
        jobs = []  # only the prompt itself
    else:
        raise RequestError(400, "max_tokens must be at least 1 without echo, got 0", param="max_tokens")
    return Call(prompts, n, jobs, model, scores, unused)


class _Written:
    """The response to one request."""

    def __init__(self, service: Service, body: CompletionBody, call: Call) -> None:
        self.service, self.body, self.call = service, body, call
        self.id, self.created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        self.sent = 0  # tokens of the events so far

    def _head(self) -> dict[str, Any]:
        model = self.body.model or self.service.names[0]
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": model}

    def _prompt_text(self, prompt: int) -> str:
        given = self.body.prompt
        if isinstance(given, str):
            return given
        if isinstance(given[prompt], str):
            return str(given[prompt])
        return str(self.service.model.tokenizer.decode(self.call.prompts[prompt], skip_special_tokens=False))

    def completion(self, results: list[Generation], scores: list[Score]) -> dict[str, Any]:
        """The response that is not streamed."""
        choices = []
        for index in range(len(self.call.prompts) * self.call.n):
            prompt = index // self.call.n
            result = results[index] if results else None
            said = self._prompt_text(prompt) if self.body.echo else ""
            choice = {"index": index, "text": said, "finish_reason": "length", "stop_reason": None}
            if result is not None:
                choice |= {"text": said + result.text, **_ended(result)}
            choices.append({**choice, "logprobs": self._log_probs(result, scores[prompt] if scores else None, 0)})
        return {**self._head(), "choices": choices, "usage": usage(self.call), "metrics": speculation(self.call)}

    def _log_probs(self, result: Any, score: Score | None, offset: int) -> dict[str, Any] | None:
        """Log probabilities of an echoed prompt and of new tokens; ``result`` is a chunk, a result or None."""
        if self.body.logprobs is None:
            return None
        tokens: list[int] = []
        values: list[float | None] = []
        top: list[Mapping[int, float] | None] = []
        if score is not None:
            tokens += score.token_ids
            values, top = scored(score)
            top = top if self.body.logprobs else [None] * len(tokens)
        if result is not None:
            tokens += result.token_ids
            values += result.log_probs or ()
            top += result.top_log_probs or [None] * len(result.token_ids)
        return completion_log_probs(self.service.model.tokenizer, tokens, values, top, offset)

    async def stream(self, answer: Answer) -> AsyncGenerator[ServerSentEvent, None]:
        """The events of the response that is streamed; an error is the last but one."""
        lengths = dict.fromkeys(range(len(self.call.jobs)), -1)
        try:
            with answer:
                async for event in answer:
                    chunk, part = event.chunk, event.part
                    assert chunk is not None
                    self.sent += len(chunk.token_ids)
                    said = self._prompt_text(part // self.call.n) if self.body.echo and lengths[part] < 0 else ""
                    text, lengths[part] = said + chunk.text, max(0, lengths[part])
                    logged = self._log_probs(chunk, None, lengths[part])
                    lengths[part] += len(text)
                    if not text and logged is None and chunk.result is None:
                        continue
                    ended = {"finish_reason": None} if chunk.result is None else _ended(chunk.result)
                    choice = {"index": part, "text": text, "logprobs": logged, **ended}
                    yield self._event({**self._head(), "choices": [choice]})
            if self.body.stream_options is not None and self.body.stream_options.include_usage:
                last = {**self._head(), "choices": [], "usage": usage(self.call), "metrics": speculation(self.call)}
                yield ServerSentEvent(encoded(last), sep="\n")
        except Exception as error:
            yield ServerSentEvent(encoded(in_form(failure_of(error), PATH)), sep="\n")
        yield ServerSentEvent("[DONE]", sep="\n")

    def _event(self, chunk: dict[str, Any]) -> ServerSentEvent:
        options = self.body.stream_options
        if options is not None and options.include_usage:
            chunk["usage"] = usage(self.call, self.sent) if options.continuous_usage_stats else None
        return ServerSentEvent(encoded(chunk), sep="\n")


def _ended(result: Generation) -> dict[str, Any]:
    return {"finish_reason": result.finish_reason, "stop_reason": stop_string(result)}
