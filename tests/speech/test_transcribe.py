"""Transcripts: the tokens of transformers, whatever is drafted or decoded beside them; one sentence for bad input."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.io import wavfile
from toy_whisper import FRAMES, write_ctranslate2
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from anabranch.api import Model, load
from anabranch.decoding.stats import Stats
from anabranch.errors import AnabranchError, CapabilityError, FileError, InputError
from anabranch.model.encoder import Source
from anabranch.speech.audio import log_mel, window
from anabranch.speech.options import checked
from anabranch.speech.transcripts import Transcript, cut_at_pauses
from anabranch.speech.vocabulary import Vocabulary
from anabranch.speech.windows import Hypothesis, Windows, segments_of
from toy_text import ToyFolders, toy_model

Sounds = list[NDArray[np.float32]]
GREEDY: Any = {"temperature": 0.0, "language": "en"}
SILENCE = [np.zeros(16_000, np.float32), np.ones(16_000, np.float32), np.zeros(1, np.float32)]
SILENCE += [np.random.default_rng(0).uniform(-1, 1, 16_000).astype(np.float32)]  # noise as loud as there is
FALLBACK: Any = {"temperature": (0.0, 0.8)}


def _tokens(transcript: Transcript) -> list[list[int]]:
    return [segment.tokens for segment in transcript.segments]


def _windows(model: Model, **options: Any) -> Windows:
    vocabulary = Vocabulary.of(model.tokenizer, model.target.config.vocab_size)
    drafter = model.drafter_of(model.spec)
    return Windows(model.scheduler, drafter, model.target, vocabulary, checked(options), threading.Event())


def _rules(hf: Any, begin: int) -> list[Any]:
    given = hf.generation_config
    return [
        SuppressTokensAtBeginLogitsProcessor(given.begin_suppress_tokens, begin),
        SuppressTokensLogitsProcessor(given.suppress_tokens),
        WhisperTimeStampLogitsProcessor(given, begin_index=begin),
    ]


def _window(sound: NDArray[np.float32]) -> torch.Tensor:
    return window(log_mel(sound, 16), 0, FRAMES, FRAMES)


# -- the reference ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("timestamps", [True, False])
def test_a_window_has_the_tokens_of_transformers(
    oracle: tuple[Any, Any], model: Model, sounds: Sounds, timestamps: bool
) -> None:
    hf, _ = oracle
    windows = _windows(model, **GREEDY, timestamps=timestamps)
    for sound in sounds:
        features = _window(sound)
        found = windows.decode(Source(features=features), windows.prompt("en", ()))
        prompt = windows.prompt("en", ())
        expected = GenerationMixin.generate(  # without Whisper's own loop over windows
            hf,
            input_features=features[None],
            decoder_input_ids=torch.tensor([prompt]),
            logits_processor=LogitsProcessorList(_rules(hf, len(prompt))[: 3 if timestamps else 2]),
            generation_config=GenerationConfig(max_new_tokens=windows.longest, eos_token_id=windows.vocabulary.end),
        )[0, len(prompt) :].tolist()
        assert found.tokens == [token for token in expected if token != windows.vocabulary.end]
        assert len(found.tokens) > 3


def test_the_mean_log_probability_and_the_silence_are_those_of_transformers(
    oracle: tuple[Any, Any], model: Model, sounds: Sounds
) -> None:
    hf, _ = oracle
    windows = _windows(model, **GREEDY)
    features = _window(sounds[0])
    found = windows.decode(Source(features=features), windows.prompt("en", ()))
    prompt, end = windows.prompt("en", ()), windows.vocabulary.end
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *found.tokens]])
        logits = hf(input_features=features[None], decoder_input_ids=ids).logits[0]
    total, new = 0.0, [*found.tokens, end][: windows.longest]
    for place, token in enumerate(new, len(prompt)):
        scores = logits[place - 1 : place]
        for rule in _rules(hf, len(prompt)):
            scores = rule(ids[:, :place], scores)
        total += float(scores[0].log_softmax(0)[token])
    assert found.avg_log_prob == pytest.approx(total / (len(found.tokens) + 1), abs=1e-4)
    assert found.avg_log_prob < -1
    assert found.no_speech_prob == pytest.approx(float(logits[0].softmax(0)[windows.vocabulary.no_speech]), abs=1e-5)


def test_the_language_is_that_of_transformers(oracle: tuple[Any, Any], model: Model, sounds: Sounds) -> None:
    hf, tokenizer = oracle
    for sound in sounds:
        features = _window(sound)
        (expected,) = hf.detect_language(features[None])
        code, probability = _windows(model).language(Source(features=features))
        assert tokenizer.convert_ids_to_tokens(int(expected)) == f"<|{code}|>"
        assert 1 / 3 <= probability <= 1


def test_the_encoder_reads_each_window_once(model: Model, sounds: Sounds, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    encoder = model.target.decoder.encoder
    assert encoder is not None
    monkeypatch.setattr(encoder, "begun", lambda *given, of=encoder.begun: read.append(given) or of(*given))
    with_language = model.transcribe(sounds[0], temperature=0.0, language=None)
    count = len(read)
    given = model.transcribe(sounds[0], temperature=0.0, language=with_language.language)
    assert count == len(read) - count > 0
    assert _tokens(with_language) == _tokens(given)


# -- lossless --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("prompt_lookup", {"temperature": 0.0}),
        ("auto", {"temperature": (0.0, 0.6), "seed": 7}),
        *(
            pytest.param(drafter, options, marks=pytest.mark.thorough)
            for drafter in ("suffix", "prompt_lookup:matches=3+suffix")
            for options in ({"temperature": 0.0}, {"temperature": (0.0, 0.6), "seed": 7})
        ),
    ],
)
def test_drafts_change_nothing(model: Model, sounds: Sounds, drafter: str, options: dict[str, Any]) -> None:
    plain = model.transcribe(sounds, **options)
    drafted = model.transcribe(sounds, drafter=drafter, **options)
    assert list(map(_tokens, drafted)) == list(map(_tokens, plain))
    assert [each.text for each in drafted] == [each.text for each in plain]
    assert sum(each.stats.draft_nodes for each in drafted) > 0


@pytest.mark.parametrize(
    "options",
    [
        {"parallel": True},
        *(
            pytest.param(options, marks=pytest.mark.thorough)
            for options in ({}, {"condition_on_previous_text": False, "task": "translate"})
        ),
    ],
)
def test_a_sound_does_not_depend_on_those_beside_it(model: Model, sounds: Sounds, options: dict[str, Any]) -> None:
    together = model.transcribe([*sounds, sounds[0]], rows=3, **FALLBACK, **options)
    for sound, found in zip([*sounds, sounds[0]], together, strict=True):
        alone = model.transcribe(sound, rows=1, **FALLBACK, **options)
        assert _tokens(alone) == _tokens(found)
        assert (alone.text, alone.language, alone.duration) == (found.text, found.language, found.duration)


def test_both_layouts_decode_the_same(oracle: tuple[Any, Any], model: Model, sounds: Sounds, tmp_path: Path) -> None:
    converted = load(
        write_ctranslate2(oracle, tmp_path / "model", dtype="float32"), drafter="none", dtype="float32", device="cpu"
    )
    assert _tokens(converted.transcribe(sounds[0], **FALLBACK)) == _tokens(model.transcribe(sounds[0], **FALLBACK))


def test_a_seed_makes_a_text_and_another_one_makes_another(model: Model, sounds: Sounds) -> None:
    drawn = [model.transcribe(sounds[0], temperature=1.0, seed=seed).text for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


# -- thresholds ------------------------------------------------------------------------------------------
def test_temperatures_are_tried_until_a_text_fits(model: Model, sounds: Sounds) -> None:
    def temperatures(**options: Any) -> set[float]:
        given: Any = {"temperature": (0.0, 0.5, 1.0), "language": "en", "no_speech_threshold": 1.0, **options}
        return {segment.temperature for segment in model.transcribe(sounds[0], **given).segments}

    assert temperatures(log_prob_threshold=-100.0, compression_ratio_threshold=100.0) == {0.0}
    assert temperatures(log_prob_threshold=-0.001) == {1.0}
    assert temperatures(log_prob_threshold=-100.0, compression_ratio_threshold=0.01) == {1.0}


def test_improbable_text_where_nothing_is_said_is_left_out(model: Model, sounds: Sounds) -> None:
    silent = model.transcribe(sounds[0], log_prob_threshold=-0.001, no_speech_threshold=0.0)
    assert (silent.text, silent.segments) == ("", [])
    assert silent.stats.tokens > 0


@pytest.mark.parametrize("sound", SILENCE)
def test_silence_and_noise_are_decoded_without_error(model: Model, sound: NDArray[np.float32]) -> None:
    found = model.transcribe(sound, **FALLBACK)
    assert found.duration == len(sound) / 16_000
    assert all(0 <= segment.start < segment.end <= 3 for segment in found.segments)


# -- windows and segments --------------------------------------------------------------------------------
def _marks(model: Model, *marks: Any) -> list[int]:
    """Tokens from times in seconds and letters."""
    first = Vocabulary.of(model.tokenizer, model.target.config.vocab_size).first_timestamp
    return [first + round(50 * each) if isinstance(each, float) else model.tokenizer.encode(each)[0] for each in marks]


@pytest.mark.parametrize(
    ("marks", "expected", "step"),
    [
        # two segments, and the beginning of a third, which the next window begins with
        ((0.0, "a", 1.0, 1.5, "b", 2.0, 2.0, "c"), [(5.0, 6.0, "a"), (6.5, 7.0, "b")], 200),
        # a timestamp at the end: nothing is said after it
        ((0.0, "a", 1.0, 1.5, "b", 2.0), [(5.0, 6.0, "a"), (6.5, 7.0, "b")], 1000),
        ((0.0, "a", 1.0), [(5.0, 6.0, "a")], 1000),
        ((0.0, "a"), [(5.0, 15.0, "a")], 1000),
        (("a", "b"), [(5.0, 15.0, "ab")], 1000),
        ((), [], 1000),
    ],
)
def test_segments_end_where_timestamps_meet(
    model: Model, marks: tuple[Any, ...], expected: list[tuple[float, float, str]], step: int
) -> None:
    found = Hypothesis(_marks(model, *marks), "", 0.0, 0.0, 1.0, Stats(), "none")
    segments, following = segments_of(_windows(model), found, 500, 1000)
    assert [(each.start, each.end, each.text) for each in segments] == expected
    assert following == 500 + step


def test_a_window_that_is_decoded_as_a_whole_keeps_its_last_segment(model: Model) -> None:
    tokens = _marks(model, 0.0, "a", 1.0, 1.0, "b")
    found = Hypothesis(tokens, "", 0.0, 0.0, 1.0, Stats(), "none")
    segments, following = segments_of(_windows(model), found, 0, 1000, whole=True)
    assert [(each.start, each.end, each.text) for each in segments] == [(0.0, 1.0, "a"), (1.0, 10.0, "b")]
    assert following == 1000


def test_long_sounds_are_cut_at_the_quietest_places() -> None:
    loud = torch.ones(4, 9000)
    loud[:, 2600:2640] = loud[:, 4700:4720] = 0.0
    loud[:, 100:900] = -1.0  # too early for a window of at least 20 s
    cuts = cut_at_pauses(loud, 3000)
    assert [start for start, _ in cuts[:3]] == [0, cuts[0][1], cuts[1][1]]
    assert 2600 <= cuts[0][1] <= 2640
    assert 4700 <= cuts[1][1] <= 4720
    assert cuts[-1][1] == 9000
    assert all(stop - start <= 3000 for start, stop in cuts)
    assert cut_at_pauses(torch.ones(4, 10), 3000) == [(0, 10)]


def test_windows_follow_each_other_and_are_shown_the_text_before(model: Model, sounds: Sounds) -> None:
    sound = np.concatenate(sounds)  # 6.1 s
    done: list[tuple[float, float]] = []
    options: Any = {"temperature": 0.0, "language": "en", "log_prob_threshold": -100.0}
    found = model.transcribe(sound, on_progress=lambda *each: done.append(each), **options)
    assert done[-1] == (pytest.approx(6.1, abs=0.01), pytest.approx(6.1, abs=0.01))
    assert [each for each, _ in done] == sorted(each for each, _ in done)
    starts = [segment.start for segment in found.segments]
    assert starts == sorted(starts)
    assert starts[-1] >= 3
    other = model.transcribe(sound, condition_on_previous_text=False, **options)
    assert _tokens(other)[0] == _tokens(found)[0]
    assert _tokens(other) != _tokens(found)
    assert model.transcribe(sound, initial_prompt="Names: Nagg.", **options).text != found.text
    cut = model.transcribe(sound, parallel=True, rows=2, **options)
    assert [segment.start for segment in cut.segments] == sorted(segment.start for segment in cut.segments)
    assert cut.segments[-1].end <= 6.1


# -- bad input -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"language": "klingon"}, "'klingon' is not one of the model's"),
        ({"task": "sing"}, "task must be 'transcribe' or 'translate'"),
        ({"temperature": -1.0}, "temperature must be at least 0"),
        ({"temperature": ()}, "temperature must be a number or a list"),
        ({"temperature": "hot"}, "temperature must be a number or a list"),
        ({"rows": 0}, "rows must be a whole number of at least 1"),
        ({"beam_size": 5}, "there is no option 'beam_size'"),
        ({"no_speech_threshold": float("nan")}, "no_speech_threshold must be a finite number"),
        ({"timestamps": "no"}, "timestamps must be True or False"),
        ({"drafter": "prompt_lookup:tokens=x"}, "tokens must be a whole number"),
    ],
)
def test_a_wrong_option_is_one_sentence(model: Model, sounds: Sounds, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        model.transcribe(sounds[0], **options)


def test_one_bad_file_of_several_is_one_sentence_before_anything_is_decoded(
    model: Model, sounds: Sounds, tmp_path: Path
) -> None:
    (tmp_path / "bad.wav").write_bytes(b"RIFF")
    with pytest.raises(FileError, match=r"bad\.wav is not a WAV file"):
        model.transcribe([sounds[0], tmp_path / "bad.wav"])
    assert model.transcribe([]) == []
    assert not model.scheduler.busy


def test_models_of_text_do_not_transcribe_and_whisper_does_not_chat(
    model: Model, sounds: Sounds, folder: Path, toys: ToyFolders
) -> None:
    with pytest.raises(CapabilityError, match="toy reads text, and only Whisper models transcribe"):
        toy_model().transcribe(sounds[0])
    with pytest.raises(AnabranchError):
        model.chat([{"role": "user", "content": "hello"}])
    with pytest.raises(CapabilityError, match="the draft model reads no source and the target reads sound in 16 mel"):
        model.transcribe(sounds[0], drafter=f"draft_model:model={toys.model}")
    with pytest.raises(
        CapabilityError, match="the draft model reads sound in 16 mel bins and the target reads no sour"
    ):
        toy_model().generate("hello", drafter=f"draft_model:model={folder}")


def test_closing_the_generator_ends_all_sounds(model: Model, sounds: Sounds) -> None:
    each = model.transcripts(sounds, rows=2, **GREEDY)
    assert next(each).text
    each.close()
    assert not model.scheduler.busy


def test_what_a_callback_raises_ends_the_call(model: Model, sounds: Sounds) -> None:
    def stop(done: float, total: float) -> None:
        raise CancelledError("enough")

    with pytest.raises(CancelledError, match="enough"):
        model.transcribe(sounds[0], on_progress=stop, **GREEDY)
    assert not model.scheduler.busy


def test_two_calls_at_once_give_what_each_gives_alone(model: Model, sounds: Sounds) -> None:
    found: dict[int, Transcript] = {}

    def run(number: int) -> None:
        found[number] = model.transcribe(sounds[number], **FALLBACK)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, sound in enumerate(sounds):
        assert _tokens(model.transcribe(sound, **FALLBACK)) == _tokens(found[number])


def test_files_and_arrays_are_the_same(model: Model, sounds: Sounds, tmp_path: Path) -> None:
    wavfile.write(tmp_path / "sound.wav", 16_000, sounds[0])
    assert _tokens(model.transcribe(tmp_path / "sound.wav", **GREEDY)) == _tokens(model.transcribe(sounds[0], **GREEDY))
