"""Adapters that calls choose by name, alone or with a LoRA of the same name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import anabranch
from anabranch.adapters.folder import CONFIG, TargetIdentity, save_adapter
from anabranch.errors import AdapterError, InputError
from anabranch.methods.streams.entry import METHOD
from anabranch.model.load import load_target
from anabranch.model.peft import write_lora
from small import drawn_lora, randomise, small_adapter
from toy_text import ToyFolders

TEXT: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}
PROMPT = "the other the thing and the rest of it"


@pytest.fixture
def second(toys: ToyFolders, tmp_path: Path) -> Path:
    """Another adapter of the toy, which drafts other trees."""
    target = load_target(str(toys.model))
    adapter = small_adapter(target.decoder)
    randomise(adapter, seed=9)
    folder, identity = tmp_path / "second", TargetIdentity.of(target, "toy")
    save_adapter(folder, adapter, method=METHOD, target=identity, training={}, measured={}, dtype=torch.float32)
    return folder


def with_lora(toys: ToyFolders, folder: Path, seed: int, *, inside: bool) -> tuple[Path, Path]:
    """The folders of an adapter that was trained with a LoRA, and of the LoRA, ``inside`` it as training writes it."""
    shutil.copytree(toys.adapter, folder)
    lora = folder / "lora" if inside else folder.with_name(f"{folder.name}-tuned")
    write_lora(lora, drawn_lora(load_target(str(toys.model)).config, seed=seed), base="toy")
    record = json.loads((folder / CONFIG).read_text("utf-8"))
    record["target"] |= {"fingerprint": "1" * 64, "lora": lora.name}
    (folder / CONFIG).write_text(json.dumps(record), "utf-8")
    return folder, lora


def trees(model: anabranch.Model, **options: Any) -> list[list[int]]:
    """The drafts of a text, which none of the options changes."""
    chunks = list(model.stream(PROMPT, drafter="streams", **TEXT, **options))
    return [chunk.step.tree.tokens.tolist() for chunk in chunks]


def test_a_call_drafts_with_the_adapter_that_it_names(toys: ToyFolders, second: Path) -> None:
    where: dict[str, Any] = {"dtype": "float32"}
    wanted = {}
    for name, folder in (("first", toys.adapter), ("second", second)):
        with anabranch.load(toys.model, adapter=folder, **where) as model:
            wanted[name] = trees(model)
            plain = model.generate(PROMPT, drafter="none", **TEXT).token_ids
    assert wanted["first"] != wanted["second"]
    with anabranch.load(toys.model, adapter=toys.adapter, adapters={"second": second}, **where) as model:
        assert "adapters=['second']" in repr(model)
        for name, options in (("first", {}), ("second", {"adapter": "second"}), ("first", {})):
            assert trees(model, **options) == wanted[name]
            assert model.generate(PROMPT, **options, **TEXT).token_ids == plain
        assert "streams" in model.generate(PROMPT, adapter="second", **TEXT).drafter
        assert model.supports(adapter="second")
        assert "there is no adapter 'x'; those loaded are second" in model.supports(adapter="x").reason
        with pytest.raises(InputError, match="adapter must be the name of a loaded adapter, got 3"):
            model.generate(PROMPT, adapter=3)  # type: ignore[arg-type]
    with anabranch.load(toys.model, adapters={"second": second}, **where) as model:
        assert model.adapter is None
        assert "streams" in model.generate(PROMPT, adapter="second", **TEXT).drafter
    with anabranch.load(toys.model, adapters={"second": second}, drafter="none", **where) as model:
        assert model.generate(PROMPT, adapter="second", **TEXT).stats.steps == TEXT["max_new_tokens"]
    with anabranch.load(toys.model, **where) as model, pytest.raises(InputError, match="none was loaded by name"):
        model.generate(PROMPT, adapter="second")


@pytest.mark.thorough
def test_a_lora_is_decoded_with_the_adapter_of_its_name(toys: ToyFolders, second: Path, tmp_path: Path) -> None:
    adapter, inside = with_lora(toys, tmp_path / "sql", 5, inside=True)
    other, apart = with_lora(toys, tmp_path / "notes", 6, inside=False)
    wanted = {}
    for name, lora in (("sql", inside), ("notes", apart), ("bare", apart)):
        with anabranch.load(toys.model, lora=lora, dtype="float32", drafter="none") as merged:
            wanted[name] = merged.generate(PROMPT, **TEXT).token_ids
    loras, adapters = {"notes": apart, "bare": apart}, {"sql": adapter, "notes": other, "second": second}
    with anabranch.load(toys.model, loras=loras, adapters=adapters, dtype="float32") as model:
        for options in ({"adapter": "sql"}, {"lora": "sql"}, {"adapter": "notes"}, {"lora": "notes"}):
            found = model.generate(PROMPT, **options, **TEXT)
            assert found.token_ids == wanted[next(iter(options.values()))]
            assert "streams" in found.drafter
        assert model.generate(PROMPT, lora="bare", **TEXT).token_ids == wanted["bare"]
        assert model.generate(PROMPT, lora="bare", adapter="second", **TEXT).token_ids == wanted["bare"]
        assert trees(model, lora="bare", adapter="second") != trees(model, lora="bare", adapter="notes")


def test_adapters_that_do_not_fit_are_refused(toys: ToyFolders, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has an empty name"):
        anabranch.load(toys.model, adapters={"": toys.adapter})
    with pytest.raises(AdapterError, match="there is no adapter folder"):
        anabranch.load(toys.model, adapters={"a": tmp_path / "none"})
    with pytest.raises(AdapterError, match="was trained for another"):
        anabranch.load(toys.model, adapters={"a": toys.other})
    alone, lora = with_lora(toys, tmp_path / "sql", 5, inside=False)
    with pytest.raises(AdapterError, match="was trained for toy with the LoRA 'sql-tuned'"):
        anabranch.load(toys.model, adapters={"a": alone})
    with pytest.raises(AdapterError, match="was trained for another"):
        anabranch.load(toys.model, adapters={"a": toys.other}, loras={"a": lora})
    with pytest.raises(InputError, match="several to choose from"):
        anabranch.load(toys.model, adapters={"a": with_lora(toys, tmp_path / "b", 5, inside=True)[0]}, lora=lora)
