from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import toy_model, write_gguf
from safetensors.torch import load_file, save_file
from toys import CASES, save_toy, toy_hf

from anabranch.errors import AnabranchError, DeviceError, FetchError, FileError, InputError, ModelError, NumericsError
from anabranch.model.families import FAMILIES, model_config
from anabranch.model.load import build_decoder, load_target, resolve_device, resolve_dtype
from anabranch.model.stored import load_safetensors_dir
from anabranch.model.weights import fill_decoder, fingerprint, stored_dtype


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_toy(toy_hf(*CASES["llama"]), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    """A model folder that a test may damage."""
    return Path(shutil.copytree(pristine, tmp_path / "toy"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return save_toy(toy_hf(*CASES["llama"]), tmp_path / "sharded", max_shard_size="60KB")


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def test_a_target_is_frozen_and_complete(folder: Path) -> None:
    target = load_target(str(folder), device="cpu")
    assert not target.decoder.training
    assert not any(parameter.requires_grad for parameter in target.decoder.parameters())
    assert target.decoder.dtype == torch.float32, "auto is what the file has"
    assert target.path == folder
    assert target.tokenizer("w5 w6")["input_ids"] == [5, 6]
    assert target.decoder.config is target.config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_auto_takes_the_type_of_the_file(tmp_path: Path, dtype: torch.dtype) -> None:
    save_toy(toy_hf(*CASES["llama"]).to(dtype), tmp_path)
    target = load_target(str(tmp_path), device="cpu")
    assert {parameter.dtype for parameter in target.decoder.parameters()} == {dtype}


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_sparse_config_means_what_transformers_takes_it_to_mean(case: str) -> None:
    """Old files leave out what was the default then; our defaults are those of transformers."""
    from transformers import AutoConfig

    model_type, given = CASES[case]
    sparse = {"model_type": model_type, **given}
    assert model_config(sparse) == model_config(AutoConfig.for_model(model_type, **given).to_dict())


def test_shards_load_as_one_file_does(folder: Path, sharded: Path) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert fingerprint(sharded) == fingerprint(folder)
    whole, parts = load_target(str(folder), device="cpu"), load_target(str(sharded), device="cpu")
    for (name, ours), (_, theirs) in zip(
        whole.decoder.named_parameters(), parts.decoder.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_the_fingerprint_names_the_weights_and_not_how_they_were_loaded(tmp_path: Path, stored: torch.dtype) -> None:
    save_toy(toy_hf(*CASES["gpt2"]).to(stored), tmp_path)
    prints = {fingerprint(tmp_path)}
    for dtype in ("float32", "bfloat16", "float16"):
        target = load_target(str(tmp_path), dtype=dtype, device="cpu")
        prints.add(target.fingerprint)
        if dtype != "float16":
            prints.add(fingerprint(target.decoder))
    assert len(prints) == 1
    assert len(prints.pop()) == 64


def test_other_weights_have_another_fingerprint(folder: Path, tmp_path: Path) -> None:
    other = save_toy(toy_hf(*CASES["llama"], seed=1), tmp_path / "other")
    assert fingerprint(other) != fingerprint(folder)
    before = fingerprint(folder)
    edit_tensors(folder, lambda tensors: tensors["model.norm.weight"].add_(0.5))
    assert fingerprint(folder) != before


def test_names_without_the_outer_module(tmp_path: Path, make_toy: Any) -> None:
    """GPT-2's own file has ``h.0.attn``, not ``transformer.h.0.attn``, and contains its masks."""
    target, _ = make_toy("gpt2")

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)

    shutil.copytree(target.path, tmp_path / "bare")
    edit_tensors(tmp_path / "bare", rename)
    assert load_target(str(tmp_path / "bare"), device="cpu").fingerprint == target.fingerprint


@pytest.mark.parametrize(("stated", "expected"), [(None, (2,)), (7, (7, 2)), ([8, 9], (8, 9, 2)), ([2, 9], (2, 9))])
def test_end_tokens_come_from_generation_config_and_tokenizer(
    folder: Path, stated: Any, expected: tuple[int, ...]
) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stated}))
    assert load_target(str(folder), device="cpu").config.eos_token_ids == expected


def test_shapes_alone_take_no_memory() -> None:
    config = model_config({"model_type": CASES["llama"][0], **CASES["llama"][1]})
    decoder = build_decoder(config)
    assert all(parameter.is_meta for parameter in decoder.parameters())
    d, v = config.hidden_size, config.vocab_size
    layer = d * (64 + 2 * 32) + d * d + 3 * d * 96 + 2 * d
    assert sum(parameter.numel() for parameter in decoder.parameters()) == 2 * v * d + 3 * layer + d


