"""SPACE's training objective: that of streams, at some of the positions of a completion.

k embeddings have few degrees of freedom, and every mask runs through the whole target and back. So a step sees many
texts at few positions rather than few texts at all of theirs.
"""

from __future__ import annotations

import torch

from anabranch.learning.examples import Batch
from anabranch.learning.objective import Scores, Segment
from anabranch.methods.space.module import MaskModule
from anabranch.methods.space.recipes import MaskLossOptions
from anabranch.methods.streams.objective import Frozen, StreamObjective
from anabranch.model.decoder import Decoder

__all__ = ["MaskLossOptions", "MaskObjective"]


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
