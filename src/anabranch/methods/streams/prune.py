"""Parallel tree pruning by early exit (ACL section 2.3, appendix G.1).

At layer N - N_s, the early-exit logits head(o(M)) of a parent already score its children. A node's weight is the
product of these transition probabilities along its path; the nodes with the largest weights are kept. The product falls
along every path, so the kept nodes always form a tree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anabranch.methods.streams.adapter import StreamModule
from anabranch.model.decoder import Decoder
from anabranch.model.passes import Pass

__all__ = ["early_exit_logits", "prune_nodes"]


def early_exit_logits(target: Decoder, adapter: StreamModule, main_BND: Tensor) -> Tensor:
    """Early-exit logits [B, N, V] of the target at layer N - N_s."""
    return target.logits(target.norm(adapter.early_exit(main_BND)))


def prune_nodes(target: Decoder, adapter: StreamModule, main_BND: Tensor, run: Pass, keep: int) -> Tensor:
    """The ``keep`` best nodes of every row, ascending [B, keep]; padding nodes come last.

    root -> a (0.6) -> c (0.4)        weights: root 1, a 0.6, b 0.3, c 0.24, d 0.03
         -> b (0.3) -> d (0.1)        keep 3: root, a, b
    """
    log_probs = early_exit_logits(target, adapter, main_BND).float().log_softmax(-1)
    tree, parents_BN = run.tree_BNN, run.parents_BN
    attached = parents_BN >= 0
    rows = torch.arange(len(tree), device=tree.device)[:, None]
    steps = log_probs[rows, parents_BN.clamp(min=0), run.tokens_BN]
    steps = torch.where(attached, steps, torch.zeros_like(steps))
    # float64, so that a child's sum never rounds above its parent's
    worth = (tree.double() @ steps.double()[:, :, None])[:, :, 0]
    padding = ~attached
    padding[:, 0] = False
    worth = worth.masked_fill(padding, float("-inf"))
    order = worth.sort(dim=-1, descending=True, stable=True).indices
    return order[:, :keep].sort(dim=-1).values
