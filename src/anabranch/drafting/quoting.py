"""The punctuation of specifications: ``NAME:setting=value,setting=value+NAME``, where values may be paths.

A value in quotes contains any character: ``rest:data="/a+b,nodes=8"``. Without quotes, the value of a path goes on at a
comma that no ``setting=`` follows, and at a plus sign that no method's name follows: ``rest:data=/a+b,c``.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from anabranch.errors import InputError

__all__ = ["pieces", "quoted", "unquoted"]

# a backslash escapes in double quotes only, and only a quote or itself
_QUOTED = re.compile(r"""(?<==)(?:"(?:\\.|[^"\\])*"|'[^']*')""")
_SPECIAL = re.compile(r"""[,+"'\s]""")


def pieces(text: str, separator: str, joined: Callable[[str, str], bool] = lambda before, after: False) -> list[str]:
    """Split at separators outside quotes.

    joined  whether a piece continues the text before it, separator included

    >>> pieces('rest:data="/a+b"+suffix', "+")
    ['rest:data="/a+b"', 'suffix']
    """
    masked = _QUOTED.sub(lambda found: "_" * len(found[0]), text)
    parts: list[str] = []
    start = 0
    for piece in masked.split(separator):
        own = text[start : start + len(piece)]
        start += len(piece) + len(separator)
        if parts and joined(parts[-1], own):
            parts[-1] += separator + own
        else:
            parts.append(own)
    return parts


def unquoted(value: str, what: str) -> str:
    """The value without its quotes, if it has any. Raises InputError for a quote that is not closed."""
    if value[:1] not in ('"', "'"):
        return value
    if not _QUOTED.fullmatch(f"={value}", 1):
        raise InputError(f"{what} starts with a quote that does not end it, got {value}; close it at the end")
    return re.sub(r'\\(["\\])', r"\1", value[1:-1]) if value[0] == '"' else value[1:-1]


def quoted(value: str) -> str:
    """The value as ``unquoted`` reads it: in quotes if it has punctuation."""
    if not _SPECIAL.search(value):
        return value
    escaped = re.sub(r'(["\\])', r"\\\1", value)
    return f'"{escaped}"'
