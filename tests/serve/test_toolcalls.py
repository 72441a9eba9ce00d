"""Tool calls in a model's text are the same however the text is cut, and everything else is text."""

from __future__ import annotations

import json
import random

import pytest

from anabranch.serve.toolcalls import Style, ToolReader, style_of

TWO = (
    'Let me look. <tool_call>\n{"name": "look", "arguments": {"at": "a \\"b\\" {", "deep": {"x": [1, {}]}}}\n'
    "</tool_call>\n"
    '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
)
CASES: list[tuple[Style, str, str, list[tuple[str, object]]]] = [
    ("tags", "just < text <tool", "just < text <tool", []),
    ("tags", " \n", " \n", []),
    ("tags", TWO, "Let me look.", [("look", {"at": 'a "b" {', "deep": {"x": [1, {}]}}), ("stop", {})]),
    ("tags", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", {"a": 1})]),
    (
        "tags",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call> and more',
        " and more",
        [("f", {"a": 1})],
    ),
    ("tags", "<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", []),
    ("tags", "text <tool_call>cut o", "text<tool_call>cut o", []),
    ("tags", '<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [("f", {"a": 1})]),
    ("tags", '{"name": "f", "arguments": {"a": "b"}}', "", [("f", {"a": "b"})]),
    ("tags", ' {"arguments": {}, "name": "f"}', "", [("f", {})]),
    (
        "tags",
        '{"name": "f", "arguments": {}}\n<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        "",
        [("f", {}), ("g", {})],
    ),
    ("tags", '{"name": "Ann", "arguments": {}}', '{"name": "Ann", "arguments": {}}', []),
    ("tags", '{"a": 1} <tool', '{"a": 1} <tool', []),
    ("json", '{"name": "f", "parameters": {"a": "}"}}', "", [("f", {"a": "}"})]),
    (
        "json",
        ' {"type": "function", "name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": 2}}',
        "",
        [("f", {}), ("g", {"b": 2})],
    ),
    ("json", '{"an": "answer"}', '{"an": "answer"}', []),
    ("json", "text {not json}", "text {not json}", []),
    (
        "parameters",
        "I will.\n<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n<parameter=b>\n12\nlines\n</parameter>\n"
        "</function>\n</tool_call>",
        "I will.",
        [("f", {"a": "12", "b": "12\nlines"})],
    ),
    ("parameters", "<tool_call>nothing</tool_call>", "<tool_call>nothing</tool_call>", []),
]
SCHEMAS = {"f": {"properties": {"a": {"type": "string"}, "b": {"type": "string"}}}}


def read(style: Style, pieces: list[str], *, single: bool = False) -> tuple[str, list[tuple[str, object]], int]:
    reader = ToolReader(style, SCHEMAS, single=single)
    found = [piece for text in pieces for piece in reader.feed(text)] + reader.finish()
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for piece in found:
        if piece.call is not None:
            if piece.name is not None:
                assert piece.id is not None
                names[piece.call] = piece.name
            arguments[piece.call] = arguments.get(piece.call, "") + piece.text
    text = "".join(piece.text for piece in found if piece.call is None)
    calls = [(names[call], json.loads(arguments[call])) for call in sorted(names)]
    return text, calls, sum(piece.end for piece in found)


@pytest.mark.parametrize(("style", "text", "said", "calls"), CASES)
def test_calls_and_text_in_any_pieces(style: Style, text: str, said: str, calls: list[tuple[str, object]]) -> None:
    draws = random.Random(0)
    for pieces in ([text], list(text), *(cut(text, draws) for _ in range(20))):
        found, made, ended = read(style, pieces)
        assert (found, made) == (said, calls)
        assert ended == len(calls)


def cut(text: str, draws: random.Random) -> list[str]:
    places = sorted(draws.sample(range(len(text) + 1), min(3, len(text))))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


def test_arguments_are_streamed_before_the_call_is_complete() -> None:
    reader = ToolReader("tags")
    begun = reader.feed('<tool_call>{"name": "f", "arguments": {"a": "long te')
    assert [(piece.name, piece.text) for piece in begun] == [("f", ""), (None, '{"a": "long te')]


def test_only_the_first_call_where_one_is_allowed() -> None:
    text, calls, ended = read("tags", [TWO], single=True)
    assert (text, [name for name, _ in calls], ended) == ("Let me look.", ["look"], 1)


def test_the_style_is_that_of_the_template() -> None:
    assert style_of("... <tool_call>\\n{name} ...") == "tags"
    assert style_of("... <tool_call><function=x> ...") == "parameters"
    assert style_of("Environment: ipython ... parameters") == "json"
    assert style_of("[TOOL_CALLS]") is None
    assert style_of(None) == "tags"
