"""Training examples as token ids, and padded batches of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from anabranch.model.encoder import Source

__all__ = ["Batch", "Example", "grouped"]


@dataclass(frozen=True)
class Example:
    """A prompt and its completion; ``id`` is unique in its file, or empty.

    source   name of the data
    encoded  what an encoder-decoder target reads; its prompt is what the decoder begins with
    """

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    source: str = ""
    id: int | str = field(default="", compare=False)
    encoded: Source | None = field(default=None, compare=False)

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)

    @cached_property
    def question(self) -> tuple[int, ...]:
        """The identity of what the completion answers: the prompt, and for an encoder-decoder target the source."""
        return self.prompt_ids if self.encoded is None else (*self.prompt_ids, -1, *self.encoded.identity)

    @property
    def name(self) -> str:
        """Source and id, for messages."""
        return " ".join(filter(None, (self.source, str(self.id)))) or "unnamed"


@dataclass(frozen=True)
class Batch:
    """Padded examples: tokens [B, T], lengths [B], and the position of each row's last prompt token [B].

    Training starts at that last prompt token. ``names`` are the examples' sources and ids, for messages. ``whole_BT``
    are the tokens of the batch that this one was split from. ``encoded`` are the sources of an encoder-decoder target.
    """

    tokens_BT: Tensor
    lengths_B: Tensor
    starts_B: Tensor
    names: tuple[str, ...] = ()
    whole_BT: Tensor | None = None
    encoded: tuple[Source | None, ...] = ()

    @staticmethod
    def of(examples: Sequence[Example]) -> Batch:
        """Pad on the right with 0; padding is never attended to."""
        width = max(len(example) for example in examples)
        tokens = torch.zeros(len(examples), width, dtype=torch.long)
        for b, example in enumerate(examples):
            tokens[b, : len(example)] = torch.tensor((*example.prompt_ids, *example.answer_ids))
        return Batch(
            tokens,
            torch.tensor([len(example) for example in examples]),
            torch.tensor([len(example.prompt_ids) - 1 for example in examples]),
            tuple(example.name for example in examples),
            encoded=tuple(example.encoded for example in examples),
        )

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.lengths_B)

    @property
    def scored_BT(self) -> Tensor:
        """The tokens that a draft vocabulary includes: those of the whole batch, so that its parts have one loss."""
        return self.tokens_BT if self.whole_BT is None else self.whole_BT

    def split(self, parts: int) -> list[Batch]:
        """At most ``parts`` batches with every ``parts``-th row each, padded to their own longest row.

        Rows of a batch have similar lengths, and so have its parts. A batch of fewer rows has fewer parts.
        """
        if parts == 1:
            return [self]
        batches = []
        for first in range(min(parts, self.size)):
            rows = slice(first, None, parts)
            lengths_B = self.lengths_B[rows]
            tokens_BT = self.tokens_BT[rows, : int(lengths_B.max())]
            names, encoded = self.names[rows], self.encoded[rows]
            batches.append(Batch(tokens_BT, lengths_B, self.starts_B[rows], names, self.scored_BT, encoded))
        return batches


def grouped(examples: Sequence[Example], rows: int = 16) -> Iterator[tuple[list[Example], Batch]]:
    """Groups of ``rows`` examples of similar length, each with its batch."""
    order = sorted(examples, key=len)
    for first in range(0, len(order), rows):
        yield (group := order[first : first + rows]), Batch.of(group)
