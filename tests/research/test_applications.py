"""The scripts that compare ways to tune a model for an application, and the page with their results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import applications_page
import compare_application
from toy_text import ToyFolders
from verbs import Anabranch


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
    words = ["compare_application.py", "--task", tmp_path / "own.jsonl", "--forms", forms, "--limit", 3, *task]
    words += ["--model", toys.model]
    words += ["--max-new-tokens", 5, "--nodes", 4, "--scored", 5, "--dtype", "float32", "--out", out]
    monkeypatch.setattr(sys, "argv", list(map(str, words)))
    compare_application.main()
    result = json.loads(out.read_text())
    assert str(tmp_path) not in out.read_text()
    named = [(one["result"], one["name"]) for one in result["contenders"]]
    assert named == [("lora", "none"), ("lora", "prompt_lookup"), ("paper", "none"), ("paper", "paper 4")]
    assert all(one["equal_texts"] == 3 for one in result["contenders"])
    scored = {one["target"]: one["quality"]["exact_match"] for one in result["scored"]["targets"]}
    assert [*scored] == ["untuned", "lora", "paper"]
    for one in result["scored"]["targets"]:
        alone = one.get("right_alone", 0) - one.get("wrong_alone", 0)
        assert alone / 5 == pytest.approx(scored[one["target"]]["mean"] - scored["lora"]["mean"])
    assert all(one["rows"] == 5 for one in scored.values())
    assert [one["form"] for one in result["forms"]] == ["lora", "paper"]
    width = json.loads((forms / "paper" / "model" / "config.json").read_text())["hidden_size"]
    assert result["forms"][1]["extra_parameters"] == (4 + 16) * width
    assert result["forms"][0]["steps"] == result["forms"][1]["steps"]
    text = "\n".join(applications_page.section("own", result))
    assert "### own\n" in text
    assert "on 5 rows" in text
    assert "| `paper` | `paper 4` |" in text
    with pytest.raises(SystemExit, match="exists already"):
        compare_application.main()
    monkeypatch.setattr(sys, "argv", [*map(str, words), "--force", "--forms", str(tmp_path)])
    with pytest.raises(SystemExit, match="has no folder 'lora'"):
        compare_application.main()


def test_the_page_is_that_of_the_newest_results() -> None:
    for name, text in applications_page.outputs().items():
        assert (applications_page.ROOT / name).read_text(encoding="utf-8") == text, name
