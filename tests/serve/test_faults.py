"""Under load: clients that leave at random, prompts of all lengths, LoRAs, restarts; others' texts stay their own."""

from __future__ import annotations

import errno
import http.client
import json
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from pydantic import ValidationError
from served import SETTINGS, Gate, Server, running, until

from anabranch.decoding import prefix_files
from anabranch.decoding.batch import Member
from anabranch.decoding.engine import Engine, Step
from anabranch.serve.chat import ChatBody
from anabranch.serve.completions import CompletionBody
from anabranch.serve.fields import Body
from anabranch.serve.info import DetokenizeBody
from anabranch.serve.messages import MessagesBody
from anabranch.serve.responses import ResponsesBody
from small import drawn_lora, small_adapter
from toy_text import ToyFolders

COMPLETIONS = "/v1/completions"
ROOT = Path(__file__).resolve().parents[2]


def asked(number: int) -> dict[str, Any]:
    draws = random.Random(number)
    prompt = "".join(draws.choice("the river ") for _ in range(draws.randint(1, 50)))
    greedy = number % 2 == 0
    return {"prompt": prompt, "max_tokens": draws.randint(4, 24), "temperature": 0 if greedy else 1, "seed": number}


def expected(server: Server, number: int) -> str:
    body = asked(number)
    options = {"max_new_tokens": body["max_tokens"], "temperature": body["temperature"], "seed": body["seed"]}
    return str(server.reference.generate(body["prompt"], **options).text)


@pytest.mark.parametrize("clients", [12, pytest.param(64, marks=pytest.mark.thorough)])
def test_clients_that_leave_at_random(clients: int) -> None:
    """A third of the clients leave; the texts of the others, streamed or whole, equal what each gets alone."""
    with running(replace(SETTINGS, rows=6, queue=2 * clients)) as server:

        def ask(number: int) -> str | None:
            body, leaves = asked(number), number % 3 == 0
            if leaves and number % 2:
                with suppress(httpx.TimeoutException):
                    httpx.post(server.url + COMPLETIONS, json={**body, "max_tokens": 40}, timeout=0.05)
                return None
            if leaves or number % 5 == 0:
                text = ""
                with server.client.stream("POST", COMPLETIONS, json={**body, "stream": True}, timeout=300) as response:
                    for line in response.iter_lines():
                        if leaves:
                            return None
                        if line.startswith("data: {"):
                            text += httpx.Response(200, content=line[6:]).json()["choices"][0]["text"]
                return text
            return str(server.ask(COMPLETIONS, **body)["choices"][0]["text"])

        with ThreadPoolExecutor(clients) as pool:
            texts = list(pool.map(ask, range(clients)))
        worker, scheduler = server.service.worker, server.service.model.scheduler
        until(lambda: not (worker.size or worker.jobs or (scheduler.engine and scheduler.engine.active)))
        for number, text in enumerate(texts):
            if text is not None:
                assert text == expected(server, number), number


def test_loras_are_models_of_their_own() -> None:
    with running(drafter="none") as server:
        target = server.service.model.target
        for model in (server.service.model, server.reference):
            model.target.decoder.add_lora("tuned", drawn_lora(target.config, seed=5))
        body: dict[str, Any] = {"prompt": "the thing", "max_tokens": 16, "temperature": 0}
        with ThreadPoolExecutor(2) as pool:
            names = (None, "tuned")
            plain, tuned = pool.map(lambda name: server.ask(COMPLETIONS, **body, model=name), names)
        generate = server.reference.generate
        assert plain["choices"][0]["text"] == generate("the thing", max_new_tokens=16).text
        assert tuned["choices"][0]["text"] == generate("the thing", max_new_tokens=16, lora="tuned").text
        assert plain["choices"][0]["text"] != tuned["choices"][0]["text"]
        assert [each["parent"] for each in server.client.get("/v1/models").json()["data"]] == [None, "toy"]


def test_adapters_are_models_of_their_own() -> None:
    with running(drafter=None) as server:
        model = server.service.model
        adapter = small_adapter(model.target.decoder)
        model.choices["drafted"] = replace(model.adapters[0], module=adapter)
        body: dict[str, Any] = {"prompt": "the thing", "max_tokens": 16, "temperature": 0}
        plain, drafted = (server.ask(COMPLETIONS, **body, model=name) for name in ("toy", "drafted"))
        assert plain["choices"] == drafted["choices"]
        assert [each["id"] for each in server.client.get("/v1/models").json()["data"]] == ["toy", "drafted"]
        (job,) = server.service.jobs([[3]], {}, model="drafted", most=1, n=1, whole=True)
        assert adapter in [getattr(part, "adapter", None) for part in job.drafter.parts]
        assert server.client.get("/props").json()["adapters"] == ["drafted"]


