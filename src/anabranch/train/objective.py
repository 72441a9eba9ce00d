"""What the streams learn: ``sum_j alpha_j * CE(stream j)`` on completion tokens (ACL eq. 6 with alpha_0 = 0).

The target is frozen: its pass runs without gradients, once a batch. The streams then trail it over all completion
positions at once, segment by segment (ACL appendix I): no streams on prompt tokens, and peak memory grows with
``segment``, not with gamma times the length of the text.

B rows, T text length, P positions of a segment, S streams, D width, V draft vocabulary,
M scored (position, stream) pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.errors import InputError
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.prune import early_exit_logits
from anabranch.methods.streams.rider import StreamRider, trail
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder, Inputs
from anabranch.train.data import Batch

__all__ = ["Frozen", "LossOptions", "Scores", "StreamObjective"]


UNCONDITIONED_STRIDE = 5  # no multiple of a usual number of streams, or one stream would have it all
UNTOLD_STRIDE = 8
CHUNK = 256  # predictions scored at once: 256 x 8,192 float32 are 8 MiB


@dataclass(frozen=True)
class LossOptions:
    """Weights of the loss.

    decay           alpha_j = decay ** (j - 1)
    soft            share of the target's own distribution in the training target (distillation); the rest is its token
    unconditioned   weight of the loss of the streams without conditioning, where the adapter has one
    pruning         weight of the early-exit adapter's next-token loss (ACL section 2.4)
    pruning_stride  that loss is computed at every so many positions
    """

    decay: float = 0.8
    soft: float = 0.5
    unconditioned: float = 0.1
    pruning: float = 1.0
    pruning_stride: int = 8

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise InputError(f"decay must be greater than 0 and at most 1, not {self.decay}")
        if not 0 <= self.soft <= 1:
            raise InputError(f"soft must be from 0 to 1, not {self.soft}")
        if not (self.unconditioned >= 0 and self.pruning >= 0 and self.pruning_stride >= 1):
            raise InputError("unconditioned and pruning must be at least 0, and pruning_stride at least 1")


@dataclass(frozen=True)
class Frozen:
    """The target's pass over a batch: main rows before layer N - N_s and after the last norm, the top layers' cache.

    About (2 D + 2 K E N_s) values a token of text.
    """

    entry_BTD: Tensor
    hidden_BTD: Tensor
    keys_values: list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Vocabulary:
    """What a batch is scored over: rows of the head [V, D], bias [V], and where each token id stands in them."""

    head_VD: Tensor
    bias_V: Tensor | None
    place: Tensor


@dataclass
class Scores:
    """A segment's loss and, for each stream, right predictions and their number."""

    loss: Tensor
    right_S: Tensor
    count_S: Tensor


Scored = tuple[Tensor, Tensor]


class VocabularyLoss(torch.autograd.Function):
    """Cross-entropy over the draft vocabulary, in chunks that stay in the processor's caches.

    The gradient is computed beside the loss, so that nothing of size M x V is ever kept: on a CPU this is several
    times faster than autograd over whole logits. Returns the weighted loss and which predictions are right [M].
    """

    @staticmethod
    def forward(
        ctx: Any,
        states_MD: Tensor,
        head_VD: Tensor,
        bias_V: Tensor | None,
        tokens_M: Tensor,
        weight_M: Tensor,
        teacher_MD: Tensor | None,
        soft: float,
        cap: float | None,
    ) -> Scored:
        """Loss = sum of weight * ((1 - soft) * CE(token) + soft * CE(target's distribution))."""
        total = torch.zeros((), device=states_MD.device)
        right = torch.empty(len(tokens_M), dtype=torch.bool, device=states_MD.device)
        gradient = torch.empty_like(states_MD)
        with torch.autocast(states_MD.device.type, enabled=False):
            for first in range(0, len(tokens_M), CHUNK):
                part = slice(first, first + CHUNK)
                z = F.linear(states_MD[part].to(head_VD.dtype), head_VD, bias_V).float()
                slope = None
                if cap is not None:
                    z = torch.tanh(z / cap)
                    slope = 1 - z * z
                    z = z * cap
                tokens, weight = tokens_M[part, None], weight_M[part, None]
                right[part] = z.argmax(-1) == tokens[:, 0]
                loss = z.logsumexp(-1) - (1 - soft) * z.gather(1, tokens)[:, 0]
                g = z.softmax(-1)
                g.scatter_add_(1, tokens, torch.full_like(weight, soft - 1, dtype=g.dtype))
                if soft and teacher_MD is not None:
                    t = F.linear(teacher_MD[part], head_VD, bias_V).float()
                    teacher = (t if cap is None else torch.tanh(t / cap) * cap).softmax(-1)
                    loss = loss - soft * torch.linalg.vecdot(teacher, z)
                    g.sub_(teacher, alpha=soft)
                total += (loss * weight[:, 0]).sum()
                g.mul_(weight)
                if slope is not None:
                    g.mul_(slope)
                gradient[part] = (g.to(head_VD.dtype) @ head_VD).to(gradient.dtype)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(right)
        return total, right

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        """The kept gradient, scaled."""
        (gradient,) = ctx.saved_tensors
        return (gradient * upstream[0], None, None, None, None, None, None, None)


