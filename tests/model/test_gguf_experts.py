"""Mixtures of experts from GGUF files: the experts stay packed in the file's blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import MIXTURES, toy_model, write_gguf
from toys import Oracle

import anabranch
from anabranch.errors import FileError, ModelError
from anabranch.model.cache import Cache
from anabranch.model.experts import Experts
from anabranch.model.gguf import read_gguf
from anabranch.model.inputs import Inputs
from anabranch.model.kernel_use import kernels_of
from anabranch.model.load import Target, load_target
from anabranch.model.native_backend import ExpertsBackend, ProductsBackend
from anabranch.model.native_linear import NativeLinear
from anabranch.model.pack import weight_bytes
from anabranch.native.library import library
from anabranch.tree import DraftTree
from small import logits_after, new_cache
from stored_rows import raw_rows, values_of
from verbs import Anabranch

IDS = list(range(3, 43))
WIDE = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 32}
needs_kernels = pytest.mark.skipif(library() is None, reason="no native kernels")
in_each_family = pytest.mark.parametrize("family", sorted(MIXTURES))
pytestmark = pytest.mark.filterwarnings("ignore:.*rope", "ignore:.*RoPE")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own."""
    monkeypatch.setenv("ANABRANCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "packed"


def mixture(path: Path, family: str, kind: str, **options: Any) -> tuple[Path, Any]:
    """A toy file whose experts have random blocks of a format, and the model of transformers with these weights."""
    model = toy_model(family, **WIDE)
    raw: dict[str, tuple[str, np.ndarray]] = {}
    for layer, block in enumerate(model.model.layers):
        experts = block.mlp.experts
        count, values = experts.num_experts, {}
        for part in ("gate", "up", "down"):
            rows = raw_rows(kind, 256 * count, 256, len(raw)).reshape(count, 256, -1)
            raw[f"blk.{layer}.ffn_{part}_exps.weight"] = kind, rows
            values[part] = values_of(kind, rows.reshape(256 * count, -1)).view(count, 256, 256)
        both = torch.cat([values["gate"], values["up"]], 1)
        if family == "gpt-oss":
            both = torch.stack([values["gate"], values["up"]], 2).flatten(1, 2).transpose(1, 2)
            values["down"] = values["down"].transpose(1, 2)
        experts.gate_up_proj.data.copy_(both)
        experts.down_proj.data.copy_(values["down"])
    return write_gguf(path / "toy.gguf", family, model, raw=raw, **options), model


def loaded(path: Path, **options: Any) -> Target:
    return load_target(str(path), device="cpu", **options)


@in_each_family
def test_a_file_is_the_model_of_transformers(tmp_path: Path, family: str) -> None:
    model = toy_model(family)
    target = loaded(write_gguf(tmp_path / "toy.gguf", family, model))
    assert (target.quantize, target.decoder.dtype) == ("none", torch.float32)
    assert target.tokenizer.decode(target.tokenizer("hi 5")["input_ids"]) == "hi 5"
    assert target.tokenizer.chat_template
    torch.testing.assert_close(logits_after(target.decoder, IDS), Oracle(model).logits(IDS), rtol=1e-4, atol=1e-4)


@needs_kernels
@in_each_family
@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", "MXFP4", "F16"])
def test_experts_have_the_values_of_the_file(tmp_path: Path, family: str, kind: str) -> None:
    path, model = mixture(tmp_path, family, kind)
    target, dense = loaded(path), loaded(path, dtype="float32")
    assert target.quantize == "stored"
    assert kind in target.formats
    assert target.fingerprint == dense.fingerprint
    assert isinstance(target.decoder.backend, ProductsBackend if family == "gpt-oss" else ExpertsBackend)
    for ours, theirs in zip(target.decoder.blocks, dense.decoder.blocks, strict=True):
        assert isinstance(ours.mlp, Experts)
        assert torch.equal(ours.mlp.router.dense(), theirs.mlp.router.weight)
        for packed, plain in zip(ours.mlp.experts, theirs.mlp.experts, strict=True):
            for name in ("up", "down"):
                linear = getattr(packed, name)
                assert isinstance(linear, NativeLinear)
                assert linear.kind == ("floats" if kind == "F16" else "stored")
                assert torch.equal(linear.kernels.unpack_stored(linear.packed), getattr(plain, name).weight)
    wanted = Oracle(model).logits(IDS)
    torch.testing.assert_close(logits_after(dense.decoder, IDS), wanted, rtol=1e-3, atol=1e-3)
    error = (logits_after(target.decoder, IDS).float() - wanted).norm() / wanted.norm()
    assert error < (0.05 if kind == "F16" else 0.2)  # a row may choose another expert


@needs_kernels
@in_each_family
def test_drafts_change_nothing(tmp_path: Path, family: str) -> None:
    path, _ = mixture(tmp_path, family, "MXFP4")
    with anabranch.load(path, device="cpu") as model:
        prompt = [*IDS, *IDS[:20]]
        plain = model.generate(prompt, max_new_tokens=30, drafter="none")
        for drafter in ("prompt_lookup", "suffix", "lookahead"):
            result = model.generate(prompt, max_new_tokens=30, drafter=drafter)
            assert result.token_ids == plain.token_ids


@needs_kernels
@pytest.mark.parametrize("family", ["qwen3moe", "mixtral"])
@pytest.mark.parametrize("kind", ["MXFP4", "F16"])
def test_nodes_of_trees_are_bit_identical_to_paths_alone(tmp_path: Path, family: str, kind: str) -> None:
    decoder = loaded(mixture(tmp_path, family, kind)[0]).decoder
    tree = DraftTree(np.array([4, 5, 6, 7, 8], np.int64), np.array([-1, 0, 0, 1, 3], np.int64))

    def read() -> Cache:
        cache = new_cache(decoder)
        decoder(Inputs.of_prompt(IDS), cache)
        cache.commit([range(len(IDS))])
        return cache

    together = decoder(Inputs.of_trees([tree]), read()).logits_MV
    for node, path in enumerate([[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4]]):
        cache = read()
        for step in path:
            alone = decoder(Inputs.of_trees([DraftTree.root(int(tree.tokens[step]))]), cache).logits_MV
            cache.commit([[0]])
        assert torch.equal(together[node], alone[0])


@needs_kernels
def test_the_second_load_maps_packed_experts(tmp_path: Path, home: Path) -> None:
    path, _ = mixture(tmp_path, "qwen3moe", "Q4_K")
    first = logits_after(loaded(path).decoder, IDS)
    calls: list[int] = []
    again = loaded(path, progress=lambda done, total: calls.append(done))
    assert len(list(home.iterdir())) == 1
    assert not calls
    assert torch.equal(logits_after(again.decoder, IDS), first)


@needs_kernels
def test_info_describes_a_mixture_without_loading_it(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = mixture(tmp_path, "qwen3moe", "Q4_K")
    facts = json.loads(Anabranch(capsys, monkeypatch)("info", path, "--json").out)
    assert not home.exists()
    assert (facts["family"], "Q4_K" in facts["weights"]) == ("qwen3_moe", True)
    target = loaded(path)
    assert facts["fingerprint"] == target.fingerprint
    # 3 of 6 experts are read
    read = facts["read_gb_s"] * 1e9 / facts["tokens_per_second_limit"]
    assert read == pytest.approx(weight_bytes(target.decoder), rel=0.1)
    assert read < 0.8 * facts["weights_mb"] * 1e6
    assert facts["pytorch_because"] is None
    path, _ = mixture(tmp_path, "gpt-oss", "MXFP4")
    facts = json.loads(Anabranch(capsys, monkeypatch)("info", path, "--json").out)
    assert "attention has sinks" in facts["pytorch_because"]
    assert "attention has sinks" in kernels_of(loaded(path).decoder).why


@in_each_family
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("expert_used_count", 9, "expert_used_count to 9, but there are"),
        ("expert_gating_func", 2, "expert_gating_func to 2, which is not supported"),
        ("expert_weights_scale", 2.5, "expert_weights_scale to 2.5, which is not supported"),
        ("expert_shared_count", 1, "expert_shared_count to 1, which is not supported"),
    ],
)
def test_other_experts_are_refused(tmp_path: Path, family: str, key: str, value: Any, message: str) -> None:
    architecture = "llama" if family == "mixtral" else family
    path = write_gguf(tmp_path / "toy.gguf", family, toy_model(family), keys={f"{architecture}.{key}": value})
    with pytest.raises(ModelError, match=message):
        read_gguf(path)


