"""The exact distribution of two sampled tokens, and whether samples are from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from anabranch.certify.statistics import EXPECTED, ChiSquare
from anabranch.model.decoder import Decoder
from small import logits_after

RARELY = 1e-3  # a right sampler fails a test this often; seeds are fixed, so it passes always or never


def next_probs(target: Decoder, text: Sequence[int], temperature: float = 1.0) -> Tensor:
    """The target's distribution after a text [V], float64, from one pass over it."""
    with torch.inference_mode():
        return (logits_after(target, text)[-1].double() / temperature).softmax(-1)


def pair_probs(target: Decoder, text: Sequence[int], *, skipped: int = 0, temperature: float = 1.0) -> Tensor:
    """The joint distribution [V, V] of two new tokens after ``skipped`` others."""
    if skipped:
        first = next_probs(target, text, temperature).tolist()
        parts = (
            pair_probs(target, [*text, t], skipped=skipped - 1, temperature=temperature) for t in range(len(first))
        )
        return torch.stack([p * part for p, part in zip(first, parts, strict=True)]).sum(0)
    first_V = next_probs(target, text, temperature)
    return first_V[:, None] * torch.stack([next_probs(target, [*text, t], temperature) for t in range(len(first_V))])


def assert_pairs_from(pairs: Iterable[Sequence[int]], probs_VV: Tensor) -> None:
    """Check by a chi-square test that pairs of tokens are a sample of a joint distribution."""
    seen = torch.zeros_like(probs_VV)
    for one, two in pairs:
        seen[one, two] += 1
    assert_counts_from(seen.flatten().tolist(), probs_VV.flatten().tolist())


def goodness_of_fit(counts: Sequence[float], probabilities: Sequence[float]) -> ChiSquare:
    """Test whether a sample is from a known distribution; cells of an expected count below 5 are pooled.

    counts [C], probabilities [C]: how often each outcome occurred, and how probable it is. An outcome of probability 0
    that occurred gives an infinite statistic.
    """
    size = sum(counts)
    known = list(zip(counts, probabilities, strict=True))
    kept = [(count, size * p) for count, p in known if size * p >= EXPECTED]
    rare = [(count, size * p) for count, p in known if size * p < EXPECTED]
    if any(count and not expected for count, expected in rare):
        return ChiSquare(math.inf, max(1, len(kept)), 0.0)
    seen, expected = sum(count for count, _ in rare), sum(expected for _, expected in rare)
    if expected >= EXPECTED or not kept:
        kept.append((seen, expected))
    else:
        smallest = min(range(len(kept)), key=lambda i: kept[i][1])
        kept[smallest] = (kept[smallest][0] + seen, kept[smallest][1] + expected)
    statistic = sum((count - wanted) ** 2 / wanted for count, wanted in kept)
    return ChiSquare.of(float(statistic), len(kept) - 1)


def assert_counts_from(counts: Sequence[float], probs: Sequence[float]) -> None:
    """Check by a chi-square test that counts are those of a sample of a distribution."""
    found = goodness_of_fit(counts, probs)
    assert found.degrees > 0, "outcomes are too rare for a test; draw more"
    assert found.p_value > RARELY, found
