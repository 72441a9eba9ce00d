"""Backends, which run the forward passes of a decoder: in PyTorch, or as captured graphs.

Those of the native kernels are in ``native_backend``. A backend holds at most packed copies of weights, so every call
takes the network.

B rows of the batch, M nodes of all rows, N nodes of the widest row, R rows of one pass, S rows a node of a rider,
V vocabulary, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from anabranch.model.blocks import Block
from anabranch.model.device.layers import fits, fused_layers, trusted
from anabranch.model.device.ops import ops
from anabranch.model.encoder import Source
from anabranch.model.graphs import FUSED, Capture, capture_for, span_bucket, width_bucket
from anabranch.model.inputs import DeviceTrees, Inputs, Nodes
from anabranch.model.network import Network
from anabranch.model.passes import Pass, PassRequest, PassResult, Rider
from anabranch.native.library import Library
from anabranch.sampling import SamplingParams, argmax, target_tokens
from anabranch.verify import Verdict

__all__ = ["GraphBackend", "TorchBackend", "backend_for"]


class TorchBackend:
    """Runs passes in PyTorch, one operation at a time; other backends override its methods.

    ragged   the rows of a pass may have different numbers of nodes; otherwise they are padded to the widest
    kernels  the native kernels if they run the layers: then main rows are float32 between layers, and a rider's rows go
             through a layer separately
    capture  captures computations of fixed shapes as graphs; None: no graphs
    verifies whether passes can return accepted paths (``PassResult.verdicts``)
    """

    ragged: bool = False
    verifies: bool = False
    kernels: Library | None = None
    capture: Capture | None = None

    def run(self, network: Network, request: PassRequest) -> PassResult:
        """Run a whole pass, up to the last norm."""
        inputs, cache, slots, taps, rider, _, sides = request
        nodes = Nodes.of(inputs, cache.lengths[slots])
        run = Pass(network.config, nodes, cache, slots, network.rope(), sides=sides, relative=network.relative)
        return self._through(network, run, inputs.counts_B, taps, rider).without_prefill(inputs)

    def _through(
        self, network: Network, run: Pass, counts_B: Sequence[int], taps: Sequence[int], rider: Rider | None
    ) -> PassResult:
        """Run all rows through all layers and the last norm."""
        x, top, entry = network.embed(run.tokens_BN, run.positions_BN), len(network.blocks), None
        tapped: dict[int, Tensor] = {}
        stops = sorted({0, *taps, top} | (set() if rider is None else {rider.start}))
        for low, high in pairwise([*stops, top]):
            if rider is not None and low == rider.start:
                x, entry = rider.enter(x, run)
            if low in taps:
                tapped[low] = x[:, : run.width].to(network.dtype).flatten(0, 1)
            if rider is not None and entry is not None and rider.rides:
                for index in range(low, high):
                    block = network.blocks[index]
                    assert isinstance(block, Block)
                    x = rider.layer(index, block, x, run, entry)
            elif low < high:
                x = self.layers(network, x, run, low, high)
        riding = None
        if rider is not None and rider.rides:
            x, riding = rider.leave(x, run)
        kept = None if entry is None else entry.kept
        if kept is not None:
            counts_B = [len(row) for row in kept]
        allowed = None if entry is None else entry.allowed
        b, n = x.shape[:2]
        return PassResult(
            counts_B,
            range(0, b * n, n),
            self.normed(network, x).flatten(0, 1),
            taps=tapped,
            kept=kept,
            riding_MSD=riding,
            allowed_B=None if allowed is None else [row[:n] for row, n in zip(allowed, counts_B, strict=True)],
        )

    def encoded(self, network: Network, source: Source) -> Tensor:
        """The encoder's output for a source [S, D]."""
        states: Tensor = network.encoder(source, network.embedding)  # type: ignore[misc]
        return states

    def layers(self, network: Network, x_BND: Tensor, run: Pass, low: int, high: int) -> Tensor:
        """Run main rows [B, N, D] through layers ``low`` to ``high`` - 1."""
        x = x_BND
        for index in range(low, high):
            side = None if run.sides is None else run.sides.layers[index]
            mix = run.recur if network.config.is_recurrent(index) else run.attend
            recall = None if network.encoder is None else partial(run.recall, index)
            x = network.blocks[index](x, run.cos, run.sin, partial(mix, index), side, recall)
        return x

    def normed(self, network: Network, x: Tensor) -> Tensor:
        """Apply the last norm [..., D], in the weights' type."""
        return network.norm(x)  # type: ignore[no-any-return]

    def head_rows(self, network: Network, tokens: Tensor) -> Tensor:
        """The rows of the head's weight [..., D] for tokens [...]."""
        rows: Tensor = network.head.weight[tokens]
        return rows

    def choose(self, network: Network, x: Tensor) -> Tensor:
        """The greedy tokens [...] of normed hidden states [..., D]; the lowest id among equals."""
        return argmax(network.logits(x).flatten(0, -2)).view(x.shape[:-1])

    def draw(
        self,
        logits_NV: Tensor,
        params: SamplingParams,
        keys_N: NDArray[np.uint64],
        histories: Sequence[Sequence[int]] | None,
    ) -> Tensor:
        """Sample the target's own tokens [N]: ``sampling.target_tokens``."""
        return target_tokens(logits_NV, params, keys_N, histories)

    def decoding(self, network: Network) -> AbstractContextManager[None]:
        """A context for decoding; on a GPU without cuDNN's attention, which makes a plan for each new shape."""
        if network.device.type == "cuda":
            return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
        return nullcontext()


