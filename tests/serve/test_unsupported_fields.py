"""Fields that an interface does not have: refused by name, neutral, or tolerated and named, as the table has them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from served import Server, running
from tokenizers.processors import TemplateProcessing

from anabranch.serve.chat import ChatBody
from anabranch.serve.completions import CompletionBody
from anabranch.serve.fields import Body
from anabranch.serve.foreign import FOREIGN
from anabranch.serve.info import DetokenizeBody, TokenizeBody
from anabranch.serve.messages import CountBody, MessagesBody
from anabranch.serve.responses import ResponsesBody
from toy_text import END, VOCABULARY

TALK = [{"role": "user", "content": "the thing"}]
CHAT, COMPLETIONS, COUNT = "/v1/chat/completions", "/v1/completions", "/v1/messages/count_tokens"
FORMAT = {"structured_outputs": {"regex": "[a-c]{2}"}}
GENERATING: dict[str, tuple[type[Body], dict[str, Any]]] = {
    CHAT: (ChatBody, {"messages": TALK, "temperature": 0, **FORMAT}),
    COMPLETIONS: (CompletionBody, {"prompt": "a", "temperature": 0, **FORMAT}),
    "/v1/responses": (ResponsesBody, {"input": "a", "temperature": 0, **FORMAT}),
    "/v1/messages": (MessagesBody, {"messages": TALK, "max_tokens": 3, "temperature": 0, **FORMAT}),
}
COUNTING: dict[str, tuple[type[Body], dict[str, Any]]] = {
    COUNT: (CountBody, {"messages": TALK}),
    "/tokenize": (TokenizeBody, {"prompt": "a"}),
    "/detokenize": (DetokenizeBody, {"tokens": [3]}),
}
HINTS = [name for name, known in FOREIGN.items() if known.hint]
REFUSED = [name for name in FOREIGN if name not in HINTS]


def lacks(model: type[Body], name: str) -> bool:
    """Whether a name of the table concerns an interface: a field that it lacks, or a key of one that it has."""
    field = re.split(r"[.[]", name)[0]
    return (field in model.model_fields) != (field == name)


def put(body: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """A body with one more field, key of a field, or item of a list."""
    field, *rest = re.split(r"[.[]", name, maxsplit=1)
    if not rest:
        return {**body, name: value}
    if name.endswith("]"):
        return {**body, field: [rest[0][:-1]]}
    return {**body, field: {**body.get(field, {}), rest[0]: value}}


@pytest.mark.parametrize("name", REFUSED)
def test_other_values_are_refused_by_name(server: Server, name: str) -> None:
    asked = 0
    for path, (model, body) in (GENERATING | COUNTING).items():
        if name not in model.foreign or not lacks(model, name):
            continue
        asked += path in GENERATING
        active = {field: idle + 0.5 for field, idle in FOREIGN[name].limits}
        response = server.post(path, **put({**body, **active}, name, "something else"))
        assert response.status_code == 400, path
        message = response.json()["error"]["message"]
        assert message.startswith(f"{name}="), path
        instead = next((field for field in FOREIGN[name].use if field in model.model_fields), None)
        assert message.endswith(f"; use {instead} instead" if instead else "; leave it out"), path
    assert asked, "an entry that concerns no interface"


@pytest.mark.parametrize("path", GENERATING)
def test_a_limit_of_penalties_changes_nothing_without_one(server: Server, path: str) -> None:
    """llama.cpp's clients send its default."""
    _, body = GENERATING[path]
    assert answer(server.ask(path, **body, repeat_last_n=64, presence_penalty=0)) == answer(server.ask(path, **body))


@pytest.mark.parametrize("path", GENERATING)
def test_neutral_values_change_nothing(server: Server, path: str) -> None:
    model, body = GENERATING[path]
    plain = answer(server.ask(path, **body))
    for turn in range(1 + max(len(known.neutral) for known in FOREIGN.values())):
        more = body
        for name in REFUSED:
            if lacks(model, name) and not name.endswith("]"):
                more = put(more, name, (None, *FOREIGN[name].neutral)[turn % (1 + len(FOREIGN[name].neutral))])
        response = server.post(path, **more)
        assert response.status_code == 200, response.text
        assert "x-anabranch-ignored" not in response.headers
        assert answer(response.json()) == plain


