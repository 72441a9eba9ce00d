"""Guessing what the target draws: the noise of a position is known before the token (``sampling.gumbels``).

Under *matching*, the target draws the token of the largest log p(w) / T + gumbel(position, w). A drafter that knows q
instead of p asks the same of q, and is right more often than one that drafts the most probable token: always, if q
were p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from anabranch.methods.base import Row
from anabranch.sampling import gumbels, position_keys

__all__ = ["Draws"]

TRUST = 0.85  # in q: scores times this are the logits of what is believed
UNKNOWN = 0.5772  # the mean of the noise, for tokens that are not looked at one by one
COLDEST = 0.01  # smaller temperatures are as good as greedy


class Draws:
    """The draws of the next tokens of one row that is not greedy, at most ``depth`` tokens ahead."""

    def __init__(self, row: Row, depth: int) -> None:
        self.temperature = max(row.sampling.temperature, COLDEST)
        self.keys_D = position_keys(row.sampling.seed, len(row.tokens) + np.arange(depth))

    def __call__(self, depth: int, tokens: Sequence[int], log_probs: Sequence[float]) -> NDArray[np.float64]:
        """Log probabilities [n] that the token ``depth`` places ahead, from 0 on, is each of n distinct ones.

        log_probs  [n] of the drafter's distribution; what they lack to a sum of 1 belongs to other tokens
        """
        q_n = np.array(log_probs, np.float64)
        noise_n = gumbels(self.keys_D[depth : depth + 1], torch.tensor(list(tokens)))[0].double().numpy()
        left = max(1.0 - float(np.exp(q_n).sum()), 1e-9)
        scores = TRUST * np.append(q_n / self.temperature + noise_n, math.log(left) / self.temperature + UNKNOWN)
        top = scores.max()
        beliefs: NDArray[np.float64] = scores[:-1] - top - math.log(np.exp(scores - top).sum())
        return np.minimum(beliefs, 0.0)