class GraphBackend(TorchBackend):
    """Captures passes as graphs at a few padded shapes and replays them; others run as in ``TorchBackend``.

    Where fused operations are trusted, a graph computes layers in these if they fit, and ends with the head, the greedy
    tokens, their verification and the commit: the host sends a pass one tensor and reads one.
    """

    verifies = True

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self._fits: bool | None = None

    def run(self, network: Network, request: PassRequest) -> PassResult:
        """Run a pass at the next larger captured shapes."""
        inputs, cache, slots, _, rider, _, sides = request
        rows, rope = len(inputs.counts_B), network.rope()
        width, longest = width_bucket(inputs.width, rows), max(cache.lengths[slots])
        if (
            # a pass that does not start at the first row reads a prompt
            (slots.start or inputs.prefill_B or sides is not None or (rider is not None and not rider.fixed))
            or (width is None or longest + width > cache.capacity)
            # the host reads which experts are chosen, and follows the tree where states do
            or (network.config.experts is not None or network.config.recurrent is not None)
            # sources have lengths of their own
            or network.encoder is not None
            or (rope.varies and any(cache.unread(slots)))  # the rest of a prompt may take tables of its own
        ):
            return super().run(network, request)
        assert width is not None
        cache.begin(width, slots)
        return self._replayed(network, request, rows, width, longest + width)

    def _replayed(self, network: Network, request: PassRequest, rows: int, width: int, used: int) -> PassResult:
        """Run a pass of ``width`` nodes a row over ``used`` positions of the cache, captured when it is repeated.

        Where fused operations are trusted, the device computes positions and masks from one tensor.
        """
        inputs, cache, slots, taps, rider, need, _ = request
        rope, known, lengths = network.rope(), trusted(network.device), cache.lengths[slots]
        table = rope.rotations(cache.capacity).table
        paths = known and need == "paths"
        fused = known and rider is None and rows * width <= FUSED and self._fused(network)
        span = span_bucket(used, cache.capacity, skips=fused)
        grown = inputs if paths and isinstance(inputs, DeviceTrees) else None
        if grown is not None:
            given = [grown.packed]
        else:
            given = [packed(inputs.widened(width), lengths)] if known else [*Nodes.of(inputs.widened(width), lengths)]

        def compute(*given: Tensor) -> tuple[Tensor, ...]:
            riding: tuple[Tensor, ...] = ()
            if known:
                tokens_BN, parents_BN, lengths_B = unpacked(given[0], rows, width)
                positions_BN, tree_BNN = ops.ancestry(parents_BN, lengths_B)
                nodes = Nodes(tokens_BN, positions_BN, lengths_B, tree_BNN)
            else:
                nodes = Nodes(*given)
            if fused:
                x = network.embed(nodes.tokens_BN, nodes.positions_BN)
                x, tapped = fused_layers(network, x, nodes, table, cache, slots, span, taps)
                hidden = network.norm(x).flatten(0, 1)
            else:
                run = Pass(network.config, nodes, cache, slots, rope, span=span)
                result = self._through(network, run, inputs.counts_B, taps, rider)
                hidden, tapped = result.hidden_MD, dict(result.taps)
                riding = () if result.riding_MSD is None else (result.riding_MSD,)
            end: tuple[Tensor, ...] = ()
            if paths:
                chosen = ops.choose(network.logits(hidden)).view(tokens_BN.shape)
                verdicts = ops.verify(tokens_BN, parents_BN, chosen)
                ops.keep(cache.keys[:, slots], cache.values[:, slots], lengths_B, verdicts)
                end = (verdicts.flatten() if grown is None else torch.cat((verdicts.flatten(), given[0])),)
            return (hidden, *(tapped[layer] for layer in taps), *riding, *end)

        shapes = (rows, slots.start, width, span, fused, paths, grown is not None)
        key = ("pass", *shapes, id(rider), tuple(taps), table.data_ptr())
        hidden, *others = cache.graphs.run(self.capture, key, compute, given, network.device, held=(table, rider))
        tapped, others = others[: len(taps)], others[len(taps) :]
        counts, verdicts = inputs.counts_B, None
        if paths:
            numbers = others[-1].cpu().numpy()
            verdicts = verdicts_of(numbers[: rows * (width + 2)].reshape(rows, -1))
            if grown is not None:
                grown.arrived(numbers[rows * (width + 2) :])
                counts = [tree.size for tree in grown.trees]
        return PassResult(
            counts,
            range(0, rows * width, width),
            hidden,
            taps=dict(zip(taps, tapped, strict=True)),
            riding_MSD=others[0] if rider is not None and rider.rides else None,
            verdicts=verdicts,
        )

    def _fused(self, network: Network) -> bool:
        if self._fits is None:
            self._fits = fits(network)
        return self._fits


def packed(inputs: Inputs, lengths: Sequence[int]) -> Tensor:
    """Tokens and parents of all nodes and the committed tokens of each row in one tensor [B (2 N + 1)], on the host."""
    return torch.from_numpy(np.concatenate((inputs.tokens_BN, inputs.parents_BN, lengths), axis=None))


def unpacked(packed: Tensor, rows: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The parts of ``packed`` that a pass reads: tokens and parents [B, N], lengths [B]."""
    nodes = rows * width
    tokens, parents = packed[:nodes].view(rows, width), packed[nodes : 2 * nodes].view(rows, width)
    return tokens, parents, packed[2 * nodes : 2 * nodes + rows]


def verdicts_of(verdicts_BX: NDArray[np.int64]) -> list[Verdict]:
    """The accepted paths that ``ops.verify`` found."""
    return [Verdict(tuple(path[:count]), token) for count, token, *path in verdicts_BX.tolist()]


def backend_for(device: torch.device) -> TorchBackend:
    """The backend of weights that are not packed: captured graphs on a GPU, plain PyTorch elsewhere."""
    capture = capture_for(device)
    return TorchBackend() if capture is None else GraphBackend(capture)
