"""Closed forms of speculative decoding: Leviathan et al. 2023, and Speculative Streaming against a draft model.

alpha  acceptance rate: the probability that a drafted token is accepted, assumed equal at all positions
gamma  tokens drafted per step
c      cost coefficient: seconds of one draft-model pass / seconds of one target pass

All formulas assume independent acceptances; ``docs/theory.md`` discusses this assumption.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anabranch.errors import InputError

__all__ = [
    "T5",
    "Experiment",
    "acceptance_rate",
    "divergence",
    "expected_operations",
    "expected_tokens",
    "fitted_acceptance_rate",
    "least_speedup",
    "optimal_gamma",
    "parity",
    "pays",
    "speedup",
    "streaming_speedup",
]


def expected_tokens(alpha: float, gamma: int) -> float:
    """Mean acceptance length (eq. 1): (1 - alpha^(gamma+1)) / (1 - alpha)."""
    _check(alpha, gamma)
    return float(sum(alpha**i for i in range(gamma + 1)))  # the same sum, without 0 / 0 at alpha = 1


def speedup(alpha: float, gamma: int, c: float) -> float:
    """Speedup in wall time over plain decoding (theorem 3.8): expected tokens / (gamma c + 1)."""
    _check(alpha, gamma, c)
    return expected_tokens(alpha, gamma) / (gamma * c + 1)


def optimal_gamma(alpha: float, c: float, *, most: int | None = None) -> int:
    """The gamma with the largest speedup, at most ``most``; 0: plain decoding is fastest.

    The speedup is a concave function of gamma over a linear one, so it first rises and then falls: the first gamma
    whose successor is not better is the best. Raises InputError if there is no largest gamma (c = 0, or alpha = 1
    without ``most``).
    """
    _check(alpha, 0, c)
    if most is None and alpha > 0 and (c == 0 or (alpha == 1 and c < 1)):
        raise InputError("there is no best gamma if drafts are free or always accepted; limit it with most")
    gamma = 0
    while (most is None or gamma < most) and speedup(alpha, gamma + 1, c) > speedup(alpha, gamma, c):
        gamma += 1
    return gamma


def pays(alpha: float, c: float) -> bool:
    """True if some gamma makes decoding faster (corollary 3.9): alpha > c."""
    _check(alpha, 0, c)
    return alpha > c


def least_speedup(alpha: float, c: float) -> float:
    """Lower bound of the speedup at the best gamma (corollary 3.9): (1 + alpha) / (1 + c) if alpha > c, else 1."""
    return (1 + alpha) / (1 + c) if pays(alpha, c) else 1.0


def expected_operations(alpha: float, gamma: int, c_operations: float) -> float:
    """Arithmetic relative to plain decoding (theorem 3.11): (gamma c' + gamma + 1) / expected tokens.

    c_operations  c', the arithmetic of one draft-model token / that of one target token
    """
    _check(alpha, gamma, c_operations)
    return (gamma * c_operations + gamma + 1) / expected_tokens(alpha, gamma)


def acceptance_rate(p_NV: ArrayLike, q_NV: ArrayLike) -> float:
    """alpha = mean over positions of sum_x min(p(x), q(x)) (corollary 3.6), for distributions [N, V] or [V]."""
    p, q = _distributions(p_NV, "p"), _distributions(q_NV, "q")
    if p.shape != q.shape:
        raise InputError(
            f"p and q must be distributions over the same tokens at the same positions, got {p.shape} and {q.shape}"
        )
    return float(np.minimum(p, q).sum(-1).mean())


def divergence(p_NV: ArrayLike, q_NV: ArrayLike) -> float:
    """D_LK = 1 - sum_x min(p(x), q(x)), mean over positions: 0 for equal and 1 for disjoint distributions."""
    return 1.0 - acceptance_rate(p_NV, q_NV)


def fitted_acceptance_rate(accepted: ArrayLike, depths: ArrayLike) -> float:
    """The maximum-likelihood alpha, given ``accepted`` [N] draft tokens of chains of ``depths`` [N].

    Each step is a run of successes that ends with a failure, unless it reached its depth: alpha = successes /
    (successes + failures). For trees with these depths, alpha is the probability that *one of* the children is right.
    """
    a, d = np.asarray(accepted, np.int64), np.asarray(depths, np.int64)
    if a.shape != d.shape or (a > d).any() or (a < 0).any():
        raise InputError("accepted must have one count for each draft, between 0 and its depth")
    trials = int(a.sum() + (a < d).sum())
    if trials == 0:
        raise InputError("an acceptance rate needs at least one draft")
    return float(a.sum() / trials)


def parity(gamma: int, target_over_draft: float, streaming_over_target: float = 1.0) -> float:
    """The ratio zeta / beta at which a draft model and Speculative Streaming are equally fast (ACL eq. 10).

    zeta, beta             mean acceptance length with the draft model, and with Speculative Streaming
    gamma                  draft-model passes per step
    target_over_draft      C_target / C_draft
    streaming_over_target  C_ss / C_target, nearly 1 if decoding is memory-bound
    """
    if gamma < 0 or target_over_draft <= 0 or streaming_over_target <= 0:
        raise InputError(
            "gamma must not be negative and latency ratios must be positive, got "
            f"{gamma}, {target_over_draft} and {streaming_over_target}"
        )
    return (gamma + target_over_draft) / (streaming_over_target * target_over_draft)


def streaming_speedup(
    zeta_over_beta: float, gamma: int, target_over_draft: float, streaming_over_target: float = 1.0
) -> float:
    """Speedup of Speculative Streaming over a draft model (v1 figure 4, ACL figure 20): parity / (zeta / beta)."""
    if zeta_over_beta <= 0:
        raise InputError(f"zeta / beta must be positive, got {zeta_over_beta}")
    return parity(gamma, target_over_draft, streaming_over_target) / zeta_over_beta


@dataclass(frozen=True)
class Experiment:
    """One row of Leviathan et al.'s table of T5-XXL experiments; ``speedup`` is their measurement."""

    task: str
    draft: str
    temperature: float
    gamma: int
    alpha: float
    c: float
    speedup: float

    @property
    def predicted(self) -> float:
        """The speedup by theorem 3.8."""
        return speedup(self.alpha, self.gamma, self.c)


# c: 0.02 and 0.11 from the paper's text, T5-base's 0.04 from its appendix on predictions
T5 = (
    Experiment("EnDe", "T5-small", 0.0, 7, 0.75, 0.02, 3.4),
    Experiment("EnDe", "T5-base", 0.0, 7, 0.80, 0.04, 2.8),
    Experiment("EnDe", "T5-large", 0.0, 7, 0.82, 0.11, 1.7),
    Experiment("EnDe", "T5-small", 1.0, 7, 0.62, 0.02, 2.6),
    Experiment("EnDe", "T5-base", 1.0, 5, 0.68, 0.04, 2.4),
    Experiment("EnDe", "T5-large", 1.0, 3, 0.71, 0.11, 1.4),
    Experiment("CNNDM", "T5-small", 0.0, 5, 0.65, 0.02, 3.1),
    Experiment("CNNDM", "T5-small", 1.0, 5, 0.53, 0.02, 2.3),
)


def _check(alpha: float, gamma: int, c: float = 0.0) -> None:
    if not 0 <= alpha <= 1:
        raise InputError(f"alpha must be a probability, got {alpha!r}")
    if gamma < 0 or c < 0:
        raise InputError(f"gamma and c must not be negative, got {gamma!r} and {c!r}")


def _distributions(values: ArrayLike, name: str) -> NDArray[np.float64]:
    probs: NDArray[np.float64] = np.asarray(values, np.float64)
    if probs.ndim == 0 or probs.size == 0 or (probs < 0).any() or not np.allclose(probs.sum(-1), 1, atol=1e-4):
        raise InputError(f"{name} must contain distributions: rows of probabilities that sum to 1")
    return probs
