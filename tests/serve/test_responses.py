"""OpenAI's responses as Codex asks for them, and OpenAI's own client for all of its interfaces."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from served import CALL, Server

RESPONSES = "/v1/responses"
LOOK = {"type": "function", "name": "look", "description": "Look.", "strict": False, "parameters": {"type": "object"}}
# a request of Codex, shortened to the toy's context
CODEX: dict[str, Any] = {
    "model": "toy",
    "instructions": "be",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "so"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "the"}]},
    ],
    "tools": [LOOK, {"type": "web_search"}, {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "c",
    "temperature": 0,
    "max_output_tokens": 8,
}


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def test_a_request_of_codex(caller: Server) -> None:
    prompt = "Tlook[system]be\n\nso[user]the[assistant]"
    expected = caller.reference.generate(prompt, max_new_tokens=8)
    body = {**CODEX, "model": None}
    response = caller.post(RESPONSES, **body)
    ignored = (
        "include[reasoning.encrypted_content], prompt_cache_key, reasoning, store, tools[custom], tools[web_search]"
    )
    assert response.headers["x-anabranch-ignored"] == ignored
    found = response.json()
    assert (found["object"], found["status"]) == ("response", "incomplete")
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    (message,) = found["output"]
    assert message["content"][0]["text"] == expected.text
    assert message["status"] == "incomplete"
    assert found["usage"]["input_tokens"] == len(expected.prompt_ids)

    events = caller.events(RESPONSES, **body)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert all(name == data["type"] for name, data in events)
    text = "".join(data["delta"] for name, data in events if name == "response.output_text.delta")
    assert text == expected.text
    names = [name.removeprefix("response.") for name, _ in events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert events[-1][1]["response"]["output"][0]["content"] == message["content"]
    assert events[-2][1]["item"]["status"] == "incomplete"


def test_calls_and_their_outputs(caller: Server, speaking: Any) -> None:
    history = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "seen"},
    ]
    prompt = '[user]a[assistant]<look{"at": 1}>[tool]seen[assistant]'
    found = caller.ask(RESPONSES, input=history, max_output_tokens=1)
    assert found["usage"]["input_tokens"] == len(caller.reference.tokenizer.encode(prompt))

    asked: dict[str, Any] = {"input": "a", "tools": [LOOK], "temperature": 0, "max_output_tokens": 60}
    speaking(f"Look: {CALL}")
    text, call = caller.ask(RESPONSES, **asked)["output"]
    assert (text["content"][0]["text"], call["name"], call["arguments"]) == ("Look:", "look", '{"at": 1}')
    speaking(f"Look: {CALL}")
    events = caller.events(RESPONSES, **asked)
    done = [data for name, data in events if name == "response.function_call_arguments.done"]
    pieces = [data["delta"] for name, data in events if name == "response.function_call_arguments.delta"]
    assert done[0]["arguments"] == "".join(pieces) == '{"at": 1}'
    assert [item["type"] for item in events[-1][1]["response"]["output"]] == ["message", "function_call"]


def test_mistakes(server: Server) -> None:
    for body, said in (
        ({"input": []}, "input is empty"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"type": "computer_call"}]}, "an item of type 'computer_call'"),
        ({"input": "x", "tool_choice": {"type": "web_search"}}, "tool_choice must name a function"),
        ({"input": "x", "background": True}, "background"),
        (
            {"input": "x", "text": {"format": {"type": "text"}}, "response_format": {"type": "json_object"}},
            "text.format and response_format both say",
        ),
    ):
        response = server.post(RESPONSES, **body)
        assert response.status_code == 400
        assert said in response.json()["error"]["message"]


def test_openais_own_client(server: Server) -> None:
    talk: list[Any] = [{"role": "user", "content": "the thing"}]
    expected = server.reference.chat(talk, max_new_tokens=10, temperature=1.0, seed=3).text
    asked: dict[str, Any] = {"model": "toy", "temperature": 1, "seed": 3}
    with client(server) as one:
        said = one.chat.completions.create(messages=talk, max_tokens=10, **asked)
        assert said.choices[0].message.content == expected
        chunks = one.chat.completions.create(messages=talk, max_tokens=10, stream=True, **asked)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
        whole = one.completions.create(prompt="the thing", max_tokens=5, logprobs=2, **asked)
        assert len(whole.choices[0].logprobs.top_logprobs) == 5
        response = one.responses.create(
            input=talk, max_output_tokens=10, extra_body={"seed": 3}, model="toy", temperature=1
        )
        assert response.output_text == expected
        with one.responses.stream(
            input=talk, max_output_tokens=10, extra_body={"seed": 3}, model="toy", temperature=1
        ) as stream:
            events = list(stream)
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected
        assert [model.id for model in one.models.list()] == ["toy", "alias"]
        with pytest.raises(openai.NotFoundError):
            one.chat.completions.create(model="none", messages=talk)

    async def one_of_many(many: openai.AsyncOpenAI, stream: bool) -> str:
        said: Any = await many.chat.completions.create(messages=talk, max_tokens=10, stream=stream, **asked)
        if not stream:
            return str(said.choices[0].message.content)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in said])

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any") as many:
            return await asyncio.gather(*(one_of_many(many, stream) for stream in (False, True) * 2))

    assert asyncio.run(together()) == [expected] * 4


class Place(BaseModel):
    at: Literal[1, 22]


def test_openais_client_parses_formats_and_calls(caller: Server) -> None:
    """The classes that a caller gives become schemas, and the answers and arguments instances of them."""
    talk: list[Any] = [{"role": "user", "content": "a"}]
    asked: dict[str, Any] = {"model": "toy", "temperature": 0}
    with client(caller) as one:
        said = one.chat.completions.parse(messages=talk, max_tokens=60, response_format=Place, **asked)
        assert isinstance(said.choices[0].message.parsed, Place)
        response = one.responses.parse(input=talk, max_output_tokens=60, text_format=Place, **asked)
        assert response.output_parsed == said.choices[0].message.parsed
        look = openai.pydantic_function_tool(Place, name="look")
        calling = one.chat.completions.parse(
            messages=talk, max_tokens=80, tools=[look], tool_choice="required", **asked
        )
        (call,) = calling.choices[0].message.tool_calls or ()
        assert (call.function.name, calling.choices[0].finish_reason) == ("look", "tool_calls")
        assert isinstance(call.function.parsed_arguments, Place)
        with one.chat.completions.stream(messages=talk, max_tokens=60, response_format=Place, **asked) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == said.choices[0].message.parsed
