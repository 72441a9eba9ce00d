"""A decoder for passes with gradients through the top layers of a target that is packed as its file stores it.

Packed weights are multiplied forward only, and the layers below the first one that gradients pass through need nothing
else. The others get products of their own: in int8, or over a dequantised copy. Everything else is shared with the
packed target, so a target is in memory once, and its top layers once more.
"""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

from anabranch.model.blocks import Block, Norm
from anabranch.model.decoder import Decoder
from anabranch.model.native_backend import ProductsBackend
from anabranch.model.native_linear import NativeLinear
from anabranch.model.network import Network
from anabranch.model.training_formats import Int8Linear
from anabranch.support.memory import give_back

__all__ = ["PackedHead", "learner_of_packed"]

M = TypeVar("M", bound=nn.Module)


class PackedHead(nn.Module):
    """The head of a packed target, read by row; its products have no gradients."""

    def __init__(self, head: NativeLinear) -> None:
        super().__init__()
        self.head, self.weight, self.bias = head, None, head.bias

    def forward(self, x: Tensor) -> Tensor:
        """States [..., D] -> logits [..., V]."""
        y: Tensor = self.head(x.detach())
        return y


class _Rows(nn.Module):
    """An embedding looked up by row, in the type of the learner's rows."""

    def __init__(self, table: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.table, self.dtype = table, dtype

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [...] -> [..., D]."""
        rows: Tensor = self.table(tokens).to(self.dtype)
        return rows


class _Backend(ProductsBackend):
    """Runs layers in PyTorch; rows of the head come from packed blocks, in the type of the learner's rows."""

    def head_rows(self, network: Network, tokens: Tensor) -> Tensor:
        """The rows of the head, from its packed weight."""
        rows: Tensor = network.head.head.rows(tokens.cpu()).to(network.dtype)
        return rows

    def choose(self, network: Network, x: Tensor) -> Tensor:
        """The greedy tokens, without storing logits."""
        tokens: Tensor = network.head.head.choose(x)
        return tokens


def learner_of_packed(packed: Decoder, first: int, *, int8: bool, dtype: torch.dtype) -> Decoder:
    """A decoder whose layers from ``first`` on pass gradients to their rows, and to none of their weights.

    int8   multiply in int8, forward and backward (``Int8Linear``), where a layer's widths are multiples of 32; else in
           ``dtype``
    dtype  of rows, and of rows of the head and of embeddings: the target's, or float32
    """
    learner = _shallow(packed)
    learner.of_rows = dtype
    blocks: list[nn.Module] = list(packed.blocks)
    for index in range(first, len(blocks)):
        block = _shallow(blocks[index])
        assert isinstance(block, Block)
        block.mlp = _shallow(block.mlp)
        for module, name in block.linears():
            linear = getattr(module, name)
            assert isinstance(linear, NativeLinear)
            setattr(module, name, _with_gradients(linear, int8=int8, dtype=dtype))
        for name, child in block.named_children():
            if isinstance(child, Norm):
                setattr(block, name, _at_least(child, dtype))
        blocks[index] = block
    learner.blocks = nn.ModuleList(blocks)
    learner.norm = _at_least(packed.norm, dtype)
    learner.embedding = _Rows(packed.embedding, dtype)
    learner.head = PackedHead(packed.head)
    learner.backend = _Backend(packed.head.kernels)
    give_back()
    return learner


def _with_gradients(linear: NativeLinear, *, int8: bool, dtype: torch.dtype) -> nn.Module:
    weight = linear.dense()
    if int8 and not any(width % 32 for width in weight.shape):
        return Int8Linear(weight, linear.bias)
    weight, (outputs, width) = weight.to(dtype), weight.shape
    made = nn.Linear(width, outputs, bias=linear.bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if linear.bias is not None:
        made.bias = nn.Parameter(linear.bias.to(weight.dtype), requires_grad=False)
    return made


def _at_least(module: M, dtype: torch.dtype) -> M:
    """The module, or for float32 rows a copy in float32: its weights may be wider than rows, and not narrower."""
    return copy.deepcopy(module).float() if dtype == torch.float32 else module


def _shallow(module: M) -> M:
    """A copy that shares parameters and submodules, any of which may be replaced in it."""
    made = copy.copy(module)
    for name in ("_modules", "_parameters", "_buffers"):
        made.__dict__[name] = dict(module.__dict__[name])
    return made
