"""Answers in a given format and calls that must be made: what comes is valid, and that of Python's options."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from served import TOOL, Server

from anabranch.serve.structure import text_grammar
from anabranch.serve.turns import Turn
from anabranch.structure.grammar import Source, compiled
from anabranch.structure.vocabulary import Vocabulary
from toy_text import VOCABULARY, byte_tokenizer

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


STRICT = {
    "type": "function",
    "function": {
        "name": "look",
        "strict": True,
        "parameters": {"type": "object", "properties": {"at": {"enum": [1, 22]}}, "required": ["at"]},
    },
}
FREE = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
CALLED = '{"name": "look", "arguments": {"at": 1}}'
TAGGED = f"<tool_call>\n{CALLED}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("", True),
        ("The sum {x: 1} <tool> of ü\n{", True),
        (TAGGED, True),
        (f"Look: {TAGGED}\n{TAGGED} so", True),
        (CALLED, True),
        ('{"at": 1}', False),
        (' \n{"name": "look"', False),
        ('<tool_call>\n{"name": "other"', False),
        (TAGGED.replace("1", "3"), False),
        (TAGGED + '\n{"name"', False),
        (CALLED + " so", False),
        (CALLED.replace("look", "find").replace("1", "3"), True),
    ],
)
def test_texts_in_which_strict_tools_may_be_called(text: str, taken: bool) -> None:
    vocabulary = Vocabulary.of(byte_tokenizer(), VOCABULARY, (VOCABULARY - 1,))
    grammar = text_grammar([STRICT, FREE], "tags")
    matcher = compiled(Source("grammar", grammar), vocabulary).matcher.deep_copy()
    tokens = byte_tokenizer().encode(text)
    assert (matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()) is taken
    pieces = [*(reader := Turn([], [STRICT, FREE]).reader("tags")).feed(text), *reader.finish()]
    if taken and "find" not in text:  # what the server reads as calls are the grammar's
        assert [piece.text for piece in pieces if piece.call is not None and piece.text] == ['{"at": 1}'] * text.count(
            CALLED
        )


def test_strict_tools_of_all_interfaces(caller: Server) -> None:
    function = STRICT["function"]
    grammar = text_grammar([STRICT], "tags")
    asked = {"temperature": 1, "seed": 5}
    expected = caller.reference.chat(TALK, tools=[STRICT], max_new_tokens=20, grammar=grammar, **asked)
    (choice,) = caller.ask(CHAT, messages=TALK, tools=[STRICT], max_tokens=20, **asked)["choices"]
    assert choice["message"]["content"] == expected.text
    flat = {"type": "function", **function}
    for path, tools, more in (
        ("/v1/responses", [flat], {"input": "a", "max_output_tokens": 4}),
        ("/v1/messages", [{"name": "look", "strict": True, "input_schema": function["parameters"]}], {"max_tokens": 4}),
    ):
        fields = more if "input" in more else {"messages": TALK, **more}
        assert caller.post(path, tools=tools, **fields).status_code == 200
        broken = [{**tools[0], "parameters": {"not": {}}, "input_schema": {"not": {}}}]
        refused = caller.post(path, tools=broken, **fields)
        assert (refused.status_code, "not supported" in refused.text) == (400, True)


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
