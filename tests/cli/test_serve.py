"""``anabranch serve`` as a user starts and ends it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

import httpx
import pytest
from terminals import PROGRAM

from anabranch.api import Model
from verbs import Anabranch


def test_it_prints_its_url_answers_and_drains_on_sigterm(where: list[object], model: Model) -> None:
    command = [*PROGRAM, "serve", *map(str, where), "--port", "0", "--name", "toy", "--drain-seconds", "120"]
    command += ["--preset", "codex"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().removeprefix("serving at ").strip()
            preset = [process.stdout.readline().strip() for _ in range(9)]
            assert preset[:4] == ["", "Codex (~/.codex/config.toml):", "", 'model = "toy"']
            assert preset[-1] == f'base_url = "{url}/v1"'
            assert httpx.get(url + "/v1/models", timeout=300).json()["data"][0]["id"] == "toy"
            answers: list[Any] = []
            body = {"prompt": "the thing", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}

            def ask() -> None:
                with httpx.stream("POST", url + "/v1/completions", json=body, timeout=300) as response:
                    for line in response.iter_lines():
                        answers.append(line)
                        started.set()

            started = threading.Event()
            asking = threading.Thread(target=ask)
            asking.start()
            started.wait(300)
            process.send_signal(signal.SIGTERM)
            asking.join()
            _, err = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 143
    chunks = [json.loads(line.removeprefix("data: ")) for line in answers if line.startswith("data: {")]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert text == model.generate("the thing", max_new_tokens=60, ignore_eos=True).text
    lines = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    assert [line["path"] for line in lines if "path" in line] == ["/v1/models", "/v1/completions"]
    assert "Traceback" not in err


def test_what_cannot_be_served_is_said_before_the_model_is_loaded(
    anabranch: Anabranch, where: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = anabranch("serve", *where, "--host", "0.0.0.0")
    assert (done.code, "can be reached by others" in done.err) == (1, True)
    done = anabranch("serve", *where, "--preset", "emacs")
    assert (done.code, "there is no preset 'emacs'; choose one of curl" in done.err) == (1, True)
    done = anabranch("serve", *where, "--lora-model", "a")
    assert (done.code, "--lora-model must be NAME=FOLDER, got 'a'" in done.err) == (1, True)
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
