"""Which tensors of a file are used: as transformers uses them, float32 logits compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from toys import CASES, save_toy, tokens, toy_hf

from anabranch.errors import ModelError, ModelWarning
from anabranch.model.load import Target, load_target
from anabranch.model.pack import pack_decoder
from anabranch.model.weights import fingerprint
from small import logits_after

Tensors = dict[str, Tensor]
TIED = {"tie_word_embeddings": True}
UNTIED = {"tie_word_embeddings": False}
# the families whose embedding or head has a name of its own
NAMES = {
    "llama": ("model.", "embed_tokens", "lm_head"),
    "phi": ("model.", "embed_tokens", "lm_head"),
    "gpt2": ("transformer.", "wte", "lm_head"),
    "opt": ("model.", "decoder.embed_tokens", "lm_head"),
    "gpt_neox": ("gpt_neox.", "embed_in", "embed_out"),
}


def toy(folder: Path, case: str, change: Callable[[Tensors], None] | None = None, **config: Any) -> Path:
    """A model folder whose tensors were changed, and whose config.json got other fields afterwards."""
    model_type, fields = CASES[case]
    model = toy_hf(model_type, {**fields, **{key: config[key] for key in TIED if key in config}})
    save_toy(model, folder)
    edit_config(folder, **config)
    if change is not None:
        stored = load_file(folder / "model.safetensors")
        change(stored)
        save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    return folder


def edit_config(folder: Path, **config: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))


def theirs(folder: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="eager").eval()
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([tokens(13)]), use_cache=False).logits[0]
    return logits


def check(target: Target, folder: Path) -> None:
    torch.testing.assert_close(logits_after(target.decoder, tokens(13)), theirs(folder), rtol=0, atol=1e-4)


def equal(folder: Path) -> Target:
    target = load_target(str(folder), dtype="float32", device="cpu")
    check(target, folder)
    return target


@pytest.mark.parametrize("case", NAMES)
def test_a_head_that_differs_wins_over_a_config_that_ties_it(case: str, tmp_path: Path) -> None:
    folder = toy(tmp_path, case, **UNTIED)
    edit_config(folder, **TIED)
    target = equal(folder)
    assert not target.config.tied_head
    assert target.decoder.config is target.config
    assert target.fingerprint == fingerprint(folder) == fingerprint(target.decoder)
    edit_config(folder, **UNTIED)
    assert fingerprint(folder) == target.fingerprint, "the config does not matter"


@pytest.mark.parametrize("case", NAMES)
def test_a_tied_matrix_may_have_either_name_or_both(case: str, tmp_path: Path) -> None:
    outer, table, head = NAMES[case]
    folder = toy(tmp_path, case, **TIED)
    stored = load_file(folder / "model.safetensors")
    matrix = stored.pop(outer + table + ".weight")
    prints = set()
    alone = (outer + table, head, "lm_head", table, outer + "lm_head", outer + outer + table)
    for names in ([outer + table, head], *([name] for name in alone)):
        written = {**stored, **{f"{name}.weight": matrix.clone() for name in names}}
        save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
        target = equal(folder)
        assert target.config.tied_head
        assert target.decoder.head.weight is target.decoder.embedding.weight
        prints |= {target.fingerprint, fingerprint(folder)}
    assert len(prints) == 1


def test_native_kernels_use_the_head_of_the_file(tmp_path: Path) -> None:
    """In bfloat16 the packed head serves as the embedding too, if they are tied."""
    folder = toy(tmp_path, "llama", **UNTIED)
    edit_config(folder, **TIED)
    target = load_target(str(folder), dtype="bfloat16", device="cpu")
    pack_decoder(target.decoder)
    ids = torch.tensor([5, 6, 7])
    stored = load_file(folder / "model.safetensors")
    embedded = target.decoder.embedding(ids).float()
    torch.testing.assert_close(embedded, stored["model.embed_tokens.weight"][ids].bfloat16().float())
    states = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    wanted = states.float() @ stored["lm_head.weight"].bfloat16().float().T
    torch.testing.assert_close(target.decoder.logits(states).float(), wanted, rtol=0.02, atol=0.1)


def test_a_tied_head_in_shards(tmp_path: Path) -> None:
    model_type, fields = CASES["llama"]
    folder = save_toy(toy_hf(model_type, {**fields, **UNTIED}), tmp_path, max_shard_size="60KB")
    edit_config(folder, **TIED)
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert not equal(folder).config.tied_head


def test_a_missing_head_or_embedding_is_refused_by_name(tmp_path: Path) -> None:
    for case in ("llama", "gpt2"):
        folder = toy(tmp_path / case, case, **TIED)
        edit_config(folder, **UNTIED)
        with pytest.raises(ModelError, match=r"the weights lack lm_head\.weight"):
            load_target(str(folder))
    folder = toy(tmp_path / "neither", "llama", lambda stored: stored.pop("model.embed_tokens.weight"), **TIED)
    with pytest.raises(ModelError, match=r"the weights lack model\.embed_tokens\.weight"):
        load_target(str(folder))


def test_a_tensor_under_two_names_must_be_the_same(tmp_path: Path) -> None:
    def twice(stored: Tensors) -> None:
        stored["norm.weight"] = stored["model.norm.weight"] + 1

    with pytest.raises(ModelError, match=r"model\.norm\.weight and norm\.weight, which differ"):
        load_target(str(toy(tmp_path, "llama", twice)))


UNUSED: dict[str, tuple[str, dict[str, tuple[int, ...]], str]] = {
    "a bias of the attention": ("llama", {"model.layers.0.self_attn.q_proj.bias": (64,)}, r"layers\.0\.self_attn"),
    "a bias of the head": ("llama", {"lm_head.bias": (97,)}, r"lm_head\.bias"),
    "a bias of a norm": ("llama", {"model.norm.bias": (64,)}, r"model\.norm\.bias"),
    "norms of queries": ("llama", {"model.layers.1.self_attn.q_norm.weight": (16,)}, r"q_norm\.weight"),
    "another layer": (
        "qwen2",
        {"model.layers.3.mlp.up_proj.weight": (96, 64), "model.layers.3.input_layernorm.weight": (64,)},
        r"contain model\.layers\.3\.input_layernorm\.weight, model\.layers\.3\.mlp\.up_proj\.weight, which",
    ),
    "a head of a classifier": ("gpt2", {"score.weight": (2, 64)}, r"score\.weight"),
    "something in int8": ("opt", {"scales": (3,)}, "scales"),
    "many": ("llama", {f"extra.{i}": (1,) for i in range(9)}, r"extra\.0, extra\.1, extra\.2 and 6 more"),
}


@pytest.mark.parametrize("name", UNUSED)
def test_unused_tensors_are_named_in_one_warning(name: str, tmp_path: Path) -> None:
    case, more, message = UNUSED[name]

    def add(stored: Tensors) -> None:
        dtype = torch.int8 if "int8" in name else torch.float32
        stored.update({key: torch.full(shape, 3, dtype=dtype) for key, shape in more.items()})

    folder = toy(tmp_path, case, add)
    with pytest.warns(ModelWarning, match=message) as seen:
        target = load_target(str(folder), dtype="float32", device="cpu")
    assert len(seen) == 1
    check(target, folder)
    assert target.fingerprint == fingerprint(folder)


def test_fewer_layers_than_the_file_has(tmp_path: Path) -> None:
    folder = toy(tmp_path, "llama", num_hidden_layers=2)
    with pytest.warns(ModelWarning, match=r"contain model\.layers\.2\..* and 6 more"):
        check(load_target(str(folder), dtype="float32", device="cpu"), folder)


@pytest.mark.parametrize(("case", "name"), [("gpt2", "transformer.h.0.attn.bias"), ("llama", "rotary_emb.inv_freq")])
def test_buffers_of_older_files_are_ignored(case: str, name: str, tmp_path: Path) -> None:
    if case == "llama":
        name = f"model.layers.0.self_attn.{name}"
    equal(toy(tmp_path, case, lambda stored: stored.update({name: torch.ones(8)})))


def test_parts_of_a_fused_matrix_must_have_their_own_shapes(tmp_path: Path) -> None:
    """Together they have the right number of rows."""
    key = "model.layers.0.self_attn."
    shifted = {f"{key}q_proj.weight": torch.zeros(72, 64), f"{key}k_proj.weight": torch.zeros(24, 64)}
    message = r"q_proj\.weight has the shape \(72, 64\), but the config requires \(64, 64\)"
    with pytest.raises(ModelError, match=message):
        load_target(str(toy(tmp_path, "llama", lambda stored: stored.update(shifted))))


def test_shapes_are_given_as_stored(tmp_path: Path) -> None:
    narrow = {"transformer.h.0.mlp.c_fc.weight": torch.zeros(64, 128)}
    message = r"mlp\.c_fc\.weight has the shape \(64, 128\), but the config requires \(64, 256\)"
    with pytest.raises(ModelError, match=message):
        load_target(str(toy(tmp_path, "gpt2", lambda stored: stored.update(narrow))))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.int64])
def test_weights_of_other_types_are_refused_by_name(dtype: torch.dtype, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    folder = toy(tmp_path, "llama", lambda stored: stored.update({name: torch.ones(64, 96).to(dtype)}))
    with pytest.raises(ModelError, match=rf"down_proj\.weight is stored as {dtype}; use weights in float32"):
        load_target(str(folder))


@pytest.mark.parametrize(
    ("narrow", "stated", "expected"),
    [
        ("norm", None, torch.float32),
        ("norm", "bfloat16", torch.bfloat16),
        ("norm", "float32", torch.float32),
        ("all", "float32", torch.bfloat16),
        ("none", "bfloat16", torch.float32),
        ("unused", "bfloat16", torch.float32),
        ("none", "nonsense", torch.float32),
    ],
)
def test_auto_is_the_type_of_the_weights_or_of_the_config_where_they_differ(
    narrow: str, stated: str | None, expected: torch.dtype, tmp_path: Path
) -> None:
    def cast(stored: Tensors) -> None:
        if narrow == "unused":
            stored["extra.attn.bias"] = torch.ones(3, dtype=torch.bfloat16)
        stored.update({name: value.bfloat16() for name, value in stored.items() if narrow in (name[6:10], "all")})

    folder = toy(tmp_path, "llama", cast, dtype=stated)
    target = load_target(str(folder), device="cpu")
    assert {parameter.dtype for parameter in target.decoder.parameters()} == {expected}
    equal(folder)
