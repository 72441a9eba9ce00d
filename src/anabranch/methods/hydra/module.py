"""Hydra's heads: each also reads the draft tokens before its own (Ankner et al. 2024).

    state of head k = (B_kL o ... o B_k1)([h; E(x_1); ...; E(x_k)])

x_1 is the root of the draft, x_2 to x_k the tokens that heads 1 to k - 1 predict. Hydra++ has deeper heads, learns the
target's distributions, and its heads read a *prefix layer* instead of h: a decoder layer of its own over the target's
states of the whole text.

K heads, M positions, F nodes of one depth, B rows, T text length, D model width, E head width.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.methods.heads.module import DraftHeads
from anabranch.methods.hydra.recipes import HydraConfig
from anabranch.model.blocks import Block, Norm, attention
from anabranch.model.cache import Cache
from anabranch.model.config import ModelConfig
from anabranch.model.decoder import Decoder
from anabranch.model.pack import packed_like
from anabranch.model.weights import fingerprint_of

__all__ = ["HydraConfig", "HydraModule", "Memory", "PrefixLayer"]


class HydraModule(DraftHeads):
    """The trained module of ``hydra``."""

    config: HydraConfig

    def __init__(self, model: ModelConfig, config: HydraConfig, vocabulary: Tensor | None = None) -> None:
        super().__init__(model, config, vocabulary, range(1, config.num_heads + 1))
        self.reads_texts = config.prefix
        if config.published:
            self.biases = nn.ParameterList(nn.Parameter(torch.zeros(len(self.vocabulary))) for _ in self.blocks)
        self.norm = Norm(model) if config.prefix and config.published else None
        self.layer = Block(model.dense()) if config.prefix else None
        if self.layer is not None:
            for linear in (self.layer.out, self.layer.mlp.down):  # at first the layer passes the states on
                assert isinstance(linear, nn.Linear)
                nn.init.zeros_(linear.weight)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)

    def embed(self, target: Decoder, tokens: Tensor) -> Tensor:
        """The embeddings of draft tokens [...] as heads read them [..., D]."""
        embedded: Tensor = target.embedding(tokens)
        return embedded if self.config.embeddings == "raw" else F.rms_norm(embedded, embedded.shape[-1:], eps=1e-9)

    def prefix(self, target: Decoder, hidden_BTD: Tensor) -> Tensor:
        """The states that the heads read [B, T, D]: the prefix layer's, or the target's without one."""
        if self.layer is None:
            return hidden_BTD
        rows, length, _ = hidden_BTD.shape
        positions = torch.arange(length, device=hidden_BTD.device).expand(rows, length)
        # copies: tables that a replay made in inference mode take no part in gradients
        cos, sin = (turn.clone().to(hidden_BTD.dtype) for turn in target.rope()(positions, length))
        bias = _causal(self.model, length, length, hidden_BTD)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(self.model, q, k.transpose(1, 2), v.transpose(1, 2), bias.to(q.dtype))

        return self.normed(self.layer(hidden_BTD, cos, sin, attend))

    def normed(self, x: Tensor) -> Tensor:
        """Input of the heads, from the output of the prefix layer [..., D]."""
        return x if self.norm is None else self.norm(x)

    def states(self, k: int, state_BFD: Tensor, path_BFC: Tensor) -> Tensor:
        """The states of head ``k`` (from 0) [B, F, D] after some paths.

        state_BFD  what the heads read, [B, 1, D] or [B, F, D]
        path_BFC   the embeddings on each path, those of the root first [B, F, (k + 1) D]
        """
        whole = torch.cat((state_BFD.expand(*path_BFC.shape[:2], -1), path_BFC.to(state_BFD.dtype)), dim=-1)
        return self.head(k, whole)

    def predicted(self, target: Decoder, states_MD: Tensor, path_MK: Tensor) -> Tensor:
        """The heads' states [M, K, D], given the true tokens on the path to each prediction."""
        path_MKD = self.embed(target, path_MK)
        outputs = [
            self.states(k, states_MD[None], path_MKD[None, :, : k + 1].flatten(2))[0]
            for k in range(self.config.num_heads)
        ]
        return torch.stack(outputs, dim=1)


