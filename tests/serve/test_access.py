"""Who may call, how much, and what becomes of requests that are damaged, too many, too late or left behind."""

from __future__ import annotations

import asyncio
import json
import logging
import select
import socket
import time
from collections.abc import MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from served import SETTINGS, Gate, Server, running, until
from test_openai import metrics, text_of

from anabranch.errors import FileError, InputError
from anabranch.serve.access import LogLines
from anabranch.serve.settings import Settings, check, keys_of

COMPLETIONS = "/v1/completions"
MESSAGE = {"messages": [{"role": "user", "content": "x"}]}


def test_keys(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# ours\nsecond\n\nthird\n")
    with running(replace(SETTINGS, api_keys=("first",), api_key_file=tmp_path / "keys")) as server:
        body = {"prompt": "x", "max_tokens": 1}
        for key in ("first", "second", "third"):
            for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
                assert server.client.post(COMPLETIONS, json=body, headers=headers).status_code == 200
        for headers in (
            {},
            {"authorization": "Bearer firs"},
            {"authorization": "first"},
            {"x-api-key": b"\xe9"},
            {"x-api-key": ""},
        ):
            response = server.client.post(COMPLETIONS, json=body, headers={**headers})
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
            theirs = server.client.post("/v1/messages", json={**MESSAGE, "max_tokens": 1}, headers={**headers})
            assert (theirs.status_code, theirs.json()["error"]["type"]) == (401, "authentication_error")
        for path in ("/v1/models", "/health", "/metrics"):
            assert server.client.get(path).status_code == 200
        for path in ("/slots", "/props"):
            assert server.client.get(path).status_code == 401


def test_a_public_address_needs_a_key(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(InputError, match="can be reached by others"):
            check(Settings(host=host))
        check(Settings(host=host, api_keys=("k",)))
        check(Settings(host=host, no_key=True))
    for host in ("127.0.0.1", "::1", "localhost"):
        check(Settings(host=host))
    for wrong in ({"port": 70000}, {"rows": 0}, {"queue": -1}, {"no_key": True, "api_keys": ("k",)}):
        with pytest.raises(InputError):
            check(Settings(**wrong))
    (tmp_path / "none").write_text("# nothing\n")
    with pytest.raises(InputError, match="contains no API key"):
        keys_of(Settings(api_key_file=tmp_path / "none"))
    with pytest.raises(FileError):
        keys_of(Settings(api_key_file=tmp_path / "missing"))


def test_pages_of_other_names_and_origins(server: Server) -> None:
    assert server.client.get("/health", headers={"host": "evil.example:80"}).status_code == 400
    assert server.client.get("/health", headers={"host": "localhost:1"}).status_code == 200
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in server.client.options(COMPLETIONS, headers=asked).headers
    with running(replace(SETTINGS, origins=("https://a.example",), hosts=("b.example",))) as other:
        allowed = other.client.options(COMPLETIONS, headers=asked)
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        assert other.client.get("/health", headers={"host": "b.example"}).status_code == 200


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"{", "application/json"),
        (b"\xff\xfe{}", "application/json"),
        (b'{"prompt": "\xff"}', "application/json"),
        (b'{"prompt": "\\ud800"}', "application/json"),
        (b"[1]", "application/json"),
        (b"[" * 100_000, "application/json"),
        (b'{"prompt": "x", "temperature": NaN}', "application/json"),
        (b'{"prompt": "x"}', "text/plain"),
        (b'{"prompt": "x"}', "application/x-www-form-urlencoded"),
        (b"", "application/json"),
    ],
)
def test_damaged_bodies(server: Server, content: bytes, kind: str) -> None:
    for path in (COMPLETIONS, "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        response = server.client.post(path, content=content, headers={"content-type": kind})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["type"] == "invalid_request_error"
        if content.endswith(b"}") and "json" not in kind:
            assert f"Content-Type: application/json, got {kind}" in response.json()["error"]["message"]


def test_bodies_that_are_too_large_or_too_slow() -> None:
    with running(replace(SETTINGS, max_body=1000)) as server:
        assert server.post(COMPLETIONS, prompt="x" * 2000).status_code == 413
        chunks = (b"x" * 400 for _ in range(4))
        response = server.client.post(COMPLETIONS, content=chunks, headers={"content-type": "application/json"})
        assert response.status_code == 413
        theirs = server.post("/v1/messages", **MESSAGE, max_tokens=1, metadata={"user_id": "x" * 2000})
        assert (theirs.status_code, theirs.json()["error"]["type"]) == (413, "request_too_large")
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=300) as connection:
            connection.sendall(
                f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3000\r\n\r\n".encode()
            )
            connection.sendall(b"x" * 1500)
            assert not select.select([connection], [], [], 0.2)[0], (
                "closed while it is sending, it could lose the answer"
            )
            connection.sendall(b"x" * 1500)
            assert b" 413 " in connection.recv(4096).split(b"\r\n")[0]
    with running(replace(SETTINGS, body_seconds=0.2)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=300) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{")
            assert b" 408 " in slow.recv(4096).split(b"\r\n")[0]


def test_connections_that_send_slowly_hold_up_nobody() -> None:
    """Forty clients stop in the middle of a header or a body: those with a body get their error."""
    with running(replace(SETTINGS, rows=2, body_seconds=2)) as server, ExitStack() as stack:
        host, port = server.url.removeprefix("http://").split(":")
        half = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Le"
        slow = [stack.enter_context(socket.create_connection((host, int(port)), timeout=300)) for _ in range(40)]
        for number, connection in enumerate(slow):
            connection.sendall((half if number % 2 else half + 'ngth: 50\r\n\r\n{"prompt": ').encode())
        assert server.ask(COMPLETIONS, prompt="the", max_tokens=9, temperature=0)["choices"][0]["text"] == (
            server.reference.generate("the", max_new_tokens=9).text
        )
        assert all(b" 408 " in connection.recv(4096).split(b"\r\n")[0] for connection in slow[::2])
        assert all(connection.recv(4096) == b"" for connection in slow[1::2])


def test_connections_without_a_head_are_closed() -> None:
    """A client that sends nothing, or stops halfway through a later head, is cut off; an idle connection stays open."""
    with running(replace(SETTINGS, body_seconds=0.3)) as server, ExitStack() as stack:
        address = server.url.removeprefix("http://")
        silent, halved, idle = (stack.enter_context(closing(HTTPConnection(address, timeout=300))) for _ in range(3))
        silent.connect()
        for connection in (halved, idle):
            connection.request("GET", "/health")
            assert connection.getresponse().read() == b'{"status":"ok"}'
        halved.sock.sendall(b"GET /health HT")
        assert silent.sock.recv(4096) == b""
        assert halved.sock.recv(4096) == b""
        time.sleep(0.5)
        idle.sock.sendall(b"GET /health HT")
        idle.sock.sendall(b"TP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in idle.sock.recv(4096).split(b"\r\n")[0]


def stuck(server: Server, **body: Any) -> Future[None]:
    """Start a stream whose connection takes no bytes of the body."""
    given: list[dict[str, Any]] = [{"type": "http.request", "body": json.dumps({**body, "stream": True}).encode()}]

    async def receive() -> dict[str, Any]:
        return given.pop() if given else await asyncio.Future[dict[str, Any]]()

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Future()

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "query_string": b"", "headers": headers}
    scope |= {"http_version": "1.1", "scheme": "http", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)}
    loop = server.service.worker._loop
    assert loop is not None
    started = asyncio.run_coroutine_threadsafe(server.app(scope, receive, send), loop)
    until(lambda: server.service.worker.jobs)
    return started


