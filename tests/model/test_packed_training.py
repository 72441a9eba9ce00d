"""Streams are trained for a GGUF file as it is stored: its packed blocks are not dequantised but for the top layers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import TOKENS, toy_model, write_gguf

from anabranch.errors import CapabilityError
from anabranch.learning.examples import Batch, Example
from anabranch.learning.target import run_frozen
from anabranch.model.learner import PackedHead, learner_of_packed
from anabranch.model.load import Target, load_target
from anabranch.model.native_linear import NativeLinear
from anabranch.model.training_formats import Int8Linear
from anabranch.native.library import library
from anabranch.train import train_adapter, trainable
from anabranch.train.arithmetic import chosen_products
from anabranch.train.checkpoint import read_log
from stored_rows import raw_rows

pytestmark = [
    pytest.mark.skipif(library() is None, reason="no native kernels"),
    pytest.mark.filterwarnings("ignore::anabranch.errors.TrainingWarning"),
]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32, "num_hidden_layers": 3}
OPTIONS = {"batch_tokens": 120, "held_out": 3, "warmup": 2, "epochs": 2.0, "segment": 8, "stream_layers": 2}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy file whose matrices are all in Q4_K."""
    model = toy_model("qwen2", tie_word_embeddings=True, **SIZES)
    rows = {"attn_q": 256, "attn_k": 64, "attn_v": 64, "attn_output": 256, "ffn_gate": 512, "ffn_up": 512}
    shapes = {"token_embd": (len(TOKENS), 256)}
    for layer in range(SIZES["num_hidden_layers"]):
        for leaf, count in {**rows, "ffn_down": 256}.items():
            shapes[f"blk.{layer}.{leaf}"] = (count, 512 if leaf == "ffn_down" else 256)
    # values of about 0.2; the states of larger ones let embeddings learn so fast that roundings matter
    raw = {f"{name}.weight": raw_rows("Q4_K", *shape, seed, 4e-4) for seed, (name, shape) in enumerate(shapes.items())}
    return write_gguf(
        *(tmp_path_factory.mktemp("model") / "toy.gguf", "qwen2", model),
        raw={name: ("Q4_K", values) for name, values in raw.items()},
        keys={"qwen2.rope.dimension_count": 32},
    )


def examples() -> list[Example]:
    """Texts that repeat themselves, of different lengths."""
    made = []
    for n in range(16):
        cycle = [3 + (5 * n + 7 * i) % (len(TOKENS) - 3) for i in range(4 + n % 3)]
        made.append(Example(tuple(cycle), tuple((cycle * 6)[: 12 + n])))
    return made


def trained(target: Target, folder: Path, **given: Any) -> tuple[dict[str, Any], list[float]]:
    """The record of a short training of streams, and its losses."""
    method = trainable("streams")
    assert method.trained is not None
    recipe = method.trained.training.recipe("small", {**OPTIONS, **given})
    record = train_adapter(target, method, recipe, examples(), folder, report=lambda _: None)
    return record, [line["loss"] for line in read_log(folder / "training")]


@pytest.mark.thorough
@pytest.mark.parametrize("products", ["int8", "stored"])
def test_losses_are_those_of_the_dequantised_target(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, products: str
) -> None:
    target = load_target(str(file), keep=False, device="cpu")
    assert target.quantize == "stored"
    if products == "stored":
        monkeypatch.setattr("anabranch.train.fit.chosen_products", lambda *_: "torch.bfloat16")
    record, losses = trained(target, tmp_path / "packed", target_format=products)
    assert record["training"]["arithmetic"] == ("int8" if products == "int8" else "bfloat16")
    dense = load_target(str(file), keep=False, device="cpu", dtype="float32")
    assert dense.fingerprint == target.fingerprint
    _, wanted = trained(dense, tmp_path / "dense")
    assert losses == pytest.approx(wanted, rel=0.005)
    assert len(losses) > 0


def test_only_the_layers_of_streams_are_in_memory_again(file: Path) -> None:
    target = load_target(str(file), keep=False, device="cpu")
    before = copy.copy(dict(target.decoder.named_modules()))
    learner = learner_of_packed(target.decoder, 1, int8=True)
    assert learner.blocks[0] is target.decoder.blocks[0]
    assert isinstance(learner.head, PackedHead)
    for block in list(learner.blocks)[1:]:
        assert all(isinstance(getattr(module, name), Int8Linear) for module, name in block.linears())  # type: ignore[operator]
    after: Mapping[str, torch.nn.Module] = dict(target.decoder.named_modules())
    assert before == after, "the packed target is as it was"
    assert isinstance(target.decoder.blocks[1].qkv, NativeLinear)


def test_a_training_that_needs_the_weights_says_so(file: Path, tmp_path: Path) -> None:
    target = load_target(str(file), keep=False, device="cpu")
    with pytest.raises(CapabilityError, match="load it with quantize='none'"):
        trained(target, tmp_path / "rounded", rounding=True)
    with pytest.raises(CapabilityError, match="not held in nf4"):
        trained(target, tmp_path / "nf4", target_format="nf4")


def test_a_run_keeps_its_products(file: Path) -> None:
    decoder = load_target(str(file), keep=False, device="cpu").decoder
    assert chosen_products(decoder, "stored") in ("int8", "torch.bfloat16")
    assert chosen_products(decoder, "int8") == "int8"
    for kept in ("int8", "torch.bfloat16"):
        assert chosen_products(decoder, "stored", {"plan": {"arithmetic": kept}}) == kept


def test_rows_of_different_length_have_the_states_that_they_have_alone(file: Path) -> None:
    decoder = load_target(str(file), keep=False, device="cpu").decoder
    some = [examples()[n] for n in (0, 5, 15)]
    together = run_frozen(decoder, Batch.of(some), taps=(1,), keys_from=1)
    for row, example in enumerate(some):
        alone, n = run_frozen(decoder, Batch.of([example]), taps=(1,), keys_from=1), len(example)
        assert torch.equal(together.hidden_BTD[row, :n], alone.hidden_BTD[0])
        assert torch.equal(together.taps[1][row, :n], alone.taps[1][0])
        assert not together.hidden_BTD[row, n:].any()
        for mine, theirs in zip(together.keys_values, alone.keys_values, strict=True):
            assert all(torch.equal(a[row, :, :n], b[0]) for a, b in zip(mine, theirs, strict=True))
            assert not any(bool(a[row, :, n:].any()) for a in mine)
