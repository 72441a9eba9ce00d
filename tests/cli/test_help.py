"""Help at the widths of real terminals."""

from __future__ import annotations

import pytest

from anabranch.cli import app
from verbs import Anabranch


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("verb", ["generate", "chat", "certify", "tune", "bench", "train streams", "simulate"])
def test_option_names_are_whole(anabranch: Anabranch, monkeypatch: pytest.MonkeyPatch, verb: str, columns: int) -> None:
    from typer.main import get_command

    monkeypatch.setenv("COLUMNS", str(columns))
    shown = anabranch(*verb.split(), "-h").out
    command = get_command(app)
    for name in verb.split():
        command = command.commands[name]  # type: ignore[attr-defined]
    names = [name for parameter in command.params for name in parameter.opts if name.startswith("--")]
    assert len(names) > 5
    assert [name for name in names if f"{name} " not in shown.replace("\n", " \n")] == []
    assert max(map(len, shown.splitlines())) <= columns
    assert "\u2026" not in shown


def test_lists_of_verbs_have_whole_sentences(anabranch: Anabranch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    for group in ((), ("train",)):
        shown = anabranch(*group, "-h").out
        assert "..." not in shown.split("Commands:")[1]
        assert max(map(len, shown.splitlines())) <= 60
