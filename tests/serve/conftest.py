from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from served import SETTINGS, Server, running


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """One server for the tests that leave it as it was."""
    with running(replace(SETTINGS, names=("toy", "alias"))) as made:
        yield made