class StreamObjective:
    """Losses of a stream adapter against its frozen target.

    ``frozen`` runs the passes without gradients: a packed copy of the target where that is faster.
    """

    def __init__(
        self,
        target: Decoder,
        adapter: StreamAdapter,
        options: LossOptions,
        *,
        segment: int = 128,
        frozen: Decoder | None = None,
    ) -> None:
        self.target, self.adapter, self.options, self.segment = target, adapter, options, segment
        self.frozen = target if frozen is None else frozen

    def vocabulary(self, batch: Batch) -> Vocabulary:
        """The draft vocabulary and the batch's own tokens, as decoding adds a row's own tokens to it."""
        device = self.target.device
        common = self.adapter.vocabulary.to(device)
        ids = torch.cat((common, batch.tokens_BT.to(device).flatten()))
        ids = torch.unique(ids)
        place = torch.full((self.target.config.vocab_size,), -1, device=device)
        place[ids] = torch.arange(len(ids), device=device)
        bias = None if self.target.head.bias is None else self.target.head.bias[ids]
        return Vocabulary(self.target.head.weight[ids], bias, place)

    @torch.no_grad()
    def freeze(self, batch: Batch) -> Frozen:
        """Run the target over the batch."""
        rows, width = batch.tokens_BT.shape
        cache = Cache(self.target.config, rows=rows, capacity=width, dtype=self.target.dtype, device=self.target.device)
        for _ in range(rows):
            cache.add_row()
        feed = Inputs.of_chains(batch.tokens_BT.numpy())
        rider = StreamRider(self.target, self.adapter, ride=False)
        with self.frozen.decoding():
            out = self.frozen(feed, cache, rider=rider, need="hidden", planned=width)
        assert rider.entry_BND is not None
        # copies, so that the lower layers' cache goes
        keys, values = cache.keys[self.adapter.start :].clone(), cache.values[self.adapter.start :].clone()
        return Frozen(rider.entry_BND.to(self.target.dtype), out.hidden_BND, list(zip(keys, values, strict=True)))

    def states(
        self, frozen: Frozen, tokens_BT: Tensor, positions_BP: Tensor, untold_BP: Tensor | None = None
    ) -> Tensor:
        """Stream states after the last norm [B, P, S, D] of some positions, told the token that follows each.

        ``untold_BP`` says where they are not to be told, as streams that ride are not.
        """
        width = frozen.entry_BTD.shape[1]
        d = frozen.entry_BTD.shape[2]
        entry = frozen.entry_BTD.gather(1, positions_BP[:, :, None].expand(-1, -1, d))
        keys = torch.arange(width, device=positions_BP.device)
        seen = keys <= positions_BP[:, :, None]
        near = seen
        if self.target.config.sliding_window is not None:
            near = seen & (positions_BP[:, :, None] - keys < self.target.config.sliding_window)
        layers = range(self.adapter.start, self.target.config.num_layers)
        visible = [near if self.target.config.is_sliding(layer) else seen for layer in layers]
        emitted = None
        if self.adapter.root is not None:
            emitted = self.target.embedding(tokens_BT.gather(1, (positions_BP + 1).clamp(max=width - 1)))
            if untold_BP is not None:
                emitted = emitted.masked_fill(untold_BP[:, :, None], 0.0)
        return trail(self.target, self.adapter, entry, emitted, positions_BP, frozen.keys_values, visible, width)

    def segments(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """Positions [B, P] that carry streams, in segments, and which of them are real [B, P]."""
        last = (batch.lengths_B - 3).to(self.target.device)  # stream 1 of a position predicts two tokens on
        starts = batch.starts_B.to(self.target.device)
        longest = int((last - starts).max()) + 1
        for offset in range(0, longest, self.segment):
            steps = torch.arange(offset, min(offset + self.segment, longest), device=starts.device)
            positions = starts[:, None] + steps
            real = positions <= last[:, None]
            yield torch.where(real, positions, starts[:, None]), real

    def conditioned(self, states_BPSD: Tensor, tokens_BT: Tensor, positions_BP: Tensor) -> Tensor:
        """States told the true tokens on the path to each prediction (teacher forcing) [B, P, S, D]."""
        conditioner = self.adapter.conditioner
        if conditioner is None:
            return states_BPSD
        width = tokens_BT.shape[1]
        carried: Tensor | None = None
        told = []
        for j in range(states_BPSD.shape[2]):
            parents = tokens_BT.gather(1, (positions_BP + 1 + j).clamp(max=width - 1))
            state, carried = conditioner(states_BPSD[:, :, j], self.target.embedding(parents), carried)
            told.append(state)
        return torch.stack(told, dim=2)

    def _cross_entropy(
        self, words: Vocabulary, states_MD: Tensor, tokens_M: Tensor, teacher_MD: Tensor | None, weight_M: Tensor
    ) -> Scored:
        """Weighted loss and right predictions; ``teacher_MD`` are the target's states that emit the tokens."""
        soft = self.options.soft if teacher_MD is not None else 0.0
        cap = self.target.config.logit_softcap
        found: Scored = VocabularyLoss.apply(  # type: ignore[no-untyped-call]
            states_MD, words.head_VD, words.bias_V, tokens_M, weight_M, teacher_MD, soft, cap
        )
        return found

    def segment_loss(self, batch: Batch, frozen: Frozen, positions_BP: Tensor, real_BP: Tensor) -> Scores:
        """The loss of one segment: a sum over its predictions (divide by the batch's count before stepping)."""
        gamma = self.adapter.config.num_streams
        tokens = batch.tokens_BT.to(self.target.device)
        lengths = batch.lengths_B.to(self.target.device)
        width = tokens.shape[1]
        streams = torch.arange(1, gamma + 1, device=tokens.device)
        index_BPS = positions_BP[:, :, None] + 1 + streams
        inside = (index_BPS < lengths[:, None, None]) & real_BP[:, :, None]
        index = index_BPS.clamp(max=width - 1)
        wanted_BPS = tokens[:, None, :].expand(-1, index.shape[1], -1).gather(2, index)
        words = self.vocabulary(batch)
        place_BPS = words.place[wanted_BPS]
        rows = torch.arange(batch.size, device=tokens.device)[:, None, None].expand_as(index)
        teacher = frozen.hidden_BTD[rows[inside], index[inside] - 1]
        stream_M = (streams - 1).expand_as(index)[inside]
        weight_M = self.options.decay ** stream_M.float()

        # streams that ride are told no token: an eighth of the positions keeps them meaningful too
        states = self.states(frozen, tokens, positions_BP, positions_BP % UNTOLD_STRIDE == 0)
        told = self.conditioned(states, tokens, positions_BP)
        loss, right = self._cross_entropy(words, told[inside], place_BPS[inside], teacher, weight_M)
        if self.adapter.conditioner is not None and self.options.unconditioned:
            # a fifth of the predictions is enough to keep the streams meaningful by themselves
            some = slice(None, None, UNCONDITIONED_STRIDE)
            plain, _ = self._cross_entropy(
                words, states[inside][some], place_BPS[inside][some], None, weight_M[some] * UNCONDITIONED_STRIDE
            )
            loss = loss + self.options.unconditioned * plain
        if self.adapter.prune is not None and self.options.pruning:
            loss = loss + self.options.pruning * self._pruning_loss(frozen, tokens, positions_BP, real_BP)
        right_S = torch.zeros(gamma, device=tokens.device).index_add_(0, stream_M, right.float())
        count_S = inside.sum((0, 1)).float()
        return Scores(loss, right_S, count_S)

    def _pruning_loss(self, frozen: Frozen, tokens_BT: Tensor, positions_BP: Tensor, real_BP: Tensor) -> Tensor:
        """Next-token loss of the early-exit adapter at some of the positions, scaled up to all of them."""
        stride = self.options.pruning_stride
        positions, real = positions_BP[:, ::stride], real_BP[:, ::stride]
        rows = torch.arange(len(tokens_BT), device=tokens_BT.device)[:, None].expand_as(positions)[real]
        entry = frozen.entry_BTD[rows, positions[real]]
        logits = early_exit_logits(self.target, self.adapter, entry[None])[0].float()
        return stride * F.cross_entropy(logits, tokens_BT[rows, positions[real] + 1], reduction="sum")
