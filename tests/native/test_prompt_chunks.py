"""A prompt leaves the same keys and values to the bit wherever its chunks end: chunks are as long as a time allows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import test_kernels
import torch
from test_kernels import CACHED, cache, model_of, tokens

from anabranch.model.decoder import Decoder
from anabranch.model.inputs import Inputs

pytestmark = test_kernels.needs_kernels

LENGTH = 150


def read(model: Decoder, chunks: Sequence[int]) -> torch.Tensor:
    memory = cache(model)
    text, start = tokens(LENGTH, 1), 0
    for chunk in chunks:
        with torch.inference_mode():
            model(Inputs.of_prompt(text[start : start + chunk]), memory, slots=slice(0, 1), need="keys")
        memory.commit([range(chunk)])
        start += chunk
    assert start == LENGTH
    return torch.stack((memory.keys[:, 0, :, :LENGTH], memory.values[:, 0, :, :LENGTH]))


@pytest.mark.parametrize("form", ["bfloat16", "float32", "int8", "int4", "bfloat16" + CACHED, "int8" + CACHED])
@pytest.mark.parametrize("name", ["llama", "sliding window (mistral)"])
def test_chunks_may_end_anywhere(name: str, form: str) -> None:
    model = model_of(name, form)
    whole = read(model, [LENGTH])
    for chunks in ([64, 64, 22], [1, 16, 133], [37] * 4 + [2]):
        assert torch.equal(read(model, chunks), whole), chunks
