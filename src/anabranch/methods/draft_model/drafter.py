"""A draft model as a drafter (Leviathan et al. 2023), optionally with a drafter of its own inside (Spector & Re 2023).

n nodes of a pass, V vocabulary of the target, W words that target and draft model have in common.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.drafting.autoregressive import AutoregressiveDrafter, Shape
from anabranch.drafting.drafter import Drafter, Row
from anabranch.drafting.head import TRUST
from anabranch.drafting.reader import Continuations
from anabranch.errors import CapabilityError
from anabranch.methods.draft_model.inner import Guesser
from anabranch.methods.draft_model.reader import DraftReader
from anabranch.model.decoder import Decoder
from anabranch.model.passes import PassResult
from anabranch.sampling import gumbels, position_keys, process_logits, target_probs

__all__ = ["DraftModelDrafter"]


class DraftModelDrafter(AutoregressiveDrafter[DraftReader]):
    """Drafts from a smaller model with the target's vocabulary.

    model     the draft model: any decoder that reads the target's token ids
    adaptive  whether the load decides how many nodes are drafted and verified, up to the shape's
    inner     guesses the draft model's own tokens, so that one of its passes may serve for several (staged)
    """

    name = "draft_model"
    rules = ("match", "rejection")
    sampled_trees = "tree=chain, tree=iid or tree=without"

    def __init__(
        self,
        target: Decoder,
        model: Decoder,
        shape: Shape | None = None,
        *,
        adaptive: bool = False,
        inner: Drafter | None = None,
    ) -> None:
        super().__init__(target, DraftReader(model), shape or Shape(), adaptive=adaptive)
        if self.shape.tokens >= model.config.max_positions:
            raise CapabilityError(
                f"the draft model reads {model.config.max_positions} tokens at most, too few to draft "
                f"{self.shape.tokens}; lower tokens"
            )
        self.guesser = None if inner is None else Guesser(inner)
        self._words = min(target.config.vocab_size, model.config.vocab_size)

    @property
    def model(self) -> Decoder:
        """The draft model."""
        return self.reader.model

    # -- rows ------------------------------------------------------------------------------------------
    def join(self, row: Row) -> None:
        """The inner drafter sees the row; the draft model reads it with its prompt, or with its first draft."""
        if self.guesser is not None:
            self.guesser.join(row)

    def read(self, row: Row, result: PassResult, start: int) -> None:
        """Read the same chunk of the prompt; of what the target did not have to read, as much again."""
        end = start + result.counts_B[0]
        if end < self.reader.longest:
            self.reader.read(row, end, most=2 * result.counts_B[0])

    def leave(self, row: Row) -> None:
        """Free the row's slot."""
        super().leave(row)
        if self.guesser is not None:
            self.guesser.leave(row)

    # -- drafts ----------------------------------------------------------------------------------------
    def _guesses(self, row: Row, asked: Continuations, nodes: Sequence[int], depth: int) -> list[int]:
        if self.guesser is None:
            return []
        guesses = self.guesser.guesses(row, asked, nodes[0], depth=depth, words=self._words)
        return [node for node in guesses if node not in nodes]

    def _tell(self, asked: Sequence[tuple[Row, Continuations, Sequence[int]]], logits_nV: Tensor) -> None:
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
                known.known.update((node, q if ok else ()) for node, q, ok in zip(nodes, q_nV, finite, strict=True))
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
                known.known[node] = [(int(token), p, None) for token, p in pairs if math.isfinite(p)]
