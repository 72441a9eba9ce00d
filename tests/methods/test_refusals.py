"""Refusals of methods: one sentence that says so, nothing left behind, and a model that decodes on.

Settings and files of one method are tested with that method; here are the cases that all of them share.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anabranch
from anabranch.adapters.folder import TargetIdentity, save_adapter
from anabranch.drafting.tables import Tokenizer, build_tables
from anabranch.errors import AnabranchError, CapabilityError, FileError, InputError
from anabranch.methods import make_drafter, methods, parse_spec
from anabranch.methods.draft_model import entry as draft_model
from anabranch.methods.draft_model.module import DraftConfig
from anabranch.methods.suffix import SuffixDrafter
from anabranch.model.load import load_target
from anabranch.model.text import fingerprint
from small import decode, request, small
from toy_tables import method
from toy_text import VOCABULARY, ToyFolders, byte_tokenizer, save_toys
from verbs import Anabranch

SIZES = {"nodes", "tree", "tokens", "window", "guesses", "ngram", "matches", "order"}
ASKED: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True}


@pytest.mark.parametrize(
    "text", [f"{m.name}:{name}=0" for m in methods() for name in m.settings.__dataclass_fields__ if name in SIZES]
)
def test_no_size_may_be_zero(text: str) -> None:
    with pytest.raises(InputError, match=r"must be .*, got '?0") as caught:
        parse_spec(text)
    assert "\n" not in str(caught.value)


def identity(folders: ToyFolders) -> TargetIdentity:
    return TargetIdentity.of(load_target(str(folders.model)), "toy")


@pytest.fixture(scope="module")
def files(toys: ToyFolders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what does not fit: tables, adapters and draft models of other makes, and broken ones."""
    home = tmp_path_factory.mktemp("misfits")
    for name, tokenizer in (("rest", "f" * 64), ("ngram", "f" * 64), ("cut", fingerprint(byte_tokenizer()))):
        entry = method("rest" if name == "cut" else name)
        assert entry.tables is not None
        texts = [np.arange(200, dtype=np.int64)]
        origin = Tokenizer("gpt", tokenizer, VOCABULARY)
        build_tables(entry.tables, texts, home / name, tokenizer=origin)
    largest = max((home / "cut").glob("*.npy"), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    module = draft_model.METHOD.trained.make(load_target(str(toys.model)).config, DraftConfig(16, 1, 2, 32), None)  # type: ignore[union-attr]
    parts: dict[str, Any] = {"training": {}, "measured": {}, "dtype": torch.float32}
    save_adapter(home / "draft", module, method=draft_model.METHOD, target=identity(toys), **parts)
    stranger = replace(identity(toys), name="another", fingerprint="0" * 64)
    save_adapter(home / "strange", module, method=draft_model.METHOD, target=stranger, **parts)
    shutil.copytree(toys.model, home / "broken")
    weights = home / "broken" / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    words = save_toys(home / "words").model / "tokenizer.json"
    words.write_text(words.read_text(encoding="utf-8").replace('"<end>"', '"<stop>"'), encoding="utf-8")
    return home


@pytest.fixture(scope="module")
def model(toys: ToyFolders) -> Iterator[anabranch.Model]:
    with anabranch.load(toys.model, adapter=toys.adapter, dtype="float32") as loaded:
        yield loaded


MISFITS: dict[str, tuple[str, type[AnabranchError], str]] = {
    "a draft model of another vocabulary": (
        "draft_model:model={}/words/model",
        CapabilityError,
        "another vocabulary.* token id 262 is '<end>' and '<stop>'",
    ),
    "a truncated draft model": ("draft_model:model={}/broken", FileError, "model.safetensors"),
    "a truncated draft model in stages": ("staged:model={}/broken", FileError, "model.safetensors"),
    "an adapter of another method": ("draft_model", CapabilityError, "needs a draft model .* none is named"),
    "a datastore of another tokenizer": (
        "rest:data={}/rest",
        FileError,
        "built with the tokenizer of 'gpt', which is not this target's",
    ),
    "n-grams of another tokenizer": (
        "ngram:data={}/ngram",
        FileError,
        "built with the tokenizer of 'gpt', which is not this target's",
    ),
    "tables of another method": ("ngram:data={}/cut", FileError, "are for the drafter 'rest'"),
    "a truncated datastore": ("rest:data={}/cut", FileError, "is truncated or was changed since it was built"),
    "a window larger than the cache": ("lookahead:window=40", CapabilityError, "but the target has 96"),
    "a part that does not fit": ("streams+rest:data={}/cut", FileError, "is truncated or was changed"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_refused_and_the_model_decodes_on(
    name: str, model: anabranch.Model, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, kind, words = MISFITS[name]
    monkeypatch.chdir(tmp_path)
    before = model.generate("the other", **ASKED).token_ids
    calls: tuple[Callable[..., Any], ...] = (model.generate, lambda *given, **more: list(model.stream(*given, **more)))
    for call in calls:
        with pytest.raises(kind, match=words) as caught:
            call("the other", drafter=spec.format(files), **ASKED)
        assert "\n" not in str(caught.value)
    assert model.generate("the other", **ASKED).token_ids == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("adapter", "drafter", "words"),
    [
        (
            "draft",
            "streams",
            "the drafter 'streams' needs an adapter that was trained for this target, and there is none",
        ),
        ("strange", "draft_model", "was trained for another"),
    ],
)
def test_adapters_that_do_not_fit_end_a_verb(
    anabranch: Anabranch, toys: ToyFolders, files: Path, tmp_path: Path, adapter: str, drafter: str, words: str
) -> None:
    trace = tmp_path / "trace.jsonl"
    done = anabranch(
        *("generate", "the", "--model", toys.model, "--adapter", files / adapter, "--drafter", drafter),
        *("--trace", trace),
    )
    assert (done.code, done.out) == (1, "")
    assert words in done.err
    assert done.err.count("\n") == 1
    assert not trace.exists()


def test_training_from_an_adapter_of_another_method_leaves_no_folder(
    anabranch: Anabranch, toys: ToyFolders, files: Path, tmp_path: Path
) -> None:
    written = tmp_path / "answers.jsonl"
    line = json.dumps({"prompt_ids": [1, 2, 3], "answer_ids": [*range(4, 24)]})
    written.write_text(f"{line}\n" * 40, encoding="utf-8")
    out = tmp_path / "new"
    done = anabranch(
        *("train", "streams", "--model", toys.model, "--answers", written, "--out", out, "--init", files / "draft"),
        *("--recipe", "small", "--stream-layers", 2, "--held-out", 4),
    )
    assert (done.code, done.out) == (1, "")
    assert "is for the method 'draft_model', not 'streams'; start from an adapter of that method" in done.err
    assert not out.exists()


def test_a_suffix_store_at_its_bound_costs_acceptance_alone() -> None:
    target = small()
    asked = [request(6 + n % 5, n, 20) for n in range(16)]
    drafter = make_drafter("suffix:store=64", target)
    assert isinstance(drafter, SuffixDrafter)
    found, _ = decode(target, asked, drafter, rows=4)
    assert found == decode(target, asked)[0]
    assert drafter.shared is not None
    assert 0 < drafter.shared.held <= 64
