"""The exact distribution of two sampled tokens, and whether samples are from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from anabranch.certify.statistics import goodness_of_fit
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


def assert_counts_from(counts: Sequence[float], probs: Sequence[float]) -> None:
    """Check by a chi-square test that counts are those of a sample of a distribution."""
    found = goodness_of_fit(counts, probs)
    assert found.degrees > 0, "outcomes are too rare for a test; draw more"
    assert found.p_value > RARELY, found
