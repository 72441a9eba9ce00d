"""Objective of draft heads: predict the tokens after the next one, ``sum_k decay^(k-1) * CE(head k)`` on completions.

The target is frozen: one pass over a batch gives the states that all heads read and, for distillation (Hydra++), those
of the distributions that they are to imitate.

B rows, T text length, P positions of a segment, K heads, D model width, M positions or predictions of a segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.drafting.head import RowVocabulary
from anabranch.drafting.replay import evaluation, replay_all
from anabranch.learning.examples import Batch, Example
from anabranch.learning.loss import Vocabulary, distillation_loss, distributions, vocabulary_loss
from anabranch.learning.objective import FrozenObjective, Scores, Segment
from anabranch.learning.target import TargetStates
from anabranch.methods.heads.drafter import HeadDraft, HeadSettings
from anabranch.methods.heads.module import DraftHeads
from anabranch.methods.heads.recipes import LossOptions
from anabranch.model.decoder import Decoder
from anabranch.tree import DraftTree

__all__ = ["HeadObjective", "LossOptions"]


@dataclass(frozen=True)
class _Predictions:
    """The predictions of a segment: where they are made, and what should come out.

    states_MD   the states that the heads read [M, D]
    path_MK     tokens after each position: those on the path to each prediction
    wanted_MK   tokens to predict
    inside_MK   which of them are in the text
    teacher_at  row and position [M, K] of the target's states that emit them
    """

    states_MD: Tensor
    path_MK: Tensor
    wanted_MK: Tensor
    inside_MK: Tensor
    teacher_at: tuple[Tensor, Tensor]


class _FromTarget:
    """A ``Builder`` whose states are the target's [B, 1, D], which the heads read before each draft."""

    def __init__(self, draft: HeadDraft) -> None:
        self.draft, self.row = draft, draft.row

    def build(
        self, states_BSD: Tensor, roots: list[int], rows: Sequence[RowVocabulary] | None = None
    ) -> list[DraftTree]:
        """One tree per row."""
        return self.draft.build(self.draft.states(states_BSD[:, 0]), roots, rows)


