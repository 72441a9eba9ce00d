"""Events of a stream: each step is told of at once, and what is ready together is sent together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from served import Gate, Server, until
from test_openai import metrics

from anabranch.serve import wire

COMPLETIONS = "/v1/completions"
ASKED: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True, "drafter": "none", "stream": True}
GENERATED = 'vllm:generation_tokens_total{model_name="toy"}'


@contextmanager
def texts(server: Server, prompt: str) -> Iterator[Iterator[str]]:
    """The texts of a stream's events as they come."""
    with server.client.stream("POST", COMPLETIONS, json={**ASKED, "prompt": prompt}) as response:
        data = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {"))
        yield (json.loads(each)["choices"][0]["text"] for each in data)


@pytest.mark.parametrize("prompts", [("the thing",), ("the thing", "a river")])
def test_steps_are_told_of_at_once(server: Server, prompts: tuple[str, ...]) -> None:
    with Gate(server) as gate, ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(server.events, COMPLETIONS, **{**ASKED, "prompt": prompt}) for prompt in prompts]
        until(lambda: len(server.service.worker.jobs) == len(prompts))
        gate.let(9)
        until(lambda: gate.held)
        assert server.service.worker._produced == []
        gate.open()
        for prompt, each in zip(prompts, asked, strict=True):
            text = "".join(event["choices"][0]["text"] for _, event in each.result())
            assert text == server.reference.generate(prompt, max_new_tokens=40, ignore_eos=True).text


def test_steps_are_counted_when_the_metrics_are_read(server: Server) -> None:
    before = metrics(server)
    with Gate(server) as gate, texts(server, "the thing") as found:
        until(lambda: server.service.worker.jobs)
        (job,) = server.service.worker.jobs
        while not job.tokens:
            gate.let(1)
            until(lambda: gate.held)
        gate.let(9)
        until(lambda: gate.held)
        assert metrics(server)[GENERATED] == before.get(GENERATED, 0) + 10
        gate.open()
        assert "".join(found) == server.reference.generate("the thing", max_new_tokens=40, ignore_eos=True).text


@pytest.mark.parametrize("most", [1, 2, 64])
def test_events_that_are_ready_together_are_sent_together(
    server: Server, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(wire, "JOINED", most)
    with texts(server, "the thing") as found:
        assert "".join(found) == server.reference.generate("the thing", max_new_tokens=40, ignore_eos=True).text
