"""A draft model as a drafter (Leviathan et al. 2023), optionally with a drafter of its own inside (Spector & Re 2023).

B rows of the batch, n nodes of a pass, V vocabulary of the target, W words that target and draft model have in common.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.errors import CapabilityError, InputError
from anabranch.methods.base import Drafter, Observation, Row
from anabranch.methods.draft_model.grow import Growth, best_first, product_size, sampled
from anabranch.methods.draft_model.inner import Guesser
from anabranch.methods.draft_model.reader import Continuations, Reader
from anabranch.model.decoder import Decoder
from anabranch.model.passes import PassResult
from anabranch.sampling import SamplingParams, generator, gumbels, position_keys, process_logits, target_probs
from anabranch.tree import DraftTree
from anabranch.verify import Rule

__all__ = ["MOST_NODES", "DraftModelDrafter", "Shape"]

MOST_NODES = 1024  # of a tree, since one in which all nodes have children grows with k ** tokens
MOST_TOKENS = 256
DRAFT_LANE = 3  # of the noise that sampled drafts are drawn with; lanes 0 to 2 are the target's and the streams'
FRONTIER = 12  # nodes of a best-first tree that are asked about in one round
# How far scores are believed where the target draws with known noise: scores plus noise, times this, are the logits of
# the belief. The streams' value; ``Beliefs`` corrects it for each depth.
TRUST = 0.85


@dataclass(frozen=True)
class Shape:
    """The shape of the trees.

    tree       "chain"; "best": the most probable nodes; "iid" and "without": every node has ``widths`` children, which
               under *rejection* are sampled independently or without replacement, and under *matching* are the best
    tokens     depth at most
    nodes      of a best-first tree at most, root included
    widths     children of a node by its depth, the last entry for all that follow (iid and without); a best-first tree
               takes the first
    threshold  nodes of a lower joint probability are left out; a sampled node of a lower one gets no children
    """

    tree: Literal["chain", "best", "iid", "without"] = "chain"
    tokens: int = 5
    nodes: int = 16
    widths: tuple[int, ...] = (16,)
    threshold: float = 0.0

    def __post_init__(self) -> None:
        if self.tree not in ("chain", "best", "iid", "without"):
            raise InputError(f"tree must be chain, best, iid or without, got {self.tree!r}")
        if not 1 <= self.tokens <= MOST_TOKENS:
            raise InputError(f"tokens must be from 1 to {MOST_TOKENS}, got {self.tokens}")
        if not 2 <= self.nodes <= MOST_NODES:
            raise InputError(f"nodes must be from 2 (the root and one draft) to {MOST_NODES}, got {self.nodes}")
        if not self.widths or min(self.widths) < 1:
            raise InputError(f"k must be at least 1, got {'/'.join(map(str, self.widths)) or 'nothing'}")
        if not 0.0 <= self.threshold < 1.0:
            raise InputError(f"threshold must be a probability of at least 0 and below 1, got {self.threshold}")
        if self.tree in ("iid", "without") and product_size(self.widths, self.tokens) > MOST_NODES:
            raise InputError(
                f"{self.tokens} tokens with {'/'.join(map(str, self.widths))} children a node make more than "
                f"{MOST_NODES:,} nodes; lower k or tokens, or use tree=best with a node budget"
            )

    @property
    def size(self) -> int:
        """The most nodes of a tree, root included."""
        if self.tree == "best":
            return self.nodes
        return self.tokens + 1 if self.tree == "chain" else product_size(self.widths, self.tokens)

    def fitting(self, budget: int) -> int:
        """The depth at which a sampled tree has at most ``budget`` nodes."""
        widths = (1,) if self.tree == "chain" else self.widths
        return max(d for d in range(self.tokens + 1) if product_size(widths, d) <= budget)


class DraftModelDrafter(Drafter):
    """Drafts from a smaller model with the target's vocabulary.

    model     the draft model: any decoder that reads the target's token ids
    adaptive  whether the load decides how many nodes are drafted and verified, up to the shape's
    inner     guesses the draft model's own tokens, so that one of its passes may serve for several (staged)
    """

    name = "draft_model"
    rules = ("match", "rejection")

    def __init__(
        self,
        target: Decoder,
        model: Decoder,
        shape: Shape | None = None,
        *,
        adaptive: bool = False,
        inner: Drafter | None = None,
    ) -> None:
        self.target, self.shape, self.adaptive = target, shape or Shape(), adaptive
        if self.shape.tokens >= model.config.max_positions:
            raise CapabilityError(
                f"the draft model reads {model.config.max_positions} tokens at most, too few to draft "
                f"{self.shape.tokens}; lower tokens"
            )
        self.reader = Reader(model)
        self.guesser = None if inner is None else Guesser(inner)
        self.max_nodes = self.shape.size
        self._words = min(target.config.vocab_size, model.config.vocab_size)

    @property
    def model(self) -> Decoder:
        """The draft model."""
        return self.reader.model

    def check(self, sampling: SamplingParams, rule: Rule) -> None:
        """*Rejection* needs trees that are verified as they were sampled."""
        super().check(sampling, rule)
        if rule == "rejection" and (self.shape.tree == "best" or self.adaptive):
            what = "drafts that the load may cut" if self.adaptive else "best-first trees"
            raise CapabilityError(
                f"{what} hold the most probable nodes, not all that were sampled, so rule='rejection' is not exact; "
                "use rule='match', or tree=chain, tree=iid or tree=without with a fixed number of tokens"
            )

    def depth_of(self, budget: int) -> int:
        """At most ``tokens``."""
        return min(self.shape.tokens, budget - 1)

    # -- rows ------------------------------------------------------------------------------------------
    def join(self, row: Row) -> None:
        """The inner drafter sees the row; the draft model reads it with its prompt, or with its first draft."""
        if self.guesser is not None:
            self.guesser.join(row)

    def read(self, row: Row, result: PassResult, start: int) -> None:
        """Read the same chunk of the prompt; of what the target did not have to read, as much again."""
        end = start + result.counts_B[0]
        if end < self.model.config.max_positions:
            self.reader.read(row, end, most=2 * result.counts_B[0])

    @torch.inference_mode()
    def leave(self, row: Row) -> None:
        """Free the row's slot."""
        super().leave(row)
        self.reader.leave(row)
        if self.guesser is not None:
            self.guesser.leave(row)

    def observe(self, rows: Sequence[Row], seen: Observation) -> None:
        """Commit what became text to the draft model's cache."""
        self.reader.settle()

    # -- drafts ----------------------------------------------------------------------------------------
    @torch.inference_mode()
    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        """Trees for all rows together: one pass of the draft model for each level, fewer with an inner drafter.

        The root alone where a text has reached the end of what the draft model can read.
        """
        found = [DraftTree.root(row.root) for row in rows]
        longest = self.model.config.max_positions
        for row in rows:
            if len(row.tokens) >= longest:
                self.reader.forget(row)
        able = [b for b, row in enumerate(rows) if row.max_depth > 0 and len(row.tokens) < longest]
        if budget < 2 or not able:
            return found
        asked = dict(zip(able, self.reader.begin([rows[b] for b in able]), strict=True))
        growths: dict[int, Growth] = {}
        wanted: dict[int, list[int]] = {}
        depths = {b: min(rows[b].max_depth, longest - len(rows[b].tokens)) for b in able}
        for b in able:
            growths[b] = self._growth(rows[b], asked[b], min(budget, self.max_nodes), depths[b])
            self._resume(b, growths[b], wanted, found)
        while wanted:
            for b, nodes in wanted.items() if self.guesser is not None else ():
                assert self.guesser is not None
                depth = min(self.depth_of(budget), depths[b]) - 1  # what follows the deepest nodes is of no use
                guesses = self.guesser.guesses(rows[b], asked[b], nodes[0], depth=depth, words=self._words)
                nodes += [node for node in guesses if node not in nodes]
            logits_nV = self.reader.ask({rows[b]: nodes for b, nodes in wanted.items()})
            self._tell([(rows[b], asked[b], nodes) for b, nodes in wanted.items()], logits_nV)
            for b in list(wanted):
                del wanted[b]
                self._resume(b, growths[b], wanted, found)
        return found

    @staticmethod
    def _resume(b: int, growth: Growth, wanted: dict[int, list[int]], found: list[DraftTree]) -> None:
        try:
            wanted[b] = list(next(growth))
        except StopIteration as end:
            found[b] = end.value

    def _growth(self, row: Row, asked: Continuations, budget: int, depth: int) -> Growth:
        shape = self.shape
        floor = math.log(shape.threshold) if shape.threshold else -math.inf
        if row.rule == "rejection":
            return sampled(
                asked,
                widths=(1,) if shape.tree == "chain" else shape.widths,
                depth=min(depth, shape.fitting(budget)),
                floor=floor,
                replacement=shape.tree != "without",
                noise=generator(row.sampling.seed, len(row.tokens), lane=DRAFT_LANE),
            )
        return best_first(
            asked,
            widths=self._widths,
            depth=min(depth, shape.tokens, budget - 1),
            nodes=budget,
            frontier=FRONTIER if shape.tree == "best" else MOST_NODES,
            floor=floor,
            chain=shape.tree == "chain",
        )

    @property
    def _widths(self) -> tuple[int, ...]:
        """Children of a node by depth, under *matching*."""
        if self.shape.tree == "chain":
            return (1,)
        return self.shape.widths[:1] if self.shape.tree == "best" else self.shape.widths

    def _tell(self, asked: Sequence[tuple[Row, Continuations, Sequence[int]]], logits_nV: Tensor) -> None:
        """Write down what follows the nodes that were asked about, in the order of the logits."""
        parts = torch.split(logits_nV[:, : self._words].float(), [len(nodes) for _, _, nodes in asked])
        matching: list[tuple[Continuations, Sequence[int], Tensor]] = []
        for (row, known, nodes), z_nW in zip(asked, parts, strict=True):
            params = replace(row.sampling, processors=())  # the user's own functions see the target's scores alone
            histories = None
            if params.needs_history:
                histories = [[*row.tokens, *known.path(node)] for node in nodes]
            if row.rule == "rejection":
                q_nV = F.pad(target_probs(z_nW, params, histories), (0, self.target.config.vocab_size - self._words))
                finite = q_nV.isfinite().all(dim=-1).tolist()
                known.found.update((node, q if ok else None) for node, q, ok in zip(nodes, q_nV, finite, strict=True))
                continue
            z_nW = process_logits(z_nW, params, histories)
            if not params.greedy:
                # the target will draw the largest of its scores plus this noise
                keys = position_keys(params.seed, [len(row.tokens) + known.depths[node] for node in nodes])
                z_nW = TRUST * (z_nW + gumbels(keys, torch.arange(self._words, device=z_nW.device)))
            matching.append((known, nodes, z_nW))
        if matching:
            self._rank(matching)

    def _rank(self, matching: Sequence[tuple[Continuations, Sequence[int], Tensor]]) -> None:
        """The best next tokens of each node, in one transfer to the host."""
        z_nW = torch.cat([z for _, _, z in matching])
        best = z_nW.log_softmax(dim=-1).topk(min(max(self._widths), self.max_nodes - 1, self._words), dim=-1)
        log_probs, tokens = torch.stack((best.values.double(), best.indices.double())).cpu().tolist()
        rows = iter(zip(tokens, log_probs, strict=True))
        for known, nodes, _ in matching:
            for node in nodes:
                pairs = zip(*next(rows), strict=True)
                known.found[node] = [(int(token), p) for token, p in pairs if math.isfinite(p)]
