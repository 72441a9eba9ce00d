"""Medusa-2's objective: the tuned target's next token and its heads together, ``CE(main) + heads * sum_k CE(head k)``.

Begin with heads that were trained on the frozen target (``--init``): the paper's first stage, without which the large
loss of fresh heads would disturb the target.

B rows, T text length, P positions, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from anabranch.learning.examples import Batch
from anabranch.learning.objective import Scores, Segment, segments
from anabranch.methods.heads.objective import HeadObjective
from anabranch.methods.medusa.draft import MedusaDraft
from anabranch.methods.medusa.module import MedusaModule
from anabranch.methods.medusa.recipes import MedusaLoss
from anabranch.methods.tuning import check_tunable, next_token_loss, tuned_pass
from anabranch.model.decoder import Decoder

__all__ = ["JointObjective", "MedusaLoss"]


class JointObjective(HeadObjective):
    """How a target's low-rank terms and its heads learn together.

    The frozen target gives the distributions to distil from. Predicted lengths are those of the tuned target's heads on
    completions of the frozen one.
    """

    def __init__(
        self, target: Decoder, module: MedusaModule, options: MedusaLoss, *, frozen: Decoder | None = None
    ) -> None:
        check_tunable(target)
        super().__init__(target, module, MedusaDraft, options, frozen=frozen)
        self.share = options.heads
        assert module.tuning is not None
        self.layers = module.tuning

    def segments(self, batch: Batch) -> Iterator[Segment]:
        """All positions at once: each needs the tuned pass over the whole text before it.

        The last has a next token to predict, and nothing for its heads.
        """
        return segments(batch, size=batch.tokens_BT.shape[1], ahead=1, device=self.target.device)

    def loss(self, batch: Batch, frozen: Tensor, segment: Segment) -> Scores:
        """The loss of a batch: that of the heads, and the next token's as often as there are heads."""
        tuned_BTD = self.tuned_states(batch)
        scores = self.heads_loss(batch, tuned_BTD, frozen, segment)
        main = next_token_loss(self.target, batch, tuned_BTD, frozen, segment, self.options.soft)
        # a batch's loss is divided by positions times heads
        return Scores(self.predictors * (main + self.share * scores.loss), scores.right_S, scores.count_S)

    def states(self, frozen: Tensor, tokens_BT: Tensor, positions_BP: Tensor) -> Tensor:
        """What the heads read at some positions [B, P, 1, D]: the tuned target's states."""
        tuned = tuned_pass(self.target, self.layers, tokens_BT)
        return super().states(tuned.hidden_BTD, tokens_BT, positions_BP)

    def tuned_states(self, batch: Batch) -> Tensor:
        """The tuned target's states after the last norm [B, T, D]."""
        return tuned_pass(self.target, self.layers, batch.tokens_BT.to(self.target.device)).hidden_BTD
