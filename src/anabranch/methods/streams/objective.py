"""The objective of lossless mode: ``sum_j alpha_j * CE(stream j)`` on completion tokens (ACL eq. 6 with alpha_0 = 0).

The target is frozen: its forward pass runs once per batch, without gradients. The streams then trail it over all
completion positions at once, segment by segment (ACL appendix I): no streams on prompt tokens, and peak memory grows
with ``segment``, not with gamma times the length of the text.

B rows, T text length, P positions of a segment, S streams, D width, M scored (position, stream) pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.drafting.replay import evaluation, replay_all
from anabranch.errors import InputError
from anabranch.learning.examples import Batch, Example
from anabranch.learning.loss import Vocabulary, vocabulary_loss
from anabranch.learning.objective import FrozenObjective, Scores, Segment
from anabranch.learning.target import Keeping, TargetStates
from anabranch.methods.streams.adapter import StreamModule
from anabranch.methods.streams.draft import StreamDraft, StreamSettings
from anabranch.methods.streams.prune import early_exit_logits
from anabranch.methods.streams.recipes import LossOptions
from anabranch.methods.streams.rider import trail
from anabranch.model.decoder import Decoder
from anabranch.model.encoder import Memory

__all__ = [
    "RIDING_STRIDE",
    "Frozen",
    "LossOptions",
    "StreamObjective",
    "StreamStates",
    "StreamedStates",
    "emitted_tokens",
]

UNCONDITIONED_STRIDE = 5  # every n-th diagonal of positions and streams, so that each stream has its share
RIDING_STRIDE = 8


@dataclass(frozen=True)
class Frozen:
    """The target's states for a batch: main rows before layer N - N_s and after the last norm, top layers' KV cache.

    About (2 D + 2 K E N_s) values per token. ``streams`` are states of streams that the pass has computed already.
    ``mains`` are main rows [B, T, D] before each layer of streams that attend to what their main row attends to most
    (``context_top``): D N_s more values. ``memories`` are the keys and values of each row's source in the top layers of
    an encoder-decoder target.
    """

    entry_BTD: Tensor
    hidden_BTD: Tensor
    keys_values: Sequence[tuple[Tensor, Tensor]]
    streams: StreamStates | None = None
    mains: Sequence[Tensor] = ()
    memories: Sequence[Memory] = ()


@dataclass(frozen=True)
class StreamStates:
    """Streams after the last norm [B, P, S, D], of consecutive positions from ``starts_B`` on."""

    states_BPSD: Tensor
    starts_B: Tensor

    def at(self, positions_BP: Tensor) -> Tensor:
        """Those of some positions [B, P, S, D]."""
        rows = torch.arange(len(positions_BP), device=positions_BP.device)[:, None]
        return self.states_BPSD[rows, positions_BP - self.starts_B[:, None]]


@dataclass(frozen=True)
class StreamedStates(TargetStates):
    """The states of a target whose pass has streams in it."""

    streams: StreamStates = field(kw_only=True)


def emitted_tokens(
    target: Decoder, adapter: StreamModule, tokens_BT: Tensor, positions_BP: Tensor, riding_BP: Tensor | None
) -> Tensor | None:
    """Embeddings [B, P, D] of the tokens after some positions, zero if streams ride; None without a root term."""
    if adapter.root is None:
        return None
    after = (positions_BP + 1).clamp(max=tokens_BT.shape[1] - 1)
    embeddings: Tensor = target.embedding(tokens_BT.gather(1, after))
    return embeddings if riding_BP is None else embeddings.masked_fill(riding_BP[:, :, None], 0.0)


class StreamObjective(FrozenObjective):
    """The ``Objective`` of a stream adapter; stream 1 of a position predicts the token two positions later."""

    options: LossOptions

    def __init__(
        self,
        target: Decoder,
        adapter: StreamModule,
        options: LossOptions | None = None,
        **passes: Any,
    ) -> None:
        super().__init__(target, adapter, options or LossOptions(), **passes)
        self.adapter = adapter
        if adapter.shape.mode == "lossless" and (self.options.main or self.options.streams != 1 or self.options.detach):
            raise InputError(
                "main, streams and detach are about the target's own next token beside its streams, and mode "
                "'lossless' trains streams only; use a recipe of shared mode"
            )
        if self.options.rounding and adapter.shape.mode != "lossless":
            raise InputError("rounding is for streams of a frozen target (mode 'lossless')")
        self.predictor, self.predictors = adapter.predictor, adapter.shape.num_streams

    def vocabulary(self, batch: Batch) -> Vocabulary:
        """The draft vocabulary with the batch's own tokens; decoding adds a row's own tokens in the same way."""
        return Vocabulary.of(self.target, self.adapter.vocabulary, batch.scored_BT)

    def vocabularies(self, batch: Batch) -> list[Vocabulary]:
        """Vocabulary of all streams."""
        return [self.vocabulary(batch)] * self.predictors

    def freeze(self, batch: Batch) -> Frozen:
        """Run the target over the batch."""
        start = self.adapter.start
        layers = range(start, len(self.target.blocks)) if self.adapter.shape.context_top else (start,)
        return self._read(self.run(batch, taps=tuple(layers), keys_from=start))

    def _read(self, states: TargetStates) -> Frozen:
        start, streams = self.adapter.start, states.streams if isinstance(states, StreamedStates) else None
        mains: list[Tensor] = []
        if streams is None and self.adapter.shape.context_top:
            mains = [states.taps[layer] for layer in range(start, len(self.target.blocks))]
        with torch.no_grad():
            memories = [self.target.memory(encoded, start) for encoded in states.encoded]
        return Frozen(states.taps[start], states.hidden_BTD, states.keys_values, streams, mains, memories)

    def keep(self, keeping: Keeping) -> None:
        """Keep the states of the frozen target."""
        self.run = keeping(self.run, dtype=self.frozen.dtype, started=True)

    def states(
        self, frozen: Frozen, tokens_BT: Tensor, positions_BP: Tensor, riding_BP: Tensor | None = None
    ) -> Tensor:
        """Stream states after the last norm [B, P, S, D] of some positions, conditioned on the token after each.

        ``riding_BP`` marks positions that are not conditioned on it, as when streams ride in the pass.
        """
        if frozen.streams is not None:
            return frozen.streams.at(positions_BP)
        width, d = frozen.entry_BTD.shape[1:]
        index = positions_BP[:, :, None].expand(-1, -1, d)
        entry, mains = frozen.entry_BTD.gather(1, index), [x_BTD.gather(1, index) for x_BTD in frozen.mains]
        keys = torch.arange(width, device=positions_BP.device)
        seen = keys <= positions_BP[:, :, None]
        near = seen
        if self.target.config.sliding_window is not None:
            near = seen & (positions_BP[:, :, None] - keys < self.target.config.sliding_window)
        layers = range(self.adapter.start, self.target.config.num_layers)
        visible = [near if self.target.config.is_sliding(layer) else seen for layer in layers]
        emitted = emitted_tokens(self.target, self.adapter, tokens_BT, positions_BP, riding_BP)
        read = frozen.keys_values, visible, width
        rows = entry, emitted, positions_BP
        return trail(self.target, self.adapter, *rows, *read, mains=mains, memories=frozen.memories)

    def conditioned(self, states_BPSD: Tensor, tokens_BT: Tensor, positions_BP: Tensor) -> Tensor:
        """States [B, P, S, D] conditioned on the true tokens of the path to each prediction (teacher forcing)."""
        conditioner = self.adapter.conditioner
        if conditioner is None:
            return states_BPSD
        width = tokens_BT.shape[1]
        carried: Tensor | None = None
        conditioned = []
        for j in range(states_BPSD.shape[2]):
            parents = tokens_BT.gather(1, (positions_BP + 1 + j).clamp(max=width - 1))
            state, carried = conditioner(states_BPSD[:, :, j], self.target.embedding(parents), carried)
            conditioned.append(state)
        return torch.stack(conditioned, dim=2)

    def _cross_entropy(
        self,
        words: Vocabulary,
        states_MD: Tensor,
        tokens_M: Tensor,
        weight_M: Tensor,
        teacher: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Weighted loss and correct predictions; ``teacher``: the target's states [T, D], and each token's row [M]."""
        soft = self.options.soft if teacher is not None else 0.0
        states_TD, taught_M = teacher or (None, None)
        cap = self.target.config.logit_softcap
        return vocabulary_loss(words, states_MD, tokens_M, weight_M, states_TD, soft, cap, taught_M)

    def loss(self, batch: Batch, frozen: Frozen, segment: Segment) -> Scores:
        """The loss of one segment: a sum over its predictions."""
        tokens, positions_BP = batch.tokens_BT.to(self.target.device), segment.positions_BP
        # streams that ride are not conditioned on the emitted token: an eighth of the positions trains that case
        states = self.states(frozen, tokens, positions_BP, positions_BP % RIDING_STRIDE == 0)
        return self.scored(batch, frozen, segment, states)

    def tuned_loss(self, batch: Batch, tuned: TargetStates, taught_BTD: Tensor | None, segment: Segment) -> Scores:
        """The loss of streams that read a tuned target's states; they distil from ``taught_BTD``, or from these.

        Neither the pruning layer nor the distributions to distil from train the rows that they read.
        """
        frozen = self._read(tuned)
        taught_BTD = tuned.hidden_BTD.detach() if taught_BTD is None else taught_BTD
        return self.loss(batch, replace(frozen, entry_BTD=frozen.entry_BTD.detach(), hidden_BTD=taught_BTD), segment)

    def scored(self, batch: Batch, frozen: Frozen, segment: Segment, states: Tensor) -> Scores:
        """The loss of streams with these states [B, P, S, D]."""
        positions_BP, real_BP = segment
        tokens = batch.tokens_BT.to(self.target.device)
        lengths = batch.lengths_B.to(self.target.device)
        streams = torch.arange(1, self.predictors + 1, device=tokens.device)
        index_BPS = positions_BP[:, :, None] + 1 + streams
        inside = (index_BPS < lengths[:, None, None]) & real_BP[:, :, None]
        index = index_BPS.clamp(max=tokens.shape[1] - 1)
        wanted_BPS = tokens[:, None, :].expand(-1, index.shape[1], -1).gather(2, index)
        words = self.vocabulary(batch)
        place_BPS = words.place[wanted_BPS]
        rows = torch.arange(batch.size, device=tokens.device)[:, None, None].expand_as(index)
        teacher = (frozen.hidden_BTD.flatten(0, 1), rows[inside] * tokens.shape[1] + index[inside] - 1)
        stream_M = (streams - 1).expand_as(index)[inside]
        weight_M = self.options.decay ** stream_M.float()

        conditioned = self.conditioned(states, tokens, positions_BP)
        loss, right = self._cross_entropy(words, conditioned[inside], place_BPS[inside], weight_M, teacher)
        if self.adapter.conditioner is not None and self.options.unconditioned:
            # a fifth of the predictions is enough to keep the streams useful without conditioning
            some = inside & (index_BPS % UNCONDITIONED_STRIDE == 0)
            weight = weight_M[some[inside]] * UNCONDITIONED_STRIDE
            plain, _ = self._cross_entropy(words, states[some], place_BPS[some], weight)
            loss = loss + self.options.unconditioned * plain
        if self.adapter.prune is not None and self.options.pruning:
            loss = loss + self.options.pruning * self._pruning_loss(words, frozen, tokens, positions_BP, real_BP)
        right_S = torch.zeros(self.predictors, device=tokens.device).index_add_(0, stream_M, right.float())
        return Scores(loss, right_S, inside.sum((0, 1)).float())

    def _pruning_loss(
        self, words: Vocabulary, frozen: Frozen, tokens_BT: Tensor, positions_BP: Tensor, real_BP: Tensor
    ) -> Tensor:
        """Next-token loss of the early-exit adapter at some positions, scaled to the number of all positions.

        It is over all tokens, or over ``words`` where the target's head passes no gradients.
        """
        stride = self.options.pruning_stride
        some = real_BP & (positions_BP % stride == 0)
        rows = torch.arange(len(tokens_BT), device=tokens_BT.device)[:, None].expand_as(positions_BP)[some]
        entry = frozen.entry_BTD[rows, positions_BP[some]]
        following = tokens_BT[rows, positions_BP[some] + 1]
        if self.target.head.weight is None:
            states = self.target.norm(self.adapter.early_exit(entry))
            weight = torch.ones(len(following), device=states.device)
            return stride * self._cross_entropy(words, states, words.place[following], weight)[0]
        logits = early_exit_logits(self.target, self.adapter, entry[None])[0].float()
        return stride * F.cross_entropy(logits, following, reduction="sum")

    def evaluate(self, examples: Sequence[Example], *, nodes: Sequence[int] = ()) -> dict[str, Any]:
        """Predicted mean acceptance length and accuracy by stream, for the default tree of 16 nodes ("tree").

        The length is also given for a chain, and for the tree without conditioning if the adapter has conditioning.
        """
        settings = {"tree": StreamSettings(), "chain": StreamSettings(tree="chain")}
        settings |= {f"{n} nodes": StreamSettings(nodes=n) for n in nodes}
        if self.adapter.conditioner is not None:
            settings["tree without conditioning"] = StreamSettings(condition=False)
        drafts = {name: StreamDraft(self.target, self.adapter, each) for name, each in settings.items()}
        try:
            self.adapter.round(self.target, self.options.rounding)
            totals, accuracy = replay_all(self, drafts, examples)
        finally:
            self.adapter.round(self.target, False)
        return evaluation(totals, accuracy, self.predictors)
