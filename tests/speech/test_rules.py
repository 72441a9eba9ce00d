"""The rules of timestamps equal transformers' on any text, and recorded log probabilities are those of the tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from anabranch.errors import InputError, ModelError
from anabranch.speech.vocabulary import Vocabulary
from anabranch.speech.windows import Confidence, timestamp_rules

PROMPT = [257, 258, 261]


@pytest.fixture(scope="module")
def vocabulary(oracle: tuple[Any, Any]) -> Vocabulary:
    return Vocabulary.of(oracle[1], len(oracle[1]))


@pytest.mark.parametrize(
    "text",
    [[], [0], [0, "a"], [0, "a", 40], [0, "a", 40, 40], [0, "a", 40, 40, "b"], ["a", "b"], [10, "a", 30, 45], [3, 3]],
)
@pytest.mark.parametrize("seed", range(4))
def test_the_rules_are_those_of_transformers(vocabulary: Vocabulary, text: list[Any], seed: int) -> None:
    first = vocabulary.first_timestamp
    new = [ord(each) if isinstance(each, str) else first + each for each in text]
    config = GenerationConfig(
        no_timestamps_token_id=vocabulary.no_timestamps, eos_token_id=vocabulary.end, max_initial_timestamp_index=50
    )
    logits = 3 * torch.randn(first + 151, generator=torch.Generator().manual_seed(seed))
    logits[: vocabulary.end] += 2.0 * (seed % 2)  # so that text or timestamps are the more probable
    theirs = WhisperTimeStampLogitsProcessor(config, begin_index=len(PROMPT))
    expected = theirs(torch.tensor([[*PROMPT, *new]]), logits[None])[0]
    found = timestamp_rules(vocabulary, len(PROMPT))([*PROMPT, *new], logits.clone())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("lead", [-9.0, -8.0, -7.0, -4.0, -1.0, 0.0, 1.0])
def test_timestamps_prevail_as_in_transformers(vocabulary: Vocabulary, lead: float) -> None:
    """With the largest logit of a timestamp so far above that of text; all 1,501 together have up to 7.3 more."""
    first = vocabulary.first_timestamp
    config = GenerationConfig(no_timestamps_token_id=vocabulary.no_timestamps, eos_token_id=vocabulary.end)
    for spread in (0.0, 0.3, 30.0):
        logits = torch.full((first + 1501,), -50.0)
        logits[ord("a")], logits[first:] = 2.0, 2.0 + lead - torch.linspace(0, spread, 1501)
        tokens = [*PROMPT, ord("b"), ord("a")]
        theirs = WhisperTimeStampLogitsProcessor(config, begin_index=len(PROMPT))
        expected = theirs(torch.tensor([tokens]), logits[None])[0]
        found = timestamp_rules(vocabulary, len(PROMPT))(tokens, logits.clone())
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_confidence_adds_up_what_the_processors_before_it_left() -> None:
    confidence, draw = Confidence(), torch.Generator().manual_seed(0)
    prompt, new, expected = [1, 2], [4, 0, 3], 0.0
    for place, token in enumerate(new):
        logits = torch.randn(5, generator=draw)
        logits[1] = -math.inf
        assert confidence([*prompt, *new[:place]], logits) is logits
        expected += float(logits.log_softmax(0)[token])
    assert confidence.total(prompt, new) == pytest.approx(expected, abs=1e-5)


def test_confidence_counts_what_many_improbable_tokens_have_together() -> None:
    confidence, logits = Confidence(), torch.full((50_000,), -20.0)
    logits[7] = 0.0
    confidence([1], logits)
    expected = -math.log1p(49_999 * math.exp(-20.0))  # 1.0e-4
    assert confidence.total([1], [7]) == pytest.approx(expected, abs=1e-6)


def test_special_tokens_are_found_by_their_names(vocabulary: Vocabulary, oracle: tuple[Any, Any]) -> None:
    assert list(vocabulary.languages) == ["de", "en", "haw"]
    assert vocabulary.seconds(vocabulary.first_timestamp + 61) == pytest.approx(1.22)
    assert vocabulary.prompt("de", "translate", [9]) == [
        *(vocabulary.previous, 9, vocabulary.start, vocabulary.languages["de"], vocabulary.tasks["translate"])
    ]
    assert vocabulary.prompt("en", "transcribe", timestamps=False)[-1] == vocabulary.no_timestamps
    assert vocabulary.code(" German ") == "de"
    with pytest.raises(InputError, match="'klingon' is not one of the model's"):
        vocabulary.code("klingon")


def test_another_tokenizer_is_refused(oracle: tuple[Any, Any]) -> None:
    from toy_text import byte_tokenizer

    with pytest.raises(ModelError, match=r"no token <\|transcribe\|>"):
        Vocabulary.of(byte_tokenizer(), 263)
    with pytest.raises(ModelError, match="more tokens than the model's 262"):
        Vocabulary.of(oracle[1], 262)