def test_a_damaged_number_of_experts_is_a_sentence(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "toy.gguf", "mixtral", toy_model("mixtral"), keys={"llama.expert_count": 3})
    with pytest.raises(FileError, match=r"ffn_gate_exps.weight in the shape \[4, 96, 64\], but 3 experts"):
        read_gguf(path)
    path = write_gguf(tmp_path / "toy.gguf", "mixtral", toy_model("mixtral"), keys={"llama.expert_count": 0})
    with pytest.raises(ModelError, match="expert_used_count to 2, but there are no experts"):
        read_gguf(path)


def test_weights_of_experts_that_do_not_add_up(tmp_path: Path) -> None:
    """llama.cpp does not read this key for Qwen3, so it means what it does in transformers."""
    model = toy_model("qwen3moe", norm_topk_prob=False)
    keys = {"qwen3moe.expert_weights_norm": False}
    target = loaded(write_gguf(tmp_path / "toy.gguf", "qwen3moe", model, keys=keys))
    torch.testing.assert_close(logits_after(target.decoder, IDS), Oracle(model).logits(IDS), rtol=1e-4, atol=1e-4)


def test_a_shared_expert_is_refused(tmp_path: Path) -> None:
    tensors = {"blk.0.ffn_up_shexp.weight": np.zeros((32, 64), np.float32)}
    path = write_gguf(tmp_path / "toy.gguf", "qwen3moe", toy_model("qwen3moe"), tensors=tensors)
    with pytest.raises(ModelError, match=r"has the tensor blk.0.ffn_up_shexp.weight, and qwen3_moe models with it"):
        read_gguf(path)
