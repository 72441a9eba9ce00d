"""GGUF files in every format of quantised weights, decoded as they are stored."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import TOKENS, toy_model, write_gguf

import anabranch
from anabranch.decoding.engine import Request
from anabranch.errors import AnabranchError, FileError, ModelError, ModelWarning, NumericsError
from anabranch.methods import make_drafter
from anabranch.methods.streams.recipes import StreamConfig
from anabranch.model import as_stored, packed_file
from anabranch.model.as_stored import describe_stored
from anabranch.model.gguf import read_gguf
from anabranch.model.inputs import Inputs
from anabranch.model.load import Target, load_target
from anabranch.model.native_backend import stack_of
from anabranch.model.native_linear import NativeLinear
from anabranch.model.peft import write_lora
from anabranch.native.arguments import FLOATS, STORED_TYPES
from anabranch.native.library import library
from children import in_child, together
from small import decode, drawn_lora, logits_after, logits_of, new_cache, small_adapter
from stored_rows import HALVES, raw_rows
from verbs import Anabranch

KINDS = sorted(STORED_TYPES)
IDS = list(range(3, 43))
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}
needs_kernels = pytest.mark.skipif(library() is None, reason="no native kernels")
pytestmark = needs_kernels
Kinds = Callable[[str], str]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own."""
    monkeypatch.setenv("ANABRANCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "packed"


def stored_file(
    path: Path, kinds: Kinds, family: str = "llama", *, raw: dict[str, Any] | None = None, **options: Any
) -> Path:
    """A toy file whose matrices have random blocks of the formats that ``kinds`` says, by name."""
    tied = options.pop("tie_word_embeddings", False)
    model = toy_model(family, tie_word_embeddings=tied, **SIZES)
    rows = {"attn_q": 256, "attn_k": 64, "attn_v": 64, "attn_output": 256, "ffn_gate": 512, "ffn_up": 512}
    made: dict[str, tuple[str, np.ndarray]] = {}
    for layer in range(2):
        for leaf, count in {**rows, "ffn_down": 256}.items():
            name = f"blk.{layer}.{leaf}.weight"
            made[name] = (kinds(name), raw_rows(kinds(name), count, 512 if leaf == "ffn_down" else 256, len(made)))
    for name in ("token_embd.weight", *(() if tied else ("output.weight",))):
        made[name] = (kinds(name), raw_rows(kinds(name), len(TOKENS), 256, len(made)))
    keys = {f"{family}.rope.dimension_count": 32}
    return write_gguf(path, family, model, raw=made | (raw or {}), keys=keys, **options)


def mixed(name: str) -> str:
    """Another format for every tensor."""
    return KINDS[sum(name.encode()) % len(KINDS)]


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    """Compare logits [N, V] of weights that are equal, but for inputs that are rounded to int8."""
    error = (one.float() - other.float()).norm(dim=-1) / other.float().norm(dim=-1)
    assert float(error.mean()) < 0.1


def unpacked(linear: NativeLinear) -> torch.Tensor:
    """The weight of a linear layer, exactly [N, D]."""
    values = linear.kernels.unpack_stored(linear.packed)
    return linear._interleave(values, back=True) if linear.gated else values


def check_values(target: Target, dense: Target) -> None:
    """Compare all weights with those of the dequantised target, in float32."""
    found = dict(target.decoder.named_modules())
    for name, module in dense.decoder.named_modules():
        if isinstance(module, torch.nn.Linear):
            linear = found[name]
            assert isinstance(linear, NativeLinear)
            assert linear.kind in ("stored", "floats")
            assert torch.equal(unpacked(linear), module.weight), name
            assert torch.equal(linear.dense(), module.weight.bfloat16())
            if module.bias is not None:
                assert torch.equal(linear.bias, module.bias)
    words = torch.arange(len(TOKENS))
    assert torch.equal(target.decoder.embedding(words), dense.decoder.embedding(words))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("F32", "BF16")])
def test_every_format_has_the_values_of_the_file(tmp_path: Path, kind: str) -> None:
    path = stored_file(tmp_path / "toy.gguf", lambda name: kind)
    target, dense = load_target(str(path), device="cpu"), load_target(str(path), dtype="float32", device="cpu")
    assert (target.quantize, target.formats, dense.quantize) == ("stored", (kind,), "none")
    assert target.fingerprint == dense.fingerprint
    check_values(target, dense)
    close(logits_after(target.decoder, IDS), logits_after(dense.decoder, IDS))