def answer(found: Any) -> Any:
    """What the model has written, in any interface's form."""
    if "choices" in found:
        return [choice.get("message", choice.get("text")) for choice in found["choices"]]
    return found.get("content") or [item["content"] for item in found["output"]]


@pytest.mark.parametrize("name", HINTS)
def test_hints_are_tolerated_and_named(server: Server, name: str) -> None:
    paths = [path for path, (model, _) in GENERATING.items() if lacks(model, name)]
    for path in paths:
        response = server.post(path, **put(GENERATING[path][1], name, "low"))
        assert (response.status_code, response.headers["x-anabranch-ignored"]) == (200, name)
    assert paths


def test_a_limit_may_come_under_two_names_if_they_agree(server: Server) -> None:
    body = {"prompt": "a", "temperature": 0, "max_tokens": 2}
    assert server.ask(COMPLETIONS, **body, max_completion_tokens=2, n_predict=2)["usage"]["completion_tokens"] == 2
    assert server.post(COMPLETIONS, **body, max_completion_tokens=3).json()["error"]["param"] == "max_completion_tokens"


def test_unknown_keys_are_named(server: Server) -> None:
    body = GENERATING[CHAT][1] | {"stream_options": {"include_usage": True, "include_obfuscation": False}}
    body["structured_outputs"] = {**FORMAT["structured_outputs"], "backend": "xgrammar"}
    named = server.post(CHAT, **body, stream=True).headers["x-anabranch-ignored"]
    assert named == "stream_options.include_obfuscation, structured_outputs.backend"


@pytest.mark.parametrize("path", COUNTING)
def test_unknown_fields_of_counts_are_named(server: Server, path: str) -> None:
    response = server.post(path, **COUNTING[path][1], some_hint=1, n_predict=3)
    assert (response.status_code, response.headers["x-anabranch-ignored"]) == (200, "n_predict, some_hint")


def test_the_documentation_has_the_table() -> None:
    page = Path(__file__).parents[2].joinpath("docs/serving.md").read_text(encoding="utf-8")
    fields, refused = page.split("\n## Fields\n")[1].split("\n### Tools\n")[0].split("**Refused by name**")
    assert [name for name in HINTS if f"`{name}`" not in fields.split("**Tolerated hints**")[1]] == []
    assert [name for name in REFUSED if f"`{name}`" not in refused] == []


def test_special_tokens_are_added_as_asked_for() -> None:
    with running() as server:
        for model in (server.service.model, server.reference):
            model.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
                single=f"{END} $A", special_tokens=[(END, VOCABULARY - 1)]
            )
        bare = server.reference.tokenizer.encode("the thing", add_special_tokens=False)
        spoken = server.reference.chat_ids(TALK)
        asked: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
        for special in (None, True, False):
            expected = bare if special is False else [VOCABULARY - 1, *bare]
            assert server.ask("/tokenize", prompt="the thing", add_special_tokens=special)["tokens"] == expected
            for prompt in ("the thing", ["the thing"]):
                found = server.ask(COMPLETIONS, prompt=prompt, add_special_tokens=special, **asked)
                assert found["usage"]["prompt_tokens"] == len(expected)
                assert found["choices"][0]["text"] == text_of(server, expected)

            expected = [VOCABULARY - 1, *spoken] if special else spoken
            assert server.ask("/tokenize", messages=TALK, add_special_tokens=special)["tokens"] == expected
            found = server.ask(CHAT, messages=TALK, add_special_tokens=special, **asked)
            assert found["usage"]["prompt_tokens"] == len(expected)
            assert found["choices"][0]["message"]["content"] == text_of(server, expected)


def text_of(server: Server, prompt: list[int]) -> str:
    return server.reference.generate(prompt, max_new_tokens=4, ignore_eos=True).text
