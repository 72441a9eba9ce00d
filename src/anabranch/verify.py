"""Which path of a draft tree the target accepts. Two rules, both exact, each where it says so.

*matching* draws the target's own token at each node and walks on while a child carries it. The tree only decides how
far one step gets, never what is said: exact for any tree whatever, greedy included.

*rejection* (Leviathan et al. 2023, algorithm 1; SpecInfer for several children) accepts a child x with probability
min(1, p(x) / q(x)), else goes on with norm(max(0, p - q)). It accepts more than *matching* when drafts are sampled,
and is exact only while every child *was sampled* from the q that the tree carries: top-k children, pruned, merged
or reranked trees have no such q and come with ``draft_probs=None``, which *rejection* refuses.

Legend: N tree nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.errors import CapabilityError
from anabranch.sampling import inverse_cdf
from anabranch.tree import DraftTree

__all__ = ["Rule", "Verdict", "match", "reject", "trials"]

Rule = Literal["match", "rejection"]

TINY = float(np.finfo(np.float64).tiny)

NO_DRAFT_PROBS = (
    "the rule 'rejection' needs the distribution that each drafted token was sampled from, and trees that were "
    "pruned, merged or built by top-k carry none; use the rule 'match'"
)


@dataclass(frozen=True)
class Verdict:
    """The accepted path, from the root 0 on, and the target's own token after its last node.

    ``next_token`` is -1 where the target's scores at that node are not finite numbers; the engine raises then.
    """

    path: tuple[int, ...]
    next_token: int

    @property
    def accepted(self) -> int:
        """The number of drafted tokens that are kept; the step emits one more."""
        return len(self.path) - 1


def match(tree: DraftTree, tokens_N: Sequence[int] | NDArray[np.int64]) -> Verdict:
    """Walk from the root while a child carries the target's own token; see ``sampling.target_tokens``.

        9 (0) +-- 1 (1) +-- 3 (3)        the target's own tokens:  0: 2,  1: 3,  2: 7,  3: 5
              +-- 2 (2)                  accepts the path (0, 2), and the next token is 7

    tokens_N  [N] the token that the target draws after each node
    """
    drawn = tokens_N.tolist() if isinstance(tokens_N, np.ndarray) else list(tokens_N)
    assert len(drawn) == tree.size, "one token of the target's own for each node"
    path, here, token = [0], 0, int(drawn[0])
    # children come behind their parent, so one walk from left to right meets the whole path
    for node, (parent, proposed) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)):
        if parent == here and proposed == token:
            path.append(node)
            here, token = node, int(drawn[node])
    return Verdict(tuple(path), token)


def reject(tree: DraftTree, probs_NV: Tensor, uniforms: np.random.Generator) -> Verdict:
    """Accept or reject children one after another; draw the next token from what remains of the target's law.

        9 (0) +-- 1 (1)     p = .2 .6 .2 .0     child 1: min(1, .6 / .8) = .75; accepted, and on to node 1
              +-- 0 (2)     q = .1 .8 .1 .0     else p becomes norm(.1 0 .1 0) = .5 0 .5 0; child 2: min(1, .5 / .1)

    probs_NV  [N, V] from ``sampling.target_probs``; rows of nodes that are not reached are not read
    uniforms  read in order, once for each child judged and once for the next token, so how many depends on the
              outcome: a generator and not an array. It must be independent of the drafts and fresh for each step
              (``sampling.generator``)

    Raises CapabilityError if the tree has children and carries no draft_probs.
    """
    _require_draft_probs(tree)
    path = [0]
    while True:
        siblings = tree.children(path[-1])
        p_V = _law(probs_NV[path[-1]])
        if not np.isfinite(p_V).all():
            return Verdict(tuple(path), -1)
        q_V = _law(tree.draft_probs[path[-1]]) if siblings and tree.draft_probs is not None else p_V
        for child, (odds, law_V) in zip(
            (*siblings, None), trials(p_V, q_V, tree.tokens[list(siblings)], tree.replacement), strict=True
        ):
            if child is None:
                token = inverse_cdf(torch.from_numpy(law_V)[None], [uniforms.random()])
                return Verdict(tuple(path), int(token))
            if uniforms.random() < odds:
                path.append(child)
                break


def trials(
    p_V: NDArray[np.float64], q_V: NDArray[np.float64], siblings: Sequence[int] | NDArray[np.int64], replacement: bool
) -> Iterator[tuple[float, NDArray[np.float64]]]:
    """Yield, for each sibling in turn, the odds that it is accepted and the law [V] it is judged by.

    One more item follows the last sibling: odds 1 and the law that the next token is drawn from if all were
    rejected. Every decision of ``reject`` is made here and nothing here is random, so enumerating these odds over a
    small vocabulary proves the shipped rule. Work for a sibling is done when it is asked for.

    p_V, q_V  float64, normalised
    """
    for tried, token in enumerate(siblings):
        if tried:
            q_V = q_V if replacement else _without(q_V, siblings[tried - 1])
        assert q_V[token] > 0, "a drafted token was sampled from draft_probs"
        yield min(1.0, float(p_V[token] / q_V[token])), p_V
        remains_V = np.maximum(p_V - q_V, 0.0)
        total = remains_V.sum()
        p_V = remains_V / total if total > 0 else p_V  # p = q: the odds were 1 and nobody comes here
    yield 1.0, p_V


def _require_draft_probs(tree: DraftTree) -> None:
    if tree.draft_probs is None and tree.size > 1:
        raise CapabilityError(NO_DRAFT_PROBS)


def _law(probs_V: Tensor) -> NDArray[np.float64]:
    """Bring one row to the host in float64; float32 rows sum to 1 only nearly, and p = q must give odds of 1."""
    row_V = probs_V.detach().to("cpu", torch.float64)
    law_V: NDArray[np.float64] = (row_V / row_V.sum()).numpy()
    return law_V


def _without(q_V: NDArray[np.float64], token: int | np.int64) -> NDArray[np.float64]:
    rest_V: NDArray[np.float64] = q_V.copy()
    rest_V[token] = 0.0
    rest_V /= max(float(rest_V.sum()), TINY)
    return rest_V
