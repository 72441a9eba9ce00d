"""Predict the target's random draws: the noise at a position does not depend on the text (``sampling.gumbels``).

Under *matching*, the target draws the token with the largest log p(w) / T + gumbel(position, w). A drafter with a
distribution q evaluates the same expression with q. If q equals p, it always predicts the draw; proposing the most
probable token would not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.drafting.drafter import Row
from anabranch.sampling import gumbels_of, halves, position_keys

__all__ = ["CONFIDENCE", "Draws", "drawn"]

# Scales (scores + noise), since q is not p: their softmax is the probability of each draw. Measured with the default
# model's streams at temperature 1 (docs/log.md).
CONFIDENCE = 0.85
UNKNOWN = 0.5772  # mean of the noise, for the tokens that are not evaluated one by one
COLDEST = 0.01  # lower temperatures are treated as this one


class Draws:
    """Predicts the draws of the next ``depth`` tokens of a sampled row."""

    def __init__(self, row: Row, depth: int) -> None:
        self.temperature = max(row.sampling.temperature, COLDEST)
        self.keys_D = position_keys(row.sampling.seed, len(row.tokens) + np.arange(depth))

    def __call__(self, depth: int, tokens: Sequence[int], log_probs: Sequence[float]) -> NDArray[np.float64]:
        """Log probabilities [n] that each of n distinct tokens is drawn ``depth`` positions ahead, counted from 0.

        log_probs  [n] of the drafter's distribution q; the remaining probability belongs to all other tokens
        """
        q_1n, keys = torch.from_numpy(np.array([log_probs], np.float64)), self.keys_D[depth : depth + 1]
        drawn_n: NDArray[np.float64] = drawn(q_1n, torch.tensor([tokens]), keys, self.temperature)[0].numpy()
        return drawn_n


def drawn(q_nk: Tensor, tokens_nk: Tensor, keys_n: NDArray[np.uint64], temperature: float = 1.0) -> Tensor:
    """Log probabilities [n, k] that the target draws each of k tokens after n nodes.

    q_nk    log probabilities of the tokens in the drafter's distributions
    keys_n  of the positions of the draws
    """
    low_n1, high_n1 = (half[:, None].to(tokens_nk.device) for half in halves(keys_n))
    noise_nk = gumbels_of(low_n1, high_n1, tokens_nk)
    left_n1 = (1.0 - q_nk.exp().sum(-1, keepdim=True)).clamp(min=1e-9).log() / temperature + UNKNOWN
    scores = torch.cat((q_nk / temperature + noise_nk.to(q_nk.dtype), left_n1), dim=-1)
    return (CONFIDENCE * scores).log_softmax(-1)[:, :-1]