def test_a_client_that_reads_nothing_is_dropped() -> None:
    """After ``send_seconds`` its row is free, though its text has not ended."""
    with running(replace(SETTINGS, send_seconds=0.2), drafter="none") as server, Gate(server) as gate:
        stuck(server, prompt="the", max_tokens=80, ignore_eos=True)
        gate.let(3)
        until(lambda: gate.held and not server.service.worker.jobs)


def test_a_client_that_reads_nothing_holds_up_nobody() -> None:
    """The next one gets the only row while the first answer still waits to be read."""
    with running(replace(SETTINGS, rows=1)) as server:
        with Gate(server):
            waiting = stuck(server, prompt="the", max_tokens=80, ignore_eos=True)
        asked: dict[str, Any] = {"prompt": "a river", "max_tokens": 20, "temperature": 0}
        text = server.reference.generate("a river", max_new_tokens=20).text
        assert server.ask(COMPLETIONS, **asked)["choices"][0]["text"] == text
        assert text_of(server.events(COMPLETIONS, **asked)) == text
        assert not waiting.done()
        waiting.cancel()


def order(server: Server, requests: Sequence[tuple[str, str, dict[str, Any]]]) -> list[int]:
    """The numbers of requests (API key, path, body) in the order of their first tokens, if all wait at the start."""
    worker = server.service.worker
    with Gate(server) as gate, ThreadPoolExecutor(len(requests)) as pool:
        sent = []
        for key, path, body in requests:
            sent.append(pool.submit(server.client.post, path, json=body, headers={"x-api-key": key}))
            until(lambda: len(worker.jobs) == len(sent))
        jobs = worker.jobs
        gate.open()
        assert [each.result().status_code for each in sent] == [200] * len(sent)
    return sorted(range(len(jobs)), key=lambda number: jobs[number].first or 0)


