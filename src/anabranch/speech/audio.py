"""Sound: WAV files and arrays as mono samples at 16 kHz, and the log-mel spectrogram that Whisper reads."""

from __future__ import annotations

import math
import struct
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.errors import AnabranchWarning, FileError, InputError, ModelError, one_line
from anabranch.support.log import warn

__all__ = ["FRAMES_A_SECOND", "RATE", "log_mel", "read_audio", "window"]

RATE = 16_000  # samples a second
HOP = 160  # samples a frame
FRAMES_A_SECOND = RATE // HOP
FFT = 400  # samples that a frame sees
AT_ONCE = 12_000  # frames computed together, which bounds memory: 50 MB at any length of a file
EDGE = 4  # frames of overlap, more than the samples beyond its own that a frame sees
RANGE = 2.0  # 80 dB, in units of the features: what is quieter than the loudest by more is cut off
RATES = (1_000, 768_000)  # samples a second that a file may have
STREAMED = 0x7FFF_0000  # bytes: headers of sounds that were written to a pipe claim at least this many
Samples = NDArray[np.float32]


def read_audio(audio: Any, sampling_rate: int = RATE) -> Samples:
    """Mono samples at 16 kHz in [-1, 1], float32 [samples], of a WAV file or of an array.

    audio          a path, or an array or tensor [samples] of floats in [-1, 1] or of integers of their type's range
    sampling_rate  of an array, in Hz

    Raises FileError for a file that is no sound, InputError for an array that is none.
    """
    if isinstance(audio, str | Path):
        return _read_file(Path(audio).expanduser())
    array = audio.detach().cpu().numpy() if isinstance(audio, Tensor) else np.asarray(audio)
    if array.ndim != 1 or array.dtype.kind not in "fiu":
        raise InputError(
            "a sound must be a path or an array of numbers of one dimension, got "
            f"{type(audio).__name__} of {array.dtype} with the shape {array.shape}; average its channels"
        )
    if not RATES[0] <= sampling_rate <= RATES[1]:
        raise InputError(f"sampling_rate must be between {RATES[0]} and {RATES[1]} Hz, got {sampling_rate}")
    return _checked(_resampled(_mono(array), int(sampling_rate)), "the array", InputError)


def _read_file(path: Path) -> Samples:
    try:
        from scipy.io import wavfile
    except ImportError as error:
        raise FileError("reading sound files needs scipy; run pip install 'anabranch[speech]'") from error
    convert = f"convert it, for example with ffmpeg -i {path.name} -ar {RATE} -ac 1 sound.wav"
    if not path.is_file():
        raise FileError(f"there is no file {path}; give the path of a WAV file")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rate, data = wavfile.read(path)
    except OSError as error:
        raise FileError(f"{path} cannot be read ({error.strerror or one_line(error)})") from error
    except (ValueError, TypeError, struct.error, EOFError, OverflowError, ZeroDivisionError, MemoryError) as error:
        raise FileError(f"{path} is not a WAV file that can be read ({one_line(error, 80)}); {convert}") from error
    if not RATES[0] <= rate <= RATES[1] or data.ndim > 2 or data.dtype.kind not in "fiu":
        raise FileError(f"{path} is not a usual sound: {rate} Hz, {data.dtype}, shape {data.shape}; {convert}")
    if any("prematurely" in str(each.message) for each in caught) and not _streamed(path):
        warn(
            f"{path} ends before the end that its header states; {len(data) / rate:.1f} s of sound are there",
            AnabranchWarning,
            stacklevel=3,
        )
    return _checked(_resampled(_mono(data), int(rate)), str(path), FileError)


def _streamed(path: Path) -> bool:
    """True if the header of a WAV file states no size, as that of one written to a pipe."""
    with path.open("rb") as file:
        head = file.read(8)
    return len(head) == 8 and struct.unpack("<I", head[4:])[0] >= STREAMED


def _mono(data: NDArray[Any]) -> Samples:
    """Samples [samples] or [samples, channels] as the mean of the channels, in [-1, 1]."""
    if data.dtype.kind in "iu":
        limit = 2.0 ** (8 * data.dtype.itemsize - 1)
        data = data.astype(np.float32) / limit - (1.0 if data.dtype.kind == "u" else 0.0)
    mixed = data if data.ndim == 1 else data.mean(axis=1)
    return mixed.astype(np.float32, copy=False)


def _resampled(samples: Samples, rate: int) -> Samples:
    if rate == RATE or not len(samples):
        return samples
    try:
        from scipy.signal import resample_poly
    except ImportError as error:
        raise InputError(f"sound at {rate} Hz needs scipy; run pip install 'anabranch[speech]'") from error
    common = math.gcd(RATE, rate)
    return np.asarray(resample_poly(samples, RATE // common, rate // common), np.float32)


def _checked(samples: Samples, name: str, error: type[FileError | InputError]) -> Samples:
    if not len(samples):
        raise error(f"{name} has no sound; give at least one sample")
    if not np.isfinite(samples).all():
        raise error(f"{name} has samples that are not finite numbers; write the sound again")
    return samples


@cache
def _extractor(bins: int) -> Any:
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=bins, sampling_rate=RATE, hop_length=HOP, n_fft=FFT)


def log_mel(samples: Samples, bins: int) -> Tensor:
    """The log-mel spectrogram [bins, frames] of samples [samples], float32, by transformers' feature extractor.

    It is computed part by part. What is 80 dB below the loudest frame is cut off, in each part and then in the whole.
    """
    if not 1 <= bins <= 256:
        raise ModelError(f"the model reads {bins} mel bins, and Whisper's features have 80 or 128")
    frames = max(1, len(samples) // HOP)
    padded = np.pad(samples, (0, FFT))  # so that the last frames see silence, as in OpenAI's Whisper
    parts = []
    for start in range(0, frames, AT_ONCE):
        first = max(0, start - EDGE)
        part = padded[first * HOP : (min(start + AT_ONCE, frames) + EDGE) * HOP]
        extracted = _extractor(bins)(part, sampling_rate=RATE, padding="longest", truncation=False, return_tensors="pt")
        parts.append(extracted["input_features"][0][:, start - first :][:, : min(AT_ONCE, frames - start)])
    features = torch.cat(parts, dim=1)
    return features.clamp_(min=float(features.max()) - RANGE)


def window(features: Tensor, start: int, stop: int, frames: int) -> Tensor:
    """The frames from ``start`` to ``stop``, cut off at or padded with zeros to ``frames``, which the encoder reads."""
    part = features[:, start : min(stop, start + frames)]
    return torch.nn.functional.pad(part, (0, frames - part.shape[1]))
