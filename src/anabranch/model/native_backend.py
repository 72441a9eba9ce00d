"""The backends of packed targets: products, or whole passes, in the native kernels.

B rows of the batch, M nodes of all rows, N nodes of the widest row, S positions of a source, V vocabulary,
D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from anabranch.model.backends import TorchBackend
from anabranch.model.blocks import Block, Norm
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder
from anabranch.model.encoder import Source
from anabranch.model.experts import Experts
from anabranch.model.inputs import starts_of
from anabranch.model.kernel_use import native_for
from anabranch.model.native_loras import NativeLoras
from anabranch.model.network import Network
from anabranch.model.passes import Pass, PassRequest, PassResult
from anabranch.model.stack import LayerWeights, Stack, StackStep
from anabranch.native import library as native
from anabranch.sampling import MIN_TEMPERATURE, SamplingParams

__all__ = ["ExpertsBackend", "NativeBackend", "ProductsBackend", "backend_of", "stack_of"]


class ProductsBackend(TorchBackend):
    """Runs passes in PyTorch over packed weights, which the native kernels multiply by."""

    def __init__(self, kernels: native.Library) -> None:
        self._products = kernels

    def head_rows(self, network: Network, tokens: Tensor) -> Tensor:
        """The rows of the head, from its packed weight."""
        rows: Tensor = network.head.rows(tokens)
        return rows

    def choose(self, network: Network, x: Tensor) -> Tensor:
        """The greedy tokens, without storing logits."""
        if network.config.logit_softcap is not None:
            return super().choose(network, x)
        tokens: Tensor = network.head.choose(x)
        return tokens

    def decoding(self, network: Network) -> AbstractContextManager[None]:
        """Keep PyTorch's threads from competing with the kernels' own."""
        return self._products.single_threaded()


class NativeBackend(ProductsBackend):
    """Runs passes in the native kernels: one call, from token ids to chosen tokens, with the rows that ride.

    With a rider that the kernels do not know, they run the main rows layer by layer, and PyTorch the rows that ride.

    encoder  the layers of the target's encoder; None: it has none
    """

    ragged = True

    def __init__(self, stack: Stack, encoder: Stack | None = None) -> None:
        super().__init__(stack.kernels)
        self.stack, self.encoder = stack, encoder
        self._loras = NativeLoras(stack.kind, stack.config)
        self.kernels = stack.kernels

    def encoded(self, network: Network, source: Source) -> Tensor:
        """Run the encoder's layers in float32 between products."""
        assert network.encoder is not None
        assert self.encoder is not None
        rows = network.encoder.begun(source, network.embedding)[0].to(torch.float32, copy=True).contiguous()
        return self.encoder.encode(rows, network.encoder.norm)

    def run(self, network: Network, request: PassRequest) -> PassResult:
        """Run a pass without padding its rows."""
        inputs, cache, slots, taps, rider, need, sides = request
        riding = None if rider is None else rider.in_kernels(self.stack.kind)
        if rider is not None and riding is None:
            return super().run(network, request)
        counts = inputs.counts_B
        words = network.config.vocab_size if inputs.sampled else 0
        call = None if riding is None else riding.call(counts, network.config.hidden_size, cache.dtype, words)
        prompts = cache.unread(slots) if network.rope().varies else ()
        step = self.stack.step(
            *(cache.lengths[slots], counts, inputs.parents_M, cache.capacity),
            prompts=prompts,
            sources=cache.memories[slots],
            loras=None if sides is None else self._loras.pointers(sides, 0),
        )
        if need == "tokens" and network.config.logit_softcap is not None:
            need = "hidden"
        hidden, tokens, seen = self.stack.through(
            inputs.tokens_M, step, cache, slots.start, need=need, taps=taps, prefill=inputs.prefill_B, rider=call
        )
        if rider is None or call is None:
            return PassResult(inputs.returned_B, starts_of(inputs.returned_B), hidden, tokens, taps=seen)
        ridden, counts = call.result(), call.counts
        if ridden.kept is not None:
            rectangle = pad_sequence([torch.from_numpy(nodes) for nodes in ridden.kept], batch_first=True)
            cache.select(rider.start, rectangle)
        return PassResult(counts, starts_of(counts), hidden, tokens, taps=seen, **ridden._asdict())

    def layers(self, network: Network, x_BND: Tensor, run: Pass, low: int, high: int) -> Tensor:
        """Run layers ``low`` to ``high`` - 1 in float32."""
        rows, step = self.rows_of(x_BND, run, low)
        self.stack.run(rows, step, run.cache, run.slots.start, low, high)
        return rows.view(x_BND.shape)

    def rows_of(self, x_BND: Tensor, run: Pass, low: int) -> tuple[Tensor, StackStep]:
        """A float32 copy of main rows [B N, D], and the step of the kernels over them from layer ``low`` on."""
        rows = x_BND.to(torch.float32, copy=True).contiguous().flatten(0, 1)
        lengths = run.cache.lengths[run.slots]
        parents_M = run.parents_BN.flatten().numpy()
        counts = [run.width] * len(lengths)
        return rows, self.stack.step(
            *(lengths, counts, parents_M, run.cache.capacity, rows),
            prompts=run.prompts,
            sources=run.cache.memories[run.slots],
            loras=None if run.sides is None else self._loras.pointers(run.sides, low),
        )

    def normed(self, network: Network, x: Tensor) -> Tensor:
        """Apply the last norm, by the kernels to float32 rows."""
        return self.stack.normed(x, network.norm) if x.dtype == torch.float32 else super().normed(network, x)

    def draw(
        self,
        logits_NV: Tensor,
        params: SamplingParams,
        keys_N: NDArray[np.uint64],
        histories: Sequence[Sequence[int]] | None,
    ) -> Tensor:
        """Sample tokens, by the kernels if nothing truncates the distribution."""
        if params.whole and logits_NV.dtype == torch.float32:
            return self.stack.kernels.draw(logits_NV, max(params.temperature, MIN_TEMPERATURE), keys_N)
        return super().draw(logits_NV, params, keys_N, histories)


def stack_of(backend: TorchBackend) -> Stack | None:
    """The stack of all layers of a target; None if another backend runs them."""
    return backend.stack if isinstance(backend, NativeBackend) else None


class ExpertsBackend(NativeBackend):
    """Runs attention and MLPs in the native kernels, one call for each layer, and experts as ``Experts`` does."""

    def run(self, network: Network, request: PassRequest) -> PassResult:
        """Run a pass without padding its rows."""
        inputs, cache, slots, taps, rider, _, sides = request
        assert sides is None, "mixtures of experts take no LoRAs by row here"
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
        rows, step = self.rows_of(x_BND, run, low)
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


def backend_of(target: Decoder, kernels: native.Library) -> TorchBackend:
    """The backend of a target whose linear layers are packed for the native kernels."""
    if not native_for(target):
        return ProductsBackend(kernels)
    stack, encoder = Stack.of_target(target), target.encoder
    if target.config.experts is not None:
        return ExpertsBackend(stack)
    below = None if encoder is None else Stack(encoder, [LayerWeights.of(block) for block in encoder.blocks], 0)
    return NativeBackend(stack, below)
