"""The distribution of decoded text by every outcome of every draw: drafter, engine and rule together, without sampling.

``test_verify.py`` enumerates the rules by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.decoding.engine import Engine, Request
from anabranch.methods import Drafter, Row, make_drafter
from anabranch.methods.draft_model.drafter import DraftModelDrafter, DraftModelSettings
from anabranch.methods.eagle.module import EagleConfig, EagleModule
from anabranch.methods.streams.recipes import StreamConfig
from anabranch.model.decoder import Decoder
from anabranch.model.weights import build_decoder
from anabranch.sampling import Constraint, SamplingParams
from anabranch.tree import DraftTree
from enumerated import Draws, drawing, outcomes
from small import LLAMA, randomise, small_adapter
from toy_distribution import next_probs, pair_probs
from toy_tables import write

WORDS, TEXT, TEMPERATURE = 4, [1, 3, 2], 2.0


def model(seed: int, words: int = WORDS) -> Decoder:
    found = build_decoder(replace(LLAMA, vocab_size=words, num_layers=1), device="cpu")
    randomise(found, seed=seed, scale=0.2)
    return found


class NoTwins:
    """A constraint: no token follows itself, nor a 0 a 2."""

    def allowed(self, tokens: Sequence[int], vocabulary: int) -> NDArray[np.bool_]:
        return np.array([self.allows(tokens, token) for token in range(vocabulary)])

    def allows(self, tokens: Sequence[int], token: int) -> bool:
        return tokens[-1] != token and (tokens[-1], token) != (0, 2)

    def forced(self, tokens: Sequence[int]) -> list[int]:
        return []

    def next_probs(self, target: Decoder, text: Sequence[int]) -> Tensor:
        """The distribution after a text: the target's, of the tokens that are allowed."""
        allowed_V = next_probs(target, text, TEMPERATURE) * torch.from_numpy(self.allowed(text, WORDS))
        return allowed_V / allowed_V.sum()

    def pair_probs(self, target: Decoder, text: Sequence[int], skipped: int) -> Tensor:
        """The joint distribution [V, V] of two tokens after ``skipped`` others."""
        first_V = self.next_probs(target, text)
        after = [[*text, token] for token in range(WORDS)]
        if not skipped:
            return first_V[:, None] * torch.stack([self.next_probs(target, each) for each in after])
        parts = [self.pair_probs(target, each, skipped - 1) for each in after]
        return (first_V[:, None, None] * torch.stack(parts)).sum(0)


