"""Verification: the path of a draft tree that the target accepts, by one of two rules.

*Matching* samples the target's own token at each node and continues while a child carries that token. The tree affects
only the number of tokens that a step emits, so matching is exact for any tree, sampled or greedy.

*Rejection* (Leviathan et al. 2023, algorithm 1; SpecInfer for several children) accepts a child x with probability
min(1, p(x) / q(x)), and otherwise continues with the residual norm(max(0, p - q)). It accepts more than matching when
drafts are sampled, but is exact only if every child *was sampled* from the q that the tree carries. Trees that were
built from top-k children, pruned, merged or reranked have no such q: their ``draft_probs`` is None, and rejection
refuses them.

Legend: N tree nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.declared import Rule
from anabranch.errors import CapabilityError
from anabranch.sampling import inverse_cdf
from anabranch.tree import DraftTree

__all__ = ["Rule", "Verdict", "follow", "match", "reject", "trials"]

TINY = float(np.finfo(np.float64).tiny)

NO_DRAFT_PROBS = (
    "the rule 'rejection' needs the distribution that each drafted token was sampled from, and trees that were "
    "pruned, merged or built by top-k carry none; use the rule 'match'"
)


class Verdict(NamedTuple):
    """The accepted path, starting at the root 0, and the target's own token after its last node.

    ``next_token`` is -1 if the target's logits at that node are not finite; the engine then raises NumericsError.
    """

    path: tuple[int, ...]
    next_token: int

    @property
    def accepted(self) -> int:
        """The number of accepted draft tokens; the step emits one more."""
        return len(self.path) - 1


def match(tree: DraftTree, tokens_N: Sequence[int] | NDArray[np.int64]) -> Verdict:
    """Follow the target's own tokens from the root as long as a child carries them; see ``sampling.target_tokens``.

        9 (0) +-- 1 (1) +-- 3 (3)        the target's own tokens:  0: 2,  1: 3,  2: 7,  3: 5
              +-- 2 (2)                  accepted path (0, 2), next token 7

    tokens_N  [N] the token that the target samples after each node
    """
    drawn = tokens_N.tolist() if isinstance(tokens_N, np.ndarray) else list(tokens_N)
    assert len(drawn) == tree.size, "one target token for each node"
    if len(drawn) == 1:
        return Verdict((0,), int(drawn[0]))
    path, here, token = [0], 0, int(drawn[0])
    # children come after their parent, so one scan from left to right finds the whole path
    for node, (parent, proposed) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)):
        if parent == here and proposed == token:
            path.append(node)
            here, token = node, int(drawn[node])
    return Verdict(tuple(path), token)


def follow(tree: DraftTree, token_at: Callable[[Sequence[int]], int]) -> Verdict:
    """``match`` that asks for the target's own token only at the nodes that it reaches.

    For tokens that take long to choose, such as those that depend on the whole text before them.

    token_at  called with the path to each of these nodes, from the root on
    """
    path = [0]
    while True:
        token = token_at(path)
        child = next((node for node in tree.children(path[-1]) if tree.tokens[node] == token), None)
        if child is None:
            return Verdict(tuple(path), token)
        path.append(child)


class Rows(Protocol):
    """The distribution [V] of each node, such as a tensor [N, V]."""

    def __getitem__(self, node: int, /) -> Tensor:
        """The distribution of one node."""


def reject(tree: DraftTree, probs_NV: Rows, uniforms: np.random.Generator) -> Verdict:
    """Accept or reject children one after another; sample the next token from the residual of the last node.

        9 (0) +-- 1 (1)     p = .2 .6 .2 .0     child 1: min(1, .6 / .8) = .75; accepted, and on to node 1
              +-- 0 (2)     q = .1 .8 .1 .0     else p becomes norm(.1 0 .1 0) = .5 0 .5 0; child 2: min(1, .5 / .1)

    probs_NV  [N, V] from ``sampling.target_probs``; rows of nodes that are not reached are not asked for
    uniforms  read once for each child tried and once for the next token. It must be independent of the drafts and new
              for each step (``sampling.generator``)

    Raises CapabilityError if the tree has children but no draft_probs.
    """
    _require_draft_probs(tree)
    path = [0]
    while True:
        siblings = tree.children(path[-1])
        p_V = _normalized(probs_NV[path[-1]])
        if not np.isfinite(p_V).all():
            return Verdict(tuple(path), -1)
        q_V = _normalized(tree.draft_probs[path[-1]]) if siblings and tree.draft_probs is not None else p_V
        for child, (probability, residual_V) in zip(
            (*siblings, None), trials(p_V, q_V, tree.tokens[list(siblings)], tree.replacement), strict=True
        ):
            if child is None:
                token = inverse_cdf(torch.from_numpy(residual_V)[None], [uniforms.random()])
                return Verdict(tuple(path), int(token))
            if uniforms.random() < probability:
                path.append(child)
                break


def trials(
    p_V: NDArray[np.float64], q_V: NDArray[np.float64], siblings: Sequence[int] | NDArray[np.int64], replacement: bool
) -> Iterator[tuple[float, NDArray[np.float64]]]:
    """Yield, for each sibling in turn, its acceptance probability and the target distribution [V] it is tried against.

    A last item follows: probability 1 and the distribution that the next token is sampled from if every sibling was
    rejected. All of ``reject``'s arithmetic is here and none of it is random, so enumerating these probabilities over
    a small vocabulary proves the rule. A sibling's item is computed only when it is requested.

    p_V, q_V  float64, normalised
    """
    for tried, token in enumerate(siblings):
        if tried:
            q_V = q_V if replacement else _without(q_V, siblings[tried - 1])
        assert q_V[token] > 0, "drafted tokens were sampled from draft_probs"
        yield min(1.0, float(p_V[token] / q_V[token])), p_V
        residual_V = np.maximum(p_V - q_V, 0.0)
        total = residual_V.sum()
        p_V = residual_V / total if total > 0 else p_V  # p = q: the sibling was certain to be accepted
    yield 1.0, p_V


def _require_draft_probs(tree: DraftTree) -> None:
    if tree.draft_probs is None and tree.size > 1:
        raise CapabilityError(NO_DRAFT_PROBS)


def _normalized(probs_V: Tensor) -> NDArray[np.float64]:
    """Copy one row to the host, normalized in float64: float32 rows sum to 1 only approximately."""
    row_V = probs_V.detach().to("cpu", torch.float64)
    normalized_V: NDArray[np.float64] = (row_V / row_V.sum()).numpy()
    return normalized_V


def _without(q_V: NDArray[np.float64], token: int | np.int64) -> NDArray[np.float64]:
    rest_V: NDArray[np.float64] = q_V.copy()
    rest_V[token] = 0.0
    rest_V /= max(float(rest_V.sum()), TINY)
    return rest_V
