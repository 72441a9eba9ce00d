"""SPACE's training objective: that of streams, at some of the positions of a completion.

k embeddings have few degrees of freedom, and every mask runs through the whole target and back. So a step sees many
texts at few positions rather than few texts at all of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from anabranch.errors import InputError
from anabranch.learning.examples import Batch
from anabranch.learning.objective import Scores, Segment
from anabranch.methods.space.module import MaskModule
from anabranch.methods.streams.objective import Frozen, LossOptions, StreamObjective
from anabranch.model.decoder import Decoder

__all__ = ["MaskLossOptions", "MaskObjective"]


@dataclass(frozen=True)
class MaskLossOptions:
    """Weights of the loss; ``decay`` and ``soft`` are those of streams (``LossOptions``).

    stride  masks are trained behind every n-th position
    masks   weight of the masks beside the tuned target's own next token, where the target is tuned too
    """

    decay: float = 0.8
    soft: float = 0.5
    stride: int = 4
    masks: float = 1.0

    def __post_init__(self) -> None:
        if self.stride < 1:
            raise InputError(f"stride must be at least 1, got {self.stride}")
        if not self.masks > 0:
            raise InputError(f"masks must be greater than 0, got {self.masks}")
        _ = self.of_streams

    @property
    def of_streams(self) -> LossOptions:
        """The weights that the streams' objective reads."""
        return LossOptions(decay=self.decay, soft=self.soft, unconditioned=0.0, pruning=0.0)


class MaskObjective(StreamObjective):
    """The ``Objective`` of masks: the streams' loss at every ``stride``-th position."""

    def __init__(
        self,
        target: Decoder,
        module: MaskModule,
        options: MaskLossOptions | None = None,
        *,
        segment: int = 128,
        frozen: Decoder | None = None,
    ) -> None:
        weights = options or MaskLossOptions()
        super().__init__(target, module, weights.of_streams, segment=segment, frozen=frozen)
        self.stride = weights.stride

    def predictions(self, batch: Batch) -> float:
        """About the number of predictions that ``loss`` scores."""
        return super().predictions(batch) / self.stride

    def loss(self, batch: Batch, frozen: Frozen, segment: Segment) -> Scores:
        """The loss of some positions of a segment; which ones depends on the batch, so that epochs differ."""
        positions_BP, real_BP = segment
        width, offset = positions_BP.shape[1], int(batch.scored_BT.sum()) % self.stride
        columns_BC = (offset - positions_BP[:, :1]) % self.stride + torch.arange(
            0, width, self.stride, device=positions_BP.device
        )
        inside_BC = columns_BC < width
        columns_BC = columns_BC.clamp(max=width - 1)
        chosen = Segment(positions_BP.gather(1, columns_BC), real_BP.gather(1, columns_BC) & inside_BC)
        return super().loss(batch, frozen, chosen)
