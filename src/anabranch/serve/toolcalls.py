"""Tool calls in a model's text: Qwen's and Hermes' tags, Qwen3-Coder's tags of parameters, and Llama's bare JSON.

Small models of the first kind often leave the tags out, so an answer that begins with the JSON of a call of a known
tool is one too. Arguments are streamed as the model writes them. What turns out to be no call is text.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["CLOSE", "OPEN", "Piece", "Style", "ToolReader", "style_of"]

Style = Literal["tags", "parameters", "json"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
LONGEST_HEAD = 256  # characters of bare JSON after which it is no call
FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def style_of(template: str | None) -> Style | None:
    """The form in which a chat template lets its model write tool calls; None for one that is not known here."""
    if not template:
        return "tags"
    if "<function=" in template:
        return "parameters"
    if OPEN in template:
        return "tags"
    if "[TOOL_CALLS]" in template or "<|channel|>" in template or "tool_call_begin" in template:
        return None
    return "json" if "parameters" in template and "ipython" in template else "tags"


@dataclass(frozen=True)
class Piece:
    """A piece of an answer: text, or a piece of the JSON of a tool call's arguments.

    call  the index of the tool call; None: text
    id    of the call, and its name, on its first piece
    end   whether the call is complete
    """

    text: str = ""
    call: int | None = None
    id: str | None = None
    name: str | None = None
    end: bool = False


class ToolReader:
    """Splits a text that arrives in pieces into text and tool calls.

    style   None: all of it is text
    tools   their schemas by name, for parameters that are written without JSON
    single  leave out all calls but the first
    """

    def __init__(
        self, style: Style | None, tools: Mapping[str, Mapping[str, Any]] | None = None, *, single: bool = False
    ) -> None:
        self._style, self._tools, self._single = style, tools or {}, single
        self.calls = 0
        self._text = ""  # not given out yet
        self._state: Literal["text", "head", "arguments", "tail"] = "text"
        self._depth, self._quoted, self._escaped = 0, False, False
        self._said = False  # whether there was text that is not blank
        self._bare = False  # whether the call that is read has no tags

    def feed(self, text: str) -> list[Piece]:
        """Take in more text; returns the pieces that are certain."""
        if self._style is None:
            return [Piece(text)] if text else []
        self._text += text
        return self._kept(self._advance())

    def finish(self) -> list[Piece]:
        """End the text; returns what was held back."""
        if self._style is None:
            return []
        pieces = list(self._advance())
        rest, self._text = self._text, ""
        if self._state == "head":
            made = self._whole_call(rest)
            pieces += made if made else [Piece(("" if self._bare else OPEN) + rest)]
        elif self._state == "arguments":  # cut off by the end of the text
            pieces.append(Piece(rest, self.calls - 1, end=True))
        elif self._state == "text" and (self._said or rest.strip() or not self.calls):
            pieces.append(Piece(rest))
        self._state = "text"
        return self._kept(pieces)

    def _kept(self, pieces: Iterable[Piece]) -> list[Piece]:
        found = [piece for piece in pieces if piece.text or piece.name or piece.end]
        return [piece for piece in found if not (self._single and piece.call)]

    def _advance(self) -> Iterator[Piece]:
        while True:
            state, size = self._state, len(self._text)
            step = {
                "text": self._in_text,
                "head": self._in_head,
                "arguments": self._in_arguments,
                "tail": self._in_tail,
            }
            yield from step[state]()
            if (self._state, len(self._text)) == (state, size):
                return

    def _in_text(self) -> Iterator[Piece]:
        if self._style != "parameters" and not self._said and self._text.lstrip().startswith("{"):
            self._state, self._bare = "head", True
            return
        if self._style == "json":
            safe = self._text if self._text.strip() or self._said else ""
        elif (at := self._text.find(OPEN)) >= 0:
            before, self._text, self._state = self._text[:at].rstrip(), self._text[at + len(OPEN) :], "head"
            self._bare = False
            yield Piece(before)
            return
        else:
            # the beginning of a tag is held back, and so is the space before it
            held = next(
                (n for n in range(min(len(OPEN) - 1, len(self._text)), 0, -1) if self._text.endswith(OPEN[:n])), 0
            )
            safe = self._text[: len(self._text) - held].rstrip()
        if safe:
            self._text, self._said = self._text[len(safe) :], True
            yield Piece(safe)

    def _in_head(self) -> Iterator[Piece]:
        if self._style == "parameters":
            if (at := self._text.find(CLOSE)) >= 0:
                body, self._text, self._state = self._text[:at], self._text[at + len(CLOSE) :], "text"
                yield from self._parameters(body)
            return
        head = HEAD.match(self._text)
        if self._bare and (len(self._text) > LONGEST_HEAD if head is None else not self._known(_name(head))):
            self._state, self._said = "text", True
        elif head is not None:
            self._text, self._state = self._text[head.end() :], "arguments"
            self._depth, self._quoted, self._escaped = 0, False, False
            yield self._begun(_name(head))
        elif not self._bare and (at := self._text.find(CLOSE)) >= 0:
            body, self._text, self._state = self._text[:at], self._text[at + len(CLOSE) :], "text"
            yield from self._whole_call(body) or [Piece(OPEN + body + CLOSE)]

    def _in_arguments(self) -> Iterator[Piece]:
        for at, character in enumerate(self._text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = character == "\\", character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    yield Piece(self._text[: at + 1], self.calls - 1, end=True)
                    self._text, self._state = self._text[at + 1 :], "tail"
                    return
        yield Piece(self._text, self.calls - 1)
        self._text = ""

    def _in_tail(self) -> Iterable[Piece]:
        """Skip what ends a call."""
        if self._bare:
            self._text = self._text.lstrip(" \n\r\t};")
            if self._text:
                self._state, self._said = "text", False
        elif (at := self._text.find(CLOSE)) >= 0:
            self._text, self._state = self._text[at + len(CLOSE) :], "text"
            self._said = False
        return ()

    def _known(self, name: str) -> bool:
        """Return whether JSON without tags is a call: in Llama's form always, else if a tool has this name."""
        return self._style == "json" or name in self._tools

    def _begun(self, name: str) -> Piece:
        self.calls += 1
        return Piece("", self.calls - 1, f"call_{uuid.uuid4().hex[:24]}", name)

    def _whole_call(self, body: str) -> list[Piece]:
        """The pieces of a call whose JSON is in another order or has arguments in a string; none: it is no call."""
        try:
            call = json.loads(body, strict=False)
        except ValueError:
            return []
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return []
        if self._bare and not self._known(call["name"]):
            return []
        given = call.get("arguments", call.get("parameters", {}))
        return self._made(call["name"], given if isinstance(given, str) else json.dumps(given, ensure_ascii=False))

    def _made(self, name: str, arguments: str) -> list[Piece]:
        return [self._begun(name), Piece(arguments, self.calls - 1, end=True)]

    def _parameters(self, body: str) -> list[Piece]:
        """The pieces of a call in tags; a value is JSON unless its schema says that it is a string."""
        function = FUNCTION.fullmatch(body)
        if function is None:
            return [Piece(OPEN + body + CLOSE)]
        known = self._tools.get(function[1], {}).get("properties", {})
        values = {name: _value(text, known.get(name, {})) for name, text in PARAMETER.findall(function[2])}
        return self._made(function[1], json.dumps(values, ensure_ascii=False))


def _name(head: re.Match[str]) -> str:
    return str(json.loads(head[1], strict=False))


def _value(text: str, schema: Any) -> Any:
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
