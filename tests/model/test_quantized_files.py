"""Quantised safetensors checkpoints as other libraries write them, against transformers on the dequantised weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_as_stored import close, needs_kernels, unpacked
from torch import Tensor
from toys import Oracle, save_toy, toy_hf

from anabranch.decoding.engine import Request
from anabranch.errors import AnabranchError, ModelError, ModelWarning
from anabranch.methods import make_drafter
from anabranch.model.load import Target, load_target
from anabranch.model.native_linear import NativeLinear
from anabranch.model.weights import fingerprint
from small import decode, logits_after
from verbs import Anabranch

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128}
IDS = list(range(3, 43))
GROUP = 64


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache directory of the test's own."""
    monkeypatch.setenv("ANABRANCH_HOME", str(tmp_path / "home"))


def packed(values: Tensor, bits: int) -> Tensor:
    """Unsigned integers [n, K] as int32 [n, K * bits / 32], the first in the lowest bits."""
    parts = values.long().view(len(values), -1, 32 // bits)
    words = (parts << (bits * torch.arange(32 // bits))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def integers(weight: Tensor, bits: int, group: int, scale: torch.dtype, zero: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Unsigned integers [N, D], scales [N, G] and zero points [N, G] near a weight."""
    parts = weight.view(len(weight), -1, group)
    low, high = (parts.amin(-1), parts.amax(-1)) if zero else (-parts.abs().amax(-1), parts.abs().amax(-1))
    scales = ((high - low) / (2**bits - 1)).to(scale)
    zeros = (-low / scales.float()).round().clamp(0, 2**bits - 1) if zero else torch.full_like(low, 2 ** (bits - 1))
    codes = (parts / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1)
    return codes.view(weight.shape).long(), scales, zeros.long()


def as_awq(codes: Tensor) -> Tensor:
    """Columns of [n, N] in AWQ's order."""
    return codes.view(len(codes), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(codes.shape)


def written(scheme: str, name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a weight as a library writes them, and its value in float32."""
    kind, *options = scheme.split()
    bits, group = 8 if "8" in options else 4, weight.shape[1] if "channel" in options else GROUP
    scale, zero = torch.bfloat16 if "bf16" in options else torch.float16, "zero" in options or kind == "awq"
    if kind == "fp8":
        count = -(-weight.shape[0] // 128), -(-weight.shape[1] // 128)
        scales = 1 + torch.rand(count if "channel" not in options else (len(weight), 1))
        wide = scales if "channel" in options else scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        wide = wide[: weight.shape[0], : weight.shape[1]]
        values = (weight / wide).to(torch.float8_e4m3fn)
        part = "weight_scale" if "channel" in options else "weight_scale_inv"
        return {f"{name}.weight": values, f"{name}.{part}": scales}, values.float() * wide
    codes, scales, zeros = integers(weight, bits, group, scale, zero)
    index = torch.arange(weight.shape[1]) // group
    if "order" in options:
        index = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(0))]
    dense = (codes - zeros[:, index]).float() * scales.float()[:, index]
    found: dict[str, Tensor]
    if kind == "int8":
        found = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
    elif kind == "packed":
        found = {
            "weight_packed": packed(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(codes.shape),
        }
        found |= {"weight_zero_point": packed(zeros.T, bits).T.contiguous()} if zero else {}
        found |= {"weight_g_idx": index.int()} if "order" in options else {}
    elif kind == "gptq":
        less = 0 if "v2" in options else 1
        found = {"qweight": packed(codes, bits).T}
        found |= {"scales": scales.T.contiguous(), "qzeros": packed(zeros.T - less, bits), "g_idx": index.int()}
    else:
        found = {"qweight": packed(as_awq(codes.T), bits), "qzeros": packed(as_awq(zeros.T), bits)}
        found["scales"] = scales.T.contiguous()
    return {f"{name}.{part}": value.contiguous() for part, value in found.items()}, dense


def stated(scheme: str) -> dict[str, Any]:
    """The ``quantization_config`` of a scheme."""
    kind, *options = scheme.split()
    bits = 8 if "8" in options else 4
    if kind == "gptq":
        form = {"checkpoint_format": "gptq_v2"} if "v2" in options else {}
        return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": "zero" not in options, **form}
    if kind == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    if kind == "fp8" and "channel" not in options:
        return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    weights = {"num_bits": bits, "type": "int", "symmetric": "zero" not in options, "group_size": GROUP}
    form = "pack-quantized" if kind == "packed" else "int-quantized"
    if kind == "fp8":
        weights, form = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}, "float-quantized"
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy with the weights that are quantised."""
    return save_toy(toy_hf("qwen2", SIZES), tmp_path_factory.mktemp("plain"))


def quantised(plain: Path, folder: Path, scheme: str, kept: torch.dtype = torch.float16) -> tuple[Path, Oracle]:
    """A checkpoint of a scheme, and transformers' model with the same values."""
    torch.manual_seed(0)
    shutil.copytree(plain, folder)
    tensors: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, value in load_file(plain / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if stem.endswith("_proj") and name != stem:
            found, values[name] = written(scheme, stem, value.float())
            tensors |= found
        else:
            tensors[name] = value.to(kept)
            values[name] = tensors[name].float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    described = json.loads(path.read_text()) | {"dtype": "bfloat16", "quantization_config": stated(scheme)}
    path.write_text(json.dumps(described))
    model = toy_hf("qwen2", SIZES)
    assert not model.load_state_dict(values, strict=False).unexpected_keys
    return folder, Oracle(model)


def weights(target: Target) -> dict[str, Tensor]:
    """The weights of linear layers in float32."""
    linears = {n: m for n, m in target.decoder.named_modules() if isinstance(m, NativeLinear | torch.nn.Linear)}
    return {n: unpacked(m) if isinstance(m, NativeLinear) else m.weight.float() for n, m in linears.items()}


STORED = {
    "packed": "Q4_0",
    "packed bf16": "Q4_0",
    "packed channel": "Q4_0",
    "packed zero": "Q5_0",
    "packed 8": "Q8_0",
    "int8 8 channel bf16": "Q8_0",
    "gptq": "Q4_0",
    "gptq v2 zero": "Q5_0",
    "gptq 8": "Q8_0",
    "awq": "Q5_0",
}


@needs_kernels
@pytest.mark.parametrize("scheme", STORED)
def test_integers_are_decoded_as_they_are_stored(plain: Path, tmp_path: Path, scheme: str) -> None:
    folder, oracle = quantised(plain, tmp_path / "model", scheme)
    target, dense = load_target(str(folder), device="cpu"), load_target(str(folder), dtype="float32", device="cpu")
    assert (target.quantize, dense.quantize) == ("stored", "none")
    assert STORED[scheme] in target.formats
    found, wanted = weights(target), weights(dense)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    torch.testing.assert_close(logits_after(dense.decoder, IDS), oracle.logits(IDS), rtol=1e-4, atol=1e-4)
    close(logits_after(target.decoder, IDS), oracle.logits(IDS))
    assert target.fingerprint == dense.fingerprint == fingerprint(folder)
    again = load_target(str(folder), device="cpu")  # from the packed weights of the first load
    assert torch.equal(logits_after(again.decoder, IDS), logits_after(target.decoder, IDS))


@needs_kernels
def test_drafts_change_nothing(plain: Path, tmp_path: Path) -> None:
    target = load_target(str(quantised(plain, tmp_path / "model", "awq")[0]), device="cpu")
    asked = [Request(IDS[:n] * 2, 20) for n in (5, 9)]
    wanted, _ = decode(target.decoder, asked)
    assert decode(target.decoder, asked, make_drafter("prompt_lookup", target.decoder), rows=2)[0] == wanted


@pytest.mark.parametrize(
    ("scheme", "why"),
    [
        ("fp8", "weights in FP8 have no kernels"),
        ("fp8 channel", "weights in FP8 have no kernels"),
        ("gptq order", r"groups of .* are not neighbours \(act-order\)"),
        ("packed order", r"groups of .* are not neighbours \(act-order\)"),
    ],
)
def test_others_are_dequantised(plain: Path, tmp_path: Path, scheme: str, why: str) -> None:
    folder, oracle = quantised(plain, tmp_path / "model", scheme, torch.bfloat16)
    exact = load_target(str(folder), dtype="float32", device="cpu")
    torch.testing.assert_close(logits_after(exact.decoder, IDS), oracle.logits(IDS), rtol=1e-4, atol=1e-4)
    with pytest.warns(ModelWarning, match=f"the weights of .* are dequantised: {why}"):
        target = load_target(str(folder), device="cpu")
    assert target.quantize == "none"


def test_scales_that_are_not_halves_are_not_rounded(plain: Path, tmp_path: Path) -> None:
    folder, _ = quantised(plain, tmp_path / "model", "packed")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("weight_scale"))
    save_file(tensors | {name: tensors[name].float() * 1.001}, folder / "model.safetensors")
    with pytest.warns(
        ModelWarning, match=f"dequantised: scales of {name.removesuffix('.weight_scale')} are not halves"
    ):
        load_target(str(folder), device="cpu")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\]"),
        ({"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'"),
        ({"config_groups": {}}, "groups of the model's quantization_config differ"),
    ],
)
def test_other_schemes_are_refused_by_name(
    plain: Path, tmp_path: Path, anabranch: Anabranch, changes: dict[str, Any], said: str
) -> None:
    folder, _ = quantised(plain, tmp_path / "model", "packed")
    path = folder / "config.json"
    described = json.loads(path.read_text())
    described["quantization_config"] |= changes
    path.write_text(json.dumps(described))
    with pytest.raises(ModelError, match=rf"{said}.*use unquantised safetensors or a GGUF file instead"):
        load_target(str(folder))
    assert anabranch("info", folder).code == 1


@pytest.mark.filterwarnings("ignore::anabranch.errors.ModelWarning")
@pytest.mark.parametrize("scheme", ["packed zero", "gptq", "awq", "fp8"])
def test_damaged_tensors_are_a_sentence(plain: Path, tmp_path: Path, scheme: str) -> None:
    folder, _ = quantised(plain, tmp_path / "model", scheme)
    tensors = load_file(folder / "model.safetensors")
    names, said = sorted(name for name in tensors if "layers.1.mlp.down_proj." in name), []
    for name in names:
        for damaged in (None, tensors[name].flatten()[:-1], tensors[name].float().log()):
            changed = {key: value for key, value in tensors.items() if key != name}
            save_file(changed if damaged is None else changed | {name: damaged}, folder / "model.safetensors")
            try:
                load_target(str(folder), device="cpu", keep=False)
            except AnabranchError as error:
                said.append(str(error))
    assert len(said) > len(names)  # without the index of groups, they are neighbours


@needs_kernels
def test_info_describes_a_folder_without_packing_it(plain: Path, tmp_path: Path, anabranch: Anabranch) -> None:
    folder, _ = quantised(plain, tmp_path / "model", "awq")
    done = anabranch("info", folder, "--json")
    facts = json.loads(done.out)
    assert facts["weights"].startswith("as stored (Q5_0")
    assert facts["fingerprint"] == load_target(str(folder), device="cpu").fingerprint
    assert facts["parameters"] == sum(p.numel() for p in toy_hf("qwen2", SIZES).parameters())
