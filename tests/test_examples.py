"""The adapters in ``examples``: they fit the default model with their LoRA, draft well, and change nothing.

The one for a GGUF file that is not at hand is read, but for its target.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from safetensors.torch import load_file

import anabranch as library
from anabranch.adapters.folder import read_record
from anabranch.model.peft import WEIGHTS, read_settings
from anabranch.tasks import find_task
from test_doc_commands import FENCED, commands
from verbs import Anabranch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
ROWS = {
    "sql": {
        "context": "CREATE TABLE head (name VARCHAR, age INTEGER)",
        "question": "How many heads are older than 56?",
    },
    "e2e": {"meaning_representation": "name[The Wrestlers], eatType[pub], food[Italian], area[riverside]"},
}

LARGER = "sql-qwen2.5-coder-0.5b"

pytestmark = pytest.mark.default_model


def test_every_folder_is_tested() -> None:
    assert {path.name for path in EXAMPLES.iterdir() if path.is_dir()} == {*ROWS, LARGER}
    for path in EXAMPLES.iterdir():
        assert sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) <= 10_000_000


@pytest.mark.thorough
def test_the_commands_of_the_page_run(anabranch: Anabranch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    found = list(commands(EXAMPLES / "README.md", FENCED))
    assert found
    for words in found:
        done = anabranch(*words, "--max-new-tokens", 12)
        assert done.code == 0, done.err
        assert done.out.startswith("SELECT COUNT(")


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["sql", "e2e"])
def test_drafts_of_an_example_are_accepted(name: str) -> None:
    folder = EXAMPLES / name
    prompt = find_task(name).template.render(ROWS[name], name)
    with library.load("default", lora=folder / "lora", adapter=folder, dtype="float32") as model:
        said = [{"role": "user", "content": prompt}]
        plain = model.chat(said, max_new_tokens=40, drafter="none")
        drafted = model.chat(said, max_new_tokens=40, drafter="streams:nodes=12")
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.mean_acceptance_length > 2
    assert drafted.finish_reason == plain.finish_reason == "stop"
    assert {"sql": "SELECT COUNT(", "e2e": "The Wrestlers"}[name] in plain.text


def test_the_example_for_a_larger_model_is_whole() -> None:
    folder = EXAMPLES / LARGER
    record = read_record(folder)
    shape, config = record["target"]["shape"], record["config"]
    assert record["target"]["lora"] == "lora"
    assert (config["main_attends"], config["num_streams"]) == ("own", 4)
    weights = (folder / "adapter.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == record["sha256"]
    terms = load_file(folder / "lora" / WEIGHTS)
    assert len(terms) == 2 * 7 * shape["num_layers"]  # all linear layers
    assert read_settings(folder / "lora").needs == "streams"
