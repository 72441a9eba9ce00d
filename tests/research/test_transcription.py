"""Whisper's published weights on real speech, against transformers; only where both are at hand.

    ANABRANCH_WHISPER=FOLDER ANABRANCH_SOUNDS=FOLDER pytest -m thorough tests/research/test_transcription.py

FOLDER is a model in CTranslate2's layout, and one with WAV files of English speech.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from anabranch.api import load
from anabranch.model.encoder import Source
from anabranch.native import library as native
from anabranch.speech.audio import Samples, log_mel, read_audio, window
from anabranch.speech.options import checked
from anabranch.speech.vocabulary import Vocabulary
from anabranch.speech.windows import Windows, segments_of
from transcription import transformers_model

WHISPER, SOUNDS = (os.environ.get(f"ANABRANCH_{name}", "") for name in ("WHISPER", "SOUNDS"))
TIE = 1e-3  # of two logits of transformers, between which float32 may choose otherwise in another order of sums

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not (WHISPER and SOUNDS), reason="set ANABRANCH_WHISPER and ANABRANCH_SOUNDS"),
]


@pytest.fixture(scope="module")
def sounds() -> list[Samples]:
    return [read_audio(path) for path in sorted(Path(SOUNDS).glob("*.wav"))]


def _rules(hf: Any, begin: int) -> LogitsProcessorList:
    given = hf.generation_config
    return LogitsProcessorList(
        [
            SuppressTokensAtBeginLogitsProcessor(given.begin_suppress_tokens, begin),
            SuppressTokensLogitsProcessor(given.suppress_tokens),
            WhisperTimeStampLogitsProcessor(given, begin_index=begin),
        ]
    )


def test_tokens_are_those_of_transformers(sounds: list[Samples]) -> None:
    """Window after window, each with the text before it; a difference is a tie."""
    model = load(WHISPER, drafter="none", dtype="float32", device="cpu")
    vocabulary = Vocabulary.of(model.tokenizer, model.target.config.vocab_size)
    hf, _ = transformers_model(Path(WHISPER), vocabulary, torch.float32)
    options = checked({"temperature": 0.0, "language": "en"})
    windows = Windows(model.scheduler, model.drafter_of("none"), model.target, vocabulary, options, threading.Event())
    for sound in sounds:
        features, start = log_mel(sound, hf.config.num_mel_bins), 0
        before: list[int] = []
        while start < features.shape[1]:
            part = window(features, start, features.shape[1], windows.frames)
            prompt = windows.prompt("en", before)
            decoded = windows.decode(Source(features=part), prompt)
            expected = _generated(hf, part, prompt, windows)
            if decoded.tokens != expected:
                _check_tie(hf, part, prompt, decoded.tokens, expected)
            frames = min(windows.frames, features.shape[1] - start)
            segments, start = segments_of(windows, decoded, start, frames)
            before += [token for segment in segments for token in segment.tokens]


@torch.inference_mode()
def _generated(hf: Any, features: torch.Tensor, prompt: list[int], windows: Windows) -> list[int]:
    """Greedy tokens of transformers, without the end token."""
    end = windows.vocabulary.end
    tokens = GenerationMixin.generate(
        hf,
        input_features=features[None],
        decoder_input_ids=torch.tensor([prompt]),
        logits_processor=_rules(hf, len(prompt)),
        generation_config=GenerationConfig(max_new_tokens=windows.longest, eos_token_id=end, pad_token_id=end),
    )[0, len(prompt) :].tolist()
    return [token for token in tokens if token != end]


@torch.inference_mode()
def _check_tie(hf: Any, features: torch.Tensor, prompt: list[int], ours: list[int], theirs: list[int]) -> None:
    end = hf.generation_config.eos_token_id
    at = next(at for at, (a, b) in enumerate(zip([*ours, end], [*theirs, end], strict=False)) if a != b)
    ids = torch.tensor([prompt + theirs[:at]])
    scores = hf(input_features=features[None], decoder_input_ids=ids).logits[:, -1].float()
    for rule in _rules(hf, len(prompt)):
        scores = rule(ids, scores)
    top = scores[0].topk(2).values
    assert float(top[0] - top[1]) < TIE, f"token {at}: {ours[at : at + 1]} for {theirs[at : at + 1]}"


@pytest.mark.skipif(native.library() is None, reason="only the native kernels are exact in bf16")
@pytest.mark.parametrize(("dtype", "quantize"), [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8")])
def test_drafts_change_no_token(sounds: list[Samples], dtype: str, quantize: str) -> None:
    model = load(WHISPER, drafter="none", dtype=dtype, quantize=quantize, device="cpu")
    plain = model.transcribe(sounds, language="en")
    for drafter, rows in (("prompt_lookup", 1), ("suffix", 4)):
        drafted = model.transcribe(sounds, language="en", drafter=drafter, rows=rows)
        for one, other in zip(plain, drafted, strict=True):
            assert [segment.tokens for segment in one.segments] == [segment.tokens for segment in other.segments]
