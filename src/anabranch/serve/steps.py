"""The extension of streamed chat completions that shows each step: its draft tree, what was accepted, and times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from anabranch.analysis.trace import step_fields
from anabranch.decoding.detokenizer import Detokenizer
from anabranch.decoding.generation import Chunk
from anabranch.serve.usage import token_text

__all__ = ["Extension", "StepWriter"]


class Extension(BaseModel):
    """Options of requests that no other server has, so an unknown one is an error."""

    model_config = ConfigDict(extra="forbid", strict=True)

    steps: bool | None = Field(
        None,
        description="with stream: choices have anabranch.step, the step that a chunk comes from in the form of a trace "
        "with the texts of its tokens, and at their end anabranch.stats and anabranch.drafter",
    )


class StepWriter:
    """Writes the steps of one sequence as JSON values; ``stop`` are its stop strings."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer, self._detokenizer = tokenizer, Detokenizer(tokenizer, stop)
        self._texts: dict[int, str] = {}  # by token
        self._emitted = 0

    def add(self, chunk: Chunk) -> dict[str, Any]:
        """The fields of a trace's step and texts: of the tree's nodes, of ``next``, and of the emitted tokens.

        ``texts`` are those of tokens by themselves; ``pieces`` add up to the text of the answer, so a token that ends
        within a character has an empty one.
        """
        step, kept = chunk.step, len(chunk.token_ids)
        end = len(step.tokens) - 1 if step.finish == "stop" else None
        fields = step_fields(step, step.tree, at=self._emitted, kept=kept)
        self._emitted += kept
        return {
            **fields,
            "texts": [self._text(token) for token in fields["tokens"]],
            "next_text": self._text(fields["next"]),
            "pieces": self._detokenizer.pieces(chunk.token_ids, end=end, last=chunk.result is not None),
        }

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = token_text(self._tokenizer, token)
        return self._texts[token]
