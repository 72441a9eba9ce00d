"""Help, completion and layout, for every verb."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from anabranch.cli import app, help
from anabranch.cli.layout import fact_lines, print_tables
from anabranch.methods import TRAININGS, methods, training
from anabranch.support.table import Table
from verbs import Anabranch


def commands(group: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Every verb and group below, with the words that call it."""
    groups = [(path, group)]
    for name in group.list_commands(None) if hasattr(group, "list_commands") else ():
        groups += commands(group.get_command(None, name), (*path, name))
    return groups


def every_command() -> list[tuple[tuple[str, ...], Any]]:
    from typer.main import get_command

    return commands(get_command(app))


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize(("words", "command"), every_command(), ids=lambda x: " ".join(x) if type(x) is tuple else "")
def test_help_fits_and_names_are_whole(
    anabranch: Anabranch, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], command: Any, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERMINAL_WIDTH", str(columns))
    done = anabranch(*words, "-h")
    assert done.code == 0
    assert max(map(len, done.out.splitlines())) <= columns
    for option in command.params:
        for name in option.opts if option.param_type_name == "option" else ():
            assert re.search(rf"(?m)^  .*{re.escape(name)}\b", done.out), name
    assert "..." not in done.out.partition("Commands:")[2]
    assert anabranch(*words, "--help").out == done.out


def test_help_lists_the_methods_of_the_registry_without_torch() -> None:
    assert dict(help.methods()) == {method.name: method.summary for method in methods()}
    trained = {method.name: method.trained.training for method in methods() if method.trained is not None}
    built = {method.name: method.tables.training for method in methods() if method.tables is not None}
    assert {name: training(command) for command, (name, _) in TRAININGS.items() if name} == trained | built
    shown = " ".join(torchless(["generate", "-h"]).split()).replace("- ", "-")  # lines may break at a hyphen
    assert all(f"{name} {summary}" in shown for name, summary in help.methods())


def torchless(*calls: Sequence[str]) -> str:
    """The output of commands, none of which may import torch or what imports it."""
    code = f"""
import sys
from typer.main import get_command
from anabranch.cli import app
command = get_command(app)
for words in {[list(words) for words in calls]}:
    command(words, standalone_mode=False)
    heavy = {{"torch", "transformers", "safetensors", "numpy"}} & {{*sys.modules}}
    assert not heavy, (words, heavy)
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_no_help_imports_torch() -> None:
    shown = torchless(*([*words, "--help"] for words, _ in every_command()))
    assert shown.count("Usage: ") == len(every_command())


@pytest.mark.thorough
def test_completion_installs_for_bash_and_completes(tmp_path: Path) -> None:
    program = tmp_path / "anabranch"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "from anabranch.cli import main; main()" "$@"\n')
    program.chmod(0o755)
    if (bash := shutil.which("bash")) is None:
        pytest.skip("there is no bash")
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def run(script: str) -> str:
        script += "\nexit"  # bash replaces itself by a single command, whose shell could then not be found
        done = subprocess.run([bash, "-c", script], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "bash completion installed" in run("anabranch --install-completion bash")
    ask = "source ~/.bash_completions/anabranch.sh; COMP_CWORD={}; COMP_WORDS=({}); _anabranch_completion anabranch"
    shown = ask + '; echo "${{COMPREPLY[@]}}"'
    assert run(shown.format(1, "anabranch ce")).split() == ["certify"]
    assert "--threads" in run(shown.format(2, "anabranch certify --thr")).split()


def test_facts_are_wrapped_at_words() -> None:
    facts = {"name": "one two three", "a": "", "long": "x" * 30}
    assert list(fact_lines(facts, 4, 18)) == ["name  one two", "      three", "a", *_cut("long  ", "x" * 30, 12)]


def _cut(start: str, text: str, width: int) -> list[str]:
    pieces = [text[i : i + width] for i in range(0, len(text), width)]
    return [start + pieces[0], *(" " * len(start) + piece for piece in pieces[1:])]


def test_a_wide_table_is_shown_row_by_row() -> None:
    rows = [("none", "1.00", "40.0"), ("streams:tree=best,nodes=8", "2.50", "80.0")]
    table = Table(("contender", "tokens/\nstep", "mean over\nprompts"), rows, "Rates", left=3)
    shown = {}
    for width in (40, 60):
        console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
        with console.file:
            print_tables([table], console)
        shown[width] = console.export_text()
    assert "streams:tree=best,nodes=8  2.50" in shown[60]
    assert shown[40].splitlines() == [
        "Rates",
        "none",
        "  tokens/step        1.00",
        "  mean over prompts  40.0",
        "streams:tree=best,nodes=8",
        "  tokens/step        2.50",
        "  mean over prompts  80.0",
    ]
