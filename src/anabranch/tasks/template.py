"""Tasks, and their prompts: templates with the names of fields in braces, or conversations."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabranch.errors import FileError, InputError

__all__ = ["Conversation", "Task", "Template", "field_text"]


class Template:
    r"""A prompt template, such as ``"Write SQL for {question} given {context}"``.

    ``{name}`` stands for a field of a row, ``{{`` and ``}}`` for braces. ``\n`` and ``\t`` mean what they mean in
    Python, since a shell does not convert them. Raises InputError for a template that cannot be parsed or has no field.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._parts: list[tuple[str, str | None]] = []
        try:
            parsed = list(string.Formatter().parse(text.replace("\\n", "\n").replace("\\t", "\t")))
        except ValueError as error:
            raise InputError(
                f"the prompt template cannot be read ({error}); write fields as {{name}}, and braces as {{{{ and }}}}"
            ) from error
        for literal, name, specification, conversion in parsed:
            if name is not None and (not name.isidentifier() or specification or conversion):
                shown = f"{name}{'!' + conversion if conversion else ''}{':' + specification if specification else ''}"
                raise InputError(
                    f"the prompt template contains {{{shown}}}; write the name of a field in braces, and nothing else"
                )
            self._parts.append((literal, name))
        self.fields = tuple(dict.fromkeys(name for _, name in self._parts if name is not None))
        if not self.fields:
            raise InputError(f"the prompt template {text!r} names no field; write one in braces, as in {{question}}")

    def render(self, row: Mapping[str, Any], where: str) -> str:
        """The prompt of a row. Raises FileError for a field that it lacks or that is not text; ``where`` names it."""
        return "".join(
            literal + ("" if name is None else field_text(row, name, where)) for literal, name in self._parts
        )


def field_text(row: Mapping[str, Any], field: str, where: str) -> str:
    """The text of a row's field, a string or a number. Raises FileError for anything else."""
    value = row[field]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise FileError(f"{where}: the field {field!r} must be a string or a number, got {type(value).__name__}")
    text = str(value)
    if not text.strip():
        raise FileError(f"{where}: the field {field!r} is empty; write its text there, or delete the line")
    return text


class Conversation:
    """Rows of ``messages`` instead of a template: the last message, the model's, is the completion.

    The text of a prompt, for people and for hashes, is the conversation before it (``render``).
    """

    text = "{messages}"
    fields = ("messages",)

    def render(self, row: Mapping[str, Any], where: str) -> str:
        """The prompt of a row as text: a single user's message alone, longer conversations with the roles."""
        messages = self.messages(row, where)
        if [message["role"] for message in messages] == ["user"]:
            return messages[0]["content"]
        return "\n".join(f"{message['role']}: {message['content']}" for message in messages)

    def messages(self, row: Mapping[str, Any], where: str) -> tuple[dict[str, str], ...]:
        """The messages of the prompt. Raises FileError for a field that is no conversation with an answer."""
        return tuple(self._checked(row, where)[:-1])

    def answer(self, row: Mapping[str, Any], where: str) -> str:
        """The last message's text. Raises FileError as ``messages`` does."""
        return self._checked(row, where)[-1]["content"]

    def _checked(self, row: Mapping[str, Any], where: str) -> list[dict[str, str]]:
        checked: list[dict[str, str]] = []
        given = row.get("messages")
        for message in given if isinstance(given, list) else []:
            parts = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else []
            if len(parts) != 2 or not all(isinstance(part, str) and part.strip() for part in parts):
                raise FileError(
                    f"{where}: each of its messages must be an object with a role and a content, both texts; correct "
                    "it, or delete the line"
                )
            checked.append({"role": str(parts[0]), "content": str(parts[1])})
        if len(checked) < 2 or checked[-1]["role"] != "assistant":
            raise FileError(
                f"{where}: its messages must be a list of at least two, the last with the role assistant; correct it, "
                "or delete the line"
            )
        return checked


@dataclass(frozen=True)
class Task:
    """An application: the prompts of a data set, their completions, and the metrics of answers.

    name        short, for tables and result files
    template    of the prompt; or rows are conversations that end with the completion
    completion  alternative fields of the completion, a text or a list of references; the first that a row has counts
    metrics     names of ``METRICS``
    folder      the folder of a known data set, with a file per split
    file        the JSONL file of a user's task, from which the splits are drawn
    licence     of the data, empty if unknown
    commercial  the licence allows commercial use
    """

    name: str
    template: Template | Conversation
    completion: tuple[str, ...]
    metrics: tuple[str, ...]
    folder: str = ""
    file: Path | None = None
    licence: str = ""
    commercial: bool = True
