"""Global settings of PyTorch change neither loading nor decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch

import anabranch
from toy_text import ToyFolders


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


STATES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "default device meta": lambda: default_device("meta"),
    "in a device": lambda: torch.device("meta"),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype float16": lambda: default_dtype(torch.float16),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode off": lambda: torch.inference_mode(False),
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "gradients": torch.enable_grad,
    "deterministic algorithms": deterministic,
}
PROMPT = [5, 6, 7, 5, 6, 7, 8, 9, 5, 6]


def decoded(model: anabranch.Model) -> list[list[int]]:
    found = [
        model.generate(PROMPT, max_new_tokens=12, drafter=spec).token_ids
        for spec in ("none", "prompt_lookup", "streams:tree=6", "lookahead", "auto")
    ]
    sampled = model.generate([PROMPT, PROMPT[:4]], max_new_tokens=12, temperature=0.8, seed=3)
    return [*found, *(each.token_ids for each in sampled)]


@pytest.fixture(scope="module")
def wanted(toys: ToyFolders) -> list[list[int]]:
    with anabranch.load(str(toys.model), dtype="float32", adapter=str(toys.adapter)) as model:
        return decoded(model)


QUICK = ("default device meta", "default dtype float16", "autocast", "inference mode", "gradients")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in STATES]
)
def test_tokens_are_the_same_under_every_state(name: str, toys: ToyFolders, wanted: list[list[int]]) -> None:
    """Around loading, around decoding, and around both."""
    for loading, decoding in ((True, False), (False, True), (True, True)):
        with STATES[name]() if loading else nullcontext():
            model = anabranch.load(str(toys.model), dtype="float32", adapter=str(toys.adapter))
        with STATES[name]() if decoding else nullcontext():
            assert decoded(model) == wanted
        assert all(p.dtype == torch.float32 and p.device.type == "cpu" for p in model.target.decoder.parameters())
        model.close()
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_default_device().type == "cpu"
