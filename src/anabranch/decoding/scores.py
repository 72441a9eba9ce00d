"""The target's tokens or logits at the nodes of each row's tree, and the path of the tree that it accepts.

Rows that take the most probable token need no logits, and do not pay for those of others.

Legend: M nodes of all rows, N nodes of one row, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.decoding.batch import Member
from anabranch.model.decoder import Decoder
from anabranch.model.passes import PassResult
from anabranch.sampling import argmax, generator, log_probs, position_keys, target_probs, top_log_probs
from anabranch.tree import DraftTree
from anabranch.verify import Verdict, match, reject

__all__ = ["Scores"]


class Scores:
    """The target's tokens or logits at the nodes of a pass over ``members``, one row each.

    found   the accepted paths, where the pass itself verified
    tokens  by row, the greedy tokens at its nodes [N], where no more is needed
    logits  by row, its logits [N, V], where sampling, penalties, processors or log probabilities need them
    """

    def __init__(self, target: Decoder, members: Sequence[Member], result: PassResult) -> None:
        self.target, self.members = target, members
        self.found = result.verdicts
        self.tokens: dict[int, NDArray[np.int64]] = {}
        self.logits: dict[int, Tensor] = {}
        if self.found is not None:
            return
        if result.tokens_M is not None:  # where all rows are greedy
            self.tokens = {b: result.tokens_M[result.nodes(b)] for b in range(len(members))}
            return
        plain = [b for b, member in enumerate(members) if member.greedy]
        others = [b for b, member in enumerate(members) if not member.greedy]
        if plain:
            hidden, parts = _gathered(result, plain)
            chosen = target.choose(hidden).cpu().numpy()
            self.tokens = {b: chosen[part] for b, part in zip(plain, parts, strict=True)}
        if others:
            hidden, parts = _gathered(result, others)
            logits = target.logits(hidden)
            self.logits = {b: logits[part] for b, part in zip(others, parts, strict=True)}

    def verdict(self, b: int, tree: DraftTree) -> Verdict:
        """The path of row ``b``'s tree that its rule accepts, and the target's own next token.

        Processors are the caller's own functions, so this raises whatever they raise.
        """
        if self.found is not None:
            return self.found[b]
        if b in self.tokens:
            return match(tree, self.tokens[b][: tree.size])
        request, text, logits_NV = self.members[b].request, self.members[b].row.tokens, self.logits[b][: tree.size]
        sampling, histories = request.sampling, None
        if sampling.needs_history:
            histories = [[*text[:-1], *(int(tree.tokens[i]) for i in tree.path_to(node))] for node in range(tree.size)]
        if request.rule == "rejection":
            probs = target_probs(logits_NV, sampling, histories)
            return reject(tree, probs, generator(sampling.seed, len(text)))
        if sampling.greedy and not sampling.needs_history:
            return match(tree, argmax(logits_NV).cpu().numpy())
        keys = position_keys(sampling.seed, len(text) + tree.depths)
        return match(tree, self.target.draw(logits_NV, sampling, keys, histories).cpu().numpy())

    def probed(self, b: int, behind: int, probe: DraftTree) -> NDArray[np.int64]:
        """The target's own tokens after row ``b``'s probe, which follows ``behind`` other nodes.

        Drawn as the row's tokens at those positions will be, so that guesses agree with them. Penalties and processors
        are left out: they cost much, and are not to see what nobody wrote.
        """
        if b in self.tokens:
            return self.tokens[b][behind:]
        member, logits_NV = self.members[b], self.logits[b][behind:]
        sampling = member.request.sampling
        if sampling.greedy or sampling.needs_history or probe.size == 1:
            return argmax(logits_NV).cpu().numpy()
        keys = position_keys(sampling.seed, len(member.row.tokens) + probe.depths[1:])
        return self.target.draw(logits_NV, sampling, keys).cpu().numpy()

    def log_probs(self, b: int, verdict: Verdict, tokens: Sequence[int]) -> tuple[float, ...]:
        """The target's raw log probability of each of the emitted ``tokens`` of row ``b``."""
        logits_NV = self.logits[b]
        nodes = torch.tensor(verdict.path[: len(tokens)], device=logits_NV.device)
        values: list[float] = log_probs(logits_NV[nodes], torch.tensor(tokens, device=logits_NV.device)).tolist()
        return tuple(values)

    def top_log_probs(self, b: int, verdict: Verdict, count: int, most: int) -> tuple[dict[int, float], ...]:
        """The ``most`` largest raw log probabilities by token id, at each of ``count`` emitted tokens of row ``b``."""
        nodes = torch.tensor(verdict.path[:count], device=self.logits[b].device)
        return tuple(top_log_probs(self.logits[b][nodes], most))


def _gathered(result: PassResult, rows: Sequence[int]) -> tuple[Tensor, list[slice]]:
    """The hidden states of some rows' nodes, one behind another, and where each row's lie."""
    parts = [result.hidden_MD[result.nodes(b)] for b in rows]
    ends = np.cumsum([len(part) for part in parts]).tolist()
    return torch.cat(parts), [slice(end - len(part), end) for part, end in zip(parts, ends, strict=True)]