def distribution(
    target: Decoder,
    drafter: Drafter,
    monkeypatch: pytest.MonkeyPatch,
    *,
    skipped: int = 0,
    constraint: Constraint | None = None,
) -> tuple[Tensor, float]:
    """The joint distribution [V, V] of two tokens after ``skipped`` others, and the mean number of drafts accepted."""
    sampling = SamplingParams(temperature=TEMPERATURE, constraint=constraint)
    asked = Request(TEXT, skipped + 2, sampling, rule="rejection")
    engine = Engine(target, drafter, capacity=16)

    def decode(draws: Draws) -> tuple[list[int], int]:
        draw_from(draws)
        engine.add(asked)
        steps = list(engine.run())
        return [token for step in steps for token in step.tokens], sum(step.verdict.accepted for step in steps)

    joint, accepted, total = torch.zeros(WORDS, WORDS, dtype=torch.float64), 0.0, 0.0
    with monkeypatch.context() as patched:
        draw_from = drawing(patched)
        for (tokens, count), weight in outcomes(decode):
            joint[tokens[-2], tokens[-1]] += weight
            accepted += weight * count
            total += weight
    assert total == pytest.approx(1.0, abs=1e-12)
    return joint, accepted


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (DraftModelSettings("chain", tokens="2"), WORDS),
        (DraftModelSettings("chain", tokens="1"), WORDS - 1),
        (DraftModelSettings("iid", tokens="1", k="2"), WORDS + 2),
        pytest.param(DraftModelSettings("without", tokens="1", k="3"), WORDS, marks=pytest.mark.thorough),
        (DraftModelSettings("chain", tokens="2", threshold=0.3), WORDS),
        (DraftModelSettings("without", tokens="1", k="2"), WORDS - 1),
        pytest.param(DraftModelSettings("iid", tokens="2", k="2/1"), WORDS, marks=pytest.mark.thorough),
        pytest.param(DraftModelSettings("without", tokens="2", k="2/1"), WORDS, marks=pytest.mark.thorough),
        pytest.param(DraftModelSettings("without", tokens="2", k="3/2"), WORDS - 1, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_a_draft_model_with_rejection(shape: DraftModelSettings, words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft models of the target's vocabulary, of more words and of fewer."""
    target = model(3)
    found, accepted = distribution(target, DraftModelDrafter(target, model(4, words), shape), monkeypatch)
    torch.testing.assert_close(found, pair_probs(target, TEXT, temperature=TEMPERATURE), rtol=0, atol=1e-6)
    assert 0 < accepted < 1


@pytest.mark.parametrize(
    "shape",
    [
        DraftModelSettings("chain", tokens="1"),
        pytest.param(DraftModelSettings("iid", tokens="1", k="2"), marks=pytest.mark.thorough),
        DraftModelSettings("without", tokens="1", k="2"),
    ],
    ids=str,
)
def test_adversaries_and_oracles_with_rejection(shape: DraftModelSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adversary samples tokens with probabilities proportional to 1 / p, the oracle with the target's own."""
    target, adversary = model(3), model(3)
    with torch.no_grad():
        adversary.head.weight.neg_()
    wanted, accepted = pair_probs(target, TEXT, temperature=TEMPERATURE), []
    for drafts in (adversary, target):
        found, share = distribution(target, DraftModelDrafter(target, drafts, shape), monkeypatch)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
        accepted.append(share)
    assert accepted[0] < 0.8
    assert accepted[1] == pytest.approx(1.0, abs=1e-6)


def chain_of_ngrams(target: Decoder, folder: Path) -> Drafter:
    write("ngram", [[1, 3, 2, 0, 3, 3, 2, 1, 0, 2, 2]], folder / "t", vocab_size=WORDS)
    return make_drafter(f"ngram:tree=chain,nodes=3,data={folder / 't'}", target)


def streams(tree: str) -> Callable[[Decoder, Path], Drafter]:
    def made(target: Decoder, folder: Path) -> Drafter:
        adapter = small_adapter(target, StreamConfig(num_streams=2, num_stream_layers=1, adapter_rank=2))
        return make_drafter(f"streams:tree={tree}", target, adapter)

    return made


def eagle(target: Decoder, folder: Path) -> Drafter:
    module = EagleModule(target.config, EagleConfig(), None)
    randomise(module, seed=4, scale=0.2)
    return make_drafter("eagle:tree=chain,depth=2", target, module.eval().requires_grad_(False))


@pytest.mark.parametrize(
    ("made", "skipped"),
    [
        pytest.param(chain_of_ngrams, 0, id="ngram"),
        pytest.param(eagle, 0, id="eagle"),
        pytest.param(streams("chain"), 1, id="streams chain"),
        pytest.param(streams("product,k=2,depth=1"), 1, id="streams product", marks=pytest.mark.thorough),
        pytest.param(streams("chain,prune_threshold=0.25"), 1, id="streams chain, pruned", marks=pytest.mark.thorough),
        pytest.param(
            streams("product,k=2,depth=1,prune_threshold=0.25"),
            1,
            id="streams product, pruned",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_other_sampled_drafts_with_rejection(
    made: Callable[[Decoder, Path], Drafter], skipped: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams draft from the second step on."""
    target = model(3)
    found, accepted = distribution(target, made(target, tmp_path), monkeypatch, skipped=skipped)
    wanted = pair_probs(target, TEXT, skipped=skipped, temperature=TEMPERATURE)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    assert 0 < accepted < 1


@pytest.mark.parametrize(
    ("made", "skipped"),
    [
        pytest.param(chain_of_ngrams, 0, id="ngram"),
        pytest.param(eagle, 0, id="eagle"),
        pytest.param(streams("chain"), 1, id="streams chain"),
        pytest.param(streams("product,k=2,depth=1"), 1, id="streams product", marks=pytest.mark.thorough),
        *(
            pytest.param(lambda target, _, shape=shape: DraftModelDrafter(target, model(4), shape), 0, id=str(shape))
            for shape in (DraftModelSettings("chain", tokens="2"), DraftModelSettings("without", tokens="1", k="3"))
        ),
    ],
)
def test_rejection_under_a_constraint(
    made: Callable[[Decoder, Path], Drafter], skipped: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are sampled without the constraint; those that it forbids have probability 0 of being accepted."""
    target, rule = model(3), NoTwins()
    found, accepted = distribution(target, made(target, tmp_path), monkeypatch, skipped=skipped, constraint=rule)
    torch.testing.assert_close(found, rule.pair_probs(target, TEXT, skipped), rtol=0, atol=1e-6)
    assert 0 < accepted < 1


class Overconfident(DraftModelDrafter):
    """Wrong on purpose: its trees state that tokens were drawn with replacement, and they were not."""

    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        return [replace(tree, replacement=True) for tree in super().draft(rows, budget)]


def test_the_enumeration_notices_a_false_statement(monkeypatch: pytest.MonkeyPatch) -> None:
    target = model(3)
    drafter = Overconfident(target, model(4), DraftModelSettings("without", tokens="1", k="3"))
    found, _ = distribution(target, drafter, monkeypatch)
    assert float((found - pair_probs(target, TEXT, temperature=TEMPERATURE)).abs().sum()) > 0.01
