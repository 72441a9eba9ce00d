"""``anabranch serve`` as a user starts and ends it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from terminals import PROGRAM

from anabranch.api import Model, load
from anabranch.model.peft import write_lora
from small import drawn_lora
from toy_text import ToyFolders
from verbs import Anabranch

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "the thing", "max_tokens": 60, "temperature": 0, "ignore_eos": True}


@contextmanager
def started(*options: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server's process and its URL while the block runs."""
    command = [*PROGRAM, "serve", *map(str, options), "--port", "0", "--name", "toy"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().removeprefix("serving at ").strip()
        finally:
            process.kill()


def refused(url: str) -> bool:
    """Whether the server takes no new request."""
    try:
        return httpx.get(url + "/health", timeout=300).status_code == 503
    except httpx.TransportError:
        return True


def streamed(url: str, begun: Callable[[], object], **fields: object) -> list[Any]:
    """The events of a stream; ``begun`` is called at its first line."""
    with httpx.stream("POST", url + COMPLETIONS, json={**BODY, "stream": True, **fields}, timeout=300) as response:
        lines = response.iter_lines()
        first = next(lines)
        begun()
        return [json.loads(line.removeprefix("data: ")) for line in [first, *lines] if line.startswith("data: {")]


def text_of(events: list[Any]) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"])


def test_it_prints_its_url_answers_and_drains_on_sigterm(where: list[object], model: Model) -> None:
    with started(*where, "--drain-seconds", 120, "--preset", "codex") as (process, url), ThreadPoolExecutor(8) as pool:
        assert process.stdout is not None
        preset = [process.stdout.readline().strip() for _ in range(9)]
        assert preset[:4] == ["", "Codex (~/.codex/config.toml):", "", 'model = "toy"']
        assert preset[-1] == f'base_url = "{url}/v1"'
        assert httpx.get(url + "/v1/models", timeout=300).json()["data"][0]["id"] == "toy"
        begun = threading.Barrier(9)
        streams = [pool.submit(streamed, url, begun.wait) for _ in range(8)]
        begun.wait(300)
        process.send_signal(signal.SIGTERM)
        while not refused(url):  # the signal is on its way
            time.sleep(0.01)
        texts = [text_of(each.result()) for each in streams]
        _, err = process.communicate(timeout=300)
    assert process.returncode == 143
    assert texts == [model.generate("the thing", max_new_tokens=60, ignore_eos=True).text] * 8
    lines = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    paths = Counter(line["path"] for line in lines if "path" in line)
    assert (paths["/v1/models"], paths[COMPLETIONS]) == (1, 8)
    assert "Traceback" not in err


@pytest.mark.thorough
def test_requests_that_outlast_the_drain_get_an_error(where: list[object]) -> None:
    """The texts of two requests that wait for one row cannot end at once: both clients get an error."""
    with started(*where, "--rows", 1, "--drain-seconds", 0) as (process, url), ThreadPoolExecutor(2) as pool:
        begun = threading.Event()
        stream = pool.submit(streamed, url, begun.set, prompt=["the thing"] * 30)
        begun.wait(300)
        whole = pool.submit(httpx.post, url + COMPLETIONS, json={**BODY, "prompt": ["the thing"] * 34}, timeout=300)
        while len(httpx.get(url + "/slots", timeout=300).json()) <= 30:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 143
    assert "Traceback" not in err
    said = {"message": "the server is shutting down", "type": "server_error", "param": None, "code": None}
    assert stream.result()[-1] == {"error": said}
    assert (whole.result().status_code, whole.result().json()) == (503, {"error": said})


@pytest.mark.thorough
def test_loras_and_adapters_are_served_by_their_names(toys: ToyFolders, tmp_path: Path) -> None:
    """At the same time as the model itself; each gives the texts of a model into which it alone is merged."""
    where = {"dtype": "float32", "device": "cpu", "drafter": "none"}
    chosen = ["--adapter-model", f"drafted={toys.adapter}"]
    expected, options = {}, [f"--{name}={value}" for name, value in where.items()]
    with load(toys.model, **where) as plain:
        expected["toy"] = plain.generate("the thing", max_new_tokens=60, ignore_eos=True).text
        config = plain.target.config
    for seed, name in enumerate(("first", "second")):
        write_lora(tmp_path / name, drawn_lora(config, seed=seed), base="toy")
        options += ["--lora-model", f"{name}={tmp_path / name}"]
        with load(toys.model, lora=tmp_path / name, **where) as tuned:
            expected[name] = tuned.generate("the thing", max_new_tokens=60, ignore_eos=True).text
    expected["drafted"] = expected["toy"]
    options = [option for option in options if not option.startswith("--drafter")] + chosen
    with started("--model", toys.model, *options) as (_, url), ThreadPoolExecutor(6) as pool:
        listed = httpx.get(url + "/v1/models", timeout=300).json()["data"]
        names = list(expected) * 2
        found = pool.map(lambda name: httpx.post(url + COMPLETIONS, json={**BODY, "model": name}, timeout=300), names)
        texts = [answer.json()["choices"][0]["text"] for answer in found]
    assert [each["id"] for each in listed] == list(expected)
    assert texts == list(expected.values()) * 2
    assert len(set(texts)) == 3
    assert [each["parent"] for each in listed] == [None, "toy", "toy", "toy"]


def test_what_cannot_be_served_is_said_before_the_model_is_loaded(
    anabranch: Anabranch, where: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = anabranch("serve", *where, "--host", "0.0.0.0")
    assert (done.code, "can be reached by others" in done.err) == (1, True)
    done = anabranch("serve", *where, "--preset", "emacs")
    assert (done.code, "there is no preset 'emacs'; choose one of curl" in done.err) == (1, True)
    for option in ("--lora-model", "--adapter-model"):
        done = anabranch("serve", *where, option, "a")
        assert (done.code, f"{option} must be NAME=FOLDER, got 'a'" in done.err) == (1, True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = anabranch("serve", *where, "--port", taken.getsockname()[1])
    assert (done.code, "cannot listen on 127.0.0.1" in done.err) == (1, True)
    monkeypatch.setattr(sys.modules["anabranch.cli.serve"], "NEEDED", ("fastapi", "no_such_package"))
    done = anabranch("serve", *where)
    assert done.code == 1
    assert done.err.strip() == (
        "error: the server needs packages that are not installed (no_such_package): pip install 'anabranch[serve]'"
    )
