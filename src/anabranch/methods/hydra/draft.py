"""Trees from Hydra's heads, level by level: a node's children are scored given the path to it.

B rows of the batch, F nodes of a level that get children, C embeddings of a path, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anabranch.drafting.calls import Call
from anabranch.drafting.head import Drawn, DrawNoise, RowVocabulary
from anabranch.drafting.levels import Level, collect, to_host, worth_expanding
from anabranch.methods.heads.module import VocabularyHeads
from anabranch.methods.heads.shape import TreeShape
from anabranch.methods.hydra.module import HydraModule
from anabranch.model.decoder import Decoder
from anabranch.model.reads import read_bytes
from anabranch.tree import DraftTree

__all__ = ["HydraDraft"]

FRONTIER = 12  # nodes of a level that get children in a best-first tree; bounds the cost of a level


class HydraDraft:
    """Builds trees for one target and module."""

    trees: tuple[str, ...] = ("best", "chain", "product")

    def __init__(self, target: Decoder, module: HydraModule, shape: TreeShape | None = None) -> None:
        self.target, self.module, self.shape = target, module, shape or TreeShape()
        self.depth = self.shape.heads(module.config.num_heads)
        self.max_nodes = self.shape.size(module.config.num_heads)
        self.heads = module.shared(target, VocabularyHeads, lambda: VocabularyHeads(target, module))
        module.pack(target)
        # the heads' blocks, and what each of them scores, one after another
        scored = self.heads.read * (1 if self.heads.shared is None else module.config.num_heads)
        self.call = Call("heads", read=read_bytes([module.blocks]) + scored)

    def row(self) -> RowVocabulary | None:
        """The own tokens of a new row; heads of their own have rows for the draft vocabulary only."""
        return None if self.heads.shared is None else RowVocabulary(self.heads.shared)

    def depth_of(self, budget: int) -> int:
        """The number of heads that a tree of ``budget`` nodes uses."""
        return min(self.depth, budget - 1)

    def states(self, hidden_BD: Tensor) -> Tensor:
        """What the heads read [B, 1, D]."""
        return hidden_BD[:, None]

    @torch.inference_mode()
    def build(
        self,
        states_BSD: Tensor,
        roots: list[int],
        rows: Sequence[RowVocabulary] | None = None,
        noise: Sequence[DrawNoise | None] | None = None,
        *,
        budget: int | None = None,
        depths: Sequence[int] | None = None,
    ) -> list[DraftTree]:
        """One tree per row from what the heads read [B, 1, D] and the rows' root tokens.

        rows    the rows' own tokens, if ``row`` made some
        noise   that of the rows that are sampled
        budget  nodes at most, root included
        depths  of the rows' trees at most
        """
        budget = self.max_nodes if budget is None else min(budget, self.max_nodes)
        depth = self.depth_of(budget if depths is None else min(budget, 1 + max(depths)))
        drawn = None if noise is None else DrawNoise.together(noise, depth, states_BSD.device)
        host = to_host(self._grow(states_BSD, roots, rows, drawn, budget, depth))
        found = []
        for b, root in enumerate(roots):
            tree = collect(root, [(t[b], j[b], p[b]) for t, j, p in host], "head", budget)
            limit = depth if depths is None else depths[b]
            found.append(tree if tree.max_depth <= limit else tree.select((tree.depths <= limit).nonzero()[0]))
        return found

    def _grow(
        self,
        states_B1D: Tensor,
        roots: list[int],
        rows: Sequence[RowVocabulary] | None,
        drawn: Drawn | None,
        budget: int,
        depth: int,
    ) -> list[Level]:
        k = 1 if self.shape.tree == "chain" else min(self.shape.k, budget - 1)
        best_first, levels = self.shape.tree == "best", list[Level]()
        tokens_BF = torch.tensor(roots, device=states_B1D.device)[:, None]
        joint_BF = torch.zeros(tokens_BF.shape, device=states_B1D.device)
        path_BFC = states_B1D.new_zeros(len(roots), 1, 0)
        for d in range(depth):
            path_BFC = torch.cat((path_BFC, self.module.embed(self.target, tokens_BF).to(path_BFC.dtype)), dim=-1)
            states_BFD = self.module.states(d, states_B1D, path_BFC)
            best, log_probs = self.heads[d].best_tokens(states_BFD, k, rows, drawn, slice(d, d + 1))
            above = torch.arange(tokens_BF.shape[1], device=best.device)[:, None].expand(best.shape)
            level = Level(best.flatten(1), (joint_BF[:, :, None] + log_probs).flatten(1), above.flatten(1))
            width = level.tokens.shape[1]
            if best_first:
                # nodes that get no children may still be leaves, so they stay candidates after the frontier
                joint, order = level.joint.topk(min(width, budget - 1), dim=-1)
                level = Level(level.tokens.gather(1, order), joint, level.parents.gather(1, order))
                width = min(FRONTIER, level.tokens.shape[1])
                if joint.device.type == "cpu":
                    width = worth_expanding([*levels, level], width, budget - 1)
            levels.append(level)
            if width == 0:
                break
            tokens_BF, joint_BF = level.tokens[:, :width], level.joint[:, :width]
            index = level.parents[:, :width, None].expand(-1, -1, path_BFC.shape[-1])
            path_BFC = path_BFC.gather(1, index)
        return levels
