"""OpenTelemetry traces: a span for each request for text, with the attributes of the GenAI semantic conventions.

Nothing is recorded unless there is a tracer provider: that of ``opentelemetry-instrument``, of a program that this
application is part of, or the one that ``exporting`` makes of OpenTelemetry's environment variables.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.propagate import extract
from opentelemetry.trace import SpanKind, StatusCode
from starlette.datastructures import Headers, State
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anabranch.serve.access import LOG
from anabranch.serve.service import Call, Service
from anabranch.serve.usage import speculation, usage

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

__all__ = ["Traces", "exporting"]

OPERATIONS = {
    **dict.fromkeys(("/v1/chat/completions", "/v1/responses", "/v1/messages"), "chat"),
    "/v1/completions": "text_completion",
}
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PHASES = {"queue": "arrived", "prompt": "joined", "decode": "first"}  # events, and the times of jobs when they begin


class Traces:
    """Makes a span of each request, a child of the one that its ``traceparent`` names; plain ASGI.

    provider  None: the process's
    texts     whether spans have the texts of prompts and answers
    """

    def __init__(self, app: ASGIApp, *, service: Service, provider: Any = None, texts: bool = False) -> None:
        self.app, self.service, self.texts = app, service, texts
        self.tracer = trace.get_tracer("anabranch", tracer_provider=provider)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; the state of one that is recorded has a ``trace``, the id for its line in the log."""
        operation = OPERATIONS.get(scope["path"]) if scope["type"] == "http" else None
        if operation is None:
            await self.app(scope, receive, send)
            return
        status = 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        attributes = {"http.request.method": scope["method"], "url.path": scope["path"]}
        with self.tracer.start_as_current_span(
            operation, context=extract(Headers(scope=scope)), kind=SpanKind.SERVER, attributes=attributes
        ) as span:
            if not span.is_recording():
                await self.app(scope, receive, send)
                return
            scope["state"]["trace"] = trace.format_trace_id(span.get_span_context().trace_id)
            try:
                await self.app(scope, receive, sending)
            finally:
                if status:
                    span.set_attribute("http.response.status_code", status)
                if status >= 500:
                    span.set_status(StatusCode.ERROR)
                call: Call | None = getattr(State(scope["state"]), "call", None)
                if call is not None:
                    self._describe(span, operation, call)

    def _describe(self, span: trace.Span, operation: str, call: Call) -> None:
        # the least delayed of three: a thread switch between the two clocks would put events before the span
        offset = max(time.time() - time.monotonic() for _ in range(3))
        for number, job in enumerate(call.jobs):
            which = {"anabranch.sequence": number} if len(call.jobs) > 1 else {}
            for name, begun in PHASES.items():
                at = getattr(job, begun)
                if at is not None:
                    span.add_event(name, which, int((at + offset) * 1e9))
        model = call.model or self.service.names[0]
        span.update_name(f"{operation} {model}")
        counted, first = usage(call), [job.first - job.arrived for job in call.jobs if job.first is not None]
        found: dict[str, Any] = {
            "operation.name": operation,
            "provider.name": "anabranch",
            "request.model": model,
            "response.model": model,
            "usage.input_tokens": counted["prompt_tokens"],
            "usage.output_tokens": counted["completion_tokens"],
            "usage.cache_read.input_tokens": counted["prompt_tokens_details"]["cached_tokens"],
            **({"response.time_to_first_chunk": min(first)} if first else {}),
            **(_asked(call) if call.jobs else {}),
            **(self._said(call) if self.texts else {}),
        }
        span.set_attributes({f"gen_ai.{name}": value for name, value in found.items()})
        statistics = speculation(call)["speculative_decoding"]
        span.set_attributes({f"anabranch.{name}": value for name, value in statistics.items()})

    def _said(self, call: Call) -> dict[str, str]:
        """The prompts, as templates make them, and the answers."""

        def messages(role: str, texts: list[str]) -> str:
            made = [{"role": role, "parts": [{"type": "text", "content": text}]} for text in texts]
            return json.dumps(made, ensure_ascii=False).encode("utf-8", "replace").decode()

        decode = self.service.model.tokenizer.decode
        answers = [job.output.detokenizer.text for job in call.jobs if job.output is not None]
        return {
            "input.messages": messages("user", [decode(ids) for ids in call.prompts]),
            "output.messages": messages("assistant", answers),
        }


def _asked(call: Call) -> dict[str, Any]:
    """The options of a request, with the values that are used, and why each of its sequences ended."""
    request, sampling = call.jobs[0].request, call.jobs[0].request.sampling
    return {
        "request.max_tokens": request.max_new_tokens,
        "request.temperature": sampling.temperature,
        "request.top_p": sampling.top_p,
        "request.top_k": sampling.top_k,
        "request.choice.count": call.n,
        "request.stop_sequences": list(call.jobs[0].stop),
        # an integer of OpenTelemetry has 64 bits; one that does not fit would end the export of all spans
        **({"request.seed": sampling.seed} if -(2**63) <= sampling.seed < 2**63 else {}),
        "response.finish_reasons": [job.reason or "abort" for job in call.jobs],
    }


def exporting() -> TracerProvider | None:
    """A provider that exports to the collector that OpenTelemetry's environment variables name; None: they name none.

    None too, with a warning, where the packages are missing, and where the process has a provider already.
    """
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return None
    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        LOG.warning("no traces are exported (%s): pip install 'anabranch[traces]'", error)
        return None
    provider = TracerProvider(
        resource=Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "anabranch")})
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
