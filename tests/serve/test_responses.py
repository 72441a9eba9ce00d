"""OpenAI's responses as Codex asks for them, and OpenAI's own client for all of its interfaces."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
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

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any") as many:
            calls = [many.chat.completions.create(messages=talk, max_tokens=10, **asked) for _ in range(4)]
            return [json.dumps(said.choices[0].message.content) for said in await asyncio.gather(*calls)]

    assert asyncio.run(together()) == [json.dumps(expected)] * 4
