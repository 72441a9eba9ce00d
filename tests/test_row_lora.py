"""LoRAs chosen per request: rows of different LoRAs in one pass say what each merged model says alone."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.decoding.engine import Engine
from anabranch.errors import AdapterError, CapabilityError, InputError
from anabranch.loading import LoadConfig, check
from anabranch.methods import make_drafter
from anabranch.model.decoder import Decoder
from anabranch.model.load import load_target
from anabranch.model.peft import write_lora
from small import SOME_CASES, decode, drawn_lora, merged_copy, request, small, small_adapter
from toy_text import ToyFolders

TEXT: dict[str, Any] = {"max_new_tokens": 16, "ignore_eos": True}


def with_loras(case: str = "llama") -> Decoder:
    target = copy.deepcopy(small(case))
    target.add_lora("a", drawn_lora(target.config, seed=5))
    target.add_lora("b", drawn_lora(target.config, "proj" if case != "gpt2" else "c_attn", seed=6))
    return target


def loras_of(case: str) -> dict[str | None, Any]:
    config = small(case).config
    return {"a": drawn_lora(config, seed=5), "b": drawn_lora(config, "proj" if case != "gpt2" else "c_attn", seed=6)}


@pytest.mark.parametrize("drafter", ["none", "prompt_lookup", "streams:placement=trail"])
@pytest.mark.parametrize("case", SOME_CASES)
def test_rows_give_the_tokens_of_merged_models(case: str, drafter: str) -> None:
    target, choice = with_loras(case), [None, "a", "b", "a", None, "b", "a"]
    asked = [replace(request(5 + 3 * n % 7, n, 10 + n), lora=lora) for n, lora in enumerate(choice)]
    modules = (small_adapter(target),) if drafter.startswith("streams") else ()
    found, _ = decode(target, asked, make_drafter(drafter, target, *modules), rows=4)
    texts = set()
    for each, said in zip(asked, found, strict=True):
        alone = small(case) if each.lora is None else merged_copy(small(case), loras_of(case)[each.lora])
        assert decode(alone, [replace(each, lora=None)])[0] == [said]
        texts.add(tuple(said))
    assert len(texts) == len(asked)


def test_the_loras_matter() -> None:
    target = with_loras()
    said = [decode(target, [replace(request(9, 1), lora=lora)])[0][0] for lora in (None, "a", "b")]
    assert len(set(map(tuple, said))) == 3


def test_unknown_or_unsupported_loras_are_refused() -> None:
    target = with_loras()
    with pytest.raises(InputError, match="there is no LoRA 'c'; those loaded are a, b"):
        Engine(target).add(replace(request(4, 1), lora="c"))
    with pytest.raises(InputError, match=r"there is no LoRA 'a'; none was loaded \(loras=\)"):
        Engine(small()).add(replace(request(4, 1), lora="a"))
    riding = make_drafter("streams:placement=ride", target, small_adapter(target))
    with pytest.raises(CapabilityError, match="takes no LoRA per request; use another drafter or placement"):
        Engine(target, riding).add(replace(request(4, 1), lora="a"))
    said, _ = decode(target, [request(4, 1)], riding)
    assert said == decode(small(), [request(4, 1)])[0]  # without a LoRA, it decodes as ever


@pytest.fixture
def folders(toys: ToyFolders, tmp_path: Path) -> dict[str, Path]:
    config = load_target(str(toys.model)).config
    for name, seed in (("sql", 5), ("e2e", 6)):
        write_lora(tmp_path / name, drawn_lora(config, seed=seed), base="toy")
    return {name: tmp_path / name for name in ("sql", "e2e")}


def test_one_loaded_target_serves_several_applications(toys: ToyFolders, folders: dict[str, Path]) -> None:
    prompts = ["the other the thing and the rest of it", "the other the thing and the rest of that"]
    wanted = {}
    for name, folder in folders.items():
        with anabranch.load(toys.model, lora=folder, dtype="float32", drafter="none") as merged:
            wanted[name] = [found.token_ids for found in merged.generate(prompts, **TEXT)]
    with anabranch.load(toys.model, dtype="float32", drafter="none") as plain:
        wanted[""] = [found.token_ids for found in plain.generate(prompts, **TEXT)]
    with anabranch.load(toys.model, loras=folders, adapter=toys.adapter, dtype="float32") as model:
        assert "loras=['sql', 'e2e']" in repr(model)
        for name in ("sql", "", "e2e", "sql"):  # the prompts' keys and values of one are not another's
            found = model.generate(prompts, lora=name or None, **TEXT)
            assert [each.token_ids for each in found] == wanted[name], name
        chunks = list(model.stream(prompts[0], lora="e2e", **TEXT))
        assert [token for chunk in chunks for token in chunk.token_ids] == wanted["e2e"][0]
        with pytest.raises(InputError, match="there is no LoRA 'other'; those loaded are sql, e2e"):
            model.generate("the", lora="other")
        with pytest.raises(InputError, match="lora must be the name of a loaded LoRA, got 3"):
            model.generate("the", lora=3)
        assert model.supports("prompt_lookup", lora="sql")
        assert "there is no LoRA 'x'" in model.supports("prompt_lookup", lora="x").reason


def test_the_weights_may_be_quantised(toys: ToyFolders, folders: dict[str, Path]) -> None:
    with anabranch.load(toys.model, loras=folders, quantize="int8", drafter="none") as model:
        found = [model.generate("the other", lora=lora, **TEXT).token_ids for lora in (None, "sql", "e2e")]
    assert len(set(map(tuple, found))) == 3


def test_invalid_options_are_refused_before_loading(folders: dict[str, Path], tmp_path: Path) -> None:
    check(LoadConfig(loras=tuple(folders.items())))
    with pytest.raises(InputError, match="give either a LoRA to merge"):
        check(LoadConfig(lora=folders["sql"], loras=tuple(folders.items())))
    with pytest.raises(InputError, match="empty name"):
        check(LoadConfig(loras=(("", folders["sql"]),)))
    with pytest.raises(AdapterError, match="there is no LoRA folder"):
        check(LoadConfig(loras=(("sql", tmp_path / "none"),)))
