"""Sounds: formats, channels and rates of WAV files, broken ones, and features equal to those of transformers."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.io import wavfile

from anabranch.errors import AnabranchWarning, FileError, InputError
from anabranch.speech import audio
from anabranch.speech.audio import RATE, log_mel, read_audio, window

TONE = (0.5 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)).astype(np.float32)  # one second


def _written(folder: Path, data: NDArray[Any], rate: int = RATE) -> Path:
    path = folder / "sound.wav"
    wavfile.write(path, rate, data)
    return path


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ((TONE * 32767).astype(np.int16), 1e-4),
        ((TONE * 2147483647).astype(np.int32), 1e-6),
        ((128 + TONE * 127).astype(np.uint8), 0.02),
        (TONE, 0.0),
        (TONE.astype(np.float64), 0.0),
        (np.stack([TONE, 0.5 * TONE], axis=1) / 0.75, 1e-6),
    ],
)
def test_every_format_is_read_as_the_same_samples(tmp_path: Path, data: NDArray[Any], error: float) -> None:
    samples = read_audio(_written(tmp_path, data))
    assert samples.dtype == np.float32
    np.testing.assert_allclose(samples, TONE, atol=error)


@pytest.mark.parametrize("rate", [8_000, 22_050, 48_000])
def test_other_rates_are_resampled(tmp_path: Path, rate: int) -> None:
    tone = (0.5 * np.sin(2 * np.pi * 440 * np.arange(rate) / rate)).astype(np.float32)
    for samples in (read_audio(_written(tmp_path, tone, rate)), read_audio(tone, rate)):
        assert len(samples) == RATE
        np.testing.assert_allclose(samples[800:-800], TONE[800:-800], atol=0.01)


def test_arrays_and_tensors_are_sounds() -> None:
    np.testing.assert_array_equal(read_audio(TONE), TONE)
    np.testing.assert_array_equal(read_audio(torch.from_numpy(TONE)), TONE)
    np.testing.assert_allclose(read_audio((TONE * 32767).astype(np.int16)), TONE, atol=1e-4)


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros((2, 10), np.float32), "one dimension"),
        (np.array(["a"]), "array of numbers"),
        (np.zeros(0, np.float32), "has no sound"),
        (np.array([0.0, np.nan]), "not finite"),
        (3.0, "one dimension"),
        (None, "array of numbers"),
    ],
)
def test_other_arrays_are_one_sentence(array: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_audio(array)


def test_a_rate_out_of_range_is_refused() -> None:
    with pytest.raises(InputError, match="sampling_rate must be between"):
        read_audio(TONE, 0)


@pytest.mark.parametrize("cut", [0, 10, 30, 44])
def test_a_broken_file_is_one_sentence(tmp_path: Path, cut: int) -> None:
    path = _written(tmp_path, TONE)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(FileError, match=r"sound\.wav (is not a WAV file|has no sound)") as raised:
        read_audio(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("data", [b"not a sound at all" * 9, b"RIFF\xff\xff\xff\xffWAVEfmt " + b"\x07" * 90])
def test_another_file_is_one_sentence(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "sound.wav"
    path.write_bytes(data)
    with pytest.raises(FileError, match=r"convert it, for example with ffmpeg -i sound\.wav"):
        read_audio(path)
    with pytest.raises(FileError, match="there is no file"):
        read_audio(tmp_path)


def test_a_file_that_ends_early_is_read_with_a_warning(tmp_path: Path) -> None:
    path = _written(tmp_path, (TONE * 32767).astype(np.int16))
    whole = path.read_bytes()
    path.write_bytes(whole[: 44 + RATE])
    with pytest.warns(AnabranchWarning, match="0.5 s of sound are there"):
        assert len(read_audio(path)) == RATE // 2


def test_a_file_written_to_a_pipe_states_no_size_and_is_read_in_silence(tmp_path: Path) -> None:
    path = _written(tmp_path, (TONE * 32767).astype(np.int16))
    whole = path.read_bytes()
    riff, data = struct.pack("<I", 0x7FFFF024), struct.pack("<I", 0x7FFFF000)
    path.write_bytes(whole[:4] + riff + whole[8:40] + data + whole[44:])
    assert len(read_audio(path)) == RATE


def test_features_are_those_of_transformers_whatever_the_length_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import WhisperFeatureExtractor

    draw = np.random.default_rng(0)
    quiet = 1e-4 * draw.normal(size=3 * RATE).astype(np.float32)
    samples = np.concatenate([quiet, TONE, quiet, TONE * 0.1])
    padded = np.pad(samples, (0, RATE))
    extractor = WhisperFeatureExtractor(feature_size=80)
    expected = extractor(padded, sampling_rate=RATE, padding="longest", truncation=False, return_tensors="pt")
    frames = len(samples) // 160
    found = log_mel(samples, 80)
    assert found.shape == (80, frames)
    torch.testing.assert_close(found, expected["input_features"][0][:, :frames], rtol=0, atol=1e-6)
    monkeypatch.setattr(audio, "AT_ONCE", 70)
    torch.testing.assert_close(log_mel(samples, 80), found, rtol=0, atol=1e-6)


@pytest.mark.parametrize("count", [1, 159, 160, 401])
def test_the_shortest_sounds_have_features(count: int) -> None:
    features = log_mel(TONE[:count], 16)
    assert features.shape == (16, max(1, count // 160))
    assert window(features, 0, features.shape[1], 3000).shape == (16, 3000)
