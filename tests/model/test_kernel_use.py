"""The kernels that decode a target, and the warning where they are not the best that the machine could run."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch.errors import PerformanceWarning
from anabranch.model import kernel_use
from anabranch.model.config import EncoderConfig, ModelConfig, RopeConfig
from anabranch.model.decoder import Decoder
from anabranch.model.kernel_use import kernels_of
from anabranch.model.pack import pack_decoder
from anabranch.native import library as native
from anabranch.native import recipe, selection
from small import LLAMA, randomise

FITS = replace(
    LLAMA, hidden_size=64, head_dim=32, num_heads=2, intermediate_size=64, rope=RopeConfig(dim=32, max_positions=96)
)
needs_kernels = pytest.mark.skipif(native.library() is None, reason=f"no native kernels here: {native.why_not()}")


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing has been warned of, and the kernels are looked for again."""
    monkeypatch.setattr(kernel_use, "_warned", set())
    yield
    native.forget()


def encoder(**changes: Any) -> EncoderConfig:
    return EncoderConfig(replace(FITS, position="none", **changes), start=(0,))


def packed(config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    model = Decoder(config)
    randomise(model, 0)
    model = model.to(dtype).eval().requires_grad_(False)
    pack_decoder(model)
    return model


def warned(config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        packed(config, dtype)
    assert all(w.category is PerformanceWarning for w in found)
    assert all(w.filename == __file__ for w in found), "a warning names the line that packed the target"
    return [str(w.message) for w in found]


@needs_kernels
def test_the_best_kernels_are_not_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANABRANCH_KERNELS", raising=False)
    native.forget()
    assert warned(FITS) == []
    assert warned(replace(FITS, encoder=encoder())) == []
    use = kernels_of(packed(FITS))
    assert (use.name, use.why, use.advice) == (selection.instruction_sets()[0], "", "")


@needs_kernels
@pytest.mark.parametrize(
    ("changes", "dtype", "why"),
    [
        ({"norm": "layer", "qk_norm": "head"}, torch.bfloat16, "have LayerNorm only before attention and MLP; use a"),
        ({"intermediate_size": 48}, torch.bfloat16, "multiples of 32, and intermediate_size is 48"),
        ({"head_dim": 160}, torch.bfloat16, "at most 128 channels or of 256, not of 160"),
        ({"encoder": encoder(head_dim=40)}, torch.bfloat16, "multiples of 32, and head_dim is 40 in the encoder"),
        ({}, torch.float16, "take bfloat16 and float32, not float16; load it in bfloat16"),
    ],
)
def test_targets_that_are_not_covered(changes: dict[str, object], dtype: torch.dtype, why: str) -> None:
    config = replace(FITS, **changes)
    (message,) = warned(config, dtype)
    assert message.startswith("decoding runs on PyTorch's kernels, which are slower: the native kernels")
    assert why in message
    assert warned(config, dtype) == [], "it was said before"
    use = kernels_of(packed(config, dtype))
    assert use.name == "torch"
    assert use.why in message
    assert use.advice in message


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if selection.unfit() is not None:
        pytest.skip("the kernels are not for this machine")
    monkeypatch.setattr(recipe, "PACKED", tmp_path)
    monkeypatch.setitem(sys.modules, "ziglang", None)
    for name, value in {"ANABRANCH_HOME": str(tmp_path), "PATH": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    for name in ("CXX", "ANABRANCH_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    native.forget()
    (message,) = warned(FITS)
    assert "there is no C++ compiler; install g++" in message


def test_kernels_that_the_user_turned_off_are_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANABRANCH_KERNELS", "none")
    native.forget()
    assert warned(FITS) == []
    use = kernels_of(packed(FITS))
    assert (use.name, use.why, use.advice) == ("torch", "ANABRANCH_KERNELS is none", "unset it")


def test_no_warning_on_other_devices() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel_use.warn_about_kernels(Decoder(FITS).to("meta"))
