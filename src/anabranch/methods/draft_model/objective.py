"""Objective of a draft model: the target's next-token distribution on its own completions (Leviathan et al. 2023, 3.6).

The acceptance rate of a draft is one minus the distance of the two distributions, so the draft model learns the
target's distribution and not the text alone.

B rows, T text length, P positions, D and H widths of draft model and target, V vocabulary, M predictions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.drafting.replay import Accuracy, Replay, evaluation, replay_drafter
from anabranch.learning.examples import Batch, Example
from anabranch.learning.loss import DistillationLoss
from anabranch.learning.objective import Scores, Segment, segments
from anabranch.learning.target import Keeping, frozen_target
from anabranch.methods.draft_model.drafter import DraftModelDrafter, DraftModelSettings
from anabranch.methods.draft_model.module import DraftModule
from anabranch.methods.draft_model.recipes import LossOptions
from anabranch.model.decoder import Decoder

__all__ = ["DraftObjective", "LossOptions"]

CHUNK = 256  # predictions scored at once: 256 x 49,152 float32 are 48 MiB
TOP = 8  # accuracy counts a token among that many best, too
ROWS = 16  # completions replayed side by side
DEPTH = 5


class DraftObjective:
    """Training objective of a draft model with a frozen target; an ``Objective``.

    frozen  runs the passes without gradients: a packed copy of the target where that is faster
    """

    predictor = "draft model"
    predictors = 1

    def __init__(
        self, target: Decoder, module: DraftModule, options: LossOptions | None = None, *, frozen: Decoder | None = None
    ) -> None:
        self.target, self.module = target, module
        self.options = options or LossOptions()
        self.run = frozen_target(target, frozen)

    def freeze(self, batch: Batch) -> Tensor:
        """The target's states after the last norm [B, T, H]."""
        return self.run(batch).hidden_BTD

    def keep(self, keeping: Keeping) -> None:
        """Keep the states of the frozen target."""
        self.run = keeping(self.run)

    def segments(self, batch: Batch) -> Iterator[Segment]:
        """All positions of the completions at once: each needs the pass over the whole text before it."""
        return segments(batch, size=batch.tokens_BT.shape[1], ahead=1, device=self.target.device)

    def predictions(self, batch: Batch) -> float:
        """Tokens of the completions."""
        return float((batch.lengths_B - 1 - batch.starts_B).clamp(min=0).sum())

    def loss(self, batch: Batch, frozen: Tensor, segment: Segment) -> Scores:
        """The loss of a batch: a sum over its completion tokens."""
        states_MD, tokens_M, rows_M, places_M = self._scored(batch, segment)
        hidden_MH = frozen[rows_M, places_M]

        def teacher(part: slice) -> Tensor:
            with torch.no_grad():
                return self.target.logits(hidden_MH[part]).float().softmax(-1)

        scores: tuple[Tensor, Tensor] = DistillationLoss.apply(  # type: ignore[no-untyped-call]
            states_MD, self.module.model.head.weight, tokens_M, teacher, self.options.soft
        )
        loss, right = scores
        return Scores(loss, right.sum().float()[None], torch.tensor([float(len(tokens_M))], device=right.device))

    def _scored(self, batch: Batch, segment: Segment) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """States [M, D] that predict, the tokens [M] that follow, and the row and position [M] of each."""
        tokens_BT = batch.tokens_BT.to(self.target.device)
        positions_BP, real_BP = segment
        rows_M = torch.arange(batch.size, device=tokens_BT.device)[:, None].expand_as(positions_BP)[real_BP]
        places_M = positions_BP[real_BP]
        return self.module.states(tokens_BT)[rows_M, places_M], tokens_BT[rows_M, places_M + 1], rows_M, places_M

    def evaluate(self, examples: Sequence[Example], *, nodes: Sequence[int] = ()) -> dict[str, Any]:
        """Predicted mean acceptance length of greedy decoding and accuracy; "tree" is the default tree of 16 nodes."""
        settings = {"tree": DraftModelSettings(), "chain": DraftModelSettings("chain")}
        settings |= {f"{n} nodes": DraftModelSettings(nodes=n) for n in nodes}
        totals, accuracy = {name: Replay() for name in settings}, Accuracy.empty(TOP, 1)
        order = sorted(examples, key=len)
        with torch.autocast(self.target.device.type, enabled=False):  # the draft model's cache has one type
            for first in range(0, len(order), ROWS):
                group = order[first : first + ROWS]
                for name, each in settings.items():
                    drafter = DraftModelDrafter(self.target, self.module.model, each)
                    replay_drafter(totals[name], group, drafter, DEPTH)
                self._score(accuracy, Batch.of(group))
        return evaluation(totals, accuracy, DEPTH)

    @torch.no_grad()
    def _score(self, accuracy: Accuracy, batch: Batch) -> None:
        for segment in self.segments(batch):
            states_MD, tokens_M, _, _ = self._scored(batch, segment)
            for part in range(0, len(tokens_M), CHUNK):
                z = F.linear(states_MD[part : part + CHUNK], self.module.model.head.weight)
                hit = z.topk(min(TOP, z.shape[-1]), dim=-1).indices == tokens_M[part : part + CHUNK, None]
                accuracy.first_J[0] += float(hit[:, 0].sum())
                accuracy.among_J[0] += float(hit.any(-1).sum())
                accuracy.count_J[0] += len(hit)