def test_conversations_survive_a_restart(tmp_path: Path) -> None:
    settings = replace(SETTINGS, prefix_disk=16, prefix_folder=tmp_path)
    body: dict[str, Any] = {
        "prompt": "a beginning that is long enough to be kept: " * 2,
        "max_tokens": 2,
        "temperature": 0,
    }
    answers = []
    for _ in range(2):
        with running(settings, drafter="none") as server:
            answers.append(server.ask(COMPLETIONS, **body))
    first, second = (answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)
    assert first == 0
    assert second > 0
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]


@pytest.mark.thorough
def test_a_server_that_ends_under_load_answers_everyone() -> None:
    """Requests that run end whole or with an error in their interface's form; nobody waits forever."""
    with (
        running(replace(SETTINGS, rows=2, queue=32)) as server,
        Gate(server) as gate,
        ThreadPoolExecutor(8) as pool,
    ):
        body: dict[str, Any] = {"prompt": "the thing", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        asked = [pool.submit(server.post, COMPLETIONS, **body) for _ in range(8)]
        until(lambda: server.service.worker.size == 8)
        server.service.drain()
        assert server.post(COMPLETIONS, **body).status_code == 503
        assert server.client.get("/health").status_code == 503
        gate.open()
        text = server.reference.generate("the thing", max_new_tokens=60, ignore_eos=True).text
        for each in asked:
            response = each.result()
            assert response.status_code == 200
            assert response.json()["choices"][0]["text"] == text


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (CompletionBody, {"prompt": [1] * 999 + ["x"] * 9_001}),
        (CompletionBody, {"prompt": "x", "stop": [1] * 10_000}),
        (ChatBody, {"messages": [1] * 10_000}),
        (ChatBody, {"messages": [{}], "tools": [1] * 10_000}),
        (MessagesBody, {"messages": [1] * 10_000, "max_tokens": 1}),
        (ResponsesBody, {"input": [1] * 10_000}),
        (DetokenizeBody, {"tokens": ["x"] * 10_000}),
    ],
)
def test_the_first_wrong_item_of_a_list_ends_its_check(body: type[Body], fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as raised:
        body(**fields)
    assert raised.value.error_count() < 10


@pytest.mark.thorough  # a million tokens of text take a while
def test_a_prompt_of_a_million_tokens_disturbs_nobody() -> None:
    """As text and as token ids: refused by its length, while others decode."""
    with running(drafter="none") as server, ThreadPoolExecutor(3) as pool:
        numbers = (3, 4)
        others = [pool.submit(server.ask, COMPLETIONS, **asked(number)) for number in numbers]
        for prompt in ("x " * 500_000, [65] * 1_000_000):
            body = {"prompt": prompt, "max_tokens": 1}
            response = httpx.post(server.url + COMPLETIONS, json=body, timeout=600)
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "context_length_exceeded"
            assert "the prompt has 1000000 tokens" in response.text
        for number, other in zip(numbers, others, strict=True):
            assert other.result()["choices"][0]["text"] == expected(server, number)


GRAMMARS: dict[str, tuple[dict[str, Any], str]] = {
    "matches nothing": ({"guided_regex": r"a[^\s\S]b"}, "matches no text"),
    "refers to itself alone": ({"guided_json": {"$ref": "#"}}, "matches no text"),
    "cannot be fulfilled": ({"guided_json": {"type": "string", "minLength": 5, "maxLength": 2}}, "not supported"),
    "has an unknown rule": ({"guided_grammar": "start: other"}, "unknown name"),
    "is too long": ({"guided_json": {"enum": ["a long value" * 9] * 9_000}}, "give at most"),
    "never ends": ({"guided_grammar": 'start: again\nagain: "x" again'}, "too complex"),
    "has too many rules": ({"guided_grammar": "start: " + "(a|b)? " * 5_000 + '\na: "a"\nb: "b"'}, "too complex"),
}
LONG = ("never ends", "has too many rules")  # that are built for seconds


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.thorough) if n in LONG else n for n in GRAMMARS])
def test_a_grammar_that_fails_disturbs_nobody(server: Server, name: str) -> None:
    """It gets one sentence as its error, and the clients beside it their own texts."""
    fields, said = GRAMMARS[name]
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(server.ask, COMPLETIONS, **asked(number)) for number in (3, 4)]
        refused = server.post(COMPLETIONS, prompt="the", max_tokens=6, temperature=0, **fields)
        assert (refused.status_code, said in refused.json()["error"]["message"]) == (400, True), refused.text
        for number, other in zip((3, 4), others, strict=True):
            assert other.result()["choices"][0]["text"] == expected(server, number)