def test_a_gguf_file(tmp_path: Path) -> None:
    original = toy_model("llama")
    path = write_gguf(tmp_path / "toy.gguf", "llama", original)
    target = load_target(str(path), dtype="float32", device="cpu")
    assert target.path == path
    assert torch.equal(target.decoder.embedding.weight, original.state_dict()["model.embed_tokens.weight"])
    half = load_target(str(path), dtype="bfloat16", device="cpu")
    assert half.fingerprint == target.fingerprint
    assert load_target(str(path), device="cpu").decoder.dtype == torch.float32, "as stored"


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before False .*opt-350m"),
        ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim 32 .*opt-350m"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ("llama", {"hidden_act": "prelu"}, "hidden_act 'prelu' in the model's config is not supported"),
        ("llama", {"num_key_value_heads": 3}, "4 heads cannot share 3"),
    ],
)
def test_variants_that_are_not_computed_are_refused(model_type: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_config({"model_type": model_type, **CASES[model_type][1], **changes})


WRONG_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "a size as text": ({"hidden_size": "128"}, "hidden_size .* must be a whole number from 1 to 1,048,576, got '128'"),
    "a size as a fraction": ({"hidden_size": 64.0}, "hidden_size .* got 64.0"),
    "a size as true": ({"num_attention_heads": True}, "num_attention_heads .* got True"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads"),
    "negative sizes": ({"vocab_size": -97}, "vocab_size"),
    "a size of many digits": ({"intermediate_size": 10**30}, "intermediate_size"),
    "a million layers": ({"num_hidden_layers": 1_000_000}, "num_hidden_layers .* got 1000000"),
    "more layers than weights": ({"num_hidden_layers": 4000}, "has 4000 layers but the weights have 3"),
    "a null size": ({"max_position_embeddings": None}, "max_position_embeddings"),
    "heads that do not divide": (
        {"num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": None},
        "not a multiple of its 7",
    ),
    "an activation without end": ({"hidden_act": "x" * 10_000}, r"hidden_act 'x{40,60}\.\.\. in .* is not supported"),
    "no rotation base": ({"rope_parameters": None, "rope_theta": 0.0}, "rope_theta .* got 0.0"),
    "a negative base": ({"rope_parameters": {"rope_theta": -5.0}}, "rope_parameters.rope_theta .* got -5.0"),
    "a base as text": ({"rope_parameters": {"rope_theta": "big"}}, "got 'big'"),
    "wider rotations than heads": (
        {"model_type": "phi", "partial_rotary_factor": 4.0},
        "partial_rotary_factor .* got 4.0",
    ),
    "odd rotations": ({"model_type": "phi", "partial_rotary_factor": 0.2}, "must be even and at most 16, .* got 3"),
    "no rotations": ({"model_type": "phi", "partial_rotary_factor": 0.01}, "got 0"),
    "rotations as a list": ({"rope_scaling": [1], "rope_parameters": None}, "rope_scaling .* must be an object"),
    "a variant as a list": ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_parameters.rope_type"),
    "no stretch": ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "rope_parameters.factor"),
    "a negative stretch": ({"rope_parameters": {"rope_type": "yarn", "factor": -8.0}}, "rope_parameters.factor"),
    "a stretch of null": ({"rope_parameters": {"rope_type": "dynamic", "factor": None}}, "'dynamic' cannot be"),
    "factors as text": (
        {"rope_parameters": {"rope_type": "longrope", "short_factor": "12", "long_factor": [1.0]}},
        "rope_parameters.short_factor",
    ),
    "too few factors": (
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        "1 factors for 8 frequencies",
    ),
    "no epsilon": ({"rms_norm_eps": 0}, "rms_norm_eps"),
    "an epsilon as text": ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
    "a flag as text": ({"tie_word_embeddings": "false"}, "tie_word_embeddings .* true or false, got 'false'"),
    "an unknown family": (
        {"model_type": "pegasus"},
        f"'pegasus' is not supported; supported are {', '.join(sorted(FAMILIES))}",
    ),
    "a family as a list": ({"model_type": ["llama"]}, r"the family \"\['llama'\]\" is not supported"),
    "an activation as a number": ({"hidden_act": 7}, "hidden_act"),
    "an end token beyond": ({"eos_token_id": 97}, "eos_token_id .* below 97 .* got 97"),
    "nested end tokens": ({"eos_token_id": [[2]]}, "eos_token_id"),
    "an end token as text": ({"eos_token_id": "</s>"}, "eos_token_id"),
    "a window of nothing": ({"model_type": "mistral", "sliding_window": 0}, "sliding_window"),
    "layer kinds as text": ({"layer_types": "full"}, "layer_types"),
    "too few layer kinds": (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "layer_types": ["full_attention"]},
        "must name 3 layers, got 1",
    ),
    "layer kinds that are not known": (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "layer_types": ["magic"] * 3},
        "'magic'",
    ),
    "a soft cap of nothing": ({"model_type": "gemma2", "attn_logit_softcapping": 0}, "attn_logit_softcapping"),
    "a scale of nothing": ({"model_type": "gemma2", "query_pre_attn_scalar": -1}, "query_pre_attn_scalar"),
}


