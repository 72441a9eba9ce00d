"""The machine measured in a moment, and signals that arrive while a contender decodes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from anabranch.bench import machine, session, shapes
from anabranch.bench.run import Ours, Outcome

Stopped = Callable[..., None]


@pytest.fixture(autouse=True)
def _quick_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SIDE", {"cpu": 64})
    quick = partial(machine.measure_machine, buffer_bytes=2**20, repeats=2)
    for user in (session, shapes):
        monkeypatch.setattr(user, "measure_machine", quick)


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Stopped:
    """Ctrl-C, or another signal, once: at the n-th call of a contender of ours, warm-up included."""
    serve = Ours.serve
    calls = {"left": 0, "signal": signal.SIGINT}

    def interrupted(self: Ours, *arguments: Any, **options: Any) -> Outcome:
        calls["left"] -= 1
        if calls["left"] == 0:
            signal.raise_signal(calls["signal"])
        return serve(self, *arguments, **options)

    monkeypatch.setattr(Ours, "serve", interrupted)

    def at(call: int, number: int = signal.SIGINT) -> None:
        calls.update(left=call, signal=number)

    return at
