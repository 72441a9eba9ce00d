"""An answer as a list of blocks, texts and tool calls in their order, as messages and responses have it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from anabranch.serve.toolcalls import Piece

__all__ = ["Block", "Blocks", "Change"]


@dataclass
class Block:
    """A text, or a tool call with an id, a name and its arguments as JSON in ``text``."""

    index: int
    text: str = ""
    id: str | None = None
    name: str | None = None

    @property
    def arguments(self) -> Any:
        """The arguments of a call as a JSON value; one that was cut off or is invalid is its text."""
        try:
            return json.loads(self.text)
        except ValueError:
            return self.text


class Change(NamedTuple):
    """A step in the life of a block: it opens, grows by a text, or closes."""

    kind: Literal["open", "grow", "close"]
    block: Block
    text: str = ""


class Blocks:
    """Turns pieces into blocks, one open at a time."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None
        self._call: int | None = None  # of the open block

    def feed(self, pieces: Iterable[Piece]) -> Iterator[Change]:
        """The changes that pieces make."""
        for piece in pieces:
            if self._open is None or piece.call != self._call:
                yield from self.finish()
                self._open = Block(len(self.all), "", piece.id, piece.name)
                self._call = piece.call
                self.all.append(self._open)
                yield Change("open", self._open)
            if piece.text:
                self._open.text += piece.text
                yield Change("grow", self._open, piece.text)
            if piece.end:
                yield from self.finish()

    def finish(self) -> Iterator[Change]:
        """Close the block that is open."""
        closed, self._open, self._call = self._open, None, None
        if closed is not None:
            yield Change("close", closed)
