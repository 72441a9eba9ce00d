"""Forked child processes: what was loaded before decodes on, and PyTorch's threads work there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from anabranch import load
from anabranch.api import Model
from anabranch.errors import DeviceError, InputError
from anabranch.learning.examples import Example
from anabranch.train.job import train_adapter, trainable
from children import SECONDS, in_child
from small import as_target, small
from toy_text import ToyFolders

PROMPT = [3, 4, 5, 3, 4]

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")


@pytest.fixture(autouse=True)
def _threads(restored_threads: int) -> None:
    """Two threads of PyTorch, and the pool of OpenMP that they need."""
    torch.set_num_threads(2)
    _parallel()


@pytest.fixture
def model(toys: ToyFolders) -> Model:
    return load(toys.model, dtype="float32", drafter="prompt_lookup", threads=2)


def _parallel() -> bool:
    """Operations for several threads: a product, which MKL or oneDNN runs, and a sum."""
    return bool((torch.ones(300, 300) @ torch.ones(300, 300)).sum() == 300**3) and bool(
        torch.ones(2**20).sum() == 2**20
    )


def test_a_child_decodes_and_loads(model: Model, toys: ToyFolders) -> None:
    alone = model.generate(PROMPT, max_new_tokens=8).token_ids
    asyncio.run(model.agenerate(PROMPT, max_new_tokens=2))  # its worker threads exist in the parent only
    in_child(_parallel)
    in_child(lambda: torch.get_num_threads() == 2)
    in_child(lambda: model.generate(PROMPT, max_new_tokens=8).token_ids == alone)
    in_child(lambda: asyncio.run(model.agenerate(PROMPT, max_new_tokens=8)).token_ids == alone)
    in_child(lambda: load(toys.model, dtype="float32").generate(PROMPT, max_new_tokens=8).token_ids == alone)
    assert _parallel()
    assert model.generate(PROMPT, max_new_tokens=8).token_ids == alone


@pytest.mark.filterwarnings("ignore::anabranch.errors.TrainingWarning")
def test_a_child_trains_like_its_parent(tmp_path: Path) -> None:
    method = trainable("medusa")
    assert method.trained is not None
    recipe = method.trained.training.recipe("small", {"held_out": 0, "batch_tokens": 60})
    examples = [Example((3, 4, 5 + n), (7, 8, 9, 3 + n)) for n in range(6)]

    def train(name: str) -> str:
        return str(train_adapter(as_target(small()), method, recipe, examples, tmp_path / name)["sha256"])

    alone = train("parent")
    in_child(lambda: train("child") == alone)

    def refuse(progress: object) -> None:
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing")

    with pytest.raises(DeviceError, match="start it with multiprocessing's method 'spawn'"):
        train_adapter(as_target(small()), method, recipe, examples, tmp_path / "gpu", report=refuse)


def test_a_stream_goes_on_in_both_processes(model: Model) -> None:
    alone = model.generate(PROMPT, max_new_tokens=12).token_ids
    stream = model.stream(PROMPT, max_new_tokens=12)
    first = list(next(stream).token_ids)
    in_child(lambda: first + [token for chunk in stream for token in chunk.token_ids] == alone)
    assert first + [token for chunk in stream for token in chunk.token_ids] == alone


def test_a_child_does_not_wait_for_a_thread_that_decoded(model: Model) -> None:
    """It forks in the middle of another thread's step: that text ends, others do not."""
    alone = model.generate(PROMPT, max_new_tokens=8).token_ids
    waiting = model.stream([7, 8, 9], max_new_tokens=8)
    next(waiting)
    inside, over = threading.Event(), threading.Event()

    def slow(tokens: Sequence[int], logits: Tensor) -> Tensor:
        inside.set()
        over.wait(SECONDS)
        return logits

    thread = threading.Thread(target=lambda: model.generate(PROMPT, max_new_tokens=1, processors=[slow]))
    thread.start()
    inside.wait(SECONDS)

    def refused() -> bool:
        try:
            list(waiting)
        except InputError as error:
            return "forked while another thread decoded" in str(error)
        return False

    in_child(lambda: model.generate(PROMPT, max_new_tokens=8).token_ids == alone)
    in_child(refused)
    over.set()
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_a_function_of_a_call_may_fork(model: Model) -> None:
    alone = model.generate(PROMPT, max_new_tokens=3).token_ids

    def forking(tokens: Sequence[int], logits: Tensor) -> Tensor:
        in_child(lambda: model.generate(PROMPT, max_new_tokens=3).token_ids == alone)
        return logits

    assert model.generate(PROMPT, max_new_tokens=3, processors=[forking]).token_ids == alone
