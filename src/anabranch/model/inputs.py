"""Inputs of a forward pass: the tokens and the parents of the nodes of every row.

A pass verifies trees; a chain or a chunk of a prompt is a tree without branches.

B rows of the batch, M nodes of all rows, N nodes of the widest row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.tree import DraftTree, depths_of, mask_of

__all__ = ["DeviceTrees", "Inputs", "Nodes", "starts_of"]


def starts_of(counts_B: Sequence[int]) -> list[int]:
    """The index of each row's first node on the axis that the nodes of all rows share, from the rows' node counts."""
    return list(accumulate(counts_B, initial=0))[:-1]


@dataclass(frozen=True)
class Inputs:
    """The nodes of one forward pass, row by row: tokens and parents [M], and the number of nodes of each row [B].

    Parents are indices within the row and precede their children; -1 marks a node without a parent. A row of 0 nodes
    takes no part in the pass. If all rows must have one width, they are padded at the end to [B, N]; a padding node
    sees only itself, and no other node sees it.

    prefill_B  the number of each row's leading nodes that are prompt tokens, a chain: only their keys and values are
               computed, and the result of the pass is without them; empty: none
    sampled    a tree carries the distributions that it was sampled from
    """

    tokens_M: NDArray[np.int64]
    parents_M: NDArray[np.int64]
    counts_B: Sequence[int]
    prefill_B: Sequence[int] = ()
    sampled: bool = False

    @staticmethod
    def of_trees(trees: Sequence[DraftTree], prompts: Sequence[Sequence[int]] = ()) -> Inputs:
        """The draft trees of one step, one for each row, each below a chain of prompt tokens if ``prompts`` has any."""
        sampled = any(tree.draft_probs is not None for tree in trees)
        if len(trees) == 1 and not any(prompts):
            return Inputs(trees[0].tokens, trees[0].parents, (trees[0].size,), (), sampled)
        tokens, parents = [tree.tokens for tree in trees], [tree.parents for tree in trees]
        counts, prefill = [tree.size for tree in trees], [len(prompt) for prompt in prompts]
        if any(prefill):
            tokens = [np.concatenate((np.array(p, np.int64), t)) for p, t in zip(prompts, tokens, strict=True)]
            parents = [np.concatenate((np.arange(-1, n - 1), p + n)) for n, p in zip(prefill, parents, strict=True)]
            counts = [n + count for n, count in zip(prefill, counts, strict=True)]
        return Inputs(np.concatenate(tokens), np.concatenate(parents), counts, prefill if any(prefill) else (), sampled)

    @staticmethod
    def of_chains(tokens_BN: NDArray[np.int64]) -> Inputs:
        """Pieces of text of equal length [B, N], a chain for each row."""
        rows, width = tokens_BN.shape
        return Inputs(tokens_BN.reshape(-1), np.tile(np.arange(-1, width - 1), rows), (width,) * rows)

    @staticmethod
    def of_prompt(tokens: Sequence[int]) -> Inputs:
        """A chunk of one prompt: one row, a chain."""
        return Inputs.of_chains(np.asarray([tokens], np.int64))

    @property
    def returned_B(self) -> Sequence[int]:
        """The number of each row's nodes in the result of the pass: all but ``prefill_B``."""
        if not self.prefill_B:
            return self.counts_B
        return [count - prefill for count, prefill in zip(self.counts_B, self.prefill_B, strict=True)]

    @property
    def starts_B(self) -> list[int]:
        """The index of each row's first node in [M]."""
        return starts_of(self.counts_B)

    @property
    def width(self) -> int:
        """The number of nodes of the widest row."""
        return max(self.counts_B)

    @property
    def alike(self) -> bool:
        """True if all rows have the same number of nodes."""
        return min(self.counts_B) == self.width

    def _padded(self, values_M: NDArray[np.int64], padding: int) -> NDArray[np.int64]:
        shape = len(self.counts_B), self.width
        if self.alike:
            return values_M.reshape(shape)
        whole = np.full(shape, padding, np.int64)
        for row, start, count in zip(whole, self.starts_B, self.counts_B, strict=True):
            row[:count] = values_M[start : start + count]
        return whole

    @cached_property
    def tokens_BN(self) -> NDArray[np.int64]:
        """Tokens [B, N], padded with 0."""
        return self._padded(self.tokens_M, 0)

    @cached_property
    def parents_BN(self) -> NDArray[np.int64]:
        """Parents [B, N], padded with -1."""
        return self._padded(self.parents_M, -1)

    @cached_property
    def depths_BN(self) -> NDArray[np.int64]:
        """The depth of each node below the last committed token [B, N]."""
        if self.width == 1:
            return np.zeros((len(self.counts_B), 1), np.int64)
        return np.stack([depths_of(parents) for parents in self.parents_BN])

    @cached_property
    def mask_BNN(self) -> NDArray[np.bool_]:
        """The nodes of its row that each node sees, itself included [B, N, N]."""
        if self.width == 1:
            return np.ones((len(self.counts_B), 1, 1), np.bool_)
        return np.stack([mask_of(parents) for parents in self.parents_BN])

    def widened(self, width: int) -> Inputs:
        """The same nodes, with every row padded to ``width``."""
        more = ((0, 0), (0, width - self.width))
        tokens, parents = np.pad(self.tokens_BN, more), np.pad(self.parents_BN, more, constant_values=-1)
        return Inputs(tokens.reshape(-1), parents.reshape(-1), (width,) * len(self.counts_B))


