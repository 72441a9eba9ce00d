"""Medusa's heads: residual blocks on the target's last hidden state, each head on its own (Cai et al. 2024).

    state of head k = (B_kL o ... o B_k1)(h),    B(x) = x + silu(W x + b)

With heads of their own K (h^2 + h + h v) parameters; with the target's, K (h^2 + h).

K heads, M positions, D model width.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.methods.heads.module import DraftHeads, begin_with, first_blocks
from anabranch.methods.medusa.recipes import MedusaConfig
from anabranch.methods.terms import terms_of
from anabranch.model.config import ModelConfig
from anabranch.model.decoder import Decoder
from anabranch.model.pack import read_bytes

__all__ = ["MedusaConfig", "MedusaModule", "MedusaStates", "begin_with_heads"]


class MedusaModule(DraftHeads):
    """The trained module of ``medusa``; ``tuning`` are the terms of the target's layers, if it is tuned too."""

    config: MedusaConfig

    def __init__(self, model: ModelConfig, config: MedusaConfig, vocabulary: Tensor | None = None) -> None:
        super().__init__(model, config, vocabulary, [0] * config.num_heads)
        self.tuning = terms_of(model, config.lora_rank)

    def predicted(self, target: Decoder, states_MD: Tensor, path_MK: Tensor) -> Tensor:
        """The heads' states [M, K, D], which do not depend on the path."""
        return torch.stack([self.head(k, states_MD) for k in range(self.config.num_heads)], dim=1)


class MedusaStates:
    """The heads' states for drafting: where the target's head is packed, all first blocks are one product."""

    def __init__(self, target: Decoder, module: MedusaModule) -> None:
        self.module, self.target = module, target
        self._first: nn.Module | None = first_blocks(target, module)
        if self._first is not None:
            module.pack(target, first=1)

    @property
    def read(self) -> int:
        """Bytes of weights that a call reads."""
        if self._first is None:
            return read_bytes([self.module.blocks])
        heads = range(self.module.config.num_heads)
        return read_bytes([self._first, *(block for k in heads for block in self.module.chain(k)[1:])])

    def __call__(self, hidden_BD: Tensor) -> Tensor:
        """The target's states after the last norm [B, D] -> the heads' [B, K, D]."""
        module = self.module
        if self._first is None:
            return module.predicted(self.target, hidden_BD, hidden_BD.new_zeros(0))
        heads = module.config.num_heads
        first_BKD = hidden_BD[:, None] + F.silu(self._first(hidden_BD).unflatten(-1, (heads, -1)))
        if module.config.num_layers == 1:
            return first_BKD
        return torch.stack([module.head(k, first_BKD[:, k], first=1) for k in range(heads)], dim=1)


def begin_with_heads(module: MedusaModule, trained: MedusaModule) -> None:
    """``begin_with``; heads that are tuned with their target may begin with those of the frozen one."""
    rank = module.config.lora_rank
    if trained.config.lora_rank == 0:
        module.config = replace(module.config, lora_rank=0)
    try:
        begin_with(module, trained)
    finally:
        module.config = replace(module.config, lora_rank=rank)
