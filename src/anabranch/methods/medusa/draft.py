"""Trees from Medusa's heads. A head does not see the others' tokens, so all nodes of a depth have the same children.

B rows of the batch, K heads, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from anabranch.drafting.drafter import Call
from anabranch.drafting.grow import Child, Form, Growth, by_depth, grow
from anabranch.methods.heads.drafter import Best, HeadDraft, HeadSettings
from anabranch.methods.heads.recipes import MOST_HEADS
from anabranch.methods.medusa.module import MedusaModule, MedusaStates
from anabranch.model.decoder import Decoder
from anabranch.tree import DraftTree

__all__ = ["MedusaDraft"]

# A sparse tree has the nodes that would be the most probable if the best token of head k were right with probability
# 0.5 * 0.85 ** (k - 1), and the n-th best n ** -RANKS as often. The paper counts this on a calibration set.
SHARES = tuple(math.log(0.5 * 0.85**k) for k in range(MOST_HEADS))
RANKS = 1.5


class MedusaDraft(HeadDraft):
    """Builds trees for one target and module."""

    trees = ("best", "chain", "sparse", "product")

    def __init__(self, target: Decoder, module: MedusaModule, settings: HeadSettings | None = None) -> None:
        super().__init__(target, module, settings)
        self._states = module.shared(target, MedusaStates, lambda: MedusaStates(target, module))
        self.call = Call("heads", read=self._states.read + self.heads.read)

    def states(self, hidden_BD: Tensor) -> Tensor:
        """The heads' states [B, K, D]."""
        return self._states(hidden_BD)

    def _grow(
        self, states_BSD: Tensor, roots: list[int], best: Best, budget: int, depths: Sequence[int]
    ) -> list[DraftTree]:
        heads = range(max(depths))
        # heads that share the target's head are scored together
        parts = [slice(0, len(heads))] if self.heads.shared is not None else [slice(d, d + 1) for d in heads]
        each = [best(states_BSD[:, part], part) for part in parts]
        tokens, log_probs = (torch.cat(of_parts, dim=1) for of_parts in zip(*each, strict=True))
        # one transfer: float64 represents both
        tokens_BKk, log_probs_BKk = torch.stack((tokens.double(), log_probs.double())).tolist()
        return [self._tree(*row, budget) for row in zip(roots, tokens_BKk, log_probs_BKk, depths, strict=True)]

    def _tree(
        self, root: int, tokens: list[list[float]], log_probs: list[list[float]], depth: int, budget: int
    ) -> DraftTree:
        levels = [
            [
                (int(token), min(log_prob, 0.0), None)
                for token, log_prob in zip(*level, strict=True)
                if math.isfinite(log_prob)
            ]
            for level in zip(tokens, log_probs, strict=True)
        ]
        kind, widths = self.settings.kind, [len(tokens[0])]
        form = Form(budget, depth, _sparse(budget, depth, widths[0]) if kind == "sparse" else widths)
        if kind != "best":
            form = replace(form, frontier=budget)
        (tree,) = grow([Growth(root, form)], lambda nodes: [levels[node.depth] for node in nodes], by_depth("head"))
        return tree


@cache
def _sparse(nodes: int, depth: int, k: int) -> dict[tuple[int, ...], int]:
    """The places of a sparse tree's nodes: the number of children by path of ranks."""
    children: list[list[Child]] = [
        [(n, SHARES[d] - RANKS * math.log(n + 1), None) for n in range(k)] for d in range(depth)
    ]
    (tree,) = grow(
        [Growth(0, Form(nodes, depth))], lambda nodes: [children[node.depth] for node in nodes], by_depth("")
    )
    paths = [tuple(tree.tokens[list(tree.path_to(node)[1:])].tolist()) for node in range(tree.size)]
    return {path: len(tree.children(node)) for node, path in enumerate(paths)}