def test_the_priority_of_a_request_and_its_key_decide_who_is_next() -> None:
    """Smaller priorities first, whatever the interface; among equals, keys get equal shares."""
    body: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "drafter": "none"}
    chat, completion = {**MESSAGE, **body}, {"prompt": "the", **body}
    with running(replace(SETTINGS, rows=1, queue=16, api_keys=("many", "few"))) as server:
        asked = [(COMPLETIONS, completion), ("/v1/chat/completions", chat)] * 2
        urgent = [("many", path, {**fields, "priority": 2 - place}) for place, (path, fields) in enumerate(asked)]
        assert order(server, urgent) == [3, 2, 1, 0]
        shared = order(server, [(key, COMPLETIONS, completion) for key in ["many"] * 8 + ["few"] * 2])
        assert max(shared.index(8), shared.index(9)) <= 5


def test_a_full_queue_refuses_and_takes_again() -> None:
    with running(replace(SETTINGS, rows=1, queue=1)) as server:
        with Gate(server) as gate, ThreadPoolExecutor(2) as pool:
            waiting = [
                pool.submit(server.ask, COMPLETIONS, prompt="the", max_tokens=3, temperature=0) for _ in range(2)
            ]
            until(lambda: server.service.worker.size == 2)
            refused = server.post(COMPLETIONS, prompt="the", max_tokens=3)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["type"] == "server_error"
            gate.open()
            texts = [each.result()["choices"][0]["text"] for each in waiting]
        assert texts == [server.reference.generate("the", max_new_tokens=3).text] * 2
        assert server.post(COMPLETIONS, prompt="the", max_tokens=3).status_code == 200
        assert server.post(COMPLETIONS, prompt="the", max_tokens=3, n=3).status_code == 400
        assert "anabranch:requests_refused_total" in server.client.get("/metrics").text


