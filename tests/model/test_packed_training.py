"""Adapters are trained for a GGUF file as it is stored: its packed blocks are dequantised for streams' layers only."""

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
from anabranch.learning.target import frozen_target, run_frozen
from anabranch.model.learner import PackedHead, learner_of_packed
from anabranch.model.load import Target, load_target
from anabranch.model.native_linear import NativeLinear
from anabranch.model.training_formats import Int8Linear
from anabranch.native.library import library
from anabranch.train import train_adapter, trainable
from anabranch.train.arithmetic import Arithmetic, chosen_for_packed
from anabranch.train.states import KeptStates
from stored_rows import raw_rows

pytestmark = [
    pytest.mark.skipif(library() is None, reason="no native kernels"),
    pytest.mark.filterwarnings("ignore::anabranch.errors.TrainingWarning"),
]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32, "num_hidden_layers": 3}
OPTIONS = {"batch_tokens": 120, "held_out": 3, "warmup": 2, "epochs": 2.0}
SLOWLY = {"lr": 3e-5}  # in these few steps; fresh heads otherwise amplify the roundings of the target's states
METHODS = {  # on a frozen target, in the forms that read it differently: (method, recipe, options)
    "streams": ("streams", "small", {"stream_layers": 2, "segment": 8}),
    "medusa": ("medusa", "small", SLOWLY),
    "medusa-paper": ("medusa", "paper", SLOWLY),
    "hydra++": ("hydra", "plus-plus", SLOWLY),
    "eagle": ("eagle", "small", SLOWLY),
}
ARITHMETIC = {
    "int8, float32": Arithmetic(torch.float32, int8=True),
    "int8, bfloat16": Arithmetic(torch.bfloat16, int8=True),
    "float32": Arithmetic(torch.float32, int8=False),
    "bfloat16": Arithmetic(torch.bfloat16, int8=False),
}


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


def trained(target: Target, folder: Path, what: str = "streams", **given: Any) -> tuple[dict[str, Any], list[float]]:
    """The record of a short training, and its loss at each step."""
    name, recipe_name, options = METHODS[what]
    method = trainable(name)
    assert method.trained is not None
    recipe = method.trained.training.recipe(recipe_name, {**OPTIONS, **options, **given})
    losses: list[float] = []
    record = train_adapter(target, method, recipe, examples(), folder, report=lambda seen: losses.append(seen.loss))
    return record, losses


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "arithmetic"),
    [
        *(("streams", arithmetic) for arithmetic in ARITHMETIC),
        *((method, "float32") for method in METHODS if method != "streams"),
        ("hydra++", "bfloat16"),
    ],
)
def test_losses_are_those_of_the_dequantised_target(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, arithmetic: str
) -> None:
    target = load_target(str(file), keep=False, device="cpu")
    assert target.quantize == "stored"
    chosen = ARITHMETIC[arithmetic]
    monkeypatch.setattr("anabranch.train.arithmetic._faster_dtype", lambda *_: chosen.dtype)
    monkeypatch.setattr("anabranch.train.arithmetic._least_seconds", lambda *_: {True: 1.0, False: 0.5})
    record, losses = trained(target, tmp_path / "packed", method, target_format="int8" if chosen.int8 else "stored")
    assert record["training"]["arithmetic"] == arithmetic
    dense = load_target(str(file), keep=False, device="cpu", dtype="float32")
    assert dense.fingerprint == target.fingerprint
    _, wanted = trained(dense, tmp_path / "dense", method)
    assert losses == pytest.approx(wanted, rel=0.005 if method == "streams" else 0.01)
    assert len(losses) > 0


def test_only_the_layers_of_streams_are_in_memory_again(file: Path) -> None:
    target = load_target(str(file), keep=False, device="cpu")
    before = copy.copy(dict(target.decoder.named_modules()))
    learner = learner_of_packed(target.decoder, 1, int8=True, dtype=torch.float32)
    assert learner.blocks[0] is target.decoder.blocks[0]
    assert isinstance(learner.head, PackedHead)
    for block in list(learner.blocks)[1:]:
        assert all(isinstance(getattr(module, name), Int8Linear) for module, name in block.linears())  # type: ignore[operator]
    after: Mapping[str, torch.nn.Module] = dict(target.decoder.named_modules())
    assert before == after, "the packed target is as it was"
    assert isinstance(target.decoder.blocks[1].qkv, NativeLinear)
    assert target.decoder.dtype == torch.bfloat16


def test_heads_have_no_layer_in_memory_again(file: Path) -> None:
    target = load_target(str(file), keep=False, device="cpu")
    for name in ("medusa", "hydra", "eagle"):
        trains = trainable(name).trained
        assert trains is not None
        module = trains.make(target.config, trains.training.recipe("small").config, None)
        learner = learner_of_packed(target.decoder, module.lowest, int8=False, dtype=torch.float32)
        assert list(learner.blocks) == list(target.decoder.blocks)


def test_states_are_kept_in_the_type_of_the_pass(file: Path, tmp_path: Path) -> None:
    decoder, some = load_target(str(file), keep=False, device="cpu").decoder, examples()[:4]
    learner = learner_of_packed(decoder, 1, int8=False, dtype=torch.float32)
    run, batch = frozen_target(learner, decoder), Batch.of(some)
    sizes = {}
    for dtype in (decoder.dtype, torch.float32):
        kept = KeptStates(tmp_path / str(dtype), learner, some, identity="toy", form="exact").keeping(run, dtype=dtype)
        wanted = run(batch, taps=(1,), keys_from=1)
        for _ in range(2):
            states = kept(batch, taps=(1,), keys_from=1)
            assert states.hidden_BTD.dtype == torch.float32
            assert torch.equal(states.hidden_BTD, wanted.hidden_BTD), "bf16 loses nothing of them"
            assert torch.equal(states.taps[1], wanted.taps[1])
            assert torch.equal(states.keys_values[0][1], wanted.keys_values[0][1])
        sizes[dtype] = sum(path.stat().st_size for path in (tmp_path / str(dtype)).iterdir())
    assert sizes[torch.bfloat16] < 0.6 * sizes[torch.float32]


def test_a_training_that_needs_the_weights_says_so(file: Path, tmp_path: Path) -> None:
    target = load_target(str(file), keep=False, device="cpu")
    with pytest.raises(CapabilityError, match="load it with quantize='none'"):
        trained(target, tmp_path / "rounded", rounding=True)
    with pytest.raises(CapabilityError, match="not held in nf4"):
        trained(target, tmp_path / "nf4", target_format="nf4")


def test_a_run_keeps_its_products(file: Path) -> None:
    decoder = load_target(str(file), keep=False, device="cpu").decoder
    assert chosen_for_packed(decoder, "stored") in ARITHMETIC.values()
    assert chosen_for_packed(decoder, "int8").int8
    assert not chosen_for_packed(decoder, "int8", lowest=3).int8, "there is no layer to multiply by"
    for kept in ARITHMETIC.values():
        assert chosen_for_packed(decoder, "stored", {"plan": {"arithmetic": kept.name}}) == kept


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
