"""Trees that grow level by level on the device: candidates of each depth, and the tree of the best of them on the host.

Since log probabilities fall along a path, the best candidates of all levels form a tree; building it level by level
gives the same nodes as a heap.

B rows of the batch, F nodes of a level that get children, k children of each, n candidates of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.tree import DraftTree

__all__ = ["Level", "collect", "sources_of", "to_host", "worth_expanding"]


@dataclass
class Level:
    """Candidates of one depth: tokens, joint log probabilities and parent slot in the frontier above, each [B, F k]."""

    tokens: Tensor
    joint: Tensor
    parents: Tensor


def worth_expanding(levels: list[Level], width: int, budget: int) -> int:
    """How many of the last level's nodes, best first, may have children among the ``budget`` best nodes, in any row.

    A child is no more probable than its parent, so a parent below the budget's least probable node has none. Not on
    a GPU, where reading this on the host costs more than a few rows.
    """
    joint = torch.cat([level.joint for level in levels], dim=1)
    if joint.shape[1] <= budget:
        return width
    least = joint.topk(budget, dim=-1).values[:, -1:]
    return min(width, int((levels[-1].joint > least).sum(1).max()))


def sources_of(label: str, depths: Iterable[int]) -> tuple[str, ...]:
    """The sources of nodes at some depths: "target" for the root, "LABEL 1" for its children, ..."""
    return tuple("target" if d == 0 else f"{label} {d}" for d in depths)


Candidates = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]


def to_host(levels: Sequence[Level]) -> list[Candidates]:
    """Tokens, joint log probabilities and parents [B, n] of all rows, in one transfer: float64 represents all three."""
    each = [torch.stack((level.tokens.double(), level.joint.double(), level.parents.double())) for level in levels]
    host = torch.cat(each, dim=-1).cpu().numpy()
    bounds = np.cumsum([level.tokens.shape[1] for level in levels])[:-1]
    split = np.split(host, bounds, axis=-1)
    return [(t.astype(np.int64), j.astype(np.float32), p.astype(np.int64)) for t, j, p in split]


def collect(root: int, levels: list[Candidates], label: str, budget: int | None, floor: float = -math.inf) -> DraftTree:
    """The tree of the ``budget`` best candidates of all levels (None: all), breadth first.

    label  of the nodes' sources, before their depth
    floor  minimum joint log probability of a node
    """
    sizes = [len(tokens) for tokens, _, _ in levels]
    joint = np.concatenate([j for _, j, _ in levels])
    depth = np.repeat(np.arange(1, len(levels) + 1), sizes)
    if budget is None:
        chosen = np.arange(len(joint))
    else:
        # stable sort: among equals the shallower one comes first, so that no node is kept without its parent
        best = np.argsort(-joint, kind="stable")[: budget - 1]
        chosen = np.sort(best[joint[best] >= floor])
    offsets = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    above = np.concatenate([p + (offsets[i - 1] if i else 0) for i, (_, _, p) in enumerate(levels)])
    place = np.full(len(joint), -1)
    place[chosen] = np.arange(1, len(chosen) + 1)
    parents = np.where(depth[chosen] == 1, 0, place[above[chosen]])
    assert (parents >= 0).all(), "a draft node lost its parent"
    tokens = np.concatenate([t for t, _, _ in levels])[chosen]
    depths = np.concatenate(([0], depth[chosen]))
    return DraftTree(
        np.concatenate(([root], tokens)).astype(np.int64),
        np.concatenate(([-1], parents)).astype(np.int64),
        sources=sources_of(label, depths.tolist()),
        log_probs=np.concatenate(([0.0], joint[chosen])).astype(np.float32),
    )