def test_a_full_disk_for_kept_texts_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(prefix_files, "write_atomically", full)
    with running(replace(SETTINGS, prefix_disk=16, prefix_folder=tmp_path)) as server, ThreadPoolExecutor(4) as pool:
        texts = pool.map(lambda number: server.ask(COMPLETIONS, **asked(number)), [*range(4), *range(4)])
        assert [text["choices"][0]["text"] for text in texts] == [expected(server, n) for n in range(4)] * 2
    assert not [*tmp_path.rglob("*.safetensors")]


def test_clients_wait_where_memory_is_exhausted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass without memory is run again with fewer rows; a text that cannot fit is refused."""
    step = Engine._step

    def full(engine: Engine, members: list[Member]) -> list[Step]:
        if len(members) > 1:
            raise torch.OutOfMemoryError
        return step(engine, members)

    with running(drafter="none") as server:
        monkeypatch.setattr(Engine, "_step", full)
        with ThreadPoolExecutor(4) as pool:
            texts = list(pool.map(lambda number: server.ask(COMPLETIONS, **asked(number)), range(4)))
        monkeypatch.setattr(Engine, "_step", step)
        assert [text["choices"][0]["text"] for text in texts] == [expected(server, number) for number in range(4)]
        with monkeypatch.context() as patch:
            patch.setattr("anabranch.decoding.scheduler.SMALL", 0)
            patch.setattr("anabranch.decoding.scheduler.free_memory", lambda device: 0)
            refused = server.post(COMPLETIONS, prompt="the", max_tokens=60)
        assert (refused.status_code, "needs a cache of" in refused.text) == (400, True)
        assert server.post(COMPLETIONS, prompt="the", max_tokens=60).status_code == 200


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_killed_server_leaves_whole_files(toys: ToyFolders, tmp_path: Path) -> None:
    """SIGKILL under load, with a full disk for the log: the next server finds the texts and answers the same."""
    options = ["--adapter", toys.adapter, "--dtype", "float32", "--device", "cpu", "--port", "0"]
    options += ["--prefix-disk", "16", "--prefix-folder", tmp_path]
    command = [sys.executable, "-m", "anabranch", "serve", "--model", toys.model, *options]
    body = {"prompt": "the river of the thing and another of the", "max_tokens": 8, "temperature": 0}
    found = []
    for _ in range(3):
        with (
            open("/dev/full", "w") as full,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=full, text=True) as process,
        ):
            try:
                assert process.stdout is not None
                url = process.stdout.readline().removeprefix("serving at ").strip()
                found.append(httpx.post(url + COMPLETIONS, json=body, timeout=300).json())
                with ThreadPoolExecutor(4) as pool:
                    load = [
                        pool.submit(
                            httpx.post, url + COMPLETIONS, json={**body, "seed": n, "temperature": 1}, timeout=300
                        )
                        for n in range(12)
                    ]
                    until(lambda load=load: any(each.done() for each in load) and any(tmp_path.glob("*/*.safetensors")))
                    process.kill()
                    for each in load:
                        with suppress(httpx.TransportError):  # the server is gone, and says so
                            assert each.result().status_code == 200
            finally:
                process.kill()
    assert len({each["choices"][0]["text"] for each in found}) == 1
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in found]
    assert cached[0] == 0
    assert cached[1] > 0
    assert cached[2] > 0


@pytest.mark.thorough
def test_an_idle_connection_stays_open(toys: ToyFolders) -> None:
    """Longer than httpx keeps one, which openai and anthropic use: else both would close it at the same moment."""
    options = ["--dtype", "float32", "--device", "cpu", "--port", "0"]
    command = [sys.executable, "-m", "anabranch", "serve", "--model", toys.model, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().removeprefix("serving at http://").strip()
            connection = http.client.HTTPConnection(address, timeout=300)
            for idle in (httpx.Limits().keepalive_expiry + 1, 0):
                connection.request("GET", "/health")
                response = connection.getresponse()
                response.read()
                assert response.status == 200
                kept = connection.sock
                time.sleep(idle)
            assert connection.sock is kept
            assert kept is not None
            process.terminate()  # an idle connection does not hold it up
            process.wait(60)
            connection.close()
        finally:
            process.kill()


@pytest.mark.thorough
def test_a_soak_leaves_nothing_behind(toys: ToyFolders, tmp_path: Path) -> None:
    """Also the script's own smoke test: its requests are answered, and it sees memory and files.

    Server and clients share one core, as in the hour-long run, which leaves the other core to other tests.
    """
    script, out = ROOT / "scripts" / "soak_server.py", tmp_path / "soak.json"
    options = ["--adapter", str(toys.adapter), "--dtype", "float32", "--device", "cpu"]
    command = [sys.executable, script, "--model", toys.model, "--seconds", "120", "--out", out, "--", *options]
    core = {max(os.sched_getaffinity(0))}
    done = subprocess.run(
        command,
        preexec_fn=lambda: os.sched_setaffinity(0, core),
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(out.read_text(encoding="utf-8"))["requests"]["seeded probe 200"] > 0
