"""EAGLE's head: one decoder layer that predicts the target's next feature from the last one and the next token.

    x[i] = fc(cat(embedding(token[i + 1]), feature[i]))        position i of the head
    feature[i + 1] = layer(x[0], ..., x[i])                    token[i + 2] is scored by the target's own head

Features are the target's states after its last norm (EAGLE, Li et al. 2024), or several layers' states fused by a
matrix (``taps``; EAGLE-3, Li et al. 2025). After the last token that the target has read, the head continues with its
own features.

B rows, T text length, I positions of the head, K kv heads, E head width, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.drafting.trained import TrainedModule, check_shape
from anabranch.errors import InputError
from anabranch.methods.eagle.recipes import EagleConfig
from anabranch.model.blocks import Block, Norm, attention
from anabranch.model.config import ModelConfig

__all__ = ["EagleConfig", "EagleModule", "begin_with"]

STD = 0.02  # of fresh weights


def _one_layer(target: ModelConfig) -> ModelConfig:
    """The head's layer is wired as the target's; a sliding window is kept where all of the target's layers have it."""
    sliding = all(target.is_sliding(layer) for layer in range(target.num_layers))
    return replace(
        target.dense(), num_layers=1, sliding_layers=None, sliding_window=target.sliding_window if sliding else None
    )


class EagleModule(TrainedModule):
    """The trained parameters of the head: 2 D^2 of ``fc``, a layer and a norm; with n taps, n D^2 and two norms more.

    The embedding and the output head are the target's. ``vocabulary`` are the tokens that are drafted.
    """

    config: EagleConfig

    def __init__(self, target: ModelConfig, config: EagleConfig, vocabulary: Tensor | None = None) -> None:
        super().__init__()
        if config.layers and config.layers[-1] >= target.num_layers:
            raise InputError(
                f"taps has layer {config.layers[-1]}, but the target's layers end at {target.num_layers - 1}"
            )
        self.config, self.model, self._layers = config, _one_layer(target), target.num_layers
        width = target.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=config.bias)
        self.fuse = nn.Linear(len(config.layers) * width, width, bias=False) if config.layers else None
        of_inputs = (config.embedding_norm or bool(config.layers), bool(config.layers))
        self.norms = nn.ModuleList(Norm(self.model) if normed else nn.Identity() for normed in of_inputs)
        self.block = Block(self.model)
        if not config.input_norm:
            self.block.norm_in = nn.Identity()
        self.norm = Norm(self.model) if config.layers else None
        ids = torch.arange(target.vocab_size) if vocabulary is None else vocabulary.long().cpu()
        self.register_buffer("vocabulary", ids)
        if not self.fc.weight.is_meta:
            self._begin()

    @property
    def lowest(self) -> int:
        """Above all layers of the target: the head reads states that they have computed."""
        return self._layers

    @torch.no_grad()
    def _begin(self) -> None:
        """Fresh weights: small ones, with which the head passes its feature on."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=STD)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        for norm in self.modules():
            if isinstance(norm, Norm) and norm.plus_one:
                nn.init.zeros_(norm.weight)
        width = self.fc.out_features
        self.fc.weight[:, width:] += torch.eye(width)
        if self.fuse is not None:
            self.fuse.weight[:, -width:] += torch.eye(width)

    def features(self, hidden: Tensor, taps: Sequence[Tensor]) -> Tensor:
        """The target's features [..., D] from its states after the last norm, or before the tapped layers."""
        return hidden if self.fuse is None else self.fuse(torch.cat(list(taps), dim=-1).to(self.fuse.weight.dtype))

    def inputs(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """The input of ``fc`` [..., 2 D], from embeddings of the next tokens and features [..., D]."""
        embedding_norm, feature_norm = self.norms
        return torch.cat((embedding_norm(embeddings), feature_norm(features)), dim=-1)

    def states(self, features: Tensor) -> Tensor:
        """Input of the target's output head, from the head's features [..., D]."""
        return features if self.norm is None else self.norm(features)

    def unroll(
        self, embeddings_BID: Tensor, features_BID: Tensor, cos: Tensor, sin: Tensor, steps: int
    ) -> list[Tensor]:
        """Features [B, I, D] that the head predicts at every position, with gradients, for each of ``steps`` steps.

        In step k (from 0) position i reads the target's features up to i - k, and then the head's own of the steps
        before: what it computes at a node of depth k + 1 of a draft whose root is k positions before (EAGLE-3's
        training-time test).
        """
        dtype = self.fc.weight.dtype
        embeddings, true = embeddings_BID.to(dtype), features_BID.to(dtype)
        count, device = true.shape[1], true.device
        distance = torch.arange(count, device=device)[:, None] - torch.arange(count, device=device)
        group, window = self.model.num_heads // self.model.num_kv_heads, self.model.sliding_window
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs: list[Tensor] = []

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys.append(k.transpose(1, 2))
            values.append(v.transpose(1, 2))
            step = len(keys) - 1
            text = distance >= step if window is None else (distance >= step) & (distance < window)
            seen = torch.cat([text, *(distance == step - own for own in range(1, step + 1))], dim=1)
            bias = torch.zeros(seen.shape, dtype=q.dtype, device=device).masked_fill_(~seen, float("-inf"))
            return attention(
                *(self.model, q, torch.cat(keys, dim=2), torch.cat(values, dim=2)), bias.repeat(group, 1)[None, None]
            )

        x = true
        for _ in range(steps):
            outputs.append(self.block(self.fc(self.inputs(embeddings, x)), cos, sin, attend))
            x = F.pad(outputs[-1][:, :-1], (0, 0, 1, 0)) if count > 1 else torch.zeros_like(x)
        return outputs


def begin_with(module: EagleModule, trained: EagleModule) -> None:
    """Copy the weights of a trained head of the same shape; the draft vocabulary stays. Raises InputError."""
    check_shape(module.config.to_dict(), trained.config.to_dict())
    weights = {name: value for name, value in trained.state_dict().items() if name != "vocabulary"}
    module.load_state_dict(weights, strict=False)