@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_floats_that_are_not_halves_are_loaded_in_their_own_type(tmp_path: Path, kind: str) -> None:
    target = load_target(str(stored_file(tmp_path / "toy.gguf", lambda name: kind)), device="cpu")
    assert (target.quantize, target.decoder.dtype) == ("none", torch.float32 if kind == "F32" else torch.bfloat16)


def test_inputs_are_bf16_unless_a_weight_of_the_layers_is_quantised(tmp_path: Path) -> None:
    """So an F16 file differs from its float32 values by the rounding of activations to bf16 alone."""
    kinds = {"blk.1.ffn_up.weight": "Q8_0", "output.weight": "Q6_K", "token_embd.weight": "BF16"}
    for changed, inside, head in ((None, "floats", "floats"), (*list(kinds)[1:2], "floats", "stored")):
        path = stored_file(tmp_path / "toy.gguf", lambda name, of=changed: kinds[name] if name == of else "F16")
        target, dense = load_target(str(path), device="cpu"), load_target(str(path), dtype="float32", device="cpu")
        assert {target.decoder.blocks[1].mlp.up.kind, target.decoder.blocks[0].qkv.kind} == {inside}
        assert target.decoder.head.kind == head
        one, other = logits_after(target.decoder, IDS).float(), logits_after(dense.decoder, IDS)
        assert (one - other).norm() < 0.02 * other.norm()
    path = stored_file(tmp_path / "toy.gguf", lambda name: kinds.get(name, "F16"))
    target, dense = load_target(str(path), device="cpu"), load_target(str(path), dtype="float32", device="cpu")
    assert {target.decoder.blocks[1].mlp.up.kind, target.decoder.blocks[0].qkv.kind} == {"stored"}
    check_values(target, dense)
    close(logits_after(target.decoder, IDS), logits_after(dense.decoder, IDS))


def test_norms_keep_the_values_of_the_file(tmp_path: Path) -> None:
    norms = {f"blk.{layer}.{leaf}.weight": 256 for layer in range(2) for leaf in ("attn_norm", "ffn_norm")}
    norms |= {"output_norm.weight": 256}
    random = np.random.default_rng(0)
    tensors = {name: (1 + 0.1 * random.standard_normal(width)).astype(np.float32) for name, width in norms.items()}
    path = stored_file(tmp_path / "toy.gguf", lambda name: "Q8_0", tensors=tensors)
    target, dense = load_target(str(path), device="cpu"), load_target(str(path), dtype="float32", device="cpu")
    assert target.decoder.dtype == torch.bfloat16
    found = dict(target.decoder.named_parameters())
    for name, value in dense.decoder.named_parameters():
        if "norm" in name:
            assert torch.equal(found[name], value)


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", False)])
def test_formats_may_differ_inside_of_a_layer(tmp_path: Path, family: str, tied: bool) -> None:
    """q, k and v are one product here, and so are gate and up, whose blocks are interleaved."""
    path = stored_file(tmp_path / "toy.gguf", mixed, family, tie_word_embeddings=tied, parts=2)
    target, dense = load_target(str(path), device="cpu"), load_target(str(path), dtype="float32", device="cpu")
    assert target.quantize == "stored"
    assert len(target.formats) > 6
    assert target.fingerprint == dense.fingerprint
    assert target.config.tied_head == tied
    check_values(target, dense)
    close(logits_after(target.decoder, IDS), logits_after(dense.decoder, IDS))


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", "F16"])
def test_drafts_change_nothing(tmp_path: Path, kind: str) -> None:
    path = stored_file(tmp_path / "toy.gguf", lambda name: kind)
    with anabranch.load(path, device="cpu") as model:
        assert model.target.quantize == "stored"
        prompt = [*IDS, *IDS[:20]]
        plain = model.generate(prompt, max_new_tokens=40, drafter="none")
        for drafter in ("prompt_lookup", "suffix", "lookahead"):
            assert model.generate(prompt, max_new_tokens=40, drafter=drafter).token_ids == plain.token_ids
        drafted = f"draft_model:model={path}"
        result = model.generate(prompt, max_new_tokens=40, drafter=drafted)
        assert result.token_ids == plain.token_ids
        # the draft model is the target itself, as it is stored; halves are drawn with less extreme scores
        assert result.stats.mean_acceptance_length > (2 if kind == "F16" else 3)


