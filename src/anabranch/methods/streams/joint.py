"""The objective of shared mode: the tuned target's next token and its streams together (ACL eq. 6, alpha_0 > 0).

Terms on all linear layers of the target (LoRA) are shared by main rows and streams. With ``detach``, they learn from
the main rows alone: streams read the tuned target as it is at each step, and the target becomes what plain LoRA
training makes of the same texts.

As in decoding, the last token of the prompt and all tokens after it have streams. With ``main_attends="own"`` the main
rows of these tokens attend to their own streams (eq. 3). Later main rows attend to earlier ones, so the loss of a token
depends on the streams of all tokens before it, and a batch is one pass over whole texts.

In each layer, streams are computed for ``segment`` positions at a time, and once more for the gradient (ACL appendix
I): the attention of all streams of a text is never in memory at once. Their states between two layers are.

B rows, T text length, P positions, S streams, D model width, L = T keys of the main stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from anabranch.errors import InputError
from anabranch.learning.examples import Batch
from anabranch.learning.objective import Scores, Segment, segments
from anabranch.learning.recompute import through
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.attention import main_attention, stream_positions
from anabranch.methods.streams.objective import RIDING_STRIDE, Frozen, LossOptions, StreamObjective
from anabranch.methods.streams.rider import Looks, initial_streams
from anabranch.methods.tuning import TextPass, check_tunable, next_token_loss, tuned_pass
from anabranch.model.blocks import Block
from anabranch.model.decoder import Decoder

__all__ = ["SharedObjective", "SharedPass"]

T = TypeVar("T")


@dataclass(frozen=True)
class SharedPass:
    """What the tuned target and its streams compute of a batch, with gradients.

    entry_BTD    main rows before layer N - N_s
    hidden_BTD   main rows after the last norm
    states_BPSD  streams after the last norm
    """

    entry_BTD: Tensor
    hidden_BTD: Tensor
    states_BPSD: Tensor


class _Part:
    """The streams of some positions [B, P], computed together in each layer."""

    def __init__(self, objective: SharedObjective, run: TextPass, positions_BP: Tensor, real_BP: Tensor) -> None:
        target, shape = objective.target, objective.adapter.shape
        self.positions_BP = positions_BP
        rows_BP = torch.arange(len(positions_BP), device=positions_BP.device)[:, None].expand_as(positions_BP)
        self.real_BP, self.places = real_BP, (rows_BP[real_BP], positions_BP[real_BP])
        self.stream_positions = stream_positions(positions_BP, shape.num_streams)
        self.rotations = run.rotated(self.stream_positions)
        keys, window = run.positions_BT[0], target.config.sliding_window
        seen = keys <= positions_BP[:, :, None]
        self._visible = {False: seen}
        if window is not None:
            self._visible[True] = seen & (positions_BP[:, :, None] - keys < window)
        self.looks = Looks(target, objective.adapter, target.dtype)

    def visible(self, sliding: bool) -> Tensor:
        """The positions of the main stream that each node sees [B, P, T]."""
        return self._visible[sliding]

    def gathered(self, x_BTX: Tensor) -> Tensor:
        """The main rows at these positions [B, P, ...]."""
        rows = torch.arange(len(x_BTX), device=x_BTX.device)[:, None]
        return x_BTX[rows, self.positions_BP]


class SharedObjective(StreamObjective):
    """The ``Objective`` of a stream adapter whose target is tuned with it.

    With ``soft``, streams are also trained on the distributions of the tuned target's own main rows. Predicted lengths
    are those of the tuned target with its streams on the completions of the data.
    """

    adapter: StreamAdapter

    def __init__(
        self,
        target: Decoder,
        adapter: StreamAdapter,
        options: LossOptions | None = None,
        *,
        segment: int = 128,
        frozen: Decoder | None = None,
    ) -> None:
        if adapter.tuning is None:
            raise InputError("shared mode trains the target with its streams: lora_rank must be at least 1, got 0")
        if adapter.shape.main_attends == "own" and options is not None and options.detach:
            raise InputError(
                "streams that main rows attend to (main_attends 'own') are part of the target, which learns from their "
                "loss, too; use detach no"
            )
        check_tunable(target)
        super().__init__(target, adapter, options or LossOptions(main=1.0, streams=0.1), segment=segment, frozen=frozen)
        self.tuning = adapter.tuning

    def freeze(self, batch: Batch) -> Frozen:
        """Nothing: no state of the target stays as it is."""
        return Frozen(torch.empty(0), torch.empty(0), [])

    def segments(self, batch: Batch) -> Iterator[Segment]:
        """All positions with a next token at once: each needs the pass over the whole text before it."""
        return segments(batch, size=batch.tokens_BT.shape[1], ahead=1, device=self.target.device)

    def predictions(self, batch: Batch) -> float:
        """The number of completion tokens times the number of streams."""
        return float((batch.lengths_B - 1 - batch.starts_B).sum()) * self.predictors

    def loss(self, batch: Batch, frozen: Frozen, segment: Segment) -> Scores:
        """The loss of a batch: main rows, and the streams together."""
        tokens_BT, positions_BP = batch.tokens_BT.to(self.target.device), segment.positions_BP
        found = self.run(tokens_BT, positions_BP, positions_BP % RIDING_STRIDE == 0)
        # neither the pruning layer nor the distributions to distil from train the rows that they read
        learned = Frozen(found.entry_BTD.detach(), found.hidden_BTD.detach(), [])
        scores = self.scored(batch, learned, segment, found.states_BPSD)
        main = next_token_loss(self.target, batch, found.hidden_BTD, None, segment, 0.0)
        # a batch's loss is divided by positions times streams
        whole = self.predictors * (self.options.main * main + self.options.streams * scores.loss)
        return Scores(whole, scores.right_S, scores.count_S)

    def states(
        self, frozen: Frozen, tokens_BT: Tensor, positions_BP: Tensor, riding_BP: Tensor | None = None
    ) -> Tensor:
        """Stream states after the last norm [B, P, S, D]; ``positions_BP`` must be all positions with streams."""
        return self.run(tokens_BT, positions_BP, riding_BP).states_BPSD

    def tuned_states(self, batch: Batch) -> Tensor:
        """The tuned target's states after the last norm [B, T, D], with streams where main rows attend to them."""
        tokens_BT = batch.tokens_BT.to(self.target.device)
        if self.adapter.shape.main_attends == "none":
            return tuned_pass(self.target, self.tuning, tokens_BT).hidden_BTD
        (segment,) = self.segments(batch)
        return self.run(tokens_BT, segment.positions_BP).hidden_BTD

    def run(self, tokens_BT: Tensor, positions_BP: Tensor, riding_BP: Tensor | None = None) -> SharedPass:
        """The pass of the tuned target, with streams at consecutive positions of each row.

        A row with fewer positions repeats its first one, and these repetitions are not attended to. ``riding_BP`` marks
        positions whose streams are not conditioned on the token after them.
        """
        target, shape = self.target, self.adapter.shape
        run = TextPass(target, tokens_BT)
        x = target.embed(tokens_BT, run.positions_BT)
        for index in range(self.adapter.start):
            x = run.layer(index, x, self.tuning[index])
        entry = self._read(x)
        real_BP = positions_BP > positions_BP[:, :1]
        real_BP[:, 0] = True
        sizes = [torch.split(part, self.segment, dim=1) for part in (positions_BP, real_BP)]
        parts = [_Part(self, run, positions, real) for positions, real in zip(*sizes, strict=True)]
        emitted_BPD = self.emitted(tokens_BT, positions_BP, riding_BP)
        emitted = [None] * len(parts) if emitted_BPD is None else torch.split(emitted_BPD, self.segment, dim=1)
        streams = [
            initial_streams(target, self.adapter, part.gathered(entry), part.stream_positions, after)
            for part, after in zip(parts, emitted, strict=True)
        ]
        for index in range(self.adapter.start, len(target.blocks)):
            x, streams = self._layer(index, run, parts, x, streams)
        b, p = positions_BP.shape
        states = target.norm(torch.cat(streams, dim=1)).view(b, p, shape.num_streams, -1)
        return SharedPass(entry, target.norm(x), states)

    def _layer(
        self, index: int, run: TextPass, parts: list[_Part], x_BTD: Tensor, streams: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Main rows [B, T, D] and the streams of each part [B, P S, D] through one layer."""
        block, sliding = self.target.blocks[index], self.target.config.is_sliding(index)
        assert isinstance(block, Block)
        side = self.adapter.side(index, 0, fixed=self.options.detach)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = run.attend(index, q, k, v)
            keys, values = run.keys_values[-1]

            def look(part: _Part, x_BRD: Tensor) -> Tensor:
                _, k, v = block.split(side.qkv(block.norm_in(x_BRD), block.qkv), *part.rotations)
                seen, asked = part.visible(sliding), part.gathered(q)
                found = main_attention(self.target.config, self.adapter.shape, asked, keys, values, (k, v), seen)
                return found[part.real_BP]

            for part, x_BRD in zip(parts, streams, strict=True):
                out = out.index_put(part.places, _again(len(parts) > 1, look, part, x_BRD))
            return out

        own = self.adapter.shape.main_attends == "own"
        x_BTD = run.layer(index, x_BTD, self.tuning[index], attend if own else None)
        keys, values = map(self._read, run.keys_values[-1])

        def through(part: _Part, x_BRD: Tensor) -> Tensor:
            look = part.looks.of(keys, values, part.visible(sliding))
            found: Tensor = block(x_BRD, *part.rotations, look, side)
            return found

        followed = [_again(len(parts) > 1, through, part, x) for part, x in zip(parts, streams, strict=True)]
        return x_BTD, followed

    def _read(self, main: Tensor) -> Tensor:
        """Values of main rows as streams read them: without gradients where their losses are apart."""
        return main.detach() if self.options.detach else main


def _again(often: bool, compute: Callable[[_Part, Tensor], Tensor], part: _Part, x_BRD: Tensor) -> Tensor:
    """``compute(part, x_BRD)``, computed again for the gradient if it is one of several parts, or if layers are."""
    if often and torch.is_grad_enabled():
        found: Tensor = checkpoint(compute, part, x_BRD, use_reentrant=False)
    else:
        found = through(partial(compute, part), x_BRD)
    return found
