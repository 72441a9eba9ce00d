"""Formats of answers: fields of OpenAI, Anthropic, vLLM and llama.cpp, as the options of a call.

A call that the model must make is a grammar: the function's name is given, its arguments follow their schema. So is a
text with calls of strict functions, if it makes any.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from anabranch.declared import Keywords
from anabranch.serve.failures import RequestError
from anabranch.serve.toolcalls import CLOSE, OPEN, Style

__all__ = ["VLLM", "call_grammar", "structure_of", "text_grammar", "wanted_format"]

ANY_OBJECT = '{"type": "object"}'
JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
VLLM = ("json", "regex", "choice", "grammar", "json_object")  # of ``structured_outputs``; ``guided_*`` before


def structure_of(given: Mapping[str, Any]) -> Keywords:
    """The option of a call that some fields ask for; empty for none. Raises RequestError.

    given  ``response_format``, ``structured_outputs`` and ``guided_*`` of a request
    """
    found: list[tuple[str, Keywords]] = []
    for name, value in given.items():
        if value is None:
            continue
        if name == "response_format":
            options = wanted_format(value, name)
        elif name == "structured_outputs":
            options = _of_vllm(value)
        else:
            options = _option(name.removeprefix("guided_"), value, name)
        if options:
            found.append((name, options))
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise RequestError(400, f"{names} both say what the answer must be; give one of them", param=found[1][0])
    return found[0][1] if found else {}


def wanted_format(form: Any, param: str) -> Keywords:
    """The option of a format: {"type": "text" | "json_object" | "json_schema", ...}. Raises RequestError."""
    kind = form.get("type") if isinstance(form, Mapping) else None
    if kind == "text":
        return {}
    if kind == "json_object":  # llama.cpp takes a schema here
        return {"schema": ANY_OBJECT if form.get("schema") is None else _schema(form["schema"], param)}
    if kind == "json_schema":
        named = form.get("json_schema", form)  # responses have the schema one level up
        if isinstance(named, Mapping) and isinstance(named.get("schema"), Mapping):
            return {"schema": _schema(named["schema"], param)}
        raise RequestError(400, f"{param} must have a JSON schema in 'schema', got {form!r}", param=param)
    raise RequestError(
        400, f"{param} must be of type 'text', 'json_object' or 'json_schema', got {kind!r}", param=param
    )


def _of_vllm(value: Any) -> Keywords:
    if not isinstance(value, Mapping):
        raise RequestError(400, "structured_outputs must be an object", param="structured_outputs")
    asked = {name: value[name] for name in VLLM if value.get(name) not in (None, False)}
    if len(asked) != 1:
        known = ", ".join(VLLM)
        raise RequestError(400, f"structured_outputs must have one of {known}", param="structured_outputs")
    ((kind, given),) = asked.items()
    return _option(kind, given, "structured_outputs")


def _option(kind: str, value: Any, param: str) -> Keywords:
    if kind == "json_object":
        return {"schema": ANY_OBJECT}
    if kind == "json":
        return {"schema": _schema(value, param)}
    if kind == "choice":
        if not isinstance(value, Sequence) or not value or not all(isinstance(each, str) and each for each in value):
            raise RequestError(400, f"{param} must be a list of texts to choose from, got {value!r}", param=param)
        return {"regex": "|".join(f"({re.escape(each)})" for each in value)}
    if not isinstance(value, str) or not value:
        raise RequestError(400, f"{param} must be a text, got {value!r}", param=param)
    return {"regex": value} if kind == "regex" else {"grammar": value}


def _schema(value: Any, param: str) -> str:
    """A schema as JSON, with its properties in their order."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping | bool):
        raise RequestError(400, f"{param} must have a JSON schema, got {value!r}", param=param)
    return json.dumps(value)


def call_grammar(tools: Sequence[Mapping[str, Any]], style: Style) -> str:
    """The Lark grammar of a call of one of some functions, as models of a style write it. Raises RequestError."""
    if style == "parameters":
        raise RequestError(
            400, "tool_choice cannot force a call of this model, which writes calls in tags", param="tool_choice"
        )
    before, after = (f"{OPEN}\n", f"\n{CLOSE}") if style == "tags" else ("", "")
    return "\n".join(["start: call", *_calls("call", tools, style, before, after), *_arguments(tools)])


def text_grammar(tools: Sequence[Mapping[str, Any]], style: Style) -> str:
    """The Lark grammar of a text in which calls of some functions may stand, and nothing else that is read as one.

    So no text, before or after a call, begins with a brace (``toolcalls``). Raises RequestError.
    """
    if style == "parameters":
        raise RequestError(
            400, "strict tools are not supported with this model, which writes calls in tags", param="tools"
        )
    rules = [
        "start: tagged* text | bare" if style == "tags" else "start: text | bare",
        "text: TEXT",
        "TEXT: /[ \\n\\r\\t]*([^{ \\n\\r\\t](.|\\n)*)?/",
        *_calls("bare", tools, style, "", ""),
    ]
    if style == "tags":
        rules += ["tagged: open call", f"open[lazy]: TEXT {_literal(OPEN)}"]
        rules += _calls("call", tools, style, "\n", f"\n{CLOSE}")
    return "\n".join([*rules, *_arguments(tools)])


def _calls(rule: str, tools: Sequence[Mapping[str, Any]], style: Style, before: str, after: str) -> list[str]:
    """The rule of a call of one of some functions between two texts."""
    key = "parameters" if style == "json" else "arguments"
    heads = [f'{before}{{"name": {json.dumps(tool["function"]["name"])}, "{key}": ' for tool in tools]
    end = _literal("}" + after)
    return [f"{rule}: " + " | ".join(f"{_literal(head)} arguments{n} {end}" for n, head in enumerate(heads))]


def _arguments(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rules of the arguments of some functions."""
    schemas = [tool["function"].get("parameters") or {"type": "object"} for tool in tools]
    return [f"arguments{n}: %json {json.dumps({'x-guidance': JSON_FORM, **each})}" for n, each in enumerate(schemas)]


def _literal(text: str) -> str:
    return json.dumps(text)
