"""Training examples as token ids, and padded batches of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Batch", "Example"]


@dataclass(frozen=True)
class Example:
    """A prompt and its completion; ``id`` is unique in its file, or empty."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    source: str = ""
    id: int | str = field(default="", compare=False)

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)

    @property
    def name(self) -> str:
        """Source and id, for messages."""
        return " ".join(filter(None, (self.source, str(self.id)))) or "unnamed"


@dataclass(frozen=True)
class Batch:
    """Padded examples: tokens [B, T], lengths [B], and the position of each row's last prompt token [B].

    Training starts at that last prompt token. ``names`` are the examples' sources and ids, for messages.
    """

    tokens_BT: Tensor
    lengths_B: Tensor
    starts_B: Tensor
    names: tuple[str, ...] = ()

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
        )

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.lengths_B)
