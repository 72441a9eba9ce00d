"""Bindings of the streams' C++ kernels (``streams.cpp``): drafting trees, and streams that trail a forward pass.

S streams, M streams of all rows of a batch, D model width.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.native.arguments import KINDS, address, filled, require
from anabranch.native.library import Library
from anabranch.native.structs import Layers, RaggedBatch, Shape, mirrored

__all__ = ["DraftConfig", "DraftedNodes", "StreamKernels", "TrailEntry"]


@mirrored
class DraftConfig(ctypes.Structure):
    """Weights and options for drafting the tree of one sequence; see ``levels.h``."""


@mirrored
class TrailEntry(ctypes.Structure):
    """The initial states of trailing streams: batch row b trails row ``nodes[b]`` of ``main``; see ``trail.h``."""


class DraftedNodes(NamedTuple):
    """A tree's nodes by rank: tokens, parents and joint log probabilities [N].

    sources  the depth of nodes that a stream proposes; the streams' number + 1 for those that are copied
    """

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
    sources: NDArray[np.int64]
    log_probs: NDArray[np.float32]


class StreamKernels:
    """The compiled kernels of streams, on the threads of ``kernels``. Raises the errors of ``Library``."""

    def __init__(self, kernels: Library) -> None:
        self._kernels = kernels
        self._draft, self._trail = kernels.function("draft"), kernels.function("trail")

    def draft(self, config: DraftConfig, states_SD: Tensor, root: int) -> DraftedNodes:
        """The tree of one sequence; only the root if no score is finite.

        States and embeddings are float32 if the weights are, else bf16.
        """
        dtype = _state_type(config.head.kind)
        require(
            states_SD.dtype == dtype and states_SD.is_cpu, "stream states must be {}, got {}", dtype, states_SD.dtype
        )
        deep = states_SD.dim() == 2 and states_SD.shape[0] >= config.depth and states_SD.shape[1] == config.d
        require(deep, "expected {} stream states of width {}, got {}", config.depth, config.d, states_SD.shape)
        require(config.nodes >= 1, "a draft needs at least 1 node, got {}", config.nodes)
        states_SD = states_SD.contiguous()
        tokens, parents, sources = integers = np.empty((3, config.nodes), np.int64)
        log_probs, row, at = np.empty(config.nodes, np.float32), integers.strides[0], address(integers)
        with self._kernels.lock:
            n = self._draft(
                *(config.head.kind, self._kernels.runner(), ctypes.byref(config), states_SD.data_ptr(), root),
                *(at, at + row, at + 2 * row, address(log_probs)),
            )
        return DraftedNodes(tokens[:n], parents[:n], sources[:n], log_probs[:n])

    def trail(self, shape: Shape, layers: Layers, batch: RaggedBatch, entry: TrailEntry, states_MD: Tensor) -> None:
        """Run streams from the main rows that they trail through ``layers`` and the last norm into ``states_MD``.

        The nodes of ``batch`` are the streams of each batch row; batch rows without streams are skipped.
        """
        require(len(layers) > 0, "streams have no layers")
        kind = layers[0].qkv.kind
        filled(states_MD, batch.nodes * shape.d, _state_type(kind))
        with self._kernels.lock:
            self._trail(
                *(kind, self._kernels.runner(), ctypes.byref(shape), layers, len(layers)),
                *(ctypes.byref(batch), ctypes.byref(entry), states_MD.data_ptr()),
            )


def _state_type(kind: int) -> torch.dtype:
    """The dtype of stream states for weights of this kind."""
    return torch.float32 if kind == KINDS["float32"] else torch.bfloat16
