"""Predict the target's random draws: the noise at a position does not depend on the text (``sampling.gumbels``).

Under *matching*, the target draws the token with the largest log p(w) / T + gumbel(position, w). A drafter with a
distribution q evaluates the same expression with q. If q equals p, it always predicts the draw; proposing the most
probable token would not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from anabranch.drafting.drafter import Row
from anabranch.sampling import gumbels, position_keys

__all__ = ["Draws"]

TRUST = 0.85  # scales the scores, since q is not p: their softmax is the probability of each draw
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
        q_n = np.array(log_probs, np.float64)
        noise_n = gumbels(self.keys_D[depth : depth + 1], torch.tensor(list(tokens)))[0].double().numpy()
        left = max(1.0 - float(np.exp(q_n).sum()), 1e-9)
        scores = TRUST * np.append(q_n / self.temperature + noise_n, math.log(left) / self.temperature + UNKNOWN)
        top = scores.max()
        beliefs: NDArray[np.float64] = scores[:-1] - top - math.log(np.exp(scores - top).sum())
        return np.minimum(beliefs, 0.0)
