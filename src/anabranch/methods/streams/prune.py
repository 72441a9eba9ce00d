"""Parallel tree pruning by early exit (ACL section 2.3, appendix G.1).

At layer N - N_s, the early-exit logits head(o(M)) of a parent already score its children. A node's transition score is
its probability given its parent. Pruning drops the subtrees of nodes whose score is below a threshold (the paper's
appendix G.1), or keeps a number of nodes (its experiments): those with the largest product of scores along their path.
The product falls along every path, so the kept nodes always form a tree.

A threshold compares each token with the states of its parent alone. So it removes tokens from the distribution that
children were sampled from, whichever were sampled, and *rejection* is exact with what is left of that distribution.
A number of kept nodes lets the sampled tokens compete with each other, so there only *matching* is.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from anabranch.methods.streams.adapter import StreamModule
from anabranch.model.decoder import Decoder
from anabranch.model.passes import Pass

__all__ = ["Kept", "early_exit_logits", "prune_nodes"]


class Kept(NamedTuple):
    """The nodes that pruning keeps.

    nodes_Bn     the kept nodes of each row, ascending, then others up to one width
    counts_B     the number of kept ones
    allowed_BnV  tokens that the threshold lets stay below each of ``nodes_Bn``; None: there is no threshold
    """

    nodes_Bn: Tensor
    counts_B: list[int]
    allowed_BnV: Tensor | None


def early_exit_logits(target: Decoder, adapter: StreamModule, main_BND: Tensor) -> Tensor:
    """Early-exit logits [B, N, V] of the target at layer N - N_s."""
    return target.logits(target.norm(adapter.early_exit(main_BND)))


def prune_nodes(
    target: Decoder, adapter: StreamModule, main_BND: Tensor, run: Pass, keep: int, threshold: float = 0.0
) -> Kept:
    """The best ``keep`` nodes of every row (0: all), of those whose transition scores reach ``threshold``.

    root -> a (0.6) -> c (0.4)        weights: root 1, a 0.6, b 0.3, c 0.24, d 0.03
         -> b (0.3) -> d (0.1)        keep 3: root, a, b; threshold 0.35: root, a, c
    """
    log_probs = early_exit_logits(target, adapter, main_BND).float().log_softmax(-1)
    tree, parents_BN = run.tree_BNN, run.parents_BN
    attached = parents_BN >= 0
    rows = torch.arange(len(tree), device=tree.device)[:, None]
    steps = log_probs[rows, parents_BN.clamp(min=0), run.tokens_BN]
    steps = torch.where(attached, steps, torch.zeros_like(steps))
    least = math.log(threshold) if threshold else -math.inf
    lost = ~attached  # padding nodes
    lost[:, 0] = False
    lost = lost | (tree & (steps < least)[:, None]).any(-1)
    # float64, so that a child's sum never rounds above its parent's
    log_scores = (tree.double() @ steps.double()[:, :, None])[:, :, 0].masked_fill(lost, float("-inf"))
    order = log_scores.sort(dim=-1, descending=True, stable=True).indices
    width = keep or order.shape[1]
    counts = (~lost).sum(-1).clamp(max=width)
    chosen = order[:, : int(counts.max())]
    after = torch.arange(chosen.shape[1], device=tree.device)[None] >= counts[:, None]
    nodes = (chosen + order.shape[1] * after).sort(dim=-1).values % order.shape[1]
    allowed = (log_probs >= least)[rows, nodes] if threshold else None
    return Kept(nodes, counts.tolist(), allowed)
