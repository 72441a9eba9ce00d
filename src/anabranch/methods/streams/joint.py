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

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anabranch.errors import InputError
from anabranch.learning.examples import Batch
from anabranch.learning.objective import segments
from anabranch.learning.recompute import through
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.attention import main_attention, stream_positions
from anabranch.methods.streams.objective import (
    RIDING_STRIDE,
    LossOptions,
    StreamedStates,
    StreamObjective,
    StreamStates,
    emitted_tokens,
)
from anabranch.methods.streams.rider import Looks, initial_streams
from anabranch.methods.tuning import TextPass, TunedObjective, TunedTarget
from anabranch.model.blocks import Block
from anabranch.model.decoder import Decoder

__all__ = ["SharedTarget", "shared_objective"]


class _Part:
    """The streams of some positions [B, P], computed together in each layer."""

    def __init__(self, shared: SharedTarget, run: TextPass, positions_BP: Tensor, real_BP: Tensor) -> None:
        target, shape = shared.target, shared.adapter.shape
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
        self.looks = Looks(target, shared.adapter, target.dtype, positions_BP)

    def visible(self, sliding: bool) -> Tensor:
        """The positions of the main stream that each node sees [B, P, T]."""
        return self._visible[sliding]

    def gathered(self, x_BTX: Tensor) -> Tensor:
        """The main rows at these positions [B, P, ...]."""
        rows = torch.arange(len(x_BTX), device=x_BTX.device)[:, None]
        return x_BTX[rows, self.positions_BP]


def shared_objective(
    target: Decoder,
    adapter: StreamAdapter,
    options: LossOptions | None = None,
    *,
    segment: int = 128,
    frozen: Decoder | None = None,
) -> TunedObjective:
    """The ``Objective`` of a stream adapter whose target is tuned with it.

    With ``soft``, streams are also trained on the distributions of the tuned target's own main rows.
    """
    if adapter.tuning is None:
        raise InputError("shared mode trains the target with its streams: lora_rank must be at least 1, got 0")
    options = options or LossOptions(main=1.0, streams=0.1)
    if adapter.shape.main_attends == "own" and options.detach:
        raise InputError(
            "streams that main rows attend to (main_attends 'own') are part of the target, which learns from their "
            "loss, too; use detach no"
        )
    streams = StreamObjective(target, adapter, options, segment=segment, frozen=frozen)
    run = SharedTarget(target, adapter, adapter.tuning, segment=segment, detach=options.detach)
    each = streams.predictors
    return TunedObjective(
        *(target, adapter.tuning, streams),
        run=run,
        frozen=frozen,
        each=each,
        main=options.main,
        share=each * options.streams,
    )


