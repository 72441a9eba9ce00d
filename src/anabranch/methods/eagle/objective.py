"""Objective of EAGLE's head: the target's features and its next-token distribution, on the target's own completions.

    loss = feature * SmoothL1(predicted feature, the target's) + token * CE(scores, the target's distribution and token)

EAGLE (Li et al. 2024, section 4.2) has the weights 1 and 0.1 and one step on the target's features. With several steps
the head also learns on its own features, as it drafts (EAGLE-3's training-time test, Li et al. 2025).

B rows, T text length, I = T - 1 positions of the head, P positions of a segment, M predictions, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.drafting.drafter import Row
from anabranch.drafting.replay import Accuracy, Replay, evaluation, replay_drafter
from anabranch.learning.examples import Batch, Example, grouped
from anabranch.learning.loss import Vocabulary, vocabulary_loss
from anabranch.learning.objective import FrozenObjective, Scores, Segment
from anabranch.methods.eagle.drafter import EagleDrafter, EagleSettings
from anabranch.methods.eagle.layer import new_layer
from anabranch.methods.eagle.module import EagleModule
from anabranch.methods.eagle.recipes import LossOptions
from anabranch.model.decoder import Decoder

__all__ = ["EagleObjective", "Frozen", "LossOptions"]

DEPTH = 5
TREES = {"tree": "best", "chain": "chain", "static tree": "static"}  # that are replayed


@dataclass(frozen=True)
class Frozen:
    """The target's states for a batch: after the last norm [B, T, D], and before each tapped layer."""

    hidden_BTD: Tensor
    taps: tuple[Tensor, ...]