@pytest.mark.parametrize(
    ("layers", "head"), [("F16", "F16"), ("F16", "Q6_K"), ("Q4_K", "F16"), ("BF16", "Q8_0"), ("Q8_0", "F32")]
)
def test_trained_drafters_read_floats_as_they_do_bf16(tmp_path: Path, layers: str, head: str) -> None:
    """In four bits, and the head's rows in eight, unless that is quantised itself."""
    kinds = {"output.weight": head, "token_embd.weight": "F16", "blk.1.ffn_up.weight": "F16"}
    path = stored_file(tmp_path / "toy.gguf", lambda name: kinds.get(name, layers))
    target = load_target(str(path), device="cpu")
    assert target.quantize == "stored"
    wide = {"attention_rank": 4, "conditioning": "path", "conditioning_rank": 32, "root_width": 32}
    decoder, shape = target.decoder, StreamConfig(num_stream_layers=1, stream_mlp="mlp+adapter", **wide)
    adapter = small_adapter(decoder, shape, torch.arange(0, len(TOKENS), 2)).to(torch.bfloat16)
    asked = [Request([*IDS[: 10 + i], *IDS[:8]], 20) for i in range(2)]
    plain, _ = decode(decoder, asked)
    # a copy in four bits drafts for weights that have more
    copied = stack_of(decoder.backend).kind == "bfloat16"
    for spec in ("streams:tree=6", "quantized_draft", "streams:tree=6+quantized_draft")[: 3 if copied else 1]:
        drafted, steps = decode(decoder, asked, make_drafter(spec, decoder, adapter), rows=2)
        assert drafted == plain
        assert any(step.tree.size > 1 for row in steps for step in row)
    assert copied == (layers in ("F16", "BF16"))


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", "F16"])
def test_requests_choose_loras(tmp_path: Path, kind: str) -> None:
    """Their terms are added to products of the stored weights, by the kernels."""
    path = stored_file(tmp_path / "toy.gguf", lambda name: kind)
    lora = drawn_lora(load_target(str(path), device="cpu").config)
    write_lora(tmp_path / "tuned", lora, base="toy")
    merged = load_target(str(path), device="cpu", dtype="float32", lora=tmp_path / "tuned")
    with anabranch.load(path, device="cpu", loras={"tuned": tmp_path / "tuned"}) as model:
        assert model.target.quantize == "stored"
        decoder = model.target.decoder
        assert decoder.backend.kernels is not None
        result = decoder(Inputs.of_prompt(IDS), new_cache(decoder, prompt=len(IDS)), loras=["tuned"])
        close(logits_of(result)[0], logits_after(merged.decoder, IDS))
        prompt = [*IDS, *IDS[:20]]
        said = [model.generate(prompt, max_new_tokens=40, lora=name).token_ids for name in ("tuned", None, "tuned")]
        plain = model.generate(prompt, max_new_tokens=40, drafter="none", lora="tuned").token_ids
    assert said[0] == said[2] == plain
    assert said[0] != said[1]


def test_what_is_asked_for_is_honoured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stored_file(tmp_path / "toy.gguf", mixed)
    kinds = {name: load_target(str(path), device="cpu", quantize=name).quantize for name in ("none", "int8", "int4")}
    assert kinds == {"none": "none", "int8": "int8", "int4": "int4"}
    given = load_target(str(path), device="cpu", dtype="bfloat16")
    assert (given.quantize, given.decoder.dtype) == ("none", torch.bfloat16)
    assert isinstance(given.decoder.head, torch.nn.Linear)


@pytest.mark.parametrize(
    ("kind", "name", "why"),
    [
        ("IQ4_XS", "blk.1.ffn_up.weight", None),
        ("TQ1_0", "blk.1.ffn_up.weight", "mlp.up_proj.weight is stored as TQ1_0, which has no kernels"),
        ("F16", "blk.0.attn_v.weight", None),
        ("F32", "output.weight", None),
    ],
)
def test_a_file_that_has_no_kernels_is_dequantised(tmp_path: Path, kind: str, name: str, why: str | None) -> None:
    random = np.random.default_rng(0)
    rows, width = {"blk.1.ffn_up.weight": (512, 256), "blk.0.attn_v.weight": (64, 256)}.get(name, (len(TOKENS), 256))
    values = random.standard_normal((rows, width)).astype(np.float16 if kind == "F16" else np.float32)
    if kind not in ("F16", "F32"):
        values = raw_rows(kind, rows, width) if kind in STORED_TYPES else _ternary(rows, width)
    path = stored_file(tmp_path / "toy.gguf", lambda name: "Q4_0", raw={name: (kind, values)})
    if why is None:
        assert load_target(str(path), device="cpu").quantize == "stored"
        return
    with pytest.warns(ModelWarning, match=f"are dequantised: model.*{why}|{why}"):
        target = load_target(str(path), device="cpu")
    assert (target.quantize, target.decoder.dtype) == ("none", torch.bfloat16)


