"""The commands about training on the docs pages and cards run as they are written, at a tiny size.

The default model is a toy with an adapter that ships for it, under the name of the real one. Files that a page takes as
given, such as a data set, are a few rows with the same fields. Options that make a run small are added to each command.
"""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch.adapters import folder as adapters
from anabranch.adapters.folder import TargetIdentity, save_adapter
from anabranch.methods.streams.entry import METHOD
from anabranch.methods.streams.recipes import StreamConfig
from anabranch.model import fetch
from anabranch.model.load import load_target
from anabranch.native import library as native
from small import drawn_lora, small_adapter
from toy_text import VOCABULARY, byte_tokenizer
from verbs import Anabranch

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = "smollm2-135m-instruct"
FENCED = re.compile(r"```console\n(.*?)```", re.DOTALL)
PAGES = {
    **{f"docs/{name}.md": FENCED for name in ("adapter", "applications", "comparison", "lora", "tasks", "training")},
    **{str(page.relative_to(ROOT)): FENCED for page in sorted((ROOT / "docs" / "methods").glob("*.md"))},
    **{str(page.relative_to(ROOT)): FENCED for page in sorted((ROOT / "examples").glob("*/README.md"))},
}
del PAGES["examples/sql-qwen2.5-coder-0.5b/README.md"]  # its model is a GGUF file that is not at hand
REAL = ["generate", "Explain why the sky is blue.", "--drafter", "draft_model"]  # needs the draft model that ships
RECORDS = ("benchmarks.md", "log.md", "reproduction.md")  # of older versions
ELSEWHERE = ("docs/encoder_decoder.md",)  # tests/speech/test_train_sounds.py runs its commands
# one page of each kind for every run
QUICK = (
    "docs/adapter.md",
    "docs/lora.md",
    "docs/methods/ngram.md",
    "examples/sql/README.md",
)
SMALL = {
    "train": ("--epochs", 1, "--held-out", 2, "--batch-tokens", 4096, "--max-tokens", 400),
    "answers": ("--max-new-tokens", 4),
    "bench": ("--limit", 2, "--max-new-tokens", 4),
    "certify": ("--limit", 2, "--max-new-tokens", 4),
    "generate": ("--max-new-tokens", 4),
    "chat": ("--max-new-tokens", 4),
}
FIELDS = {
    "sql_create_context": ("context", "question", "answer"),
    "e2e_nlg": ("meaning_representation", "human_reference"),
    "dialogsum": ("dialogue", "summary"),
}

pytestmark = [
    pytest.mark.filterwarnings("ignore::anabranch.errors.AnabranchWarning"),
    pytest.mark.filterwarnings("ignore::anabranch.errors.TrainingWarning"),
]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of as many layers as the recipes ask for, and an adapter that ships for it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    where = tmp_path_factory.mktemp("toy")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 12, "num_attention_heads": 4}
    config = LlamaConfig(
        **shape, vocab_size=VOCABULARY, num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=None
    )
    config.eos_token_id = VOCABULARY - 1
    LlamaForCausalLM(config).save_pretrained(where / "model")
    byte_tokenizer().save_pretrained(where / "model")
    target = load_target(str(where / "model"))
    streams = StreamConfig(
        5, 12, "mlp+adapter", 4, attention_rank=2, mlp_rank=2, conditioning="path", conditioning_rank=5, root_width=512
    )
    adapter, identity = small_adapter(target.decoder, streams), TargetIdentity.of(target, "default")
    save_adapter(where / "shipped" / SHIPPED, adapter, method=METHOD, target=identity, training={}, measured={})
    return where


def rows(*fields: str, count: int = 8, first: int = 0) -> list[dict[str, str]]:
    return [{field: f"the {field} {n}" for field in fields} for n in range(first, first + count)]


