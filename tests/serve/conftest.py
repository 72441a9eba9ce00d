from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from served import SETTINGS, TEMPLATE, Server, running


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """One server for the tests that leave it as it was."""
    with running(replace(SETTINGS, names=("toy", "alias"))) as made:
        yield made


@pytest.fixture(scope="session")
def caller() -> Iterator[Server]:
    """A server whose template takes tools."""
    with running() as server:
        for model in (server.service.model, server.reference):
            model.tokenizer.chat_template = TEMPLATE
        yield server


@pytest.fixture
def speaking(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the model's texts be given ones: the tokens stay the model's, the text is replaced where it is decoded."""

    def say(text: str) -> None:
        from anabranch.decoding.detokenizer import Detokenizer

        monkeypatch.setattr(Detokenizer, "text", property(lambda self: text))
        given = iter(text[at : at + 3] for at in range(0, len(text), 3))
        monkeypatch.setattr(Detokenizer, "add", lambda self, tokens: next(given, ""))
        monkeypatch.setattr(Detokenizer, "finish", lambda self: "".join(given))

    return say
