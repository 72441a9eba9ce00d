"""OpenTelemetry spans of requests, by the SDK's exporter in memory, and by OTLP to a collector that listens."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from served import SETTINGS, Gate, Server, running, until

pytest.importorskip("opentelemetry.sdk")

from dataclasses import replace

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from anabranch.serve.traces import exporting

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TALK = [{"role": "user", "content": "a secret"}]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def memory() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def traced(memory: InMemorySpanExporter) -> Iterator[Server]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    with running(replace(SETTINGS, rows=1), traces=provider) as server:
        yield server


def the_span(memory: InMemorySpanExporter) -> Any:
    """The next span, which ends a little after its client has the whole response."""
    until(lambda: len(memory.get_finished_spans()) > 0)
    (span,) = memory.get_finished_spans()
    memory.clear()
    return span


def test_a_request_is_a_span_of_its_clients_trace(
    traced: Server, memory: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "anabranch.serve")
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    body = {"messages": TALK, "max_tokens": 9, "temperature": 0.5, "seed": 3, "n": 2, "stop": "~~"}
    answer = traced.client.post(CHAT, json=body, headers=headers).json()
    span = the_span(memory)
    assert (span.name, span.kind) == ("chat toy", SpanKind.SERVER)
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    until(lambda: TRACE in [getattr(line, "anabranch_fields", {}).get("trace_id") for line in list(caplog.records)])
    found = span.attributes
    assert found["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]
    asked = {"max_tokens": 9, "temperature": 0.5, "seed": 3, "choice.count": 2, "stop_sequences": ("~~",)}
    assert {name: found[f"gen_ai.request.{name}"] for name in asked} == asked
    assert found["gen_ai.response.finish_reasons"] == tuple(one["finish_reason"] for one in answer["choices"])
    statistics = answer["metrics"]["speculative_decoding"]
    assert found["anabranch.num_spec_steps"] == statistics["num_spec_steps"] > 0
    assert found["http.response.status_code"] == 200
    assert not [name for name, value in found.items() if "secret" in str(value)]
    # one row: the second sequence waits for the first
    events = [(event.attributes["anabranch.sequence"], event.name) for event in span.events]
    assert sorted(events) == [(which, name) for which in (0, 1) for name in ("decode", "prompt", "queue")]
    times = [event.timestamp for event in span.events]
    assert span.start_time <= times[0] <= times[1] <= times[2] <= span.end_time
    assert times[2] <= times[4]


def test_streams_completions_and_requests_that_fail(traced: Server, memory: InMemorySpanExporter) -> None:
    traced.events(COMPLETIONS, prompt="the", max_tokens=5, seed=2**70)
    span = the_span(memory)
    assert (span.name, span.parent) == ("text_completion toy", None)
    assert span.attributes["gen_ai.usage.output_tokens"] == 5
    assert [event.name for event in span.events] == ["queue", "prompt", "decode"]
    assert traced.post(CHAT, messages=TALK, top_p=7).status_code == 400
    span = the_span(memory)
    assert (span.name, span.attributes["http.response.status_code"]) == ("chat", 400)
    assert span.status.status_code is StatusCode.UNSET
    for path in ("/health", "/metrics"):
        traced.client.get(path)
    assert memory.get_finished_spans() == ()


def test_a_client_that_leaves_ends_its_span(traced: Server, memory: InMemorySpanExporter) -> None:
    with Gate(traced), traced.leaving(CHAT, messages=TALK):
        until(lambda: traced.service.worker.jobs)
    span = the_span(memory)
    assert span.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert span.attributes["http.response.status_code"] == 499


def test_texts_where_asked_for(memory: InMemorySpanExporter) -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    with running(replace(SETTINGS, log_prompts=True), traces=provider) as server:
        text = server.ask(CHAT, messages=TALK, max_tokens=5, temperature=0)["choices"][0]["message"]["content"]
    found = the_span(memory).attributes
    (said,) = json.loads(found["gen_ai.input.messages"])
    assert said == {"role": "user", "parts": [{"type": "text", "content": "[user]a secret[assistant]"}]}
    assert json.loads(found["gen_ai.output.messages"])[0]["parts"][0]["content"] == text


def test_spans_reach_the_collector_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    assert exporting() is None
    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "300")  # it sends again what is not answered in time
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        provider = exporting()
        assert provider is not None
        with running(traces=provider) as server:
            server.ask(COMPLETIONS, prompt="the", max_tokens=3)
        provider.shutdown()
        collector.shutdown()
    ((path, body),) = received
    assert path == "/v1/traces"
    assert b"text_completion toy" in body
    assert b"gen_ai.usage.input_tokens" in body
