"""SAR-SFT's objective: the tuned target's next token and its masks together, ``CE(main) + masks * CE(masks)``.

The paper replaces k tokens at one random place of some answers by masks, so that one model learns both to continue a
text and to fill in masks. Here masks follow every ``stride``-th position of each completion, beside the text itself.

B rows, P positions, S masks, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import Tensor

from anabranch.learning.examples import Batch
from anabranch.learning.objective import Scores, Segment, segments
from anabranch.learning.target import run_frozen
from anabranch.methods.space.module import MaskModule
from anabranch.methods.space.objective import MaskLossOptions, MaskObjective
from anabranch.methods.streams.objective import Frozen
from anabranch.methods.tuning import check_tunable, next_token_loss, tuned_pass
from anabranch.model.decoder import Decoder

__all__ = ["JointMaskObjective"]


class JointMaskObjective(MaskObjective):
    """How the terms of a target's layers and its masks learn together.

    The frozen target gives the distributions to distil from. Predicted lengths are those of the tuned target's masks on
    completions of the frozen one.
    """

    def __init__(
        self, target: Decoder, module: MaskModule, options: MaskLossOptions, *, frozen: Decoder | None = None
    ) -> None:
        check_tunable(target)
        super().__init__(target, module, options, frozen=frozen)
        self.share, self.soft = options.masks, options.soft
        assert module.tuning is not None
        self.layers = module.tuning

    def freeze(self, batch: Batch) -> Frozen:
        """The frozen target's states after the last norm; keys and values are those of the tuned pass."""
        hidden_BTD = run_frozen(self.target, batch, frozen=self.frozen).hidden_BTD
        return Frozen(hidden_BTD, hidden_BTD, [])

    def keep(self, frozen: Frozen, keep: Callable[[Tensor], Tensor]) -> Frozen:
        """A copy with the states replaced by ``keep(states)``."""
        kept = keep(frozen.hidden_BTD)
        return Frozen(kept, kept, [])

    def segments(self, batch: Batch) -> Iterator[Segment]:
        """All positions at once: each needs the tuned pass over the whole text before it.

        The last has a next token to predict, and nothing for its masks.
        """
        return segments(batch, size=batch.tokens_BT.shape[1], ahead=1, device=self.target.device)

    def loss(self, batch: Batch, frozen: Frozen, segment: Segment) -> Scores:
        """The loss of a batch: that of the masks, and the next token's as often as there are masks."""
        tuned = tuned_pass(self.target, self.layers, batch.tokens_BT.to(self.target.device))
        scores = super().loss(batch, replace(frozen, keys_values=tuned.keys_values), segment)
        main = next_token_loss(self.target, batch, tuned.hidden_BTD, frozen.hidden_BTD, segment, self.soft)
        # a batch's loss is divided by the number of its masks
        whole = self.predictors / self.stride * main + self.share * scores.loss
        return Scores(whole, scores.right_S, scores.count_S)

    def states(
        self, frozen: Frozen, tokens_BT: Tensor, positions_BP: Tensor, riding_BP: Tensor | None = None
    ) -> Tensor:
        """The masks' states after the last norm [B, P, S, D], behind the tuned target's text."""
        if not frozen.keys_values:
            frozen = replace(frozen, keys_values=tuned_pass(self.target, self.layers, tokens_BT).keys_values)
        return super().states(frozen, tokens_BT, positions_BP, riding_BP)

    def tuned_states(self, batch: Batch) -> Tensor:
        """The tuned target's states after the last norm [B, T, D]."""
        return tuned_pass(self.target, self.layers, batch.tokens_BT.to(self.target.device)).hidden_BTD
