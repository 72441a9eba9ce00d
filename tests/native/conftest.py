from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield
