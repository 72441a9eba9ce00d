"""A real server of a toy model: uvicorn in a thread, on a free port."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from anabranch.api import Model
from anabranch.serve.app import create_app
from anabranch.serve.connection import Connection
from anabranch.serve.service import Service
from anabranch.serve.settings import Settings
from toy_text import toy_model

SETTINGS = Settings(rows=8, queue=8, keep_alive=0.2)


@dataclass
class Server:
    """A server that runs, a client of it, and another copy of its model for what is expected."""

    url: str
    service: Service
    client: httpx.Client
    reference: Model
    app: FastAPI

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def ask(self, path: str, **body: Any) -> Any:
        """The JSON of a response that succeeds."""
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str, **body: Any) -> list[Any]:
        """The events of a stream that succeeds: (name, JSON), without the last line of OpenAI's."""
        found: list[Any] = []
        name = None
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: ") and line != "data: [DONE]":
                    found.append((name, json.loads(line.removeprefix("data: "))))
        return found

    @contextmanager
    def leaving(self, path: str, **body: Any) -> Iterator[None]:
        """Send a request whose client goes away at the end of the block without having read anything."""
        url, content = httpx.URL(self.url), json.dumps(body)
        head = f"POST {path} HTTP/1.1\r\nHost: {url.host}\r\nContent-Type: application/json\r\n"
        with socket.create_connection((url.host, url.port)) as client:
            client.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n{content}".encode())
            yield


class Gate:
    """Holds a server's decoding thread: while requests come and go, only those passes run that are let through."""

    def __init__(self, server: Server, passes: int = 0) -> None:
        self._worker, self._passes, self._opened = server.service.worker, passes, threading.Event()
        self._run = self._worker._pass

    def __enter__(self) -> Gate:
        self._worker._pass = self._held  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self.open()
        self._worker._pass = self._run  # type: ignore[method-assign]

    def let(self, passes: int) -> None:
        self._passes = passes

    def open(self) -> None:
        self._opened.set()

    @property
    def held(self) -> bool:
        """Whether all passes that were let through have run."""
        return not self._passes

    def _held(self) -> None:
        while not (self._passes or self._opened.wait(0.002)):
            if not self._worker._inbox.empty():
                return
        self._run()
        self._passes = max(0, self._passes - 1)


def until(condition: Callable[[], object]) -> None:
    """Wait for something that another thread does, for five minutes at most."""
    limit = time.monotonic() + 300
    while not condition():
        if time.monotonic() > limit:
            pytest.fail("the condition did not become true")
        time.sleep(0.005)


@contextmanager
def running(settings: Settings = SETTINGS, *, traces: Any = None, **toy: Any) -> Iterator[Server]:
    """Serve a toy model while the block runs."""
    with (
        toy_model(**toy) as model,
        toy_model(**toy) as reference,
        serving(model, settings, reference, traces=traces) as server,
    ):
        yield server


@contextmanager
def serving(model: Model, settings: Settings, reference: Model, *, traces: Any = None) -> Iterator[Server]:
    """Serve a model while the block runs."""
    app = create_app(model, settings, traces=traces)
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(128)  # clients may connect before the thread serves
    config = uvicorn.Config(
        app, http=Connection, log_config=None, access_log=False, lifespan="on", timeout_keep_alive=600
    )
    server = uvicorn.Server(config)  # which closes no connection while a client writes to it
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
    thread.start()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    try:
        with httpx.Client(base_url=url, timeout=300, transport=httpx.HTTPTransport(retries=50)) as client:
            yield Server(url, app.state.service, client, reference, app)
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
TEMPLATE = (
    "{% if tools %}{% for t in tools %}T{{ t['function']['name'] }}{% endfor %}{% endif %}"
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
    "{% for c in m.get('tool_calls', []) %}"
    "<{{ c['function']['name'] }}{{ c['function']['arguments'] | tojson }}>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