class SharedTarget(TunedTarget):
    """Runs a tuned target with its streams.

    segment  number of positions whose streams are computed at a time
    detach   streams read main rows without gradients
    """

    def __init__(
        self, target: Decoder, adapter: StreamAdapter, layers: nn.ModuleList, *, segment: int, detach: bool
    ) -> None:
        super().__init__(target, layers)
        self.adapter, self.segment, self.detach = adapter, segment, detach

    def __call__(self, batch: Batch, *, taps: Sequence[int] = (), keys_from: int | None = None) -> StreamedStates:
        """The states of a batch and its streams, all of which are conditioned on the token after them."""
        return self._run(batch, riding=False)

    def learn(self, batch: Batch) -> StreamedStates:
        """The same, with some streams that ride, which are not conditioned on that token."""
        return self._run(batch, riding=True)

    def hidden(self, batch: Batch) -> Tensor:
        """The states after the last norm [B, T, D], with streams where main rows attend to them."""
        return super().hidden(batch) if self.adapter.shape.main_attends == "none" else self(batch).hidden_BTD

    def _run(self, batch: Batch, *, riding: bool) -> StreamedStates:
        """The pass of the tuned target, with streams of all positions from each row's last prompt token on.

        A row with fewer positions repeats its first one, and these repetitions are not attended to.
        """
        target, shape, tokens_BT = self.target, self.adapter.shape, batch.tokens_BT.to(self.target.device)
        ((positions_BP, _),) = segments(batch, size=tokens_BT.shape[1], ahead=1, device=target.device)
        run = TextPass(target, tokens_BT)
        x = target.embed(tokens_BT, run.positions_BT)
        for index in range(self.adapter.start):
            x = run.layer(index, x, self.layers[index])
        entry = self._read(x)
        real_BP = positions_BP > positions_BP[:, :1]
        real_BP[:, 0] = True
        sizes = [torch.split(part, self.segment, dim=1) for part in (positions_BP, real_BP)]
        parts = [_Part(self, run, positions, real) for positions, real in zip(*sizes, strict=True)]
        riding_BP = positions_BP % RIDING_STRIDE == 0 if riding else None
        emitted_BPD = emitted_tokens(target, self.adapter, tokens_BT, positions_BP, riding_BP)
        emitted = [None] * len(parts) if emitted_BPD is None else torch.split(emitted_BPD, self.segment, dim=1)
        streams = [
            initial_streams(target, self.adapter, part.gathered(entry), part.stream_positions, after)
            for part, after in zip(parts, emitted, strict=True)
        ]
        for index in range(self.adapter.start, len(target.blocks)):
            x, streams = self._layer(index, run, parts, x, streams)
        b, p = positions_BP.shape
        states = StreamStates(
            target.norm(torch.cat(streams, dim=1)).view(b, p, shape.num_streams, -1), batch.starts_B.to(target.device)
        )
        return StreamedStates(target.norm(x), {self.adapter.start: entry}, [], streams=states)

    def _layer(
        self, index: int, run: TextPass, parts: list[_Part], x_BTD: Tensor, streams: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Main rows [B, T, D] and the streams of each part [B, P S, D] through one layer."""
        block, sliding = self.target.blocks[index], self.target.config.is_sliding(index)
        assert isinstance(block, Block)
        side = self.adapter.side(index, 0, fixed=self.detach)

        own, top = self.adapter.shape.main_attends == "own", self.adapter.shape.context_top
        choosing: list[Tensor | None] = [None] * len(parts)  # the queries of the parts' main rows

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = run.attend(index, q, k, v)
            if top:  # only the order of weights matters, which has no gradient
                choosing[:] = [part.gathered(q.detach()) for part in parts]
            if not own:
                return out
            keys, values = run.keys_values[-1]

            def look(part: _Part, x_BRD: Tensor) -> Tensor:
                _, k, v = block.split(side.qkv(block.norm_in(x_BRD), block.qkv), *part.rotations)
                seen, queries = part.visible(sliding), part.gathered(q)
                attended = main_attention(self.target.config, self.adapter.shape, queries, keys, values, (k, v), seen)
                return attended[part.real_BP]

            for part, x_BRD in zip(parts, streams, strict=True):
                out = out.index_put(part.places, _again(len(parts) > 1, look, part, x_BRD))
            return out

        x_BTD = run.layer(index, x_BTD, self.layers[index], attend if own or top else None)
        keys, values = map(self._read, run.keys_values[-1])

        def through(main_q: Tensor | None, part: _Part, x_BRD: Tensor) -> Tensor:
            look = part.looks.of(keys, values, part.visible(sliding), main_q)
            result: Tensor = block(x_BRD, *part.rotations, look, side)
            return result

        each = zip(choosing, parts, streams, strict=True)
        return x_BTD, [_again(len(parts) > 1, partial(through, main_q), part, x) for main_q, part, x in each]

    def _read(self, main: Tensor) -> Tensor:
        """Values of main rows as streams read them: without gradients where their losses are apart."""
        return main.detach() if self.detach else main


def _again(often: bool, compute: Callable[[_Part, Tensor], Tensor], part: _Part, x_BRD: Tensor) -> Tensor:
    """``compute(part, x_BRD)``, computed again for the gradient if it is one of several parts, or if layers are."""
    if often and torch.is_grad_enabled():
        result: Tensor = checkpoint(compute, part, x_BRD, use_reentrant=False)
    else:
        result = through(partial(compute, part), x_BRD)
    return result
