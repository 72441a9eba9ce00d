"""The scripts that compare ways to tune a model for an application, and the page with their results."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from toy_text import ToyFolders
from verbs import Anabranch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield
    for name in ("compare_application", "applications_page"):
        sys.modules.pop(name, None)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::anabranch.errors.TrainingWarning")
def test_tuned_models_are_compared_on_the_same_rows(
    anabranch: Anabranch, toys: ToyFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"q": f"the {n} of the", "a": f"the {n % 3}"} for n in range(60)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = ["--prompt-template", "Say {q}", "--completion", "a", "--raw"]
    forms, out = tmp_path / "forms", tmp_path / "application-own.json"
    train = ["--model", toys.model, "--task", tmp_path / "own.jsonl", *task, "--dtype", "float32", "--held-out", 2]
    train += ["--epochs", 1, "--batch-tokens", 100]
    done = anabranch("train", "lora", *train, "--out", forms / "lora")
    assert done.code == 0, done.err
    joint = ["--recipe", "paper-shared", "--stream-layers", 1, "--lora-rank", 4, "--no-timing"]
    done = anabranch("train", "streams", *train, *joint, "--out", forms / "paper")
    assert done.code == 0, done.err
    script = importlib.import_module("compare_application")
    words = ["compare_application.py", "--task", tmp_path / "own.jsonl", "--forms", forms, "--limit", 3, *task]
    words += ["--model", toys.model]
    words += ["--max-new-tokens", 5, "--nodes", 4, "--dtype", "float32", "--out", out]
    monkeypatch.setattr(sys, "argv", list(map(str, words)))
    script.main()
    result = json.loads(out.read_text())
    assert str(tmp_path) not in out.read_text()
    named = [(one["result"], one["name"]) for one in result["contenders"]]
    assert named == [("lora", "none"), ("lora", "prompt_lookup"), ("paper", "none"), ("paper", "paper 4")]
    assert all(one["equal_texts"] == 3 for one in result["contenders"])
    assert [one["form"] for one in result["forms"]] == ["lora", "paper"]
    width = json.loads((forms / "paper" / "model" / "config.json").read_text())["hidden_size"]
    assert result["forms"][1]["extra_parameters"] == (4 + 16) * width
    assert result["forms"][0]["steps"] == result["forms"][1]["steps"]
    page = importlib.import_module("applications_page")
    text = "\n".join(page.section("own", result))
    assert "### own\n" in text
    assert "| `paper` | `paper 4` |" in text
    assert "- paper: `" in text
    with pytest.raises(SystemExit, match="exists already"):
        script.main()
    monkeypatch.setattr(sys, "argv", [*map(str, words), "--force", "--forms", str(tmp_path)])
    with pytest.raises(SystemExit, match="has no folder 'lora'"):
        script.main()


def test_the_page_is_that_of_the_newest_results() -> None:
    page = importlib.import_module("applications_page")
    for name, text in page.outputs().items():
        assert (page.ROOT / name).read_text(encoding="utf-8") == text, name
