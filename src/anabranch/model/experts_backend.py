"""The backend of a packed target; with experts, the kernels run a layer up to these, PyTorch groups rows by expert.

M nodes of all rows, N nodes of the widest row, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anabranch.model.backends import TorchBackend
from anabranch.model.blocks import Block, Norm
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder
from anabranch.model.experts import Experts
from anabranch.model.inputs import starts_of
from anabranch.model.kernel_use import native_for
from anabranch.model.native_backend import NativeBackend, ProductsBackend
from anabranch.model.network import Network
from anabranch.model.passes import Pass, PassRequest, PassResult
from anabranch.model.stack import LayerWeights, Stack, StackStep
from anabranch.native import library as native

__all__ = ["ExpertsBackend", "backend_of"]


def backend_of(target: Decoder, kernels: native.Library) -> TorchBackend:
    """The backend of a target whose linear layers are packed for the native kernels."""
    if not native_for(target):
        return ProductsBackend(kernels)
    stack, encoder = Stack.of_target(target), target.encoder
    if target.config.experts is not None:
        return ExpertsBackend(stack)
    if encoder is None:
        return NativeBackend(stack)
    return NativeBackend(stack, Stack(encoder, [LayerWeights.of(block) for block in encoder.blocks], 0))


class ExpertsBackend(NativeBackend):
    """Runs attention and MLPs in the native kernels, one call for each layer, and experts as ``Experts`` does."""

    def run(self, network: Network, request: PassRequest) -> PassResult:
        """Run a pass without padding its rows."""
        inputs, cache, slots, taps, rider, _, sides = request
        assert sides is None, "a target with LoRAs by row is not packed"
        if rider is not None:
            return TorchBackend.run(self, network, request)
        prompts = cache.unread(slots) if network.rope().varies else ()
        tokens = torch.from_numpy(inputs.tokens_M)
        rows = network.embed(tokens, tokens).to(torch.float32, copy=True)  # rotary positions: none are added
        step = self.stack.step(
            cache.lengths[slots], inputs.counts_B, inputs.parents_M, cache.capacity, rows, prompts=prompts
        )
        tapped: dict[int, Tensor] = {}
        for layer in range(len(network.blocks)):
            if layer in taps:
                tapped[layer] = rows.to(network.dtype)
            self._layer(network, rows, step, cache, slots.start, layer)
        result = PassResult(inputs.counts_B, starts_of(inputs.counts_B), self.normed(network, rows), taps=tapped)
        return result.without_prefill(inputs)

    def layers(self, network: Network, x_BND: Tensor, run: Pass, low: int, high: int) -> Tensor:
        """Run layers ``low`` to ``high`` - 1 in float32."""
        rows, step = self.rows_of(x_BND, run)
        for layer in range(low, high):
            self._layer(network, rows, step, run.cache, run.slots.start, layer)
        return rows.view(x_BND.shape)

    def _layer(self, network: Network, rows_MD: Tensor, step: StackStep, cache: Cache, slot: int, layer: int) -> None:
        """Run a layer over float32 rows in place."""
        self.stack.run(rows_MD, step, cache, slot, layer, layer + 1)
        block = network.blocks[layer]
        assert isinstance(block, Block)
        if isinstance(block.mlp, Experts):
            assert isinstance(block.norm_mlp, Norm)
            rows_MD += block.mlp(self.stack.normed(rows_MD, block.norm_mlp))
