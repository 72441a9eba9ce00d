"""``grow`` in tensors: trees whose levels are products on the target's device, and that are read on the host once.

A level is expanded as a whole: of its nodes those that may have children in the tree, at most ``frontier`` of each row.
Afterwards the best candidates of all levels are the tree (``Form.by_level``).

B rows of the batch, F nodes of a level that get children, k children of each, n candidates of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.tree import DraftTree

__all__ = ["Level", "grow_tensors", "trees_of"]

Expand: TypeAlias = Callable[[int, Tensor, "Tensor | None"], "tuple[Tensor, Tensor]"]


@dataclass
class Level:
    """Candidates of one depth: tokens, joint log probabilities and parent slot in the frontier above, each [B, n]."""

    tokens: Tensor
    joint: Tensor
    parents: Tensor


def grow_tensors(
    roots_B: Tensor, expand: Expand, *, depth: int, budget: int | None, frontier: int, lazy: bool
) -> list[Level]:
    """The candidates of all levels; those of a level fall in probability if there is a budget.

    expand    (depth from 0 on, tokens of the nodes [B, F], where their parents were among the nodes before [B, F], None
              for the root) -> their children and log probabilities, best first [B, F, k]
    budget    nodes of a tree, root included; None: a product tree, or a chain
    frontier  nodes of a level that are expanded at most, if there is a budget
    lazy      whether to read on the host how many nodes can have children among the best: not on a GPU, where that
              takes longer than a few rows
    """
    levels: list[Level] = []
    tokens_BF, above_BF = roots_B[:, None], None
    joint_BF = torch.zeros(tokens_BF.shape, device=roots_B.device)
    for d in range(depth):
        tokens_BFk, log_probs_BFk = expand(d, tokens_BF, above_BF)
        parents = torch.arange(tokens_BFk.shape[1], device=roots_B.device)[:, None].expand(tokens_BFk.shape)
        level = Level(tokens_BFk.flatten(1), (joint_BF[:, :, None] + log_probs_BFk).flatten(1), parents.flatten(1))
        width = level.tokens.shape[1]
        if budget is not None:
            # nodes that are not expanded may still be leaves, so they stay candidates after the frontier
            joint, order = level.joint.topk(min(width, budget - 1), dim=-1)
            level = Level(level.tokens.gather(1, order), joint, level.parents.gather(1, order))
            width = min(frontier, level.tokens.shape[1])
            if lazy:
                width = _parents([*levels, level], width, budget - 1)
        levels.append(level)
        if width == 0:
            break
        tokens_BF, joint_BF, above_BF = level.tokens[:, :width], level.joint[:, :width], level.parents[:, :width]
    return levels


def _parents(levels: list[Level], width: int, budget: int) -> int:
    """Number of the last level's nodes, best first, that may have children among the ``budget`` best nodes of any row.

    A child is no more probable than its parent, so a parent below the budget's least probable node has none.
    """
    joint = torch.cat([level.joint for level in levels], dim=1)
    if joint.shape[1] <= budget:
        return width
    least = joint.topk(budget, dim=-1).values[:, -1:]
    return min(width, int((levels[-1].joint > least).sum(1).max()))


def trees_of(
    roots: Sequence[int], levels: Sequence[Level], label: str, budget: int | None, floor: float = -math.inf
) -> list[DraftTree]:
    """The trees of the ``budget`` best candidates of all levels (None: all), by rank; read in one transfer.

    label  of the nodes' sources, before their depth
    floor  minimum joint log probability of a node
    """
    # float64 represents all three
    each = [torch.stack((level.tokens.double(), level.joint.double(), level.parents.double())) for level in levels]
    sizes = [level.tokens.shape[1] for level in levels]
    depths = np.repeat(np.arange(1, len(levels) + 1), sizes)
    before = np.repeat([0, 0, *np.cumsum(sizes)[:-2]][: len(levels)], sizes)  # candidates before the level above
    host = torch.cat(each, dim=-1).cpu().numpy()
    return [_tree(root, host[:, b], depths, before, label, budget, floor) for b, root in enumerate(roots)]


def _tree(
    root: int,
    candidates_3n: NDArray[np.float64],
    depths: NDArray[np.int64],
    before: NDArray[np.int64],
    label: str,
    budget: int | None,
    floor: float,
) -> DraftTree:
    joint = candidates_3n[1].astype(np.float32)
    # stable: among equals the shallower one comes first, so that no node is kept without its parent
    best = np.argsort(-joint, kind="stable")[: None if budget is None else budget - 1]
    best = best[joint[best] >= floor]
    place = np.full(len(joint), -1)
    place[best] = np.arange(1, len(best) + 1)
    parents = np.where(depths[best] == 1, 0, place[before[best] + candidates_3n[2, best].astype(np.int64)])
    assert (parents >= 0).all(), "a draft node lost its parent"
    return DraftTree(
        np.concatenate(([root], candidates_3n[0, best])).astype(np.int64),
        np.concatenate(([-1], parents)).astype(np.int64),
        sources=("target", *(f"{label} {depth}" for depth in depths[best].tolist())),
        log_probs=np.concatenate(([0.0], joint[best])).astype(np.float32),
    )
