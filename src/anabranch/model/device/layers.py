"""Layers of a target in the fused operations of ``ops``: five kernels each, for the few rows of a decoding step.

They take the place of ``Block.forward`` on a GPU where three things hold: Triton is there and its kernels agree with
their definitions on this machine (``trusted``); the layers are of the usual kind, a norm before attention and one
before the MLP, with weights that are not packed or quantised (``fits``); and a pass has at most ``MOST_ROWS`` rows,
since each block of so many reads all weights once more.

B rows of the batch, N tree nodes, R rows of a layer, D model width, E head width.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import MISSING, fields
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from anabranch.model.blocks import Block, Norm
from anabranch.model.cache import Cache
from anabranch.model.config import ModelConfig
from anabranch.model.device.cases import cases, difference
from anabranch.model.device.ops import ACTIVATIONS, NORMS, implement, ops
from anabranch.model.network import Network

__all__ = ["MOST_ROWS", "FusedRows", "fits", "fused_layers", "norm_of", "trusted"]

MOST_ROWS = 64
EVERY = 12  # of the cases of an operation, one in so many is tried: each takes a second to compile the first time
# what ``fused_layer`` knows how to compute; a config that differs from the usual in anything else has other layers
KNOWN = frozenset(
    (
        *("position", "rope", "learned_offset", "embedding_scale", "logit_softcap", "tied_head"),
        *("norm", "norm_eps", "norm_plus_one", "qk_norm"),
        *("qkv_bias", "out_bias", "mlp_bias", "head_bias", "gated_mlp", "activation"),
        *("attention_scale", "attention_softcap", "sliding_window", "sliding_layers"),
        *("eos_token_ids", "bos_token_id"),
    )
)


@cache
def trusted(device: torch.device) -> bool:
    """Whether a device has kernels for the fused operations that agree with their definitions; warns if they do not."""
    if device.type != "cuda":
        return False
    try:
        from anabranch.model.device.kernels import KERNELS
    except ImportError:
        return False
    try:
        tried = [case for dtype in (torch.bfloat16, torch.float32) for case in cases(dtype, every=EVERY)]
        why = next(filter(None, (difference(case, KERNELS, device) for case in tried)), "")
    except Exception as error:  # Triton's compiler and CUDA's driver raise errors of any class
        why = f"{type(error).__name__}: {error}".split("\n")[0]
    if why:
        warnings.warn(f"fused kernels are off, so steps take longer; tokens stay the same: {why}", stacklevel=2)
        return False
    implement(KERNELS)
    return True


def fits(network: Network) -> bool:
    """Whether ``fused_layer`` computes the layers of a network as its blocks do."""
    config = network.config
    usual = all(
        getattr(config, field.name) == field.default
        for field in fields(ModelConfig)
        if field.default is not MISSING and field.name not in KNOWN
    )
    return usual and all(
        type(block) is Block and all(type(getattr(module, name)) is nn.Linear for module, name in block.linears())
        for block in network.blocks
    )


class NormArguments(NamedTuple):
    """A norm as the operations take it."""

    weight: Tensor | None
    bias: Tensor | None
    norm: int
    eps: float


NO_NORM = NormArguments(None, None, 0, 0.0)


def norm_of(norm: Norm) -> NormArguments:
    """The arguments of a norm."""
    kind = "layer" if norm.kind == "layer" else "rms_plus_one" if norm.plus_one else "rms"
    return NormArguments(norm.weight, norm.bias, NORMS.index(kind), norm.eps)


class FusedRows:
    """The rows of some layers: where they stand in the text and in the cache, and what they see.

    parents_BN  of the nodes
    lengths_B   committed tokens of each row of the batch
    span        positions of the cache that are read
    """

    def __init__(self, config: ModelConfig, table: Tensor, parents_BN: Tensor, lengths_B: Tensor, span: int) -> None:
        self.config, self.lengths_B, self.span = config, lengths_B, span
        self.table = table if config.position == "rope" else None
        self.positions_BN, self.tree_BNN = ops.ancestry(parents_BN, lengths_B)

    @cached_property
    def places_BN(self) -> Tensor:
        """Positions in the cache: nodes lie after the committed tokens in their order."""
        n = self.positions_BN.shape[1]
        return self.lengths_B[:, None] + torch.arange(n, device=self.lengths_B.device)

    def attend(self, layer: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of the nodes in a layer, over keys and values [B, K, C, E] of the cache; returns [B, N, H E]."""
        c = self.config
        scale = c.attention_scale if c.attention_scale is not None else c.head_dim**-0.5
        window = c.sliding_window if c.is_sliding(layer) and c.sliding_window is not None else 0
        a: Tensor = ops.attend(
            *(q, keys[:, :, : self.span], values[:, :, : self.span], self.lengths_B, self.tree_BNN, self.positions_BN),
            *(None, None, 0, window, scale, c.attention_softcap or 0.0),
        )
        return a


def fused_layer(block: Block, layer: int, x_BND: Tensor, rows: FusedRows, cache: Cache, slots: slice) -> Tensor:
    """One block over the nodes of a pass, whose keys and values are written to the cache."""
    c, (b, n, d) = block.config, x_BND.shape
    keys, values = cache.keys[layer, slots], cache.values[layer, slots]
    head_norm = 0 if block.q_norm is None else norm_of(block.q_norm).norm
    q = ops.heads(
        *(x_BND, block.qkv.weight, block.qkv.bias, *norm_of(block.norm_in)),
        *(_weight(block.q_norm), _weight(block.k_norm), head_norm, rows.table, rows.positions_BN),
        *(keys, values, rows.places_BN),
    )
    a, x = rows.attend(layer, q, keys, values).view(b * n, -1), x_BND.view(b * n, d)
    x = ops.product(a, block.out.weight, block.out.bias, *NO_NORM, 0, 0, x)
    assert block.norm_mlp is not None
    activation, gates = ACTIVATIONS.index(c.activation), c.intermediate_size if c.gated_mlp else 0
    y = ops.product(x, block.mlp.up.weight, block.mlp.up.bias, *norm_of(block.norm_mlp), activation, gates, None)
    out: Tensor = ops.product(y, block.mlp.down.weight, block.mlp.down.bias, *NO_NORM, 0, 0, x)
    return out.view(b, n, d)


def _weight(norm: Norm | None) -> Tensor | None:
    return None if norm is None else norm.weight


def fused_layers(
    network: Network, x_BND: Tensor, rows: FusedRows, cache: Cache, slots: slice, taps: Sequence[int]
) -> tuple[Tensor, dict[int, Tensor]]:
    """All blocks; also the rows [B N, D] before each tapped layer."""
    x, tapped = x_BND, {}
    for layer, block in enumerate(network.blocks):
        if layer in taps:
            tapped[layer] = x.flatten(0, 1)
        assert isinstance(block, Block)
        x = fused_layer(block, layer, x, rows, cache, slots)
    if len(network.blocks) in taps:
        tapped[len(network.blocks)] = x.flatten(0, 1)
    return x, tapped
