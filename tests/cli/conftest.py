from __future__ import annotations

import pytest

from anabranch.api import Model, load
from toy_text import ToyFolders


@pytest.fixture(scope="session")
def where(toys: ToyFolders) -> list[object]:
    """The options that choose the toy."""
    return ["--model", toys.model, "--adapter", toys.adapter, "--dtype", "float32", "--device", "cpu"]


@pytest.fixture(scope="session")
def model(toys: ToyFolders) -> Model:
    """The toy, loaded."""
    return load(toys.model, adapter=toys.adapter, dtype="float32", device="cpu")
