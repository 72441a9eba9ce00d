"""A prompt leaves the same keys and values to the bit wherever its chunks end, and however much of it was kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import test_kernels
import torch
from test_kernels import CACHED, cache, model_of, tokens

from anabranch.decoding.engine import Request
from anabranch.decoding.prefix_files import PrefixFiles
from anabranch.decoding.prefixes import Prefixes
from anabranch.decoding.scheduler import Scheduler
from anabranch.methods.none import NoDrafter
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


@pytest.mark.parametrize("form", ["bfloat16", "bfloat16" + CACHED])
def test_texts_on_disk_come_back_to_the_bit(form: str, tmp_path: Path) -> None:
    model, found = model_of("llama", form), []
    for reused in (0, 149):
        scheduler = Scheduler(model)
        scheduler.keep(Prefixes(2**24, PrefixFiles(tmp_path, form, 2**24)))
        ticket = scheduler.submit(Request(tokens(LENGTH, 1), 20), NoDrafter())
        while not ticket.emitted:
            scheduler.tick()
        assert ticket.reused == reused
        assert scheduler.engine is not None
        memory = scheduler.engine.cache
        found.append(torch.stack((memory.keys[:, 0, :, :LENGTH], memory.values[:, 0, :, :LENGTH])))
        while scheduler.busy:
            scheduler.tick()
        scheduler.close()
    assert torch.equal(*found)
