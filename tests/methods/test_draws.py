"""The estimates of the target's draws by a drafter that knows the noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from anabranch.drafting.drafter import Row
from anabranch.drafting.draws import CONFIDENCE, Draws
from anabranch.sampling import SamplingParams, gumbels, position_keys, target_tokens

WORDS = 23


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_a_drafter_with_the_targets_distribution_is_right(temperature: float) -> None:
    random = torch.Generator().manual_seed(0)
    for seed in range(20):
        sampling = SamplingParams(temperature=temperature, seed=seed)
        text = [1] * (3 + seed)
        logits_NV = 3 * torch.randn(4, WORDS, generator=random)
        wanted = target_tokens(logits_NV, sampling, position_keys(seed, len(text) + np.arange(4)))
        draws = Draws(Row(text, 3, sampling), 4)
        for depth, row_V in enumerate(logits_NV.log_softmax(-1).tolist()):
            assert int(draws(depth, range(WORDS), row_V).argmax()) == wanted[depth]


def test_what_is_not_looked_at_keeps_its_share() -> None:
    sampling = SamplingParams(temperature=1.0, seed=4)
    draws = Draws(Row([1, 2], 2, sampling), 1)
    few, all_of_it = (np.exp(draws(0, [5, 6], np.log(probs))) for probs in ([0.1, 0.2], [0.3, 0.7]))
    assert few.sum() < 0.9
    assert all_of_it.sum() == pytest.approx(1.0, abs=1e-3)
    noise = gumbels(position_keys(4, [2]), torch.tensor([5, 6]))[0].numpy()
    odds = np.log([0.3, 0.7]) + noise
    assert np.log(all_of_it[1] / all_of_it[0]) == pytest.approx(CONFIDENCE * (odds[1] - odds[0]), rel=1e-5)
