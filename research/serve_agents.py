"""Time the turns of an agent's session whose prompt grows with each tool call, with and without prefix reuse.

    python research/serve_agents.py --model MODEL.gguf --out benchmarks/serve-agents-MACHINE-DATE.json
    python research/serve_agents.py --model MODEL.gguf --server llama.cpp=http://127.0.0.1:8081 --out ...

The session is recorded: in each turn the agent has read the next lines of a file of this repository, and the prompt of
the last turn has about ``--tokens`` tokens. So all servers get the same prompts, whatever their model writes; an answer
is greedy and ends after ``--new`` tokens at the latest. ``reuse`` is ``anabranch serve`` as it is, ``fresh`` one that
keeps nothing of earlier prompts, ``--server`` one that runs already, as ``llama_server.py MODEL.gguf --rows 4
--capacity 10000``. They take turns. Since ``fresh`` reads every prompt as a whole, it gets one turn in ``--every``.

responses  as Codex sends it: instructions, items of calls and their outputs, ``store`` false
messages   as Claude Code sends it: a system line that differs in each request, blocks of tool use, ``cache_control``
chat       chat completions, for servers that have neither

The forms have different system prompts, so that a session finds nothing of another form's.
"""

from __future__ import annotations

import argparse
import http.client
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from anabranch.errors import InputError
from measured import result_options, write_measured
from serve_load import CHAT, PATIENCE, model_at, pairs, say, started

ARMS = {"reuse": "", "fresh": "--prefix-memory 0"}
READ_FROM = Path(__file__).resolve().parents[1] / "src" / "anabranch" / "decoding"
ASKED = "Explain how this project decodes several texts at a time, and where a prompt is read."
SYSTEM = "You are the coding agent {}. Read the files that you need with the tools, then answer. Keep answers short."
READ = {
    "name": "read_file",
    "description": "Read lines of a file",
    "schema": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "first": {"type": "integer"}, "last": {"type": "integer"}},
        "required": ["path", "first", "last"],
        "additionalProperties": False,
    },
}


class Call(NamedTuple):
    """A call of the tool that the agent made, and its result."""

    id: str
    arguments: dict[str, Any]
    output: str


def recorded(turns: int, count: Callable[[str], int], tokens: int) -> list[Call]:
    """The calls of a session, whose outputs have so many tokens together."""
    lines = [(path, line) for path in sorted(READ_FROM.glob("*.py")) for line in path.read_text().splitlines()]
    each = len(lines) * tokens // count("\n".join(line for _, line in lines)) // turns
    if not 0 < each <= len(lines) // turns:
        raise InputError(f"--tokens {tokens} in {turns} turns are {each} lines a turn, of {len(lines)} that there are")
    calls = []
    for turn in range(turns):
        part = lines[turn * each : (turn + 1) * each]
        arguments = {"path": part[0][0].name, "first": turn * each + 1, "last": (turn + 1) * each}
        calls.append(Call(f"call_{turn:04d}", arguments, "\n".join(line for _, line in part)))
    return calls