def test_clients_that_leave_free_their_rows_and_disturb_nobody(server: Server) -> None:
    """A stream and a whole answer are left: no further pass runs for them, and the text beside them is as alone."""
    worker, ended = server.service.worker, 'vllm:request_success_total{finished_reason="abort",model_name="toy"}'
    before = metrics(server).get(ended, 0)
    long: dict[str, Any] = {"prompt": "the thing", "max_tokens": 80, "ignore_eos": True, "drafter": "none"}
    with Gate(server) as gate, ThreadPoolExecutor(1) as pool:
        beside = pool.submit(server.ask, COMPLETIONS, prompt="a river", max_tokens=60, temperature=0, drafter="none")
        until(lambda: len(worker.jobs) == 1)
        with server.client.stream("POST", COMPLETIONS, json={**long, "stream": True}) as response:
            until(lambda: len(worker.jobs) == 2)
            gate.let(12)
            next(line for line in response.iter_lines() if line.startswith("data: "))
        until(lambda: len(worker.jobs) == 1)
        with server.leaving(COMPLETIONS, **long):
            until(lambda: len(worker.jobs) == 2)
        until(lambda: len(worker.jobs) == 1)
        gate.open()
        text = beside.result()["choices"][0]["text"]
    assert text == server.reference.generate("a river", max_new_tokens=60).text
    assert metrics(server)[ended] == before + 2


def test_requests_that_take_too_long_end() -> None:
    with running(replace(SETTINGS, request_seconds=0.2)) as server:
        scheduler = server.service.model.scheduler
        tick = scheduler.tick
        scheduler.tick = lambda: (time.sleep(0.05), tick())[1]  # type: ignore[method-assign]
        body: dict[str, Any] = {"prompt": "the", "max_tokens": 80, "ignore_eos": True, "drafter": "none"}
        late = server.post(COMPLETIONS, **body)
        assert (late.status_code, late.json()["error"]["type"]) == (504, "timeout_error")
        assert "takes longer" not in late.text
        streamed = server.events(COMPLETIONS, **body)
        assert streamed[-1][1]["error"]["type"] == "timeout_error"


def test_comments_keep_a_silent_stream_alive() -> None:
    with running(replace(SETTINGS, keep_alive=0.05)) as server:
        body = {"prompt": "the", "max_tokens": 2, "stream": True}
        with Gate(server) as gate, server.client.stream("POST", COMPLETIONS, json=body) as response:
            lines = response.iter_lines()
            assert next(lines) == ": keep-alive"
            gate.open()
            assert list(lines)[-2] == "data: [DONE]"


def test_errors_of_a_step_end_their_requests_only(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = "anabranch.decoding.engine.Engine.step"
    with monkeypatch.context() as patch:
        patch.setattr(engine, lambda self: 1 / 0)
        failed = server.post(COMPLETIONS, prompt="the", max_tokens=2)
    assert failed.status_code == 500
    assert "division" not in failed.text
    assert server.ask(COMPLETIONS, prompt="the", max_tokens=2, temperature=0)


def test_log_lines_have_ids_and_counts_but_no_text(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="anabranch.serve"):
        given = server.client.post(
            COMPLETIONS, json={"prompt": "secret words", "max_tokens": 2, "hint": 1}, headers={"x-request-id": "mine-1"}
        )
        other = server.post(COMPLETIONS, prompt="secret words", max_tokens=2)
        assert given.headers["x-request-id"] == "mine-1"
        counted = server.post("/tokenize", prompt="secret words", hint=1)
        names = {"mine-1", other.headers["x-request-id"], counted.headers["x-request-id"]}
        until(lambda: names <= {line.get("request_id") for line in logged(caplog)})  # others may still be on their way
    lines = logged(caplog)
    first = next(line for line in lines if line.get("request_id") == "mine-1")
    assert (first["status"], first["completion_tokens"], first["ignored"]) == (200, 2, ["hint"])
    assert [line["ignored"] for line in lines if line.get("path") == "/tokenize"] == [["hint"]]
    assert "secret" not in json.dumps(lines)


def test_texts_are_logged_where_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with (
        running(replace(SETTINGS, log_prompts=True)) as server,
        caplog.at_level(logging.INFO, logger="anabranch.serve"),
    ):
        server.ask(COMPLETIONS, prompt="some words", max_tokens=2)
        until(lambda: ["some words"] in [line.get("prompts") for line in logged(caplog)])


def logged(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(LogLines().format(record)) for record in list(caplog.records)]
