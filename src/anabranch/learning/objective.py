"""The protocol of training objectives.

One optimiser step is

    frozen = objective.freeze(batch)                 the target's pass, without gradients
    for segment in objective.segments(batch):
        scores = objective.loss(batch, frozen, segment)
        (scores.loss / objective.predictions(batch)).backward()

B rows, P positions of a segment, S predictors of a position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from anabranch.learning.examples import Batch, Example
from anabranch.learning.target import Keeping, frozen_target
from anabranch.model.decoder import Decoder

__all__ = ["FrozenObjective", "Objective", "Scores", "Segment", "segments"]

F = TypeVar("F")


class Segment(NamedTuple):
    """Positions [B, P] that are trained together, and which of them are real and not padding [B, P]."""

    positions_BP: Tensor
    real_BP: Tensor

    def places(self) -> tuple[Tensor, Tensor]:
        """Row and position of each real position, both [M]."""
        rows = torch.arange(len(self.positions_BP), device=self.positions_BP.device)
        return rows[:, None].expand_as(self.positions_BP)[self.real_BP], self.positions_BP[self.real_BP]


@dataclass
class Scores:
    """A segment's loss (a sum over its predictions), and the correct and total predictions of each predictor."""

    loss: Tensor
    right_S: Tensor
    count_S: Tensor


class Objective(Protocol[F]):
    """The training objective of a method's module; ``F`` is the result of the target's pass.

    predictor   what makes a position's predictions, for logs and cards (such as "head")
    predictors  number of predictors at each position
    options     the weights of the loss, a frozen dataclass
    """

    predictor: str
    predictors: int
    options: Any

    def freeze(self, batch: Batch) -> F:
        """Run the target over the batch, without gradients."""

    def keep(self, keeping: Keeping) -> None:
        """Replace what runs the frozen target by one that keeps its states for later epochs."""

    def segments(self, batch: Batch) -> Iterator[Segment]:
        """The batch in parts, so that peak memory does not grow with the length of the text."""

    def predictions(self, batch: Batch) -> float:
        """The number of a batch's predictions, by which its loss is divided."""

    def loss(self, batch: Batch, frozen: F, segment: Segment) -> Scores:
        """The loss of one segment."""

    def evaluate(self, examples: Sequence[Example], *, nodes: Sequence[int] = ()) -> dict[str, Any]:
        """Predicted mean acceptance length and accuracy on held-out examples, as JSON values.

        "tree"          the length that training is judged by
        "N nodes"       the length of trees of N nodes, for each N of ``nodes``
        "top 1", ...    share of right predictions by predictor: the best token, one of the N best
        "at least"      share of drafted steps that accept at least 1, 2, ... tokens
        "by source"     the length by the examples' source
        Any other name is a length too, of a tree of another shape.
        """


class FrozenObjective:
    """The parts of an ``Objective`` that all with a frozen target share.

    module   what is trained
    options  the weights of its loss
    ahead    tokens from a position to the first one that is predicted there
    whole    whether all positions are trained together, since each needs the pass over the whole text before it
    segment  otherwise the number of positions whose predictions are in memory at a time
    frozen   the target for passes without gradients: a packed copy where that is faster
    run      runs these passes
    """

    ahead = 2
    predictors = 1
    whole = False

    def __init__(
        self, target: Decoder, module: Any, options: Any, *, segment: int = 128, frozen: Decoder | None = None
    ) -> None:
        self.target, self.module, self.options, self.segment = target, module, options, segment
        self.frozen = target if frozen is None else frozen
        self.run = frozen_target(target, frozen)

    def keep(self, keeping: Keeping) -> None:
        """Keep the states of the frozen target."""
        self.run = keeping(self.run, dtype=self.frozen.dtype)

    def segments(self, batch: Batch) -> Iterator[Segment]:
        """The positions that predictions are made at."""
        size = batch.tokens_BT.shape[1] if self.whole else self.segment
        return segments(batch, size=size, ahead=self.ahead, device=self.target.device)

    def predictions(self, batch: Batch) -> float:
        """The number of predictions of all predictors, including those past the end of the text."""
        return float((batch.lengths_B - self.ahead - batch.starts_B).clamp(min=0).sum()) * self.predictors


def segments(batch: Batch, *, size: int, ahead: int, device: torch.device) -> Iterator[Segment]:
    """Positions from the last prompt token on, ``size`` at a time, up to the last with a token ``ahead`` of it."""
    last = (batch.lengths_B - 1 - ahead).to(device)
    starts = batch.starts_B.to(device)
    longest = int((last - starts).max()) + 1
    for offset in range(0, longest, size):
        steps = torch.arange(offset, min(offset + size, longest), device=device)
        positions = starts[:, None] + steps
        real = positions <= last[:, None]
        yield Segment(torch.where(real, positions, starts[:, None]), real)