@pytest.mark.parametrize("name", WRONG_FIELDS)
def test_a_config_with_wrong_fields_names_the_field(name: str, folder: Path) -> None:
    changes, message = WRONG_FIELDS[name]
    edit(folder / "config.json", **changes)
    with pytest.raises(ModelError, match=message) as caught:
        load_target(str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("theta", [float("nan"), float("inf"), True])
def test_a_base_that_is_no_number_is_refused_without_a_file_too(theta: Any) -> None:
    with pytest.raises(ModelError, match="rope_theta"):
        model_config({"model_type": "llama", **CASES["llama"][1], "rope_theta": theta})


def test_a_huge_limit_of_positions_costs_nothing(folder: Path) -> None:
    edit(folder / "config.json", max_position_embeddings=10**9)
    assert load_target(str(folder), device="cpu").config.max_positions == 10**9


def test_weights_that_float16_cannot_hold(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors["model.norm.weight"].fill_(1e6))
    with pytest.raises(NumericsError, match=r"model\.norm\.weight has values out of the range of float16; .* bfloat16"):
        load_target(str(folder), dtype="float16")
    assert load_target(str(folder), dtype="bfloat16").decoder.norm.weight.isfinite().all()


TOKENIZERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda stored: [],
    "no model": lambda stored: {},
    "another kind": lambda stored: {**stored, "model": {"type": "Magic"}},
    "a vocabulary of texts": lambda stored: {**stored, "model": {**stored["model"], "vocab": {"w0": "0"}}},
    "a normaliser that is not known": lambda stored: {**stored, "normalizer": {"type": "Nothing"}},
    "added tokens as text": lambda stored: {**stored, "added_tokens": "many"},
    "an added token without content": lambda stored: {**stored, "added_tokens": [{"id": 2}]},
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers_that_cannot_be_read(folder: Path, name: str) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(TOKENIZERS[name](json.loads(path.read_text()))))
    with pytest.raises(FileError, match="no readable tokenizer") as caught:
        load_target(str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\x00" * 64, b"[" * 100_000, b"\xff\xfe"])
def test_files_that_are_no_json(folder: Path, content: bytes) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"):
        (folder / name).write_bytes(content)
        with pytest.raises(FileError) as caught:
            load_target(str(folder))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("weight_map", [[], "model", {"a": 1}, {"a": ["b"]}, {"a": "../b"}, {"a": "x\0y"}, {"a": ""}])
def test_an_index_of_nonsense(sharded: Path, weight_map: Any) -> None:
    edit(sharded / "model.safetensors.index.json", weight_map=weight_map)
    with pytest.raises(AnabranchError) as caught:
        load_target(str(sharded))
    assert "\n" not in str(caught.value)


def test_a_missing_shard(sharded: Path) -> None:
    lost = sorted(sharded.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(FileError, match=f"lacks the shard '{lost.name}'"):
        load_target(str(sharded))


def test_an_index_that_leads_out_of_its_folder(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    edit(index, weight_map=dict.fromkeys(names, "../toy/model.safetensors"))
    with pytest.raises(FileError, match="lacks the shard"):
        load_safetensors_dir(sharded)


def resized(folder: Path, change: Callable[[bytes], bytes]) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")


K = "model.layers.1.self_attn.k_proj.weight"
Q = "model.layers.0.self_attn.q_proj.weight"
DAMAGE: list[tuple[Callable[[Path], Any], type[AnabranchError], str]] = [
    *((lambda f, n=n: resized(f, lambda old: old[:n]), FileError, "truncated") for n in (0, 4, 100, 20_000)),
    *(
        (lambda f, n=n: resized(f, lambda old: n.to_bytes(8, "little") + old[8:]), FileError, "not a safetensors file")
        for n in (0, 3, 2**31, 2**63 - 1, 2**64 - 1)
    ),
    (lambda f: resized(f, lambda old: b"\xff" * 4096), FileError, "not a safetensors file"),
    (pickled, FileError, "convert them to safetensors"),
    (lambda f: (f / "model.safetensors").unlink(), FileError, r"neither model\.safetensors nor"),
    (lambda f: edit_tensors(f, lambda t: t.pop(K)), ModelError, r"lack model\.layers\.1\.self_attn\.k_proj\.weight"),
    *(
        (
            lambda f, shape=shape: edit_tensors(f, lambda t: t.update({Q: torch.zeros(shape)})),
            ModelError,
            r"q_proj\.weight has .*config requires \(64, 64\)",
        )
        for shape in ((64, 63), (63, 64), (64,))
    ),
    *(
        (
            lambda f, name=name, value=value: edit_tensors(f, lambda t: t[name].view(-1)[5:6].fill_(value)),
            NumericsError,
            f"{name}.* not finite numbers",
        )
        for name in ("model.norm.weight", K)
        for value in (float("nan"), float("inf"), -float("inf"))
    ),
    *(
        (lambda f, text=text: (f / "config.json").write_text(text), FileError, r"config\.json")
        for text in ("{", "[1]", "")
    ),
    (
        lambda f: (f / "config.json").write_text('{"model_type": "llama"}'),
        ModelError,
        "has 32 layers but the weights have 3",
    ),
    (lambda f: [path.unlink() for path in f.glob("tokenizer*")], FileError, "no readable tokenizer"),
    *(
        (
            lambda f, end=end: (f / "generation_config.json").write_text(json.dumps({"eos_token_id": end})),
            ModelError,
            r"eos_token_id in generation_config\.json must be a token id below 97",
        )
        for end in ("2", [2, 97], -1, {"a": 2}, [None], True)
    ),
]


@pytest.mark.parametrize(("damage", "error", "message"), DAMAGE)
def test_damaged_folders(
    damage: Callable[[Path], Any], error: type[AnabranchError], message: str, folder: Path
) -> None:
    damage(folder)
    with pytest.raises(error, match=message):
        load_target(str(folder))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "no folder ./nowhere"),
        ("/no/where/at/all", "no folder"),
        ("", "no folder"),
        ("missing.gguf", "no file missing.gguf"),
        ("notes.txt", "neither a folder nor"),
        ("./", r"has no config\.json"),
    ],
)
def test_paths_without_a_model(name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(FileError, match=message):
        load_target(name)


def test_a_hub_out_of_reach_says_how_to_go_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(FetchError, match=r"cannot be reached; copy its config\.json, safetensors and tokenizer files"):
        load_target("org/model")


def test_only_safetensors_are_downloaded_from_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    target = load_target("org/model", revision="v2", device="cpu")
    assert (asked["name"], asked["revision"], target.path) == ("org/model", "v2", folder)
    assert not any(pattern.endswith((".bin", ".pt", "*")) for pattern in asked["allow_patterns"])


@pytest.mark.parametrize("device", ["banana", "cuda:x", "mps", "cuda:99"])
def test_devices_that_are_not_there(device: str) -> None:
    with pytest.raises(DeviceError, match="device"):
        resolve_device(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_cuda(folder: Path) -> None:
    with pytest.raises(DeviceError, match="no CUDA device here"):
        load_target(str(folder), device="cuda")
    assert resolve_device("auto") == torch.device("cpu")


@pytest.mark.parametrize("dtype", ["int8", "half", torch.int8, ""])
def test_types_that_are_not_known(dtype: Any) -> None:
    with pytest.raises(InputError, match="use auto, float32, bfloat16 or float16"):
        resolve_dtype(dtype)


def test_no_memory_for_the_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = torch.empty

    def full(*shape: Any, **options: Any) -> torch.Tensor:
        if options.get("device") == torch.device("cpu"):
            raise torch.OutOfMemoryError("out of memory")
        return make(*shape, **options)

    config = model_config(json.loads((folder / "config.json").read_text()))
    tensors = load_safetensors_dir(folder)
    assert stored_dtype(config, tensors) == torch.float32
    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(DeviceError, match="no memory left on cpu"):
        fill_decoder(config, tensors, dtype=torch.float32, device=torch.device("cpu"))