def _causal(config: ModelConfig, queries: int, keys: int, like: Tensor) -> Tensor:
    """The bias of the last ``queries`` tokens of a text to all of its ``keys`` tokens, of the type of ``like``."""
    bias = torch.full((queries, keys), float("-inf"), dtype=like.dtype, device=like.device).triu(keys - queries + 1)
    return bias.repeat(config.num_heads // config.num_kv_heads, 1)[None, None]


class Memory:
    """The keys and values of a row's prefix layer, and the target's states that it has not read yet.

    Only committed tokens are read, so nothing is taken back but what the target has to read again (``rewind``).
    """

    def __init__(self) -> None:
        self.length = 0
        self.waiting: list[Tensor] = []
        self._keys_values: Tensor | None = None  # [2, K, capacity, E]

    def add(self, states_nD: Tensor) -> None:
        """Take the target's states of the next n tokens, to be read when a draft needs them."""
        self.waiting.append(states_nD)

    def rewind(self, length: int) -> None:
        """Forget all keys and values after the first ``length``."""
        self.length = min(self.length, length)

    def put(self, cache: Cache) -> None:
        """Write all keys and values to the first slot of a cache."""
        if self._keys_values is not None:
            cache.put(0, 0, *self._keys_values[:, None, :, : self.length])

    def append(self, keys_nKE: Tensor, values_nKE: Tensor) -> tuple[Tensor, Tensor]:
        """Append n keys and values; returns all of them [K, L, E]."""
        n, heads, width = keys_nKE.shape
        end = self.length + n
        if self._keys_values is None or self._keys_values.shape[2] < end:
            grown = keys_nKE.new_empty(2, heads, max(64, 2 * end), width)
            if self._keys_values is not None:
                grown[:, :, : self.length] = self._keys_values[:, :, : self.length]
            self._keys_values = grown
        self._keys_values[:, :, self.length : end] = torch.stack((keys_nKE, values_nKE)).transpose(1, 2)
        self.length = end
        return self._keys_values[0, :, :end], self._keys_values[1, :, :end]


class PrefixLayer:
    """The prefix layer for drafting, packed like the target's layers where these are packed.

    recalled  the beginning of the next row's prompt that is kept, and what the layer has read of it
    """

    def __init__(self, target: Decoder, module: HydraModule) -> None:
        self.recalled: tuple[Sequence[int], Memory] = (), Memory()
        assert module.layer is not None
        self.target, self.module, self.layer = target, module, module.layer
        packed, block = copy.deepcopy(module.layer), target.blocks[0]
        assert isinstance(block, Block)
        like = block.qkv  # its outputs have the weights' type, those of the head may not
        for owner, name in ((packed, "qkv"), (packed, "out"), (packed.mlp, "up"), (packed.mlp, "down")):
            linear = getattr(owner, name)
            made = packed_like(like, linear.weight.detach(), linear.bias)
            if made is not None:
                setattr(owner, name, made)
                self.layer = packed

    @cached_property
    def fingerprint(self) -> str:
        """The identity of the layer's weights."""
        assert self.module.layer is not None
        return fingerprint_of(self.module.model, self.module.layer)

    def new_cache(self, capacity: int) -> Cache:
        """A cache for the keys and values of one text, in which they are kept and recalled."""
        config = replace(self.module.model.dense(), num_layers=1, sliding_layers=None)
        return Cache(config, rows=1, capacity=capacity, dtype=self.target.dtype, device=self.target.device)

    def read(self, memories: Sequence[Memory]) -> Tensor:
        """Read all waiting states of some rows in one pass; returns the layer's output for each row's last [B, D]."""
        config, device = self.target.config, self.target.device
        parts = [torch.cat(memory.waiting) for memory in memories]
        counts, lengths = [len(part) for part in parts], [memory.length for memory in memories]
        positions = torch.cat(
            [torch.arange(start, start + n, device=device) for start, n in zip(lengths, counts, strict=True)]
        )
        x_1MD = torch.cat(parts)[None].to(self.target.dtype)
        longest = max(map(sum, zip(lengths, counts, strict=True)))
        cos, sin = (turn.to(x_1MD.dtype) for turn in self.target.rope()(positions[None], longest))

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            outputs, first = [], 0
            for memory, n in zip(memories, counts, strict=True):
                rows = slice(first, first + n)
                keys, values = memory.append(k[0, rows].to(x_1MD.dtype), v[0, rows].to(x_1MD.dtype))
                bias = _causal(config, n, keys.shape[1], x_1MD) if n > 1 else None
                outputs.append(attention(config, q[:, rows].to(x_1MD.dtype), keys[None], values[None], bias))
                first += n
            return torch.cat(outputs, dim=1)

        read: Tensor = self.layer(x_1MD, cos, sin, attend)
        for memory in memories:
            memory.waiting.clear()
        return self.module.normed(read[0, torch.tensor(counts, device=device).cumsum(0) - 1])