def _ternary(rows: int, width: int) -> np.ndarray:
    kind = gguf.GGMLQuantizationType.TQ1_0
    return gguf.quants.quantize(np.ones((rows, width), np.float32), kind)


def test_info_describes_a_file_without_loading_it(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stored_file(tmp_path / "toy.gguf", mixed)
    facts = json.loads(Anabranch(capsys, monkeypatch)("info", path, "--json").out)
    assert not home.exists()  # nothing was packed
    target, dense = load_target(str(path), device="cpu"), load_target(str(path), dtype="float32", device="cpu")
    assert facts["fingerprint"] == target.fingerprint
    assert facts["weights"] == f"as stored ({', '.join(target.formats)})"
    assert facts["formats_mb"].keys() == set(target.formats)
    assert facts["parameters"] == sum(parameter.numel() for parameter in dense.decoder.parameters())
    assert facts["train_streams_with"].startswith("anabranch train streams --model")
    assert "tokens/s with plain decoding" in Anabranch(capsys, monkeypatch)("info", path).out
    contents = read_gguf(path)
    described = describe_stored(target.config, contents.tensors, contents.matrices, contents.files)
    assert described.fingerprint == target.fingerprint
    linears = [each for each in target.decoder.modules() if isinstance(each, NativeLinear)]
    assert described.read == sum(linear.nbytes for linear in linears)


# -- kept for the next load ------------------------------------------------------------------------
def packing(path: Path, **options: Any) -> bool:
    """Load a file; returns whether its weights were packed, and checks that they are those of the file."""
    calls: list[tuple[int, int]] = []
    target = load_target(str(path), device="cpu", progress=lambda *call: calls.append(call), **options)
    check_values(target, load_target(str(path), dtype="float32", device="cpu"))
    assert not calls or calls[-1][0] == calls[-1][1]
    return bool(calls)


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    return stored_file(tmp_path / "toy.gguf", mixed)


def test_packed_weights_are_kept(toy: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_target(str(toy), device="cpu")
    (entry,) = home.iterdir()
    assert not packing(toy)
    assert load_target(str(toy), device="cpu").fingerprint == first.fingerprint
    assert packing(toy, keep=False)
    os.utime(toy, (1, 1))  # the file was changed
    assert packing(toy)
    assert len(list(home.iterdir())) == 2
    monkeypatch.setattr(as_stored, "LAYOUT", -1)  # another version
    as_stored._layout.cache_clear()
    assert packing(toy)
    as_stored._layout.cache_clear()
    assert entry in home.iterdir()


@pytest.mark.parametrize("damage", ["cut", "facts", "part", "empty", "folder"])
def test_a_damaged_entry_is_packed_again(toy: Path, home: Path, damage: str) -> None:
    load_target(str(toy), device="cpu")
    (entry,) = home.iterdir()
    whole = bytearray(entry.read_bytes())
    if damage == "cut":
        del whole[-5000:]
    elif damage == "facts":
        whole[-200] ^= 255
    elif damage == "part":
        whole[:64] = bytes(range(100, 164))  # the formats of the first weight's blocks
    elif damage == "empty":
        whole.clear()
    entry.unlink()
    if damage == "folder":
        entry.mkdir()
        assert packing(toy)  # and cannot be kept
        return
    entry.write_bytes(whole)
    assert packing(toy)
    assert not packing(toy)


def test_the_file_may_be_replaced_while_the_model_is_in_use(toy: Path, home: Path) -> None:
    for keep in (True, True, False):
        target = load_target(str(toy), device="cpu", keep=keep)
        before = logits_after(target.decoder, IDS)
        content = toy.read_bytes()
        toy.write_bytes(bytes(len(content)))
        for entry in home.iterdir():
            entry.unlink()
        assert torch.equal(logits_after(target.decoder, IDS), before)
        toy.write_bytes(content)


def test_the_cache_is_bounded(toy: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_target(str(toy), device="cpu")
    (first,) = home.iterdir()
    old = time.time() - 5000
    os.utime(first, (old, old))
    left, newer = home / ".toy.1.tmp", home / ".toy.2.tmp"
    left.write_bytes(b"a load that was killed")
    newer.write_bytes(b"a load that runs now")
    os.utime(left, (old, old))
    monkeypatch.setattr(packed_file, "MOST", 3 * first.stat().st_size // 2)
    os.utime(toy, (1, 1))
    assert packing(toy)
    assert not first.exists()
    assert (left.exists(), newer.exists()) == (False, True)
    monkeypatch.setattr(packed_file, "MOST", 1000)
    os.utime(toy, (2, 2))
    assert packing(toy)
    assert packing(toy)  # too large to be kept


def test_a_full_disk_leaves_nothing_behind(toy: Path, home: Path) -> None:
    def limited() -> bool:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        return packing(toy) and packing(toy)

    in_child(limited)
    assert list(home.iterdir()) == []


def test_an_unwritable_cache_directory(toy: Path, home: Path) -> None:
    home.parent.mkdir()
    home.write_text("not a folder")
    assert packing(toy)
    assert packing(toy)


def test_three_processes_pack_at_once(toy: Path, home: Path) -> None:
    # a late one finds what the first one packed
    together(*[lambda: packing(toy) in (True, False)] * 3)
    assert len(list(home.iterdir())) == 1
    assert not packing(toy)


def test_threads_that_pack_at_once_have_files_of_their_own(toy: Path, home: Path) -> None:
    content = np.arange(5000, dtype=np.uint8)
    first = packed_file.PackedWriter([toy], "key", content.nbytes)
    first.add("part", [content])
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(packed_file.PackedWriter, [toy], "key", content.nbytes).result()
    first.commit({})
    kept = packed_file.PackedFile.find([toy], "key")
    assert kept is not None
    assert kept.parts()["part"].tolist() == content.tolist()
    other.discard()
    assert len(list(home.iterdir())) == 1


# -- damaged files ---------------------------------------------------------------------------------
def damaged(whole: bytes, random: np.random.Generator) -> Iterator[bytes]:
    """A file that was cut, and one with some bytes of its head changed: dimensions, formats, offsets."""
    yield whole[: int(random.integers(len(whole)))]
    for _ in range(4):
        changed = bytearray(whole)
        at = int(random.integers(5000, 9000))
        changed[at : at + 8] = random.integers(0, 256, 8, dtype=np.uint8).tobytes()
        yield bytes(changed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::anabranch.errors.ModelWarning")
def test_damaged_files_are_a_sentence(tmp_path: Path, kind: str) -> None:
    path = stored_file(tmp_path / "toy.gguf", lambda name: kind)
    whole, random = path.read_bytes(), np.random.default_rng(0)
    sentences = []
    for content in damaged(whole, random):
        path.write_bytes(content)
        try:
            load_target(str(path), device="cpu", keep=False)
        except AnabranchError as error:
            sentences.append(str(error))
    assert sentences
    assert not any("\n" in sentence for sentence in sentences)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        # embedding and head of each format in the thorough run
        pytest.param(kind, name, marks=() if layer or kind in ("F16", "Q4_0", "Q6_K") else pytest.mark.thorough)
        for name, layer in (("blk.1.attn_k.weight", True), ("token_embd.weight", False), ("output.weight", False))
        for kind in sorted(set(KINDS) - {"MXFP4"})
    ],
)
def test_scales_that_are_not_finite_are_refused(tmp_path: Path, home: Path, kind: str, name: str) -> None:
    rows = {"blk.1.attn_k.weight": 64}.get(name, len(TOKENS))
    values = raw_rows(kind, rows, 256)
    if kind in FLOATS:
        values[rows - 1, -4:] = 0xFF  # the last one or two values are NaN
    else:
        values[rows - 1, HALVES[kind][-1] : HALVES[kind][-1] + 2] = np.array([np.nan], np.float16).view(np.uint8)
    path = stored_file(tmp_path / "toy.gguf", lambda name: kind, raw={name: (kind, values)})
    with pytest.raises(NumericsError, match=r"weight has values that are not finite numbers \(NaN or infinity\)"):
        load_target(str(path), device="cpu")
    assert not home.exists() or not list(home.iterdir())


def test_wrong_sizes_are_refused(tmp_path: Path) -> None:
    few = stored_file(tmp_path / "few.gguf", mixed, raw={"blk.0.attn_k.weight": ("Q8_0", raw_rows("Q8_0", 32, 256))})
    with pytest.raises(ModelError, match=r"k_proj.weight has the shape \(32, 256\), but .* requires \(64, 256\)"):
        load_target(str(few), device="cpu")
    whole = stored_file(tmp_path / "toy.gguf", mixed).read_bytes()
    place = whole.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4
    huge = tmp_path / "huge.gguf"
    for size in (2**62, 2**40, 256 * 2**20):
        huge.write_bytes(whole[: place + 8] + size.to_bytes(8, "little") + whole[place + 16 :])
        with pytest.raises(FileError, match=r"truncated or damaged .* fetch it again"):
            read_gguf(huge)