def write(path: Path, lines: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


@pytest.fixture
def place(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a user: data sets, files of rows, a model, a LoRA."""
    from anabranch.model.peft import write_lora

    native.library()  # from the user's cache folder, and kept for this process
    monkeypatch.setenv("ANABRANCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(adapters, "SHIPPED", toy / "shipped")
    monkeypatch.setattr(fetch, "default_model_dir", lambda *_, **__: toy / "model")
    monkeypatch.setattr("anabranch.cli.models.fetch_default", lambda *_, **__: toy / "model")
    shutil.copytree(toy / "model", "MODEL")
    for data in ("DIR", "data"):
        for name, fields in FIELDS.items():
            for n, split in enumerate(("train", "validation", "test")):
                write(tmp_path / data / name / f"{split}.jsonl.gz", rows(*fields, first=20 * n))
    for name in ("rows", "booking"):
        write(tmp_path / f"{name}.jsonl", rows("prompt", "completion", count=40))
    write(tmp_path / "tickets.jsonl", rows("subject", "body", "reply", count=40))
    for name in ("prompts", "all"):
        write(tmp_path / f"{name}.jsonl", rows("prompt"))
    write(tmp_path / "corpus.jsonl", rows("text"))
    completions = [{"prompt_ids": [n, 2, 3], "answer_ids": [4, 5, 6, n, 7, 8, VOCABULARY - 1]} for n in range(12)]
    write(tmp_path / "completions.jsonl", completions)
    write(tmp_path / "answers.jsonl", completions)
    write_lora(tmp_path / "FOLDER", drawn_lora(load_target("MODEL").config), base="default")
    return tmp_path


def commands(page: Path, pattern: re.Pattern[str]) -> Iterator[list[str]]:
    """The commands of this program on a page; a quotation may go over several lines."""
    for block in pattern.findall(page.read_text(encoding="utf-8")):
        held = ""
        for line in block.replace("\\\n", " ").splitlines():
            held += line + "\n"
            try:
                words = shlex.split(held, comments=True)
            except ValueError:  # the quotation is still open
                continue
            held = ""
            if words[:1] == ["anabranch"]:
                yield words[1:]


def shrunk(words: list[str]) -> list[object]:
    """A command with options that make it small."""
    verb = words[1] if words[:2] == ["train", "answers"] else words[0]
    more: list[object] = [*SMALL.get(verb, ())]
    for option in ("--task-rows", "--self-prompted"):
        more += [option, 6] if option in words else []
    if words[0] == "train" and verb != "answers":
        if words[1] in ("ngram", "datastore"):
            return words
        data = ("--answers", "--text", "--task")
        more += [] if any(option in words for option in data) else ["--self-tokens", 2000, "--self-rows", 8]
        more += ["--no-timing"]
    return [*words, *more]


def forget(words: list[str]) -> None:
    """Delete what an earlier command of the page has written to the same place."""
    if "--out" in words:
        out = Path(words[words.index("--out") + 1])
        shutil.rmtree(out, ignore_errors=True)
        for path in out.parent.glob(f"{out.name}.*" if out.suffix == "" else f"{out.name}*"):
            if path.is_file():
                path.unlink()


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=() if page in QUICK else pytest.mark.thorough) for page in PAGES]
)
def test_commands_about_training_run_as_written(page: str, place: Path, anabranch: Anabranch) -> None:
    found = [words for words in commands(ROOT / page, PAGES[page]) if words != REAL]
    if not found:
        pytest.skip("the page has no commands")
    for words in found:
        if "--ray" in words:  # tests/integrations/test_ray_data.py runs it
            continue
        forget(words)
        if "--answers" in words and not (path := Path(words[words.index("--answers") + 1])).exists():
            shutil.copy("completions.jsonl", path)  # of a tuned model, which a script writes
        done = anabranch(*shrunk(words), stdin="the river\n" if words[0] == "chat" else None)
        assert done.code == 0, f"{shlex.join(words)}\n{done.err[-2000:]}"


def test_a_page_that_is_not_tested_has_no_such_commands() -> None:
    pages = [p for p in (ROOT / "docs").rglob("*.md") if p.name not in RECORDS and p.parent.name != "benchmarks"]
    others = [path for path in pages if str(path.relative_to(ROOT)) not in (*PAGES, *ELSEWHERE)]
    assert [(path.name, words) for path in others for words in commands(path, FENCED) if words[0] == "train"] == []
