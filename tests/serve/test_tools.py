"""Tools in conversations: the prompt that the model sees, and calls that it writes, whole and streamed.

The toy cannot write a call, so where one is needed its tokens are given another text.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from served import CALL, TOOL, Server

from anabranch.serve.conversation import PREAMBLE, template_messages
from anabranch.serve.failures import RequestError

CHAT = "/v1/chat/completions"


def test_the_model_sees_tools_and_earlier_calls(caller: Server) -> None:
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "seen"}]},
    ]
    found = caller.ask("/tokenize", messages=talk, tools=[TOOL])["tokens"]
    text = caller.reference.tokenizer.decode(found)
    call = '<look{"at": 1}>'
    assert text == f"Tlook[user]a[assistant]{call}[tool]seen[assistant]"
    assert caller.ask("/tokenize", messages=talk[:1], tools=[])["tokens"] == caller.reference.chat_ids(talk[:1])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 30}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 30}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 30}),
    ],
)
def test_an_empty_list_of_tools_means_none(caller: Server, speaking: Any, path: str, body: dict[str, Any]) -> None:
    expected = len(caller.reference.chat_ids([{"role": "user", "content": "a"}]))
    speaking(CALL)
    found = caller.ask(path, **body, tools=[])
    usage = found["usage"]
    cached = usage.get("cache_read_input_tokens", 0)  # which only messages count apart
    assert usage.get("prompt_tokens", usage.get("input_tokens", 0) + cached) == expected
    text = found["choices"][0]["message"] if "choices" in found else (found.get("output") or [found])[0]["content"][0]
    assert text.get("content", text.get("text")) == CALL
    forced: dict[str, Any] = {"type": "any"} if path == "/v1/messages" else {"type": "function", "name": "look"}
    refused = caller.post(path, **body, tools=[], tool_choice="required" if path == CHAT else forced)
    assert (refused.status_code, "not among the request's tools" in refused.text) == (400, True)


def test_templates_without_tools_get_them_in_words(server: Server) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "tool", "tool_call_id": "c", "content": "seen"}]
    text = server.reference.tokenizer.decode(server.ask("/tokenize", messages=talk, tools=[TOOL])["tokens"])
    said = PREAMBLE.format(tools=json.dumps(TOOL))
    assert text == f"[system]{said}[user]a[user]<tool_response>\nseen\n</tool_response>[assistant]"


def test_messages_of_developers_and_several_systems() -> None:
    talk = [
        {"role": "system", "content": "a"},
        {"role": "developer", "content": "b"},
        {"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]},
        {"role": "assistant", "content": None},
    ]
    assert template_messages(talk) == [
        {"role": "system", "content": "a\n\nb"},
        {"role": "user", "content": "c\nd"},
        {"role": "assistant", "content": ""},
    ]
    with pytest.raises(RequestError, match="a tool call must have a function with a name"):
        template_messages([{"role": "assistant", "tool_calls": [{"id": "x"}]}])


def test_tool_choice_and_the_forms_of_tools(caller: Server) -> None:
    talk = [{"role": "user", "content": "a"}]
    with_tools, without = (
        caller.ask(CHAT, messages=talk, max_tokens=1, tools=[TOOL], tool_choice=choice)["usage"]["prompt_tokens"]
        for choice in ("auto", "none")
    )
    assert without == len(caller.reference.chat_ids(talk)) < with_tools
    for tools in ([{"type": "web_search"}], [{"type": "function", "function": {}}], [{"type": "function"}]):
        assert caller.post(CHAT, messages=talk, tools=tools).json()["error"]["param"] == "tools"
    assert caller.post(CHAT, messages=talk, tools=[TOOL], tool_choice={"type": "function"}).status_code == 400


def test_calls_in_whole_and_streamed_answers(caller: Server, speaking: Any) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "a"}],
        "tools": [TOOL],
        "temperature": 0,
        "max_tokens": 30,
    }
    speaking("Look: " + CALL)
    (choice,) = caller.ask(CHAT, **body)["choices"]
    message = choice["message"]
    assert message["content"] == "Look:"
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": '{"at": 1}'}
    assert call["id"].startswith("call_")
    speaking("Look: " + CALL)
    deltas = [choice["delta"] for _, data in caller.events(CHAT, **body) for choice in data["choices"]]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content") or "" for delta in deltas) == "Look:"
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert (calls[0]["function"]["name"], calls[0]["type"], calls[0]["index"]) == ("look", "function", 0)
    assert "".join(call["function"]["arguments"] for call in calls) == '{"at": 1}'
