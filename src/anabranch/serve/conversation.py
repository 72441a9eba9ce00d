"""Conversations and tools of the interfaces, in the form that chat templates take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from anabranch.model.text import ChatTemplate, template_reads
from anabranch.serve.failures import RequestError

__all__ = ["described_tools", "joined_text", "template_messages", "tools_of"]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXTS = ("text", "input_text", "output_text", "refusal")
# for templates without tools: the form in which Hermes and Qwen2.5 were trained
PREAMBLE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
    'tags:\n<tool_call>\n{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)


def joined_text(content: Any, where: str = "messages") -> str:
    """The text of a content: a string, None, or parts of text. Raises RequestError for anything else."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise RequestError(400, f"a content must be a string or a list of parts, got {content!r}", param=where)
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        if isinstance(part, Mapping) and kind not in TEXTS:
            raise RequestError(
                400, f"the model reads text only, and a message has a part of type {kind!r}", param=where
            )
        text = part if isinstance(part, str) else part.get("text", part.get("refusal")) if kind is not None else None
        if not isinstance(text, str):
            raise RequestError(
                400, f"a part of a content must be {{'type': 'text', 'text': ...}}, got {part!r}", param=where
            )
        texts.append(text)
    return "\n".join(texts)


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """OpenAI's messages as templates take them. Raises RequestError.

    Developers are systems, leading system messages are one, and arguments of tool calls are objects.
    """
    made: list[dict[str, Any]] = []
    for message in messages:
        role = message.get("role")
        if role not in ROLES:
            raise RequestError(
                400, f"the role of a message must be one of {', '.join(ROLES)}, got {role!r}", param="messages"
            )
        if role == "user" and message.get("content") is None:
            raise RequestError(400, "a message of the user must have a content", param="messages")
        one: dict[str, Any] = {
            "role": {"developer": "system", "function": "tool"}.get(role, role),
            "content": joined_text(message.get("content")),
        }
        one |= {name: message[name] for name in ("name", "tool_call_id", "reasoning_content") if message.get(name)}
        if message.get("tool_calls"):
            one["tool_calls"] = [_call(call) for call in message["tool_calls"]]
        if made and one["role"] == "system" and all(each["role"] == "system" for each in made):
            made[-1]["content"] += "\n\n" + one["content"]
        else:
            made.append(one)
    return made


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(400, f"a tool call must have a function with a name, got {call!r}", param="messages")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments)
        except ValueError:
            read = arguments
        arguments = read if isinstance(read, dict) else arguments
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def tools_of(tools: Sequence[Any] | None) -> list[dict[str, Any]]:
    """The functions of a request's tools, checked. Raises RequestError."""
    found = []
    for tool in tools or ():
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(function, Mapping):
            raise RequestError(
                400, f"a tool must be {{'type': 'function', 'function': ...}}, got {tool!r}", param="tools"
            )
        if not isinstance(function.get("name"), str) or not isinstance(function.get("parameters") or {}, Mapping):
            raise RequestError(
                400, f"a function must have a name and parameters, got {dict(function)!r}", param="tools"
            )
        found.append({"type": "function", "function": dict(function)})
    return found


def described_tools(
    tokenizer: Any, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], Sequence[Mapping[str, Any]] | None]:
    """The messages and the tools for the template.

    For a template that reads no tools they are described in the system message, and earlier calls and results are text.
    """
    if template_reads(tokenizer, "tools", ChatTemplate()):
        return messages, tools or None
    spoken = [_spoken(message) for message in messages]
    if tools:
        said = PREAMBLE.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if spoken and spoken[0]["role"] == "system":
            spoken[0] = {**spoken[0], "content": f"{spoken[0]['content']}\n\n{said}".lstrip()}
        else:
            spoken.insert(0, {"role": "system", "content": said})
    return spoken, None


def _spoken(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    said = [message["content"]] if message["content"] else []
    return {
        "role": message["role"],
        "content": "\n".join([*said, *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]),
    }