class EagleObjective(FrozenObjective):
    """The ``Objective`` of a head with a frozen target."""

    predictor = "step"
    ahead, whole = 1, True

    module: EagleModule
    options: LossOptions

    def __init__(self, target: Decoder, module: EagleModule, options: LossOptions, **passes: Any) -> None:
        super().__init__(target, module, options, **passes)
        self.predictors = options.unroll

    def vocabulary(self, batch: Batch) -> Vocabulary:
        """The draft vocabulary with the batch's own tokens; decoding adds a row's own tokens in the same way."""
        return Vocabulary.of(self.target, self.module.vocabulary, batch.scored_BT)

    @torch.no_grad()
    def freeze(self, batch: Batch) -> Frozen:
        """Run the target over the batch."""
        layers = self.module.config.layers
        states = self.run(batch, taps=layers)
        return Frozen(states.hidden_BTD, tuple(states.taps[layer] for layer in layers))

    def predictions(self, batch: Batch) -> float:
        """Tokens of the completions that the head can predict, times the steps."""
        first = batch.starts_B.clamp(min=1)  # the head has no position before the second token
        return float((batch.lengths_B - 1 - first).clamp(min=0).sum()) * self.predictors

    def unrolled(self, batch: Batch, frozen: Frozen) -> list[Tensor]:
        """The features [B, I, D] that the head predicts in each step; position i predicts that of token i + 1."""
        tokens_BT = batch.tokens_BT.to(self.target.device)
        rows, width = tokens_BT.shape
        positions = torch.arange(width - 1, device=tokens_BT.device).expand(rows, width - 1)
        # copies: tables that a replay made in inference mode take no part in gradients
        cos, sin = (turn.clone().to(self.module.fc.weight.dtype) for turn in self.target.rope()(positions, width))
        with torch.no_grad():
            embeddings = self.target.embed(tokens_BT[:, 1:], positions + 1)
            taps = [self._noisy(tap[:, :-1], tokens_BT) for tap in frozen.taps]
            hidden = frozen.hidden_BTD[:, :-1]
            hidden = hidden if taps else self._noisy(hidden, tokens_BT)
        features = self.module.features(hidden, taps)
        return self.module.unroll(embeddings, features, cos, sin, self.options.unroll)

    def _noisy(self, states: Tensor, tokens_BT: Tensor) -> Tensor:
        """States with noise that depends on the batch alone, so that a resumed run sees the same."""
        if not self.options.noise:
            return states
        chance = torch.Generator().manual_seed(int(tokens_BT.sum()))
        noise = torch.rand(states.shape, generator=chance).to(states.device, states.dtype) - 0.5
        return states + noise * (2 * self.options.noise * states.abs().mean())

    @staticmethod
    def _scored(segment: Segment) -> tuple[Tensor, Tensor]:
        """Rows and positions [M] whose next tokens are predicted: by the head's position before them."""
        return segment._replace(real_BP=segment.real_BP & (segment.positions_BP > 0)).places()

    def loss(self, batch: Batch, frozen: Frozen, segment: Segment) -> Scores:
        """The loss of a batch: a sum over its predictions in all steps."""
        options, words = self.options, self.vocabulary(batch)
        rows_M, places_M = self._scored(segment)
        tokens_BT = batch.tokens_BT.to(self.target.device)
        wanted_M = words.place[tokens_BT[rows_M, places_M + 1]]
        true_MD = frozen.hidden_BTD[rows_M, places_M]
        total = torch.zeros((), device=tokens_BT.device)
        right, count = torch.zeros(self.predictors), torch.zeros(self.predictors)
        for step, features_BID in enumerate(self.unrolled(batch, frozen)):
            known_M = places_M > step  # a draft that deep begins at a position of the head
            features_MD, true = features_BID[rows_M, places_M - 1][known_M], true_MD[known_M]
            weight_M = torch.full((len(true),), options.decay**step, device=total.device)
            states_MD, cap = self.module.states(features_MD), self.target.config.logit_softcap
            scores = vocabulary_loss(words, states_MD, wanted_M[known_M], weight_M, true, options.soft, cap)
            total = total + options.token * scores[0]
            if options.feature and not frozen.taps:
                distance = F.smooth_l1_loss(features_MD.float(), true.float(), reduction="none").mean(-1)
                total = total + options.feature * (distance * weight_M).sum()
            right[step], count[step] = scores[1].sum(), len(true)
        return Scores(total, right, count)

    @torch.inference_mode()
    def evaluate(self, examples: Sequence[Example], *, nodes: Sequence[int] = ()) -> dict[str, Any]:
        """Predicted mean acceptance length of greedy decoding and accuracy; "tree" is the default tree of 16 nodes."""
        settings = {name: EagleSettings(tree, depth=DEPTH, k=16) for name, tree in TREES.items()}
        settings |= {f"{n} nodes": EagleSettings(nodes=n, depth=DEPTH, k=16) for n in nodes}
        totals, accuracy = {name: Replay() for name in settings}, Accuracy.empty(self.predictors)
        layer = new_layer(self.frozen, self.module)  # as it will draft
        for group, batch in grouped(examples):
            frozen = self.freeze(batch)
            self._score(accuracy, batch, frozen)
            with torch.autocast(self.target.device.type, enabled=False), self.frozen.decoding():
                for name, each in settings.items():
                    drafter = EagleDrafter(self.frozen, self.module, each, layer=layer)
                    self._replay(totals[name], group, frozen, drafter)
        return evaluation(totals, accuracy, DEPTH)

    @staticmethod
    def _replay(total: Replay, group: Sequence[Example], frozen: Frozen, drafter: EagleDrafter) -> None:
        features = drafter.layer.features(frozen.hidden_BTD, list(frozen.taps))
        fed = [0] * len(group)

        def feed(row: Row, number: int, position: int) -> None:
            drafter.reader.feed((row, features[number, fed[number] : position + 1]))
            fed[number] = position + 1

        replay_drafter(total, group, drafter, DEPTH, feed)

    def _score(self, accuracy: Accuracy, batch: Batch, frozen: Frozen) -> None:
        words, tokens_BT = self.vocabulary(batch), batch.tokens_BT.to(self.target.device)
        for segment in self.segments(batch):
            rows_M, places_M = self._scored(segment)
            wanted_M = words.place[tokens_BT[rows_M, places_M + 1]]
            for step, features_BID in enumerate(self.unrolled(batch, frozen)):
                known_M = places_M > step
                states_MD = self.module.states(features_BID[rows_M, places_M - 1][known_M])
                accuracy.add(step, words, states_MD, wanted_M[known_M])
