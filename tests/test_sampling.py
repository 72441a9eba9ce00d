"""The distribution, its noise, and that the shortcuts draw from the same distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from anabranch.errors import InputError
from anabranch.sampling import (
    SamplingParams,
    generator,
    gumbels,
    inverse_cdf,
    log_probs,
    position_keys,
    process_logits,
    target_probs,
    target_tokens,
)
from toy_distribution import assert_counts_from

NO_KEYS = np.zeros(0, np.uint64)  # greedy decoding reads none
LOGITS = torch.tensor([[0.5, 0.2, 0.2, 0.1], [0.1, 0.6, 0.0, 0.3]]).log()  # [2, 4]


WHOLE = [[0.5, 0.2, 0.2, 0.1], [0.1, 0.6, 0.0, 0.3]]
BEST = [[1, 0, 0, 0], [0, 1, 0, 0]]
CUT = [[5 / 9, 2 / 9, 2 / 9, 0], [0, 2 / 3, 0, 1 / 3]]  # tied tokens stay together
SQUARED = [[p * p / 0.34 for p in WHOLE[0]], [p * p / 0.46 for p in WHOLE[1]]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, WHOLE),
        ({"temperature": 0.5}, SQUARED),
        *(({"temperature": temperature}, BEST) for temperature in (0.0, 1e-6, 1e-38, 5e-324)),
        *(({"top_k": k}, probs) for k, probs in ((1, BEST), (2, CUT), (99, WHOLE))),
        *(({"top_p": p}, probs) for p, probs in ((0.3, BEST), (0.85, CUT), (1e-9, BEST))),
        ({"min_p": 0.3}, CUT),
    ],
)
def test_target_probs(options: dict[str, float], expected: list[list[float]]) -> None:
    params = SamplingParams(**{"temperature": 1.0, **options})
    torch.testing.assert_close(target_probs(LOGITS, params), torch.tensor(expected).float(), rtol=1e-5, atol=1e-6)
    assert target_probs(LOGITS.bfloat16(), params).dtype == torch.float32
    assert params.greedy == (options == {"temperature": 0.0})


def test_greedy_takes_the_first_of_ties() -> None:
    assert target_probs(torch.tensor([[1.0, 3.0, 3.0, 3.0]]), SamplingParams()).tolist() == [[0, 1, 0, 0]]
    wide = torch.zeros(1, 1000)
    wide[0, [300, 301, 900]] = 5.0
    assert target_tokens(wide, SamplingParams(), NO_KEYS).tolist() == [300]


def test_top_p_beyond_the_shortlist_sorts_everything() -> None:
    logits = torch.stack([torch.zeros(2000), torch.arange(2000) * -0.001, torch.arange(2000) * -1.0])
    probs = target_probs(logits, SamplingParams(temperature=1.0, top_p=0.5))
    assert (probs > 0).sum(dim=-1).tolist()[0] == 2000  # all of them tie
    ordered = logits[1].softmax(0).double()
    enough = int((ordered.cumsum(0) < 0.5).sum()) + 1
    assert (probs[1] > 0).sum() == enough
    assert (probs[2] > 0).sum() == 1


def test_inputs_are_left_alone() -> None:
    def in_place(history: Sequence[int], logits: Tensor) -> Tensor:
        logits[0] = -math.inf
        return logits

    before = LOGITS.clone()
    everything = SamplingParams(temperature=1.0, top_k=2, top_p=0.5, min_p=0.1, processors=(in_place,))
    target_probs(LOGITS, everything, [[0], [1]])
    assert torch.equal(LOGITS, before)


def test_log_probs_are_raw() -> None:
    expected = torch.tensor([0.1, 0.6]).log()
    torch.testing.assert_close(log_probs(LOGITS + 3, torch.tensor([3, 1])), expected)


def test_repetition_penalty_pulls_seen_tokens_down_once() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0]])
    params = SamplingParams(repetition_penalty=4.0)
    assert process_logits(logits, params, [[0, 0, 1]]).tolist() == [[0.5, -8.0, 1.0]]
    assert target_tokens(logits, params, NO_KEYS, [[0, 0, 1]]).tolist() == [2]
    assert process_logits(logits, params, [[]]).tolist() == logits.tolist()


def test_processors_see_the_history_of_their_own_node() -> None:
    def forbid_the_last(history: Sequence[int], logits: Tensor) -> Tensor:
        return logits.index_fill(0, torch.tensor([history[-1]]), -math.inf)

    params = SamplingParams(temperature=1.0, processors=(forbid_the_last,))
    probs = target_probs(LOGITS, params, [[3, 0], [0, 1]])
    torch.testing.assert_close(probs, torch.tensor([[0, 0.4, 0.4, 0.2], [0.25, 0, 0, 0.75]]))


def test_history_is_needed_only_where_the_distribution_depends_on_it() -> None:
    assert not SamplingParams(temperature=1.0, top_k=3).needs_history
    assert SamplingParams(repetition_penalty=1.1).needs_history
    for histories in (None, [[0]]):
        with pytest.raises(InputError, match="histories"):
            target_probs(LOGITS, SamplingParams(repetition_penalty=1.1), histories)


def test_broken_processors_are_named() -> None:
    forbid = SamplingParams(processors=(lambda history, logits: logits - math.inf,))
    with pytest.raises(InputError, match="forbid every token"):
        target_probs(LOGITS, forbid, [[0], [0]])
    cut = SamplingParams(processors=(lambda history, logits: logits[:2],))
    with pytest.raises(InputError, match="shape"):
        target_probs(LOGITS, cut, [[0], [0]])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_k=7),
        SamplingParams(temperature=0.9, top_p=0.8),
        SamplingParams(temperature=0.9, min_p=0.05),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.3),
    ],
)
def test_parity_with_hugging_face(params: SamplingParams) -> None:
    hf = pytest.importorskip("transformers.generation.logits_process")
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(1)) * 3
    history = torch.randint(0, 50, (5, 9), generator=torch.Generator().manual_seed(2))
    scores = logits
    if params.repetition_penalty != 1:
        scores = hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(history, scores)
    scores = hf.TemperatureLogitsWarper(params.temperature)(history, scores)
    if params.top_k:
        scores = hf.TopKLogitsWarper(params.top_k)(history, scores)
    if params.top_p < 1:
        scores = hf.TopPLogitsWarper(params.top_p)(history, scores)
    if params.min_p:
        scores = hf.MinPLogitsWarper(params.min_p)(history, scores)
    torch.testing.assert_close(process_logits(logits, params, history.tolist()), scores)


def test_inverse_cdf_drawing() -> None:
    rows = torch.tensor([[0.5, 0.0, 0.5]] * 4)
    assert inverse_cdf(rows, [0.0, 0.499, 0.5, 0.999]).tolist() == [0, 0, 2, 2]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 4, 255, 256, 257, 700]), st.floats(0, 1, exclude_max=True))
def test_inverse_cdf_never_draws_the_impossible(seed: int, vocabulary: int, uniform: float) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.random(vocabulary) ** 8 * (rng.random(vocabulary) < 0.3)
    weights[rng.integers(vocabulary)] = 1e-9
    probs = torch.from_numpy(weights / weights.sum()).float()
    for aim in (uniform, 0.0, 1 - 2.0**-53):
        token = int(inverse_cdf(probs[None], [aim]))
        assert probs[token] > 0
        total = float(probs.double().sum())
        cdf = probs.double().cumsum(0)
        assert float(cdf[token]) >= aim * total - 1e-12
        assert float(cdf[token] - probs[token]) <= aim * total + 1e-12


@pytest.mark.parametrize("params", [SamplingParams(temperature=1.0, top_k=3), SamplingParams(temperature=0.6)], ids=str)
def test_target_tokens_follow_the_distribution(params: SamplingParams) -> None:
    draws = 40_000
    tokens = target_tokens(LOGITS[:1].expand(draws, 4), params, position_keys(3, np.arange(draws)))
    counts = torch.bincount(tokens, minlength=4).double()
    assert_counts_from(counts.tolist(), target_probs(LOGITS[:1], params)[0].tolist())


def test_draws_at_two_positions_are_independent() -> None:
    draws, params = 40_000, SamplingParams(temperature=1.0)
    tokens = target_tokens(LOGITS[:1].expand(2 * draws, 4), params, position_keys(4, np.arange(2 * draws)))
    pairs = torch.bincount(4 * tokens[::2] + tokens[1::2], minlength=16).double()
    distribution = target_probs(LOGITS[:1], params)[0].double()
    assert_counts_from(pairs.tolist(), (distribution[:, None] * distribution).flatten().tolist())


def test_similar_distributions_mostly_draw_the_same_token() -> None:
    """Drafters profit from the noise: at least (1 - d) / (1 + d) of draws agree, d the total variation."""
    source, draws = torch.Generator().manual_seed(1), 4000
    logits = torch.randn(1, 300, generator=source) * 2
    near = logits + torch.randn(1, 300, generator=source) / 2
    params, keys = SamplingParams(temperature=1.0), position_keys(5, np.arange(draws))
    same = target_tokens(logits.expand(draws, -1), params, keys) == target_tokens(near.expand(draws, -1), params, keys)
    apart = float((logits.softmax(-1) - near.softmax(-1)).abs().sum() / 2)
    assert float(same.float().mean()) > (1 - apart) / (1 + apart) - 0.03
    assert float(same.float().mean()) > 1.5 * float(logits.softmax(-1).max())  # than the most probable token is drawn


def test_greedy_tokens_have_the_distribution_of_target_probs() -> None:
    logits = torch.randint(0, 4, (200, 300), generator=torch.Generator().manual_seed(0)).float()  # full of ties
    shortcut = target_tokens(logits, SamplingParams(), NO_KEYS)
    assert shortcut.dtype == torch.int64
    noise = np.random.default_rng(0).random(200)
    assert torch.equal(shortcut, inverse_cdf(target_probs(logits, SamplingParams()), noise))
    assert torch.equal(shortcut, logits.argmax(-1))


def test_the_draw_at_a_node_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(33, 1000, generator=torch.Generator().manual_seed(3)) * 4
    params = SamplingParams(temperature=0.8, top_p=0.9)
    keys = position_keys(5, np.arange(33) // 2)  # two nodes a depth
    together = target_tokens(logits, params, keys)
    alone = [int(target_tokens(logits[i : i + 1], params, keys[i : i + 1])) for i in range(33)]
    assert together.tolist() == alone


def test_keys_belong_to_positions() -> None:
    positions = np.array([[7, 3], [7, 10_000_000_000]])
    keys = position_keys(1, positions)
    assert keys.shape == (2, 2)
    assert keys.dtype == np.uint64
    assert keys[0, 0] == keys[1, 0]
    assert keys[0].tolist() == position_keys(1, np.arange(20))[[7, 3]].tolist()
    assert keys[1, 1] == position_keys(1, [10_000_000_000])[0]
    assert position_keys(1, []).shape == (0,)


def test_keys_differ_by_seed_lane_and_position() -> None:
    values = [position_keys(seed, np.arange(100), lane) for seed in (-1, 0, 1, 2**70) for lane in (0, 1, 2)]
    assert len(np.unique(np.concatenate(values))) == 900
    assert (values[3] == values[9]).all()  # 2**70 is 0 modulo 2**64


def test_gumbels_have_the_gumbel_distribution() -> None:
    noise = gumbels(position_keys(0, np.arange(20)), torch.arange(5000))
    assert noise.shape == (20, 5000)
    assert noise.dtype == torch.float32
    quantiles = (-(-noise.double()).exp()).exp()  # uniform on (0, 1)
    counts = torch.histc(quantiles, bins=20, min=0, max=1)
    assert_counts_from(counts.tolist(), [1 / 20] * 20)
    for lag in (1, 256):
        pairs = torch.corrcoef(torch.stack((quantiles[:, :-lag].flatten(), quantiles[:, lag:].flatten())))
        assert abs(float(pairs[0, 1])) < 0.013  # 4 standard deviations
    between = torch.corrcoef(quantiles)
    assert float((between - torch.eye(20)).abs().max()) < 0.07


def test_gumbels_are_a_token_s_own() -> None:
    keys = position_keys(2, [9, 4])
    all_of_them = gumbels(keys, torch.arange(50_000))
    some = torch.tensor([49_999, 3, 3, 0])
    assert torch.equal(gumbels(keys[1:], some), all_of_them[1:, some])
    assert bool(all_of_them.isfinite().all())


def test_noise_is_pinned() -> None:
    """The noise of a seed is a promise to users: the same text tomorrow and on another machine."""
    assert position_keys(0, [0, 1]).tolist() == [213000021201967259, 9267267987884836803]
    torch.testing.assert_close(
        gumbels(position_keys(0, [0]), torch.arange(3))[0], torch.tensor([-1.072394, 4.681586, 0.256236])
    )


def test_generator_is_fresh_for_each_position() -> None:
    draws = [generator(0, position).random(4).tolist() for position in (5, 5, 6)]
    assert draws[0] == draws[1]
    assert not set(draws[0]) & set(draws[2])


NONSENSE: dict[str, tuple[Any, ...]] = {
    "temperature": (-0.1, math.nan, math.inf, "hot"),
    "top_p": (0.0, 1.1, math.nan),
    "top_k": (-1, 2.5),
    "min_p": (-0.1, 1.0, math.nan),
    "repetition_penalty": (0.0, -1.0, math.nan),
    "seed": (1.5, None, True),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in NONSENSE for value in NONSENSE[name]])
def test_values_that_mean_nothing_are_refused(name: str, value: object) -> None:
    with pytest.raises(InputError, match=rf"^{name} must be .*, got "):
        SamplingParams(**{name: value})
