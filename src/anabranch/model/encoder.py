"""The encoder of an encoder-decoder model: it reads a source once, and each layer of the decoder attends to its output.

B rows of the batch, N nodes, S positions of a source, C channels and T frames of features, D model width,
H query heads, K kv heads, E head width.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.errors import InputError
from anabranch.model.blocks import attention
from anabranch.model.config import EncoderConfig, ModelConfig
from anabranch.model.layers import Layers
from anabranch.model.relative import relative_bias

__all__ = ["Encoder", "Memory", "Source", "begun", "recalled"]

STRIDE = 2  # frames of features a position


@dataclass(frozen=True, eq=False)
class Source:
    """The input of the encoder for a request. Requests that share one object share its keys and values.

    tokens    of a text. Beside features: a text that drafts may repeat, which the encoder does not read
    features  [C, T], for an encoder that reads features
    """

    tokens: Sequence[int] = ()
    features: Tensor | None = None

    @property
    def positions(self) -> int:
        """The length of the encoder's output."""
        return len(self.tokens) if self.features is None else self.features.shape[1] // STRIDE

    @cached_property
    def identity(self) -> tuple[int, ...]:
        """Numbers that differ where sources do: the tokens, and a checksum of the features."""
        if self.features is None:
            return tuple(self.tokens)
        return (*self.tokens, zlib.crc32(self.features.cpu().numpy().tobytes()))


def begun(config: ModelConfig, prompt: Sequence[int]) -> tuple[list[int], Source | None]:
    """The tokens that a text begins with, and its source, for the tokens that a user gives."""
    return (list(prompt), None) if config.encoder is None else (list(config.encoder.start), Source(prompt))


class Memory(NamedTuple):
    """Keys and values of a source for each layer of the decoder [layers, K, S, E], contiguous."""

    keys: Tensor
    values: Tensor

    def above(self, layer: int) -> Memory:
        """The keys and values of the layers from ``layer`` on."""
        return Memory(self.keys[layer:], self.values[layer:])


def recalled(config: ModelConfig, memories: Sequence[Memory | None], layer: int, q_BNHE: Tensor) -> Tensor:
    """Attention of rows to the sources of their texts [B, N, H E], each of a length of its own, in a layer."""
    found = []
    for b, memory in enumerate(memories):
        assert memory is not None, "a row of an encoder-decoder model has a source"
        keys, values = memory.keys[layer][None], memory.values[layer][None]
        found.append(attention(config, q_BNHE[b : b + 1], keys, values, None))
    return found[0] if len(found) == 1 else torch.cat(found)


class Encoder(Layers):
    """Reads one source at a time, so that no source is padded and the output does not depend on other requests.

    described  its whole config; ``config`` is that of the layers
    """

    def __init__(self, config: EncoderConfig) -> None:
        layers, channels = config.layers, config.channels
        super().__init__(layers, embedded=not (channels or config.shared))
        self.described = config
        width = layers.hidden_size
        self.conv1 = nn.Conv1d(channels, width, kernel_size=3, padding=1) if channels else None
        self.conv2 = nn.Conv1d(width, width, kernel_size=3, stride=STRIDE, padding=1) if channels else None

    def check(self, source: Source | None) -> None:
        """Raise InputError for a source that the encoder cannot read."""
        channels, limit = self.described.channels, self.config.max_positions
        if source is None:
            raise InputError("this model reads a source and writes a text about it; give the request a source")
        if channels:
            wanted, shape = (channels, STRIDE * limit), None if source.features is None else source.features.shape
            if shape != wanted:
                got = "none" if shape is None else f"features of the shape {tuple(shape)}"
                raise InputError(f"this model reads features of the shape {wanted}, got {got}")
            return
        if source.features is not None:
            raise InputError("this model reads a text, got features; give the tokens of a source")
        if not source.tokens:
            raise InputError("the source is empty; give at least one token")
        words = self.config.vocab_size
        if wrong := [token for token in source.tokens if not 0 <= token < words]:
            raise InputError(f"the source has the token id {wrong[0]}, but the vocabulary ends at {words - 1}")
        if len(source.tokens) > limit:
            raise InputError(
                f"the source has {len(source.tokens)} tokens, but the encoder's limit is {limit}; shorten it"
            )

    def size(self, source: Source) -> int:
        """The positions of a source."""
        return self.config.max_positions if self.described.channels else len(source.tokens)

    def some(self, size: int) -> Source:
        """A source of at most this size, for timing."""
        limit, channels = self.config.max_positions, self.described.channels
        return Source(features=torch.zeros(channels, STRIDE * limit)) if channels else Source([0] * min(size, limit))

    def forward(self, source: Source, embedding: nn.Module) -> Tensor:
        """The output of the last norm [S, D]; ``embedding`` is the decoder's."""
        x = self.begun(source, embedding)
        bias = None
        if self.relative is not None and self.config.relative is not None:
            positions = torch.arange(x.shape[1], device=x.device)[None]
            bias = relative_bias(self.relative, self.config.relative, positions, positions).to(x.dtype)
            group = self.config.num_heads // self.config.num_kv_heads
            bias = bias.reshape(1, self.config.num_kv_heads, group * x.shape[1], x.shape[1])

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(self.config, q, k.transpose(1, 2), v.transpose(1, 2), bias)

        unrotated = x.new_empty(0)
        for block in self.blocks:
            x = block(x, unrotated, unrotated, attend)
        states: Tensor = self.norm(x)[0]
        return states

    def begun(self, source: Source, embedding: nn.Module) -> Tensor:
        """The rows before the first layer [1, S, D]; ``embedding`` is the decoder's."""
        embedding = embedding if self.embedding is None else self.embedding
        some = next(self.blocks.parameters())
        if self.conv1 is not None and self.conv2 is not None:
            assert source.features is not None
            # bfloat16 convolutions take 40 times as long as float32 ones on a CPU without instructions for them
            dtype = self.conv1.weight.dtype
            kind = torch.float32 if some.device.type == "cpu" else dtype
            x = source.features[None].to(some.device, kind)
            for conv in (self.conv1, self.conv2):
                bias = None if conv.bias is None else conv.bias.to(kind)
                x = F.gelu(F.conv1d(x, conv.weight.to(kind), bias, conv.stride, conv.padding))
            x = x.transpose(1, 2).to(dtype)
        else:
            x = embedding(torch.tensor([*source.tokens], device=some.device)[None])
            x = x * self.config.embedding_scale if self.config.embedding_scale != 1.0 else x
        return self.placed(x, torch.arange(x.shape[1], device=x.device)[None])
