"""Objective of a draft model: the target's next-token distribution on its own completions (Leviathan et al. 2023, 3.6).

The acceptance rate of a draft is one minus the distance of the two distributions, so the draft model learns the
target's distribution and not the text alone.

B rows, T text length, P positions, D and H widths of draft model and target, V vocabulary, M predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anabranch.drafting.replay import Accuracy, Replay, evaluation, replay_drafter
from anabranch.learning.examples import Batch, Example, grouped
from anabranch.learning.loss import Vocabulary, distillation_loss
from anabranch.learning.objective import FrozenObjective, Scores, Segment
from anabranch.methods.draft_model.drafter import DraftModelDrafter, DraftModelSettings
from anabranch.methods.draft_model.module import DraftModule
from anabranch.methods.draft_model.recipes import LossOptions

__all__ = ["DraftObjective", "LossOptions"]

DEPTH = 5


class DraftObjective(FrozenObjective):
    """The ``Objective`` of a draft model with a frozen target."""

    predictor = "draft model"
    ahead, whole = 1, True
    module: DraftModule
    options: LossOptions

    def freeze(self, batch: Batch) -> Tensor:
        """The target's states after the last norm [B, T, H]."""
        return self.run(batch).hidden_BTD

    def loss(self, batch: Batch, frozen: Tensor, segment: Segment) -> Scores:
        """The loss of a batch: a sum over its completion tokens."""
        states_MD, tokens_M, rows_M, places_M = self._scored(batch, segment)
        hidden_MH = frozen[rows_M, places_M]

        def teacher(part: slice) -> Tensor:
            return self.target.logits(hidden_MH[part]).float().softmax(-1)

        head = self.module.model.head.weight
        loss, right = distillation_loss(states_MD, head, tokens_M, teacher, self.options.soft)
        return Scores(loss, right.sum().float()[None], torch.tensor([float(len(tokens_M))], device=right.device))

    def _scored(self, batch: Batch, segment: Segment) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """States [M, D] that predict, the tokens [M] that follow, and the row and position [M] of each."""
        tokens_BT = batch.tokens_BT.to(self.target.device)
        rows_M, places_M = segment.places()
        return self.module.states(tokens_BT)[rows_M, places_M], tokens_BT[rows_M, places_M + 1], rows_M, places_M

    def evaluate(self, examples: Sequence[Example], *, nodes: Sequence[int] = ()) -> dict[str, Any]:
        """Predicted mean acceptance length of greedy decoding and accuracy; "tree" is the default tree of 16 nodes."""
        settings = {"tree": DraftModelSettings(), "chain": DraftModelSettings("chain")}
        settings |= {f"{n} nodes": DraftModelSettings(nodes=n) for n in nodes}
        totals, accuracy = {name: Replay() for name in settings}, Accuracy.empty(1)
        with torch.autocast(self.target.device.type, enabled=False):  # the draft model's cache has one type
            for group, batch in grouped(examples):
                for name, each in settings.items():
                    drafter = DraftModelDrafter(self.target, self.module.model, each)
                    replay_drafter(totals[name], group, drafter, DEPTH)
                self._score(accuracy, batch)
        return evaluation(totals, accuracy, DEPTH)

    @torch.no_grad()
    def _score(self, accuracy: Accuracy, batch: Batch) -> None:
        words = Vocabulary(self.module.model.head.weight, None, self.module.vocabulary)
        for segment in self.segments(batch):
            states_MD, tokens_M, _, _ = self._scored(batch, segment)
            accuracy.add(0, words, states_MD, tokens_M)