class Nodes(NamedTuple):
    """The inputs of a pass over rows of known lengths, as tensors; ``tree_BNN`` is the mask among the nodes."""

    tokens_BN: Tensor
    positions_BN: Tensor
    lengths_B: Tensor
    tree_BNN: Tensor

    @staticmethod
    def of(inputs: Inputs, lengths: Sequence[int]) -> Nodes:
        """The tensors on the host; ``lengths`` are the committed tokens of each row [B]."""
        lengths_B = np.asarray(lengths, np.int64)
        arrays = (inputs.tokens_BN, inputs.depths_BN + lengths_B[:, None], lengths_B, inputs.mask_BNN)
        return Nodes(*map(torch.from_numpy, arrays))


class DeviceTrees(Inputs):
    """Best-first trees that were grown on a GPU; a pass that verifies them there need not read them before.

    All are padded to one width. Whoever asks for tokens or parents waits for them.

    packed  tokens [B N], parents [B N], committed tokens [B], bits of joint log probabilities [B N]; int64
    label   of the nodes' sources, before their depth
    """

    def __init__(self, packed: Tensor, rows: int, width: int, label: str) -> None:
        self.__dict__.update(packed=packed, label=label, counts_B=(width,) * rows, prefill_B=())

    packed: Tensor
    label: str

    def arrived(self, numbers: NDArray[np.int64]) -> None:
        """Take the numbers of ``packed`` from a transfer that had others too."""
        self.__dict__["numbers"] = numbers

    @cached_property
    def numbers(self) -> NDArray[np.int64]:
        """``packed`` on the host."""
        numbers: NDArray[np.int64] = self.packed.cpu().numpy()
        return numbers

    @cached_property
    def tokens_M(self) -> NDArray[np.int64]:
        """The tokens of all nodes."""
        return self.numbers[: sum(self.counts_B)]

    @cached_property
    def parents_M(self) -> NDArray[np.int64]:
        """The parents of all nodes."""
        return self.numbers[sum(self.counts_B) : 2 * sum(self.counts_B)]

    @cached_property
    def trees(self) -> list[DraftTree]:
        """The trees, without padding."""
        joint = self.numbers[2 * sum(self.counts_B) + len(self.counts_B) :].astype(np.int32).view(np.float32)
        rows = (self.tokens_BN, self.parents_BN, joint.reshape(len(self.counts_B), -1))
        return [self._tree(*row) for row in zip(*rows, strict=True)]

    def _tree(self, tokens: NDArray[np.int64], parents: NDArray[np.int64], joint: NDArray[np.float32]) -> DraftTree:
        size = 1 + int((parents >= 0).sum())  # the best nodes come first, padding last
        depths = depths_of(parents[:size]).tolist()
        sources = ("target", *(f"{self.label} {depth}" for depth in depths[1:]))
        return DraftTree(tokens[:size].copy(), parents[:size].copy(), sources=sources, log_probs=joint[:size].copy())
