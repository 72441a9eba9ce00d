"""Answers in a given format and calls that must be made: what comes is valid, and that of Python's options."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from served import TOOL, Server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TALK = [{"role": "user", "content": "a"}]
SCHEMA = {
    "type": "object",
    "properties": {"z": {"enum": ["x", "yy"]}, "a": {"type": "boolean"}},
    "required": ["z", "a"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"response_format": NAMED}, {"schema": json.dumps(SCHEMA)}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"schema": json.dumps(SCHEMA)}),
        ({"structured_outputs": {"json": SCHEMA}}, {"schema": json.dumps(SCHEMA)}),
        ({"guided_json": json.dumps(SCHEMA)}, {"schema": json.dumps(SCHEMA)}),
        ({"guided_regex": "[a-c]{3}"}, {"regex": "[a-c]{3}"}),
        ({"guided_choice": ["one.", "two words"]}, {"regex": r"(one\.)|(two\ words)"}),
        ({"structured_outputs": {"grammar": 'start: "a" /[0-9]/'}}, {"grammar": 'start: "a" /[0-9]/'}),
    ],
    ids=lambda value: next(iter(value)),
)
def test_formats(server: Server, fields: dict[str, Any], options: dict[str, Any]) -> None:
    for temperature in (0, 1):
        asked: dict[str, Any] = {"temperature": temperature, "seed": 3}
        expected = server.reference.chat(TALK, max_new_tokens=40, **asked, **options)
        (choice,) = server.ask(CHAT, messages=TALK, max_tokens=40, **asked, **fields)["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (expected.text, "stop")
        text = server.reference.generate("a", max_new_tokens=40, **asked, **options).text
        assert server.ask(COMPLETIONS, prompt="a", max_tokens=40, **asked, **fields)["choices"][0]["text"] == text


def test_a_prediction_becomes_drafts(server: Server) -> None:
    asked: dict[str, Any] = {"messages": TALK, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    plain = server.ask(CHAT, **asked)
    text = plain["choices"][0]["message"]["content"]
    assert "completion_tokens_details" not in plain["usage"]
    for content in (text, [{"type": "text", "text": text[:5]}, {"type": "text", "text": text[5:]}]):
        found = server.ask(CHAT, prediction={"type": "content", "content": content}, **asked)
        assert found["choices"] == plain["choices"]
        details = found["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] > 0
    found = server.ask(CHAT, prediction={"type": "content", "content": text}, drafter="none", **asked)
    assert found["choices"] == plain["choices"]
    for wrong in ({"type": "text", "content": text}, {"type": "content"}, {"type": "content", "content": [3]}):
        response = server.post(CHAT, prediction=wrong, **asked)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prediction"


def test_formats_of_responses_and_messages(server: Server) -> None:
    expected = server.reference.chat(TALK, max_new_tokens=40, schema=json.dumps(SCHEMA)).text
    form = {"type": "json_schema", "name": "n", "schema": SCHEMA}
    found = server.ask("/v1/responses", input="a", temperature=0, max_output_tokens=40, text={"format": form})
    assert found["output"][0]["content"][0]["text"] == expected
    form = {"type": "json_schema", "schema": SCHEMA}
    for fields in ({"output_format": form}, {"output_config": {"format": form}}):
        found = server.ask("/v1/messages", messages=TALK, temperature=0, max_tokens=40, **fields)
        assert found["content"][0]["text"] == expected


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_calls_that_must_be_made(caller: Server, choice: Any) -> None:
    place = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/at"}},
        "required": ["at"],
        "additionalProperties": False,
    }
    schema = {**place, "$defs": {"at": {"enum": [1, 22]}}}
    tool = {"type": "function", "function": {**TOOL["function"], "parameters": schema}}
    body: dict[str, Any] = {"messages": TALK, "tools": [tool], "tool_choice": choice, "max_tokens": 80, "seed": 1}
    (made,) = caller.ask(CHAT, **body)["choices"]
    assert (made["finish_reason"], made["message"]["content"]) == ("tool_calls", None)
    (call,) = made["message"]["tool_calls"]
    assert call["function"]["name"] == "look"
    assert json.loads(call["function"]["arguments"])["at"] in (1, 22)
    deltas = [each["delta"] for _, data in caller.events(CHAT, **body) for each in data["choices"]]
    streamed = "".join(each["function"]["arguments"] for delta in deltas for each in delta.get("tool_calls", ()))
    assert streamed == call["function"]["arguments"]
    if choice != "required":
        return
    with anthropic.Anthropic(base_url=caller.url, api_key="any") as theirs:
        said = theirs.messages.create(
            model="claude-x",
            messages=TALK,
            max_tokens=80,
            tools=[{"name": "look", "input_schema": schema}],
            tool_choice={"type": "any"},
        )
    assert (said.stop_reason, said.content[0].type) == ("tool_use", "tool_use")
    assert said.content[0].input["at"] in (1, 22)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"response_format": {"type": "xml"}}, "response_format must be of type"),
        ({"response_format": {"type": "json_schema"}}, "must have a JSON schema"),
        ({"response_format": NAMED, "guided_regex": "a"}, "both say what the answer must be"),
        ({"guided_regex": "(?=a)"}, "regex"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs must have one of"),
        ({"guided_choice": []}, "a list of texts"),
        ({"guided_json": {"not": {}}}, "not supported"),
        ({"grammar": "root ::= x"}, "grammar='root ::= x' is not supported"),
        ({"response_format": NAMED, "tools": [TOOL]}, "cannot call tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "run"}}}, "asks for 'run'"),
        ({"tool_choice": "required"}, "tool_choice asks for one"),
    ],
)
def test_what_cannot_be_is_refused(caller: Server, fields: dict[str, Any], said: str) -> None:
    response = caller.post(CHAT, messages=TALK, max_tokens=4, **fields)
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]
