"""The plugin for ``llm``, run by its command line and its Python interface, on a toy model."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import anabranch

llm = pytest.importorskip("llm")

from click.testing import CliRunner, Result  # noqa: E402
from llm.cli import cli  # noqa: E402
from llm.plugins import load_plugins, pm  # noqa: E402

from anabranch.integrations import llm as plugin  # noqa: E402
from toy_text import ToyFolders  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
Llm = Callable[..., Result]


@pytest.fixture
def home(toys: ToyFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """llm's folder, with two models."""
    entries = [
        {"model_id": "toy", "model": str(toys.model), "drafter": "none"},
        {"model_id": "tuned", "model": str(toys.model), "adapter": str(toys.adapter)},
    ]
    (tmp_path / plugin.FILE).write_text(json.dumps(entries), encoding="utf-8")
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    return tmp_path


@pytest.fixture
def called(home: Path) -> Iterator[Llm]:
    """llm's command line, in this process."""
    load_plugins()
    added = not pm.is_registered(plugin)  # an installed package is there by its entry point
    if added:
        pm.register(plugin, "anabranch-test")
    yield lambda *words, **more: CliRunner().invoke(cli, words, catch_exceptions=False, **more)
    if added:
        pm.unregister(plugin)


def answer(toys: ToyFolders, *talk: str, **options: Any) -> str:
    """The text that the Python interface gives a conversation whose turns alternate."""
    messages = [{"role": ("user", "assistant")[at % 2], "content": said} for at, said in enumerate(talk)]
    with anabranch.load(str(toys.model), drafter="none") as model:
        return model.chat(messages, **options).text


def test_a_prompt_its_options_and_its_log(called: Llm, home: Path, toys: ToyFolders) -> None:
    words = ("-m", "toy", "the thing", "-o", "max_new_tokens", "7", "-o", "temperature", "1.5", "-o", "seed", "3")
    done = called(*words)
    expected = answer(toys, "the thing", max_new_tokens=7, temperature=1.5, seed=3)
    assert (done.exit_code, done.output) == (0, expected + "\n")
    assert called(*words, "--no-stream").output == expected + "\n"
    (record, *_) = json.loads(called("logs", "--json", "-n", "1").output)
    assert (record["model"], record["response"], record["output_tokens"]) == ("toy", expected, 7)
    assert record["response_json"]["finish_reason"] == "length"


def test_conversations_continue_with_the_same_model(called: Llm, toys: ToyFolders) -> None:
    first = called("-m", "tuned", "a", "-o", "max_new_tokens", "3").output[:-1]
    second = called("-c", "b", "-o", "max_new_tokens", "3").output[:-1]
    assert first == answer(toys, "a", max_new_tokens=3)
    assert second == answer(toys, "a", first, "b", max_new_tokens=3)


def test_answers_of_a_schema(called: Llm) -> None:
    pytest.importorskip("llguidance")
    done = called("-m", "toy", "a", "--schema", json.dumps({"enum": ["red", "green"]}))
    assert json.loads(done.output) in ("red", "green")


def test_mistakes_are_sentences(called: Llm, home: Path, tmp_path: Path) -> None:
    for words, said in (
        (("-m", "toy", "a", "-o", "top_p", "7"), "top_p must be"),
        (("-m", "toy", "a", "-o", "max_new_tokens", "x"), "max_new_tokens"),
        (("-m", "toy", "a", "-o", "model", "b"), "model"),
        (("-m", "toy", ""), "the conversation is empty"),
        (("-m", "tuned", "a", "-o", "drafter", "medusa"), "medusa"),
    ):
        done = CliRunner().invoke(cli, words)
        assert done.exit_code == 1, words
        assert said in done.output, words
        assert "Traceback" not in done.output
    (home / plugin.FILE).write_text("- model_id: a\n  model: gone\n- model_id: b\n  weights: c\n", encoding="utf-8")
    assert "b has 'weights'; give model" in called("models").output
    assert "gone" in CliRunner().invoke(cli, ("-m", "a", "b")).output


def test_async_prompts_are_decoded_together(called: Llm, toys: ToyFolders) -> None:
    model = llm.get_async_model("toy")

    async def both() -> list[str]:
        asked = [model.prompt(text, max_new_tokens=6) for text in ("a", "b")]
        return list(await asyncio.gather(*(each.text() for each in asked)))

    assert asyncio.run(both()) == [answer(toys, text, max_new_tokens=6) for text in ("a", "b")]


def test_a_reader_that_stops_frees_the_row(called: Llm) -> None:
    model = llm.get_model("toy")
    chunks = iter(model.prompt("a", max_new_tokens=40))
    next(chunks)
    del chunks
    assert not model._loaded.model().scheduler.busy


def test_llm_finds_the_plugin_by_its_entry_point(home: Path, tmp_path: Path) -> None:
    known = tmp_path / "anabranch-0.dist-info"  # as an installation would have it
    known.mkdir()
    stated = re.search(r"\[project\.entry-points\.llm\]\n(.+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert stated is not None
    (known / "entry_points.txt").write_text("[llm]\n" + stated[1].replace('"', ""), encoding="utf-8")
    (known / "METADATA").write_text("Metadata-Version: 2.1\nName: anabranch\nVersion: 0\n", encoding="utf-8")
    code = (
        "import sys, llm.cli; sys.argv = ['llm', 'models', '--options', '-q', 'toy']; "
        "llm.cli.cli(standalone_mode=False); print('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert "Decoder: toy" in done.stdout
    assert "divide the logits by this" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"  # llm starts no slower