def responses(model: str, calls: Sequence[Call], turn: int, new: int) -> tuple[str, dict[str, Any]]:
    items: list[dict[str, Any]] = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": ASKED}]}
    ]
    for call in calls:
        made = {"name": READ["name"], "arguments": json.dumps(call.arguments), "call_id": call.id}
        items.append({"type": "function_call", **made})
        items.append({"type": "function_call_output", "call_id": call.id, "output": call.output})
    tool = {"type": "function", "name": READ["name"], "description": READ["description"], "strict": False}
    return "/v1/responses", {
        "model": model,
        "instructions": SYSTEM.format("R"),
        "input": items,
        "tools": [{**tool, "parameters": READ["schema"]}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "store": False,
        "stream": True,
        "temperature": 0,
        "max_output_tokens": new,
    }


def messages(model: str, calls: Sequence[Call], turn: int, new: int) -> tuple[str, dict[str, Any]]:
    spoken: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": ASKED}]}]
    for call in calls:
        use = {"type": "tool_use", "id": call.id, "name": READ["name"], "input": call.arguments}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": call.output}
        spoken += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    spoken[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
    billing = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={turn:05d};"}
    return "/v1/messages", {
        "model": model,
        "system": [billing, {"type": "text", "text": SYSTEM.format("M"), "cache_control": {"type": "ephemeral"}}],
        "messages": spoken,
        "tools": [{"name": READ["name"], "description": READ["description"], "input_schema": READ["schema"]}],
        "stream": True,
        "temperature": 0,
        "max_tokens": new,
    }


def chat(model: str, calls: Sequence[Call], turn: int, new: int) -> tuple[str, dict[str, Any]]:
    spoken: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM.format("C")},
        {"role": "user", "content": ASKED},
    ]
    for call in calls:
        made = {"name": READ["name"], "arguments": json.dumps(call.arguments)}
        spoken.append(
            {"role": "assistant", "content": "", "tool_calls": [{"id": call.id, "type": "function", "function": made}]}
        )
        spoken.append({"role": "tool", "tool_call_id": call.id, "content": call.output})
    function = {"name": READ["name"], "description": READ["description"], "parameters": READ["schema"]}
    return CHAT, {
        "model": model,
        "messages": spoken,
        "tools": [{"type": "function", "function": function}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": new,
    }


FORMS = {form.__name__: form for form in (responses, messages, chat)}


def timed(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send a turn; its seconds to the first text and to the end, and its tokens."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE)
    try:
        connection.connect()
        began = time.perf_counter()
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        lines = [(time.perf_counter() - began, line) for line in response]
    finally:
        connection.close()
    if response.status != 200:
        raise InputError(f"{url}{path} answered {response.status}: {b''.join(line for _, line in lines)[:300]!r}")
    usage: dict[str, Any] = {}
    first = 0.0
    for at, line in lines:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if event.get("error"):
            raise InputError(f"{url}{path} failed: {event['error']}")
        first = first or (at if _says(event) else 0.0)
        for holder in (event, event.get("response") or {}, event.get("message") or {}):
            usage |= holder.get("usage") or {}
    details = usage.get("input_tokens_details") or usage.get("prompt_tokens_details") or {}
    cached = usage.get("cache_read_input_tokens", details.get("cached_tokens", 0)) or 0
    prompt = usage.get("prompt_tokens", usage.get("input_tokens", 0))
    return {
        "prompt_tokens": prompt + (cached if "cache_read_input_tokens" in usage else 0),
        "cached_tokens": cached,
        "new_tokens": usage.get("completion_tokens", usage.get("output_tokens", 0)),
        "ttft_ms": round(1e3 * first, 1),
        "seconds": round(lines[-1][0], 4),
    }


def _says(event: dict[str, Any]) -> bool:
    """Return whether an event has text or a part of a call."""
    if str(event.get("type", "")).endswith(("_delta", ".delta")):
        return event["type"] != "message_delta"
    deltas = [choice.get("delta", {}) for choice in event.get("choices", ())]
    return any(delta.get("content") or delta.get("tool_calls") for delta in deltas)


def run(args: argparse.Namespace, urls: dict[str, str]) -> list[dict[str, Any]]:
    """The turns of all forms; the servers take turns."""
    names = {arm: model_at(url) for arm, url in urls.items()}
    with httpx.Client(timeout=PATIENCE, trust_env=False) as client:

        def count(text: str) -> int:
            url = next(iter(urls.values()))
            found = client.post(f"{url}/tokenize", json={"prompt": text, "content": text}).json()
            return len(found["tokens"])

        calls = recorded(args.turns, count, args.tokens)
    found = []
    for form in args.forms:
        for turn in range(1, args.turns + 1):
            for arm in list(urls) if turn % 2 else list(urls)[::-1]:
                if arm == "fresh" and turn % args.every:
                    continue
                path, body = FORMS[form](names[arm], calls[:turn], turn, args.new)
                found.append({"form": form, "turn": turn, "arm": arm, **timed(urls[arm], path, body)})
                say(json.dumps(found[-1]))
    return found


def summary(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Seconds of an arm's turns, of those among them that all arms had, and of the last one, by form and arm."""
    found: dict[str, Any] = {}
    arms = {turn["arm"] for turn in turns}
    had = Counter((turn["form"], turn["turn"]) for turn in turns)
    for turn in turns:
        empty = {"turns": 0, "seconds": 0.0, "seconds_shared": 0.0}
        mine = found.setdefault(turn["form"], {}).setdefault(turn["arm"], empty)
        mine["turns"] += 1
        mine["seconds"] = round(mine["seconds"] + turn["seconds"], 3)
        if had[turn["form"], turn["turn"]] == len(arms):
            mine["seconds_shared"] = round(mine["seconds_shared"] + turn["seconds"], 3)
        mine["last"] = {name: turn[name] for name in ("prompt_tokens", "cached_tokens", "ttft_ms", "seconds")}
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="default", help="the model that the arms serve")
    add("--server", action="append", default=[], metavar="LABEL=URL", help="a server that runs already")
    add("--arms", nargs="*", choices=ARMS, default=list(ARMS), help="servers to start")
    add("--forms", nargs="+", choices=FORMS, default=["responses", "messages"], help="forms of the requests")
    add("--turns", type=int, default=20, help="of the session")
    add("--every", type=int, default=4, help="of how many turns the arm that keeps nothing gets one, the last of them")
    add("--tokens", type=int, default=7500, help="of all results of tools together")
    add("--new", type=int, default=32, help="tokens of an answer, at most")
    result_options(parser)
    return parser.parse_args()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Time all turns."""
    if args.turns < 1 or args.every < 1 or not (args.arms or args.server):
        raise InputError("give --turns and --every of at least 1, and an arm or a --server")
    with ExitStack() as stack:
        running = {arm: stack.enter_context(started(arm, ARMS[arm], args.model)) for arm in args.arms}
        turns = run(args, running | pairs(args.server, "--server"))
    return {"summary": summary(turns), "turns": turns}


def main() -> None:
    say(json.dumps(write_measured(parse(), measure)["summary"], indent=1))


if __name__ == "__main__":
    main()
