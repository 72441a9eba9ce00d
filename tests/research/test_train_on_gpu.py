"""``research/train_on_gpu.py`` before a GPU is at hand: parts of a model, and the model in transformers."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train_on_gpu
from anabranch.model.cache import Cache
from anabranch.model.inputs import Inputs
from anabranch.model.weights import build_decoder
from small import LLAMA, prompt, randomise


def test_a_model_is_put_together_from_its_parts(tmp_path: Path) -> None:
    model, parts, there = tmp_path / "m.gguf", tmp_path / "parts", tmp_path / "there"
    model.write_bytes(bytes(range(256)) * 8000)
    train_on_gpu.split(Namespace(model=model, megabytes=1, out=parts))
    assert sorted(path.name for path in parts.iterdir()) == [
        *("m.gguf.part000", "m.gguf.part001", "m.gguf.part002", "m.gguf.sha256")
    ]
    there.mkdir()
    train_on_gpu.join(there / "m.gguf", parts)
    assert (there / "m.gguf").read_bytes() == model.read_bytes()
    (parts / "m.gguf.part001").unlink()
    with pytest.raises(ValueError, match="are not the whole file; copy them again"):
        train_on_gpu.join(there / "m.gguf", parts)
    assert sorted(path.name for path in there.iterdir()) == ["m.gguf"]


@torch.inference_mode()
def test_transformers_has_the_same_model() -> None:
    decoder = build_decoder(replace(LLAMA, family="qwen2", qkv_bias=True), device="cpu")
    randomise(decoder, seed=3)
    text = prompt(12)
    cache = Cache(decoder.config, rows=1, capacity=32, dtype=decoder.dtype, device=decoder.device)
    cache.add_row()
    ours = decoder(Inputs.of_prompt(text), cache).logits_MV
    theirs = train_on_gpu.in_transformers(decoder)(torch.tensor([text])).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
