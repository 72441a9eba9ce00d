"""Shared mode in its naive layout: all rows of a text, main rows and streams, in one attention with one mask."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.attention import stream_positions
from anabranch.methods.streams.recipes import StreamConfig
from anabranch.model.blocks import attention
from anabranch.model.decoder import Decoder

LITERAL = StreamConfig(
    num_streams=3,
    num_stream_layers=2,
    stream_mlp="mlp+adapter",
    adapter_rank=0,
    pruning_rank=2,
    mode="shared",
    main_attends="own",
)


class Layout:
    """The rows of a text of T tokens whose tokens from ``first`` on have streams.

    Rows 0 to T - 1 are main rows; the streams of each token follow, token by token.
    """

    def __init__(self, target: Decoder, adapter: StreamAdapter, text: Sequence[int], first: int) -> None:
        self.target, self.adapter, config = target, adapter, target.config
        self.length, self.first, s = len(text), first, adapter.config.num_streams
        tokens, positions = torch.tensor(text)[None], torch.arange(self.length)[None]
        x = target.embed(tokens, positions)
        cos, sin = target.rope()(positions, self.length)
        for index in range(adapter.start):
            x = self._block(index, x, (cos, sin), self._mask(index, 0), self.length)
        self.entry_TD = x[0]
        own = stream_positions(positions[:, first:], s)
        x = torch.cat((x, adapter.initial(x[:, first:])), dim=1)
        more = target.rope()(own, self.length)
        turns = (torch.cat((cos, more[0]), dim=1), torch.cat((sin, more[1]), dim=1))
        for index in range(adapter.start, config.num_layers):
            x = self._block(index, x, turns, self._mask(index, s), self.length)
        x = target.norm(x)[0]
        self.hidden_TD, self.states_PSD = x[: self.length], x[self.length :].view(self.length - first, s, -1)

    def logits(self) -> Tensor:
        """The main rows' logits [T, V]."""
        return self.target.logits(self.hidden_TD[None])[0].detach()

    def _mask(self, index: int, streams: int) -> Tensor:
        """The mask of rows that see rows [R, R], one pair after the other."""
        config, shape = self.target.config, self.adapter.config
        nodes = [(t, 0) for t in range(self.length)]
        nodes += [(t, j) for t in range(self.first, self.length) for j in range(1, streams + 1)]
        window = config.sliding_window if config.is_sliding(index) else None

        def sees(row: tuple[int, int], key: tuple[int, int]) -> bool:
            (t, j), (u, i) = row, key
            if i == 0:
                return u <= t and (window is None or t - u < window)
            return u == t and (i <= j or (j == 0 and shape.main_attends == "own"))

        return torch.tensor([[sees(row, key) for key in nodes] for row in nodes])

    def _weighed(self, q_RHE: Tensor, k_RKE: Tensor, mask: Tensor) -> Tensor:
        """Which row sees which, by kv head [K, R, R]: a stream only the ``context_top`` keys of its main row."""
        config, shape, n = self.target.config, self.adapter.config, self.length
        group, scale = config.num_heads // config.num_kv_heads, q_RHE.shape[-1] ** -0.5
        allowed = mask.repeat(config.num_kv_heads, 1, 1)
        for kv in range(config.num_kv_heads):
            for t in range(self.first, n):
                keys, heads = k_RKE[:n, kv], q_RHE[t, kv * group : (kv + 1) * group]
                weights = (heads @ keys.T * scale).masked_fill(~mask[t, :n], float("-inf")).softmax(-1).sum(0)
                top = torch.zeros(n, dtype=torch.bool)
                top[weights.topk(min(shape.context_top, n)).indices] = True
                rows = n + (t - self.first) * shape.num_streams + torch.arange(shape.num_streams)
                allowed[kv, rows, :n] &= top
        return allowed

    def _block(self, index: int, x: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor, main: int) -> Tensor:
        config, shape = self.target.config, self.adapter.config
        block = self.target.blocks[index]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if shape.position == "rotation":
                angle = shape.rotation_step * torch.arange(1, shape.num_streams + 1).repeat(
                    (v.shape[1] - main) // shape.num_streams
                )
                cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
                left, right = v[0, main:].chunk(2, dim=-1)
                turned = torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)
                v = torch.cat((v[:, :main], turned[None]), dim=1)
            allowed = self._weighed(q[0], k[0], mask) if main < len(mask) and shape.context_top else mask[None]
            bias = torch.zeros(allowed.shape).masked_fill(~allowed, float("-inf"))
            bias = bias.repeat(1, config.num_heads // config.num_kv_heads, 1)[None]
            return attention(config, q, k.transpose(1, 2), v.transpose(1, 2), bias)

        if index >= self.adapter.start:
            side = self.adapter.side(index, main)
        else:
            side = None if self.adapter.tuning is None else self.adapter.tuning[index]
        found: Tensor = block(x, *turns, attend, side)
        return found
