from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from toy_text import ToyFolders, save_toys


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Toy tensors are faster on one thread, and equal runs give equal bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> ToyFolders:
    """Folders of a toy model and its adapter."""
    return save_toys(tmp_path_factory.mktemp("toys"))
