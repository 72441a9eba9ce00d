"""Layers of a target in the fused operations of ``ops``: five kernels each, for the few rows of a decoding step.

They take the place of ``Block.forward`` on a GPU where three things hold: Triton is there and its kernels agree with
their definitions on this machine (``trusted``); the layers are of the usual kind, a norm before attention and one
before the MLP, with weights that are not packed or quantised (``fits``); and a pass has at most ``graphs.FUSED`` rows.

B rows of the batch, N tree nodes, R rows of a layer, D model width, E head width.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import MISSING, fields
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from anabranch.model.blocks import Block, Norm
from anabranch.model.cache import Cache
from anabranch.model.config import ModelConfig
from anabranch.model.device.cases import cases, difference
from anabranch.model.device.ops import ACTIVATIONS, NORMS, implement, ops
from anabranch.model.inputs import Nodes
from anabranch.model.mlp import MLP
from anabranch.model.network import Network

__all__ = ["NO_NORM", "attend", "fits", "fused_layers", "norm_of", "project", "trusted"]

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


def trusted(device: torch.device) -> bool:
    """True if a device has kernels for the fused operations that agree with their definitions; warns if they do not."""
    return device.type == "cuda" and _tried(device)


@cache
def _tried(device: torch.device) -> bool:
    try:
        from anabranch.model.device.kernels import KERNELS
    except ImportError:
        return False
    tried = (case for dtype in (torch.bfloat16, torch.float32) for case in cases(dtype, every=EVERY))
    if why := next(filter(None, (difference(case, KERNELS, device) for case in tried)), ""):
        reason = why.split("\n")[0]
        warnings.warn(f"fused kernels are off, so steps take longer; tokens stay the same: {reason}", stacklevel=3)
        return False
    implement(KERNELS)
    return True


def fits(network: Network) -> bool:
    """True if ``fused_layer`` computes the layers of a network as its blocks do."""
    config = network.config
    usual = all(
        getattr(config, field.name) == field.default
        for field in fields(ModelConfig)
        if field.default is not MISSING and field.name not in KNOWN
    )
    return (
        usual
        and config.qk_norm != "all"
        and all(
            type(block) is Block and all(type(getattr(module, name)) is nn.Linear for module, name in block.linears())
            for block in network.blocks
        )
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


def project(
    block: Block,
    weight: Tensor,
    x_BRD: Tensor,
    table: Tensor | None,
    positions_BR: Tensor,
    keys_BKCE: Tensor,
    values_BKCE: Tensor,
    places_BR: Tensor,
) -> Tensor:
    """A block's norm and projections, with ``weight`` in place of its own, and their rotation: ``ops.heads``."""
    assert isinstance(block.qkv, nn.Linear)
    assert isinstance(block.norm_in, Norm)
    q_norm, k_norm = (NO_NORM if norm is None else norm_of(norm) for norm in (block.q_norm, block.k_norm))
    q: Tensor = ops.heads(
        *(x_BRD, weight, block.qkv.bias, *norm_of(block.norm_in), q_norm.weight, k_norm.weight, q_norm.norm),
        *(table if block.config.position == "rope" else None, positions_BR, keys_BKCE, values_BKCE, places_BR),
    )
    return q


def attend(
    config: ModelConfig,
    layer: int,
    q_BRHE: Tensor,
    keys_BKLE: Tensor,
    values_BKLE: Tensor,
    lengths_B: Tensor,
    tree_BNN: Tensor | None,
    positions_BN: Tensor,
    own_keys_BKRE: Tensor | None = None,
    own_values_BKRE: Tensor | None = None,
    streams: int = 0,
) -> Tensor:
    """Attention [B, R, H E] in a layer of a target: ``ops.attend`` with its scale, soft cap and window."""
    scale = config.attention_scale if config.attention_scale is not None else config.head_dim**-0.5
    window = config.sliding_window if config.is_sliding(layer) and config.sliding_window is not None else 0
    a: Tensor = ops.attend(
        *(q_BRHE, keys_BKLE, values_BKLE, lengths_B, tree_BNN, positions_BN if window else None),
        *(own_keys_BKRE, own_values_BKRE, streams, window, scale, config.attention_softcap or 0.0),
    )
    return a


def fused_layers(
    network: Network,
    x_BND: Tensor,
    nodes: Nodes,
    table: Tensor,
    cache: Cache,
    slots: slice,
    span: int,
    taps: Sequence[int],
) -> tuple[Tensor, dict[int, Tensor]]:
    """All blocks over the nodes of a pass [B, N, D], whose keys and values are written to the cache.

    Also returns the rows [B N, D] before each tapped layer. ``span`` positions of the cache are read.
    """
    x, tapped = x_BND, {}
    # nodes lie after the committed tokens in their order
    places_BN = nodes.lengths_B[:, None] + torch.arange(x.shape[1], device=x.device)
    for layer, block in enumerate(network.blocks):
        if layer in taps:
            tapped[layer] = x.flatten(0, 1)
        assert isinstance(block, Block)
        x = _layer(block, layer, x, nodes, table, places_BN, cache.keys[layer, slots], cache.values[layer, slots], span)
    if len(network.blocks) in taps:
        tapped[len(network.blocks)] = x.flatten(0, 1)
    return x, tapped


def _layer(
    block: Block,
    layer: int,
    x_BND: Tensor,
    nodes: Nodes,
    table: Tensor,
    places_BN: Tensor,
    keys_BKCE: Tensor,
    values_BKCE: Tensor,
    span: int,
) -> Tensor:
    c, (b, n, d) = block.config, x_BND.shape
    assert block.norm_mlp is not None
    assert isinstance(block.qkv, nn.Linear)
    assert isinstance(block.mlp, MLP)
    q = project(block, block.qkv.weight, x_BND, table, nodes.positions_BN, keys_BKCE, values_BKCE, places_BN)
    keys, values = keys_BKCE[:, :, :span], values_BKCE[:, :, :span]
    a = attend(c, layer, q, keys, values, nodes.lengths_B, nodes.tree_BNN, nodes.positions_BN).view(b * n, -1)
    x = ops.product(a, block.out.weight, block.out.bias, *NO_NORM, 0, 0, x_BND.view(b * n, d))
    activation, gates = ACTIVATIONS.index(c.activation), c.intermediate_size if c.gated_mlp else 0
    y = ops.product(x, block.mlp.up.weight, block.mlp.up.bias, *norm_of(block.norm_mlp), activation, gates, None)
    out: Tensor = ops.product(y, block.mlp.down.weight, block.mlp.down.bias, *NO_NORM, 0, 0, x)
    return out.view(b, n, d)
