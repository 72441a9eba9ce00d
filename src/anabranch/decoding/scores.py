"""The target's tokens or logits at the nodes of each row's tree, and the path of the tree that it accepts.

Rows that take the most probable token need no logits, and do not pay for those of others. The most probable token of
all is also that of the tokens that a constraint allows, if it is one of them; only where it is not, logits are needed,
of that node. Penalties, processors and constraints depend on the text before a node, and are computed only for nodes
that verification reaches.

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
from anabranch.sampling import (
    argmax,
    generator,
    log_probs,
    position_keys,
    process_logits,
    target_probs,
    top_log_probs,
)
from anabranch.tree import DraftTree
from anabranch.verify import Verdict, follow, match, reject

__all__ = ["Scores"]


class Scores:
    """The target's tokens or logits at the nodes of a pass over ``members``, one row each.

    verdicts  the accepted paths, where the pass itself verified
    tokens    by row, the greedy tokens at its nodes [N], where no more is needed
    logits    by row, its logits [N, V], where sampling, penalties, processors or log probabilities need them
    """

    def __init__(self, target: Decoder, members: Sequence[Member], result: PassResult) -> None:
        self.target, self.members, self.result = target, members, result
        self.verdicts = result.verdicts
        self.tokens: dict[int, NDArray[np.int64]] = {}
        self.logits: dict[int, Tensor] = {}
        if self.verdicts is not None:
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
        if self.verdicts is not None:
            return self.verdicts[b]
        member = self.members[b]
        sampling, text = member.request.sampling, member.row.tokens
        if b in self.tokens:
            if sampling.constraint is None:
                return match(tree, self.tokens[b][: tree.size])
            return follow(tree, lambda path: self._corrected(b, path[-1], _history(text, tree, path)))
        logits_NV = self.logits[b][: tree.size]
        if member.request.rule == "rejection":
            return reject(tree, _Distributions(logits_NV, tree, member), generator(sampling.seed, len(text)))
        if sampling.needs_history:
            return follow(tree, lambda path: self._drawn(b, path, _history(text, tree, path)))
        if sampling.greedy:
            return match(tree, argmax(logits_NV).cpu().numpy())
        keys = position_keys(sampling.seed, len(text) + tree.depths)
        return match(tree, self.target.draw(logits_NV, sampling, keys).cpu().numpy())

    def _corrected(self, b: int, node: int, history: Sequence[int]) -> int:
        """The greedy token at a node of a row with a constraint: the most probable one that is allowed."""
        token, sampling = int(self.tokens[b][node]), self.members[b].request.sampling
        assert sampling.constraint is not None
        if token < 0 or sampling.constraint.allows(history, token):
            return token
        hidden_1D = self.result.hidden_MD[self.result.nodes(b)][node : node + 1]
        return int(argmax(process_logits(self.target.logits(hidden_1D), sampling, [history])))

    def _drawn(self, b: int, path: Sequence[int], history: Sequence[int]) -> int:
        """The target's own token after a path of a row's tree, where it depends on the tokens before it."""
        sampling, node = self.members[b].request.sampling, path[-1]
        keys = position_keys(sampling.seed, [len(self.members[b].row.tokens) + len(path) - 1])
        logits_1V = self.logits[b][node : node + 1]
        if sampling.constraint is not None and sampling.unconstrained.whole:  # as in ``_corrected``, with noise
            token = int(self.target.draw(logits_1V, sampling.unconstrained, keys))
            if token < 0 or sampling.constraint.allows(history, token):
                return token
        return int(self.target.draw(logits_1V, sampling, keys, [history]))

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


class _Distributions:
    """The target's distribution at the nodes of a row's tree, computed when it is asked for."""

    def __init__(self, logits_NV: Tensor, tree: DraftTree, member: Member) -> None:
        self.logits_NV, self.tree, self.member = logits_NV, tree, member

    def __getitem__(self, node: int, /) -> Tensor:
        sampling, logits_1V = self.member.request.sampling, self.logits_NV[node : node + 1]
        if not sampling.needs_history:
            return target_probs(logits_1V, sampling)[0]
        history = _history(self.member.row.tokens, self.tree, self.tree.path_to(node))
        return target_probs(logits_1V, sampling, [history])[0]


def _history(text: Sequence[int], tree: DraftTree, path: Sequence[int]) -> list[int]:
    """All tokens up to and including the last node of a path."""
    return [*text, *(int(tree.tokens[node]) for node in path[1:])]


def _gathered(result: PassResult, rows: Sequence[int]) -> tuple[Tensor, list[slice]]:
    """The hidden states of some rows' nodes, one behind another, and where each row's lie."""
    parts = [result.hidden_MD[result.nodes(b)] for b in rows]
    ends = np.cumsum([len(part) for part in parts]).tolist()
    return torch.cat(parts), [slice(end - len(part), end) for part, end in zip(parts, ends, strict=True)]
