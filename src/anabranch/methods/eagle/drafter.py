"""EAGLE as a drafter: the head continues the target's features, and the target's output head scores them.

n nodes of a pass, W scored tokens, V vocabulary, D width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.drafting.autoregressive import AutoregressiveDrafter
from anabranch.drafting.drafter import Needs, Observation, Row
from anabranch.drafting.draws import drawn
from anabranch.drafting.grow import Form
from anabranch.drafting.head import RowVocabulary
from anabranch.drafting.reader import Continuations
from anabranch.drafting.settings import TreeSettings
from anabranch.methods.eagle.layer import EagleLayer, layer_of
from anabranch.methods.eagle.module import EagleModule
from anabranch.methods.eagle.reader import FeatureReader
from anabranch.model.decoder import Decoder
from anabranch.model.passes import PassResult
from anabranch.sampling import position_keys, process_logits, target_probs

__all__ = ["EagleDrafter", "EagleSettings"]

SHORTLIST = 64  # a node's best tokens, to which the noise is added where the target draws its tokens with it
# EAGLE-1's tree (``mc_sim_7b_63`` of the published code): the number of children by path of ranks
STATIC_TREE: dict[tuple[int, ...], int] = {
    (): 4,
    (0,): 3,
    (1,): 2,
    (2,): 2,
    (3,): 1,
    (0, 0): 3,
    (0, 1): 2,
    (0, 2): 2,
    (1, 0): 1,
    (0, 0, 0): 3,
    (0, 0, 0, 0): 2,
}
STATIC_NODES = 1 + sum(STATIC_TREE.values())


@dataclass(frozen=True)
class EagleSettings(TreeSettings):
    """Settings of ``eagle:...``.

    tree       best (EAGLE-2: the nodes of the highest joint probability), static (EAGLE-1's tree), chain, auto (best,
               and the load decides how many nodes), or a number: best with so many nodes
    nodes      node budget, root included; 0: 16, with tree=auto 24, with tree=static all 26
    depth      tokens on a path at most
    k          children of a node at most
    threshold  nodes of a lower joint probability are left out
    """

    trees = ("best", "static", "chain", "auto")
    budgeted = ("best", "static", "auto")
    default_nodes: ClassVar[Mapping[str, int]] = {**TreeSettings.default_nodes, "static": STATIC_NODES}
    least = (("depth", 1),)
    depth: int = 5
    k: int = 10
    threshold: float = 0.0

    @property
    def budget(self) -> int:
        """The most nodes of a tree."""
        return self.size_for(self.depth)


class EagleDrafter(AutoregressiveDrafter[FeatureReader]):
    """Drafts from one autoregressive layer on the target's features.

    settings  best (EAGLE-2's dynamic tree: the nodes of the highest joint probability), chain, or static: EAGLE-1's
              tree, or the best ``nodes`` of its nodes
    layer     the head's passes, where they are not those that all drafters of the module share
    """

    name = label = "eagle"
    rules = ("match", "rejection")
    sampled_trees = "tree=chain"

    def __init__(
        self,
        target: Decoder,
        module: EagleModule,
        settings: EagleSettings | None = None,
        *,
        layer: EagleLayer | None = None,
    ) -> None:
        self.layer = layer or layer_of(target, module)
        settings = settings or EagleSettings()
        super().__init__(target, FeatureReader(self.layer), settings, settings.depth)
        self.module, self.static = module, settings.tree == "static"
        self.needs = Needs(module.config.layers, prompt=True, recalls=lambda *text: self.reader.known(*text)[0])

    def depth_of(self, budget: int) -> int:
        """At most ``tokens``, and less in small trees: a level takes a pass of the head."""
        deepest = super().depth_of(budget)
        return min(deepest, -(-2 * budget // 3)) if self.settings.kind != "chain" else deepest

    # -- rows ------------------------------------------------------------------------------------------
    @torch.inference_mode()
    def join(self, row: Row) -> None:
        """The row's own tokens are drafted too once they occur in its text."""
        row.state[self] = RowVocabulary(self.layer.head)
        self.reader.seat(row)

    def read(self, row: Row, result: PassResult, start: int) -> None:
        """Read the features of a chunk of the prompt."""
        self.reader.resume(row, start)
        self._feed([row], result, [range(result.starts_B[0], result.starts_B[0] + result.counts_B[0])])
        self.reader.catch_up(row)

    def _feed(self, rows: Sequence[Row], result: PassResult, nodes: Sequence[Sequence[int]]) -> None:
        """Add the features of rows' next committed nodes in a pass, with as few operations as for one row."""
        at = torch.tensor([node for each in nodes for node in each], device=result.hidden_MD.device)
        taps = [result.taps[layer][at] for layer in self.needs.layers]
        features_nD = torch.split(self.layer.features(result.hidden_MD[at], taps), [len(each) for each in nodes])
        self.reader.feed(*zip(rows, features_nD, strict=True))

    def observe(self, rows: Sequence[Row], seen: Observation) -> None:
        """Keep the features of the accepted nodes."""
        super().observe(rows, seen)
        live = [i for i, going in enumerate(seen.live) if going]
        if not live:
            return
        starts = seen.result.starts_B
        nodes = [[starts[seen.slots[i]] + node for node in seen.verdicts[i].path] for i in live]
        self._feed([rows[i] for i in live], seen.result, nodes)

    def _able(self, row: Row) -> bool:
        return self.reader.knows(row)

    # -- drafts ----------------------------------------------------------------------------------------
    def _form(self, row: Row, budget: int, depth: int) -> Form:
        form = super()._form(row, budget, depth)
        return replace(form, widths=STATIC_TREE, frontier=len(STATIC_TREE)) if self.static else form

    @property
    def _children(self) -> int:
        """The most children of a node."""
        return 4 if self.static else min(self.settings.widths[0], self.max_nodes - 1)

    def _tell(self, answered: Sequence[tuple[Row, Continuations, Sequence[int]]], features_nD: Tensor) -> None:
        head = self.layer.head
        states_nD = self.module.states(features_nD).to(self.target.dtype)
        counts = [len(nodes) for _, _, nodes in answered]
        scored = zip(torch.split(states_nD, counts), torch.split(head.scores(states_nD).float(), counts), strict=True)
        for (row, known, nodes), (states, z_nW) in zip(answered, scored, strict=True):
            ids_W, z_nW = self._with_own(row, states, z_nW)
            z_nW = head.capped(z_nW)
            if row.rule == "rejection":
                self._distributions(row, known, nodes, ids_W, z_nW)
            else:
                self._best(row, known, nodes, ids_W, z_nW)

    def _with_own(self, row: Row, states_nD: Tensor, z_nW: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids [W] and scores [n, W], those of the row's own tokens included."""
        words: RowVocabulary = row.state[self].extend(row.tokens)
        ids_W = self.layer.head.vocabulary
        if not len(words.ids):
            return ids_W, z_nW
        if words.head is None:
            own = F.linear(states_nD.to(words.head_XD.dtype), words.head_XD, words.bias_X)
        else:
            own = words.head(states_nD)
        return torch.cat((ids_W, words.ids)), torch.cat((z_nW, own.float()), dim=-1)

    def _distributions(self, row: Row, known: Continuations, nodes: Sequence[int], ids_W: Tensor, z_nW: Tensor) -> None:
        """Write down the distributions [V] that tokens are sampled from."""
        params, histories = self._sampling(row, known, nodes)
        self._know_distributions(known, nodes, target_probs(self._whole(ids_W, z_nW), params, histories))

    def _best(self, row: Row, known: Continuations, nodes: Sequence[int], ids_W: Tensor, z_nW: Tensor) -> None:
        """Write down the best next tokens of each node and their log probabilities."""
        params, histories = self._sampling(row, known, nodes)
        if params.needs_history:
            z_nW = process_logits(self._whole(ids_W, z_nW), params, histories)[:, ids_W]
        elif not params.greedy:
            z_nW = process_logits(z_nW, params)
        count = self._children if params.greedy else SHORTLIST
        log_probs, places = (x[0] for x in self.layer.head.best(z_nW[None], min(count, z_nW.shape[1])))
        tokens = ids_W[places]
        if not params.greedy:
            keys = position_keys(params.seed, [len(row.tokens) + known.depths[node] for node in nodes])
            best = drawn(log_probs, tokens, keys).topk(min(self._children, tokens.shape[1]), dim=-1)
            log_probs, tokens = best.values, tokens.gather(1, best.indices)
        self._know_best(known, nodes, tokens.tolist(), log_probs.tolist())

    def _whole(self, ids_W: Tensor, z_nW: Tensor) -> Tensor:
        """Scores [n, V] over the target's vocabulary; tokens that are not drafted have none."""
        whole_nV = z_nW.new_full((len(z_nW), self.target.config.vocab_size), -math.inf)
        whole_nV[:, ids_W] = z_nW
        return whole_nV
