"""EAGLE's head as it drafts: on the native kernels where the target runs on them, otherwise in PyTorch.

B rows of the cache, M nodes of a pass, N nodes of the widest row, D width.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from anabranch.drafting.drafter import Call
from anabranch.drafting.head import DraftHead
from anabranch.methods.eagle.module import EagleModule
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder
from anabranch.model.inputs import Inputs, Nodes
from anabranch.model.mlp import MLP
from anabranch.model.native_linear import NativeLinear
from anabranch.model.pack import read_bytes
from anabranch.model.passes import Pass
from anabranch.model.quantize import QuantizedWeight
from anabranch.model.stack import LayerWeights, Stack
from anabranch.model.weights import fingerprint_of
from anabranch.support.memory import give_back

__all__ = ["EagleLayer", "NativeEagleLayer", "layer_of", "new_layer"]


class EagleLayer:
    """Passes of a head, shared by all drafters of it and the target.

    head  the target's output head over the draft vocabulary
    call  a pass, as rows count it
    """

    def __init__(self, target: Decoder, module: EagleModule) -> None:
        self.target, self.module = target, module
        self.head = DraftHead(target, module.vocabulary)
        self.call = self._counted(read_bytes((module.block, module.fc)))

    def _counted(self, read: int) -> Call:
        """A pass that reads so many bytes besides the head over the draft vocabulary."""
        return Call("partial", 1, self.target.config.num_layers, read + self.head.read)

    @cached_property
    def fingerprint(self) -> str:
        """The identity of the module's weights."""
        return fingerprint_of(self.module.model, self.module)

    @property
    def dtype(self) -> torch.dtype:
        """The type of features and of the cache."""
        return self.module.fc.weight.dtype

    def new_cache(self, rows: int, capacity: int) -> Cache:
        """An empty cache for the layer. Raises DeviceError where memory does not suffice."""
        return Cache(
            *(self.module.model,),
            rows=rows,
            capacity=capacity,
            dtype=self.dtype,
            device=self.target.device,
            kernels=self.target.backend.kernels,
        )

    def features(self, hidden: Tensor, taps: list[Tensor]) -> Tensor:
        """The target's features [..., D], in the head's type."""
        return self.module.features(hidden, taps).to(self.dtype)

    def run(self, inputs: Inputs, features_MD: Tensor, cache: Cache, slots: slice) -> Tensor:
        """The features [M, D] that the head predicts after each node; their keys and values are not committed.

        inputs       the tokens that follow the positions of ``features_MD``
        features_MD  the target's features at committed positions, the head's own of the parent at drafted nodes
        """
        device, width = self.target.device, features_MD.shape[1]
        cache.begin(inputs.width, slots)
        nodes = Nodes.of(inputs, cache.lengths[slots])
        run = Pass(self.module.model, nodes, cache, slots, self.target.rope())
        counts = torch.tensor(inputs.counts_B)
        real_BN = (torch.arange(run.width) < counts[:, None]).to(device)
        features = torch.zeros(*real_BN.shape, width, dtype=self.dtype, device=device)
        features[real_BN] = features_MD
        embeddings = self.target.embed(run.tokens_BN, run.positions_BN + 1).to(self.dtype)
        x = self.module.fc(self.module.inputs(embeddings, features))
        x = self.module.block(x, run.cos, run.sin, lambda q, k, v: run.attend(0, q, k, v))
        out: Tensor = x[real_BN]
        return out


class NativeEagleLayer(EagleLayer):
    """Passes on the native kernels. Drafts need not be exact, so weights are int8 unless the target is float32."""

    def __init__(self, target: Decoder, module: EagleModule) -> None:
        super().__init__(target, module)
        block = module.block
        assert isinstance(block.mlp, MLP)
        weights = LayerWeights(
            block,
            self._packed(block.qkv),
            self._packed(block.out),
            up=self._packed(block.mlp.up, gated=block.mlp.gated),
            down=self._packed(block.mlp.down),
        )
        self.stack = Stack(target, [weights], 0)
        self._fc = self._packed(module.fc, wide=True)
        self._fuse = None if module.fuse is None else self._packed(module.fuse)
        self.call = self._counted(self.stack.nbytes + self._fc.nbytes)
        give_back()

    @property
    def dtype(self) -> torch.dtype:
        """The target's type."""
        return self.target.dtype

    def _packed(self, linear: nn.Module, *, gated: bool = False, wide: bool = False) -> NativeLinear:
        assert isinstance(linear, nn.Linear)
        weight = linear.weight.detach().to(self.dtype)
        exact = self.dtype == torch.float32
        bias = None if linear.bias is None else linear.bias.detach()
        return NativeLinear(weight if exact else QuantizedWeight.of(weight, "int8"), bias, gated=gated, wide=wide)

    def features(self, hidden: Tensor, taps: list[Tensor]) -> Tensor:
        """The target's features [..., D]."""
        if self._fuse is None:
            return hidden
        fused: Tensor = self._fuse(torch.cat(taps, dim=-1))
        return fused

    def run(self, inputs: Inputs, features_MD: Tensor, cache: Cache, slots: slice) -> Tensor:
        """See ``EagleLayer``; rows are not padded."""
        cache.begin(inputs.width, slots)
        tokens_M = torch.from_numpy(inputs.tokens_M)
        positions_BN = torch.from_numpy(inputs.depths_BN + np.asarray(cache.lengths[slots])[:, None]) + 1
        real_BN = torch.arange(inputs.width) < torch.tensor(inputs.counts_B)[:, None]
        embeddings = self.target.embed(tokens_M, positions_BN[real_BN]).to(self.dtype)
        x_MD = self._fc(self.module.inputs(embeddings, features_MD))
        step = self.stack.step(cache.lengths[slots], inputs.counts_B, inputs.parents_M, cache.capacity, x_MD)
        self.stack.run(x_MD, step, cache, slots.start, 0, 1)
        out: Tensor = x_MD.to(self.dtype)
        return out


def new_layer(target: Decoder, module: EagleModule) -> EagleLayer:
    """The head's passes for a target, with a packed copy of its present weights where the target is packed."""
    return (EagleLayer if target.backend.kernels is None else NativeEagleLayer)(target, module)


def layer_of(target: Decoder, module: EagleModule) -> EagleLayer:
    """The head's passes for a target, built once."""
    return module.shared(target, EagleLayer, lambda: new_layer(target, module))
