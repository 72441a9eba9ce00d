"""Anthropic's messages: their client, the texts of ``model.chat``, tools, and prompts that stay the same."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import anthropic
import pytest
from pydantic import BaseModel
from served import CALL, Server

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TALK = [{"role": "user", "content": "the thing"}]
GREEDY = {"temperature": 0}  # which their client has no argument for
LOOK = {"name": "look", "description": "Look.", "input_schema": {"type": "object"}}


def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0)


def test_their_client_gets_the_text_of_chat(server: Server) -> None:
    expected = server.reference.chat([{"role": "system", "content": "be"}, *TALK], max_new_tokens=12)
    asked: dict[str, Any] = {
        "model": "claude-opus-7",
        "system": "be",
        "messages": TALK,
        "extra_body": {"temperature": 0},
    }
    with client(server) as theirs:
        said = theirs.messages.create(**asked, max_tokens=12)
        with theirs.messages.stream(**asked, max_tokens=12) as stream:
            assert "".join(stream.text_stream) == expected.text
            final = stream.get_final_message()
        counted = theirs.messages.count_tokens(model="claude-opus-7", system="be", messages=TALK)
    assert [block.text for block in said.content] == [expected.text]
    assert (said.stop_reason, said.model, said.role) == ("max_tokens", "claude-opus-7", "assistant")
    usage = said.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(expected.prompt_ids)
    assert usage.output_tokens == len(expected.token_ids)
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12)
    assert counted.input_tokens == len(expected.prompt_ids)


class Place(BaseModel):
    kind: Literal["town", "river"]
    far: bool


def test_their_client_parses_formats(server: Server) -> None:
    asked: dict[str, Any] = {"model": "claude-any", "messages": TALK, "max_tokens": 60, "extra_body": GREEDY}
    with client(server) as theirs:
        said = theirs.messages.parse(**asked, output_format=Place)
        with theirs.messages.stream(**asked, output_format=Place) as stream:
            streamed = stream.get_final_message()
    assert isinstance(said.parsed_output, Place)
    assert streamed.parsed_output == said.parsed_output


def test_their_client_lists_models(server: Server) -> None:
    found = client(server).models.list()
    assert [(each.id, each.type, each.display_name) for each in found.data] == [
        (n, "model", n) for n in ("toy", "alias")
    ]
    assert (found.has_more, found.first_id, found.last_id) == (False, "toy", "alias")
    assert client(server).models.retrieve("claude-any").created_at.tzinfo is not None


def test_their_asynchronous_client(server: Server) -> None:
    async def streamed(theirs: anthropic.AsyncAnthropic) -> str:
        asked: dict[str, Any] = {"model": "claude-any", "messages": TALK, "extra_body": GREEDY}
        async with theirs.messages.stream(**asked, max_tokens=12) as stream:
            return "".join([text async for text in stream.text_stream])

    async def together() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="any", max_retries=0) as theirs:
            return list(await asyncio.gather(*(streamed(theirs) for _ in range(3))))

    assert asyncio.run(together()) == [server.reference.chat(TALK, max_new_tokens=12).text] * 3


@pytest.mark.parametrize(
    ("both", "named"),
    [
        ({"stop": ["a"], "stop_sequences": ["b"]}, "stop_sequences"),
        (
            {"output_config": {"format": {"type": "text"}}, "response_format": {"type": "json_object"}},
            "output_config.format",
        ),
    ],
)
def test_two_names_for_one_thing_are_refused(server: Server, both: dict[str, Any], named: str) -> None:
    response = server.post(MESSAGES, messages=TALK, max_tokens=3, **both)
    assert response.status_code == 400
    assert named in response.text
    assert " both say " in response.text
    same = {"stop": ["a"], "stop_sequences": ["a"]}
    assert server.post(MESSAGES, messages=TALK, max_tokens=3, **same).status_code == 200


def test_stop_sequences(server: Server) -> None:
    whole = server.reference.chat(TALK, max_new_tokens=20).text
    stop = next(letter for letter in whole[3:] if letter.isascii() and letter.isalnum())
    expected = server.reference.chat(TALK, max_new_tokens=20, stop=stop)
    found = server.ask(MESSAGES, messages=TALK, max_tokens=20, temperature=0, stop_sequences=[stop])
    assert found["content"] == [{"type": "text", "text": expected.text}]
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", stop)


def test_events_of_a_stream(server: Server) -> None:
    events = server.events(MESSAGES, messages=TALK, max_tokens=6, temperature=0)
    names = [name for name, _ in events]
    assert all(name == data["type"] for name, data in events)
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}


def test_a_changing_billing_line_leaves_the_prompt_as_it_is(server: Server) -> None:
    def tokens(number: int) -> int:
        line = f"x-anthropic-billing-header: cc_version=2.1; cch={number}"
        system = [
            {"type": "text", "text": line},
            {"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}},
        ]
        joined = server.ask(COUNT, system=f"{line}\nbe", messages=TALK)["input_tokens"]
        assert joined == server.ask(COUNT, system=system, messages=TALK)["input_tokens"]
        return int(joined)

    assert tokens(1) == tokens(99999) == server.ask(COUNT, system="be", messages=TALK)["input_tokens"]


def test_tools_and_their_results(caller: Server, speaking: Any) -> None:
    talk = [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "seen"}]},
                {"type": "text", "text": "c"},
            ],
        },
    ]
    prompt = '[user]a[assistant]b<look{"at": 1}>[tool]seen[user]c[assistant]'
    assert caller.ask(COUNT, messages=talk)["input_tokens"] == len(caller.reference.tokenizer.encode(prompt))

    asked: dict[str, Any] = {"messages": TALK, "max_tokens": 60, "tools": [LOOK], "extra_body": {"temperature": 0}}
    expected = [("text", "Look:"), ("tool_use", "look", {"at": 1})]
    with client(caller) as theirs:
        speaking(f"Look: {CALL}")
        said = theirs.messages.create(model="claude-x", **asked, stop_sequences=["\x00"])
        assert [kinds(block) for block in said.content] == expected
        speaking(f"Look: {CALL}")
        with theirs.messages.stream(model="claude-x", **asked) as stream:
            assert [kinds(block) for block in stream.get_final_message().content] == expected


def kinds(block: Any) -> tuple[Any, ...]:
    return (block.type, block.text) if block.type == "text" else (block.type, block.name, block.input)


def test_mistakes_and_fields_without_effect(server: Server) -> None:
    for body, said in (
        ({"messages": TALK}, "max_tokens: field required"),
        ({"messages": [{"role": "narrator", "content": "x"}], "max_tokens": 1}, "must be user or assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 1}, "part of type 'image'"),
        ({"messages": TALK, "max_tokens": 1, "mcp_servers": [{}]}, "mcp_servers"),
        ({"messages": TALK, "max_tokens": 1, "tools": [{"name": 3}]}, "a tool must have a name"),
    ):
        response = server.post(MESSAGES, **body)
        assert response.status_code == 400
        error = response.json()
        assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
        assert said in error["error"]["message"]
    searching = [{"type": "web_search_20250305", "name": "web_search"}]
    found = server.post(MESSAGES, messages=TALK, max_tokens=1, tools=searching, metadata={"user_id": "u"})
    assert found.headers["x-anabranch-ignored"] == "metadata, tools[web_search_20250305]"
    with client(server) as theirs, pytest.raises(anthropic.NotFoundError):
        theirs.messages.create(model="gpt-1", messages=TALK, max_tokens=1)