class HeadObjective(FrozenObjective):
    """The ``Objective`` of draft heads with a frozen target; head 1 predicts the token two positions later.

    draft  (target, module, shape) -> builds the trees of a shape, for evaluation

    A module whose heads read more than the target's states is trained on whole texts.
    """

    predictor = "head"
    module: DraftHeads
    options: LossOptions

    def __init__(
        self,
        target: Decoder,
        module: DraftHeads,
        options: LossOptions,
        *,
        draft: Callable[[Decoder, Any, HeadSettings], HeadDraft],
        **passes: Any,
    ) -> None:
        super().__init__(target, module, options, **passes)
        self.draft, self.whole, self.predictors = draft, module.reads_texts, module.config.num_heads

    def freeze(self, batch: Batch) -> Tensor:
        """The target's states after the last norm [B, T, D]."""
        return self.run(batch).hidden_BTD

    def loss(self, batch: Batch, frozen: Tensor, segment: Segment) -> Scores:
        """The loss of one segment: a sum over its predictions."""
        return self.heads_loss(batch, self.module.prefix(self.target, frozen), frozen, segment)

    def tuned_loss(self, batch: Batch, tuned: TargetStates, taught_BTD: Tensor | None, segment: Segment) -> Scores:
        """The loss of heads that read a tuned target's states; they distil from ``taught_BTD``, or from these."""
        taught_BTD = tuned.hidden_BTD.detach() if taught_BTD is None else taught_BTD
        return self.heads_loss(batch, tuned.hidden_BTD, taught_BTD, segment)

    def heads_loss(self, batch: Batch, read_BTD: Tensor, frozen: Tensor, segment: Segment) -> Scores:
        """The loss of the heads where they read some states [B, T, D]; ``frozen`` are the target's own."""
        goals = self._goals(batch, read_BTD, segment)
        states_MKD = self.module.predicted(self.target, goals.states_MD, goals.path_MK)
        words = self.module.vocabularies(self.target, batch.scored_BT)
        if self.module.weights is None:
            loss, right_MK = self._shared(goals, states_MKD, frozen, words[0])
        else:
            loss, right_MK = self._own(goals, states_MKD, frozen, words)
        return Scores(loss, right_MK.sum(0).float(), goals.inside_MK.sum(0).float())

    def _goals(self, batch: Batch, states_BTD: Tensor, segment: Segment) -> _Predictions:
        tokens_BT, lengths_B = batch.tokens_BT.to(self.target.device), batch.lengths_B.to(self.target.device)
        rows_M, places_M = segment.places()
        after_MK = places_M[:, None] + torch.arange(1, self.predictors + 1, device=tokens_BT.device)
        inside_MK = after_MK + 1 < lengths_B[rows_M, None]
        last = tokens_BT.shape[1] - 1
        rows_MK, at_MK = rows_M[:, None].expand_as(after_MK), after_MK.clamp(max=last)
        wanted_MK = tokens_BT[rows_MK, (after_MK + 1).clamp(max=last)]
        return _Predictions(
            states_BTD[rows_M, places_M], tokens_BT[rows_MK, at_MK], wanted_MK, inside_MK, (rows_MK, at_MK)
        )

    def _shared(
        self, goals: _Predictions, states_MKD: Tensor, frozen: Tensor, words: Vocabulary
    ) -> tuple[Tensor, Tensor]:
        """The loss of all heads together, scored by the target's head, and which predictions are right [M, K]."""
        inside, (rows_MK, at_MK) = goals.inside_MK, goals.teacher_at
        weights_K = self.options.decay ** torch.arange(self.predictors, device=inside.device)
        taught = (rows_MK * frozen.shape[1] + at_MK)[inside]  # heads at different positions imitate one distribution
        wanted, weights = words.place[goals.wanted_MK[inside]], weights_K.expand_as(inside)[inside]
        soft, cap = self.options.soft, self.target.config.logit_softcap
        teacher = frozen.flatten(0, 1)
        loss, right = vocabulary_loss(words, states_MKD[inside], wanted, weights, teacher, soft, cap, taught)
        right_MK = torch.zeros_like(inside)
        right_MK[inside] = right
        return loss, right_MK

    def _own(
        self, goals: _Predictions, states_MKD: Tensor, frozen: Tensor, words: Sequence[Vocabulary]
    ) -> tuple[Tensor, Tensor]:
        """The loss of heads with weights of their own; tokens outside the draft vocabulary are left out."""
        cap, ids = self.target.config.logit_softcap, self.module.vocabulary.to(self.target.device)
        with torch.no_grad():
            head_VD = self.target.head_rows(ids)
        total, right_MK = torch.zeros((), device=ids.device), torch.zeros_like(goals.inside_MK)
        for k, vocabulary in enumerate(words):
            place_M = vocabulary.place[goals.wanted_MK[:, k]]
            inside_M = goals.inside_MK[:, k] & (place_M >= 0)
            hidden_mD = frozen[goals.teacher_at[0][inside_M, k], goals.teacher_at[1][inside_M, k]]

            def teacher(part: slice, hidden_mD: Tensor = hidden_mD, bias: Tensor | None = vocabulary.bias_V) -> Tensor:
                return distributions(F.linear(hidden_mD[part].to(head_VD.dtype), head_VD, bias), cap)

            given = states_MKD[inside_M, k], vocabulary.head_VD, place_M[inside_M]
            loss, right = distillation_loss(*given, teacher, self.options.soft, vocabulary.bias_V, cap)
            total = total + self.options.decay**k * loss
            right_MK[inside_M, k] = right
        return total, right_MK

    # -- evaluation by replay ----------------------------------------------------------------------------
    def vocabularies(self, batch: Batch) -> list[Vocabulary]:
        """Vocabulary of each head; heads that share the target's add the batch's own tokens."""
        return self.module.vocabularies(self.target, batch.scored_BT)

    def states(self, frozen: Tensor, tokens_BT: Tensor, positions_BP: Tensor) -> Tensor:
        """Input of the heads at some positions [B, P, 1, D]."""
        states_BTD = self.module.prefix(self.target, frozen)
        return states_BTD.gather(1, positions_BP[:, :, None].expand(-1, -1, frozen.shape[2]))[:, :, None]

    def conditioned(self, states_BPSD: Tensor, tokens_BT: Tensor, positions_BP: Tensor) -> Tensor:
        """The heads' states [B, P, K, D], given the true tokens on the path to each prediction."""
        after_BPK = positions_BP[:, :, None] + torch.arange(1, self.predictors + 1, device=positions_BP.device)
        rows = torch.arange(len(tokens_BT), device=tokens_BT.device)[:, None, None]
        path_BPK = tokens_BT[rows, after_BPK.clamp(max=tokens_BT.shape[1] - 1)]
        predicted = self.module.predicted(self.target, states_BPSD[:, :, 0].flatten(0, 1), path_BPK.flatten(0, 1))
        return predicted.reshape(*positions_BP.shape, *predicted.shape[1:])

    def evaluate(self, examples: Sequence[Example], *, nodes: Sequence[int] = ()) -> dict[str, Any]:
        """Predicted mean acceptance length and accuracy by head; "tree" is the default tree of 16 nodes."""
        drafts = {"tree": self.draft(self.target, self.module, HeadSettings())}
        shapes = {"chain": HeadSettings("chain")}
        if "sparse" in drafts["tree"].trees:
            shapes["sparse tree"] = HeadSettings("sparse")
        shapes |= {f"{n} nodes": HeadSettings(nodes=n) for n in nodes}
        drafts |= {name: self.draft(self.target, self.module, shape) for name, shape in shapes.items()}
        totals, accuracy = replay_all(self, {name: _FromTarget(draft) for name, draft in drafts.items()}, examples)
        return evaluation(totals, accuracy, self.predictors)
