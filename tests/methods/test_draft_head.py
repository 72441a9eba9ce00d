"""Scores of draft tokens from states, and the frozen target's states over a batch."""

from __future__ import annotations

import pytest
import torch

from anabranch.drafting.drafter import Row
from anabranch.drafting.head import DraftHead, DrawNoise, RowVocabulary
from anabranch.learning.examples import Batch, Example
from anabranch.learning.target import run_frozen
from anabranch.model.cache import Cache
from anabranch.model.inputs import Inputs
from anabranch.sampling import SamplingParams, position_keys, target_tokens
from small import VOCABULARY, prompt, small


def states(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("case", ["llama", "gemma2", "phi"])
def test_the_best_tokens_are_those_of_the_targets_distribution_over_the_vocabulary(case: str) -> None:
    target, ids = small(case), [0, 3, 5, 8]
    head = DraftHead(target, torch.tensor(ids))
    rows = [RowVocabulary(head).extend([5, 11]), RowVocabulary(head)]
    tokens, log_probs = head.best_tokens(states(2, 3), 4, rows)
    logits = target.logits(states(2, 3))
    for b, known in enumerate(([*ids, 11], ids)):
        wanted = logits[b][:, known].log_softmax(-1).topk(4, dim=-1)
        assert tokens[b].tolist() == torch.tensor(known)[wanted.indices].tolist()
        assert torch.allclose(log_probs[b], wanted.values, atol=1e-5)


def test_with_the_targets_own_states_the_best_sampled_token_is_its_draw() -> None:
    target, params = small(), SamplingParams(temperature=0.8, seed=11)
    head = DraftHead(target, torch.arange(VOCABULARY))
    rows = [Row(prompt(5), 5, params), Row(prompt(7), 7, SamplingParams())]
    drawn = DrawNoise.together([DrawNoise.of(row, 3) for row in rows], 3)
    tokens, _ = head.best_tokens(states(2, 3), 2, drawn=drawn, levels=slice(0, 3))
    logits = target.logits(states(2, 3))
    assert tokens[0, :, 0].tolist() == target_tokens(logits[0], params, position_keys(11, [5, 6, 7])).tolist()
    assert tokens[1, :, 0].tolist() == logits[1].argmax(-1).tolist()
    # one level for all states
    tokens, _ = head.best_tokens(states(2, 3), 1, drawn=drawn, levels=slice(2, 3))
    assert tokens[0, :, 0].tolist() == target_tokens(logits[0], params, position_keys(11, [7, 7, 7])).tolist()


def test_the_frozen_target_gives_each_row_the_states_of_its_own_pass() -> None:
    target = small("mistral")
    examples = [Example(tuple(prompt(6, 1)), tuple(prompt(5, 2))), Example(tuple(prompt(3, 3)), tuple(prompt(4, 4)))]
    found = run_frozen(target, Batch.of(examples), taps=(1,))
    for b, example in enumerate(examples):
        cache = Cache(target.config, rows=1, capacity=16, dtype=target.dtype, device=target.device)
        cache.add_row()
        with torch.no_grad():
            alone = target(Inputs.of_prompt((*example.prompt_ids, *example.answer_ids)), cache, taps=(1,))
        assert torch.allclose(found.hidden_BTD[b, : len(example)], alone.hidden_MD, atol=1e-5)
        assert torch.allclose(found.taps[1][b, : len(example)], alone.taps[1], atol=1e-5)
    assert not found.hidden_BTD.requires_grad
