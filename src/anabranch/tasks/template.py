"""Prompt templates: text with the names of fields in braces."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

from anabranch.errors import FileError, InputError

__all__ = ["Template", "field_text"]


class Template:
    r"""A prompt template, such as ``"Write SQL for {question} given {context}"``.

    ``{name}`` stands for a field of a row, ``{{`` and ``}}`` for braces. ``\n`` and ``\t`` are read as in Python, since
    a shell passes them on as they are. Raises InputError for a template that cannot be parsed or names no field.
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
            literal + ("" if name is None else field_text(row, name, where, "choose with --prompt-template"))
            for literal, name in self._parts
        )


def field_text(row: Mapping[str, Any], field: str, where: str, advice: str) -> str:
    """The text of a field: a string, or a number. Raises FileError for anything else."""
    value = row.get(field)
    if field not in row:
        raise FileError(f"{where} has no field {field!r}; its fields are {', '.join(row) or 'none'}: {advice}")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise FileError(f"{where}: the field {field!r} must be a string or a number, got {type(value).__name__}")
    text = str(value)
    if not text.strip():
        raise FileError(f"{where}: the field {field!r} is empty; write its text there, or delete the line")
    return text
