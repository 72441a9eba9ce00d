from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from toy_whisper import whisper_hf, whisper_tokenizer

from anabranch.api import Model, load


@pytest.fixture(scope="session")
def oracle() -> tuple[Any, Any]:
    """transformers' toy model and its tokenizer."""
    tokenizer = whisper_tokenizer()
    return whisper_hf(tokenizer), tokenizer


@pytest.fixture(scope="session")
def folder(oracle: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy in Hugging Face's layout."""
    made = tmp_path_factory.mktemp("whisper")
    for each in oracle:
        each.save_pretrained(made)
    return made


@pytest.fixture(scope="session")
def model(folder: Path) -> Model:
    """The toy, loaded in float32, with plain decoding as the default."""
    return load(folder, drafter="none", dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def sounds() -> list[NDArray[np.float32]]:
    """Three sounds at 16 kHz, of 3.1, 1 and 2 seconds: sweeps of tones with noise."""
    draw = np.random.default_rng(0)
    made = []
    for seconds, pitch in ((3.1, 300), (1.0, 900), (2.0, 500)):
        t = np.arange(int(16_000 * seconds)) / 16_000
        sound = 0.3 * np.sin(2 * np.pi * pitch * t * (1 + t)) + 0.05 * draw.normal(size=len(t))
        made.append(sound.astype(np.float32))
    return made
