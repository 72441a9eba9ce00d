"""The page's files, and the steps that a streamed chat completion has for it; a browser runs it in test_browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from served import SETTINGS, TOOL, Server, running
from test_openai import text_of

from anabranch.analysis.trace import step_fields
from anabranch.model.text import token_bytes
from anabranch.serve import page, steps

CHAT = "/v1/chat/completions"
TALK = [{"role": "user", "content": "the thing"}]
WITH_STEPS = {"anabranch": {"steps": True}}


def choices_of(events: list[Any], index: int = 0) -> Iterator[Any]:
    for _, data in events:
        for choice in data["choices"]:
            if choice["index"] == index:
                yield choice


def steps_of(events: list[Any], index: int = 0) -> list[Any]:
    return [
        choice["anabranch"]["step"] for choice in choices_of(events, index) if "step" in choice.get("anabranch", {})
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1, "seed": 3, "drafter": "none"},
        {"temperature": 0, "guided_regex": "the thing [a-c]{9}"},
        {"temperature": 0, "logprobs": True},
    ],
    ids=str,
)
def test_steps_are_those_of_a_trace(server: Server, fields: dict[str, Any]) -> None:
    events = server.events(CHAT, messages=TALK, max_tokens=24, **fields, **WITH_STEPS)
    asked = dict(fields)
    asked.pop("logprobs", None)
    asked["regex"] = asked.pop("guided_regex", None)
    reference, at = server.reference, 0
    found = steps_of(events)
    with closing(reference.chat_stream(TALK, max_new_tokens=24, **asked)) as chunks:
        for step, chunk in zip(found, chunks, strict=True):
            kept = len(chunk.token_ids)
            expected = step_fields(chunk.step, chunk.step.tree, at=at, kept=kept)
            at += kept
            assert step.keys() == {*expected, "texts", "next_text", "pieces"}
            assert step["log_probs"] == pytest.approx(
                expected["log_probs"], abs=1e-4
            )  # as the prompt was read in chunks
            varying = {"ms": 5, "log_probs": None}
            assert {**step, **varying, "ms": len(step["ms"])} == {**step, **expected, **varying}
            texts = [token_bytes(reference.tokenizer, token) for token in step["tokens"]]
            shown = [data.decode() for data in texts if data.isascii()]
            assert shown == [text for text in step["texts"] if not text.startswith("bytes:")]
            result = chunk.result
    assert "".join(piece for step in found for piece in step["pieces"]) == text_of(events) == result.text
    end = list(choices_of(events))[-1]
    assert end["anabranch"]["drafter"] == result.drafter
    assert end["anabranch"]["stats"]["tokens"] == sum(step["kept"] for step in found) == len(result.token_ids)
    assert {source for step in found for source in step["sources"]} >= {"target"}
    if "regex" in fields:
        assert any("grammar" in step["sources"] for step in found)


def test_steps_of_several_samples_and_stop_strings(server: Server) -> None:
    whole = server.reference.chat(TALK, max_new_tokens=24, temperature=0).text
    stop = next(letter for letter in whole[3:] if letter.isascii() and letter.isalnum())
    body: dict[str, Any] = {"messages": TALK, "n": 2, "max_tokens": 24, "temperature": 1, "seed": 5, "stop": [stop]}
    events = server.events(CHAT, **body, **WITH_STEPS)
    for index in range(2):
        found = steps_of(events, index)
        assert "".join(piece for step in found for piece in step["pieces"]) == text_of(events, index)
        assert [step["at"] for step in found] == [sum(s["kept"] for s in found[:place]) for place in range(len(found))]


def test_steps_of_a_call_that_must_be_made(caller: Server) -> None:
    asked: dict[str, Any] = {"messages": TALK, "tools": [TOOL], "tool_choice": "required", "max_tokens": 60}
    events = caller.events(CHAT, **asked, temperature=0, **WITH_STEPS)
    assert steps_of(events)
    assert "".join(piece for step in steps_of(events) for piece in step["pieces"]).startswith("<tool_call>")
    assert any(choice["delta"].get("tool_calls") for choice in choices_of(events))


def test_steps_cost_nothing_unless_asked_for(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(steps.StepWriter, "__init__", fail)
    for more in ({}, {"anabranch": None}, {"anabranch": {}}, {"anabranch": {"steps": False}}):
        events = server.events(CHAT, messages=TALK, max_tokens=8, temperature=0, **more)
        assert text_of(events)
        assert not any("anabranch" in choice for choice in choices_of(events))


def test_wrong_options_are_refused(server: Server) -> None:
    for given in ({"steps": 1}, {"step": True}, [], "steps"):
        response = server.post(CHAT, messages=TALK, stream=True, anabranch=given)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "anabranch")
    response = server.post(CHAT, messages=TALK, **WITH_STEPS)
    assert (response.status_code, response.json()["error"]["message"]) == (400, "anabranch.steps needs stream=true")
    document = server.client.get("/openapi.json").json()
    assert set(document["components"]["schemas"]["Extension"]["properties"]) == {"steps"}
    assert "/page/{name}" not in document["paths"]


def test_texts_of_token_ids(server: Server) -> None:
    found = server.ask("/detokenize", tokens=[256, 195, 262], return_token_strs=True)
    tokenizer = server.reference.tokenizer
    assert found["token_strs"][0] == token_bytes(tokenizer, 256).decode() == "th"
    assert "token_strs" not in server.ask("/detokenize", tokens=[256])


def test_files_load_nothing_from_elsewhere(server: Server) -> None:
    response = server.client.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    assert server.client.head("/").headers["content-length"] == str(len(response.content))
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    linked = set(re.findall(r'(?:src|href)="([^"]*)"', response.text))
    assert linked == {f"page/{name}" for name in ("icon.svg", "style.css", "app.js")}
    assert not re.search(r"<style|style=|\son\w+=|<script(?![^>]*\ssrc=)", response.text)
    for name in page.FILES:
        response = server.client.get(f"/page/{name}")
        assert response.status_code == 200
        assert response.headers["x-content-type-options"] == "nosniff"
        if name.endswith(".js"):
            assert "javascript" in response.headers["content-type"]
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", response.text)
            for imported in re.findall(r'from "\./([^"]*)"', response.text):
                assert imported in page.FILES
        addresses = set(re.findall(r"https?://[^\s\"'<]*", response.text))
        assert addresses <= {"http://www.w3.org/2000/svg"}
    for wrong in ("/page/none.js", "/page/..%2Fapp.py", "/page/", "/page"):
        assert server.client.get(wrong).status_code == 404


def test_the_page_itself_needs_no_key() -> None:
    with running(replace(SETTINGS, api_keys=("secret",))) as server:
        for path in ("/", "/page/app.js"):
            assert server.client.get(path).status_code == 200
        for path in ("/props", "/pages"):
            assert server.client.get(path).status_code == 401
