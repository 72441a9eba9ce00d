"""Prometheus metrics: vLLM's names for requests, latencies, the caches and speculation, and our own.

vLLM's names make its dashboards and benchmark clients work as they are; ``anabranch:*`` are ours.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from anabranch.decoding.generation import Chunk, Generation
from anabranch.decoding.scheduler import Scheduler
from anabranch.serve.jobs import Job

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = CONTENT_TYPE_LATEST
MODEL = "model_name"
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
UNCOUNTED = 64  # steps: one by one amid decoding, from cold caches, counting each takes several times as long
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)


class Metrics:
    """The metrics of one server, labelled with the name of its model; safe for threads."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self._steps_left: deque[tuple[Chunk, float, bool]] = deque()  # to be counted: seconds, whether the first
        self._running = self._gauge("vllm:num_requests_running", "Sequences that have a row")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Sequences that wait for a row")
        self._cache = self._gauge("vllm:kv_cache_usage_perc", "Used part of the allocated KV cache; 1 is all of it")
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens of finished sequences")
        self._generated = self._counter("vllm:generation_tokens", "New tokens")
        self._success = self._counters("vllm:request_success", "Ended sequences", "finished_reason")
        self._queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens that were looked up")
        self._hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens that were found")
        self._first = self._histogram("vllm:time_to_first_token_seconds", "Time to first token", FIRST)
        self._between = self._histogram("vllm:inter_token_latency_seconds", "Time between tokens of a step", TOKEN)
        self._each = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Time per token after the first", TOKEN
        )
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "Time of a sequence", WHOLE)
        self._queued = self._histogram("vllm:request_queue_time_seconds", "Time before a row was free", WHOLE)
        self._read = self._histogram("vllm:request_prefill_time_seconds", "Time to read the prompt", WHOLE)
        self._decode = self._histogram("vllm:request_decode_time_seconds", "Time after the first token", WHOLE)
        self._lengths = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a sequence", TOKENS)
        self._answers = self._histogram("vllm:request_generation_tokens", "New tokens of a sequence", TOKENS)
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Drafts, one a sequence and step")
        self._draft_tokens = self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens, nodes of trees included")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens")
        self._places = self._counters(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by their depth in the tree, from 0",
            "position",
        )
        self._steps = self._counter("anabranch:steps", "Target passes, each counted for every sequence in it")
        self._sources = self._counters("anabranch:tokens", "New tokens by what proposed them", "source")
        self._seconds = self._counters("anabranch:step_seconds", "Time of steps by part", "part")
        self._passes = self._counters("anabranch:passes", "Forward passes by kind", "kind")
        self.refused = self._counter("anabranch:requests_refused", "Requests that the queue had no room for")

    def _gauge(self, name: str, said: str) -> Gauge:
        return Gauge(name, said, (MODEL,), registry=self.registry).labels(self._model)

    def _counter(self, name: str, said: str) -> Counter:
        return Counter(name, said, (MODEL,), registry=self.registry).labels(self._model)

    def _counters(self, name: str, said: str, label: str) -> Callable[[str], Counter]:
        """A counter for each value of a label. They are kept: looking one up takes ten times as long as counting."""
        several = Counter(name, said, (MODEL, label), registry=self.registry)
        return cache(lambda value: several.labels(self._model, value))

    def _histogram(self, name: str, said: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, said, (MODEL,), registry=self.registry, buckets=buckets).labels(self._model)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format (``CONTENT_TYPE``)."""
        self._count_steps()
        return generate_latest(self.registry)

    def load(self, running: int, scheduler: Scheduler) -> None:
        """Set the gauges after a tick."""
        self._running.set(running)
        self._waiting.set(scheduler.waiting)
        engine = scheduler.engine
        places = 0 if engine is None else engine.cache.rows * engine.cache.capacity
        self._cache.set(sum(engine.cache.lengths) / places if engine is not None and places else 0.0)

    def step(self, job: Job, chunk: Chunk, since: float | None) -> None:
        """Count a step of a sequence; ``since`` is the time since its last one, None for the first."""
        if since is None:
            assert job.first is not None
            self._steps_left.append((chunk, job.first - job.arrived, True))
        else:
            self._steps_left.append((chunk, since, False))
        if len(self._steps_left) >= UNCOUNTED:
            self._count_steps()

    def _count_steps(self) -> None:
        with suppress(IndexError):  # there are none left; another thread may take some
            while True:
                self._count_step(*self._steps_left.popleft())

    def _count_step(self, chunk: Chunk, seconds: float, first: bool) -> None:
        step = chunk.step
        self._generated.inc(len(chunk.token_ids))
        (self._first if first else self._between).observe(seconds)
        self._steps.inc()
        if step.drafted:
            self._drafts.inc()
            self._draft_tokens.inc(step.drafted)
        self._accepted.inc(step.verdict.accepted)
        for place in range(step.verdict.accepted):
            self._places(str(place)).inc()
        for source in chunk.sources:
            self._sources(source).inc()
        for part, seconds in zip(step.timings._fields, step.timings, strict=True):
            self._seconds(part).inc(seconds)
        for call in step.calls:
            self._passes(call.kind).inc()

    def ended(self, job: Job, reason: str, result: Generation | None) -> None:
        """Count the end of a sequence: "stop", "length", "abort" or "error"."""
        self._count_steps()
        now, prompt = time.monotonic(), len(job.request.prompt_ids)
        self._success(reason).inc()
        self._prompt.inc(prompt)
        self._queries.inc(prompt)
        self._hits.inc(0 if job.ticket is None else job.ticket.reused)
        self._whole.observe(now - job.arrived)
        self._lengths.observe(prompt)
        self._answers.observe(job.tokens)
        if job.joined is not None:
            self._queued.observe(max(0.0, job.joined - job.arrived))
        if result is not None and job.first is not None:
            self._read.observe(result.stats.prefill_seconds)
            self._decode.observe(now - job.first)
            self._each.observe((now - job.first) / max(1, len(result.token_ids) - 1))
