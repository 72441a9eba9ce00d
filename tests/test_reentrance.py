"""Users' functions that call the model which calls them, directly or in a thread that they wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch import Tensor

from anabranch import load
from anabranch.api import Model
from anabranch.drafting.drafter import Row
from anabranch.errors import InputError
from anabranch.methods.prompt_lookup import PromptLookupDrafter
from anabranch.tree import DraftTree
from toy_text import ToyFolders

PROMPT, OTHER = [3, 4, 5, 3, 4], [7, 3, 4, 5, 6, 7, 3]
SECONDS = 300  # a deadlock takes longer


@pytest.fixture
def model(toys: ToyFolders) -> Model:
    return load(toys.model, dtype="float32", drafter="prompt_lookup")


def within(call: Callable[[], Any]) -> Any:
    """The result of a call in a thread of its own, which would hang if the call did."""
    found: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "a deadlock"
    if failed:
        raise failed[0]
    return found[0]


def in_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def directly(call: Callable[[], Any]) -> Any:
    return call()


WAYS: dict[str, Callable[[Model], list[int]]] = {
    "generate": lambda model: model.generate(OTHER, max_new_tokens=5).token_ids,
    "batch": lambda model: model.generate([OTHER, PROMPT], max_new_tokens=5)[0].token_ids,
    "sampled": lambda model: model.generate(OTHER, max_new_tokens=5, temperature=1.0).token_ids,
    "stream": lambda model: [t for chunk in model.stream(OTHER, max_new_tokens=5) for t in chunk.token_ids],
    "agenerate": lambda model: asyncio.run(model.agenerate(OTHER, max_new_tokens=5)).token_ids,
}


@pytest.mark.parametrize("where", [directly, in_thread])
@pytest.mark.parametrize("way", WAYS)
def test_a_function_may_call_its_model(model: Model, way: str, where: Callable[[Callable[[], Any]], Any]) -> None:
    call, inner = WAYS[way], list[list[int]]()
    alone, outer = call(model), model.generate(PROMPT, max_new_tokens=4).token_ids

    def guard(tokens: Sequence[int], logits: Tensor) -> Tensor:
        inner.append(where(lambda: call(model)))
        return logits

    def progress(done: int, total: int) -> None:
        inner.append(where(lambda: call(model)))

    found = within(lambda: model.generate(PROMPT, max_new_tokens=4, processors=[guard]))
    assert found.token_ids == outer
    assert len(inner) >= 4
    found = within(lambda: model.generate(PROMPT, max_new_tokens=4, on_prompt=progress))
    assert found.token_ids == outer
    assert all(each == alone for each in inner)
    assert model.generate(PROMPT, max_new_tokens=4).token_ids == outer  # and the model goes on


def test_calls_within_calls_end_somewhere(model: Model) -> None:
    depth = 0

    def guard(tokens: Sequence[int], logits: Tensor) -> Tensor:
        nonlocal depth
        depth += 1
        model.generate(PROMPT, max_new_tokens=1, processors=[guard])
        return logits

    with pytest.raises(InputError, match="levels deep"):
        within(lambda: model.generate(PROMPT, max_new_tokens=2, processors=[guard]))
    assert depth == 8
    assert model.generate(PROMPT, max_new_tokens=2).token_ids


def test_a_function_in_a_second_call_calls_again_from_a_thread(model: Model) -> None:
    alone = model.generate(OTHER, max_new_tokens=3).token_ids
    found: list[list[int]] = []

    def inmost(tokens: Sequence[int], logits: Tensor) -> Tensor:
        found.append(model.generate(OTHER, max_new_tokens=3).token_ids)
        return logits

    def guard(tokens: Sequence[int], logits: Tensor) -> Tensor:
        in_thread(lambda: model.generate(PROMPT, max_new_tokens=1, processors=[inmost]))
        return logits

    within(lambda: model.generate(PROMPT, max_new_tokens=1, processors=[guard]))
    assert found
    assert all(each == alone for each in found)


def test_a_text_decoded_in_the_same_steps_cannot_go_on_in_one(model: Model) -> None:
    other = model.stream(OTHER, max_new_tokens=50)
    next(other)

    def guard(tokens: Sequence[int], logits: Tensor) -> Tensor:
        for _ in other:
            pass
        return logits

    with pytest.raises(InputError, match="together with its own"):
        within(lambda: model.generate(PROMPT, max_new_tokens=4, processors=[guard]))


def test_a_drafter_that_calls_its_own_model_is_refused(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def draft(self: PromptLookupDrafter, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        model.generate(OTHER, max_new_tokens=1)
        return []

    monkeypatch.setattr(PromptLookupDrafter, "draft", draft)
    with pytest.raises(InputError, match="a drafter cannot call the model"):
        within(lambda: model.generate(PROMPT, max_new_tokens=4))


@pytest.mark.parametrize("kind", [ValueError, SystemExit, GeneratorExit, KeyboardInterrupt])
def test_an_exception_of_a_function_ends_its_own_call_only(model: Model, kind: type[BaseException]) -> None:
    alone = model.generate(OTHER, max_new_tokens=20).token_ids
    stream = model.stream(OTHER, max_new_tokens=20)
    tokens = list(next(stream).token_ids)

    def failing(tokens: Sequence[int], logits: Tensor) -> Tensor:
        raise kind("no")

    with pytest.raises(kind):
        within(lambda: model.generate(PROMPT, max_new_tokens=4, processors=[failing]))
    tokens += [token for chunk in stream for token in chunk.token_ids]
    assert tokens == alone


def test_another_thread_does_not_end_with_what_a_function_raises(model: Model) -> None:
    alone = model.generate(OTHER, max_new_tokens=20).token_ids
    failed = threading.Event()
    ticks: list[list[int]] = []

    def failing(tokens: Sequence[int], logits: Tensor) -> Tensor:
        raise SystemExit

    def waiting() -> None:
        with pytest.raises(SystemExit):
            model.generate(PROMPT, max_new_tokens=4, processors=[failing])
        failed.set()

    def slow(tokens: Sequence[int], logits: Tensor) -> Tensor:
        if not thread.is_alive() and not failed.is_set():
            thread.start()
        return logits

    thread = threading.Thread(target=waiting)
    while not failed.is_set():  # until this thread's tick ran the other's function, or the other's own did
        ticks.append(within(lambda: model.generate(OTHER, max_new_tokens=20, processors=[slow])).token_ids)
        thread.join(SECONDS)
    assert all(each == alone for each in ticks)
