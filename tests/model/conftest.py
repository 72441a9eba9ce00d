from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from toys import CASES, Oracle, ToyMaker, save_toy, toy_hf

from anabranch.model.load import Target, load_target


@pytest.fixture(scope="session")
def make_toy(tmp_path_factory: pytest.TempPathFactory) -> ToyMaker:
    """Our decoder and transformers' model of a case of ``toys.CASES``, with the same weights."""

    @cache
    def make(case: str) -> tuple[Target, Oracle]:
        model_type, config = CASES[case]
        model = toy_hf(model_type, config)
        folder: Path = save_toy(model, tmp_path_factory.mktemp(case))
        return load_target(str(folder), dtype="float32", device="cpu"), Oracle(model)

    return make


@pytest.fixture(params=sorted(CASES))
def toy(request: pytest.FixtureRequest, make_toy: ToyMaker) -> tuple[Target, Oracle]:
    """Every case in turn."""
    return make_toy(request.param)
