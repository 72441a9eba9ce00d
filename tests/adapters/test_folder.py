"""The adapter folder: what comes back is what was saved, and whatever is wrong with it is one clear sentence."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from anabranch.adapters import folder as folders
from anabranch.adapters.folder import TargetIdentity, find_adapters, load_adapter, read_record, save_adapter
from anabranch.adapters.record import card, predicted_lengths
from anabranch.errors import AdapterError, FileError, InputError
from anabranch.methods import registry
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.drafter import StreamDrafter
from anabranch.methods.streams.entry import METHOD
from anabranch.methods.streams.recipes import MOST_STREAMS, StreamConfig
from anabranch.model.load import Target
from anabranch.model.rope import MARGIN
from anabranch.model.weights import build_decoder
from small import RICH, as_target, decode, request, small, small_adapter

WORDS = torch.tensor([0, 2, 3, 5, 11])
TRAINING = {
    "command": "anabranch train streams --answers answers.jsonl --out adapter",
    "data": [{"source": "poems", "examples": 1200, "licence": "CC0-1.0"}],
    "steps": 40,
}
MEASURED = {"held-out answers": 9, "predicted mean acceptance length": {"tree": 2.5, "top 1": [0.5, 0.25]}}


@pytest.fixture
def target() -> Target:
    return as_target(small())


def save(folder: Path, adapter: StreamAdapter, identity: TargetIdentity, **options: Any) -> dict[str, Any]:
    return save_adapter(folder, adapter, method=METHOD, target=identity, **{"training": {}, "measured": {}, **options})


@pytest.fixture
def saved(target: Target, tmp_path: Path) -> Path:
    adapter = small_adapter(target.decoder, RICH, WORDS)
    identity = TargetIdentity.of(target)
    save(tmp_path / "a", adapter, identity, training=TRAINING, measured=MEASURED, dtype=torch.float32)
    return tmp_path / "a"


def test_a_saved_adapter_loads_unchanged(target: Target, saved: Path) -> None:
    loaded = load_adapter(saved, target)
    original = small_adapter(target.decoder, RICH, WORDS)
    assert loaded.module.config == RICH
    assert loaded.module.vocabulary.dtype == torch.int64
    for name, value in original.state_dict().items():
        assert torch.equal(loaded.module.state_dict()[name], value)
    assert not loaded.module.training
    assert not any(parameter.requires_grad for parameter in loaded.module.parameters())
    assert loaded.record == read_record(saved)
    assert loaded.record["measured"] == MEASURED
    assert load_file(saved / "adapter.safetensors")["vocabulary"].dtype == torch.int32
    asked = [request(6, 1, 12)]
    drafter = StreamDrafter(target.decoder, loaded.module)
    assert decode(target.decoder, asked, drafter)[0] == decode(target.decoder, asked)[0]


def test_the_type_and_place_are_the_targets(target: Target, saved: Path) -> None:
    cast = replace(target, decoder=build_decoder(target.config, device="cpu", dtype=torch.bfloat16))
    adapter = load_adapter(saved, cast).module
    assert {parameter.dtype for parameter in adapter.parameters()} == {torch.bfloat16}
    assert adapter.vocabulary.dtype == torch.int64


def test_bfloat16_halves_the_file_and_a_whole_vocabulary_takes_no_space(target: Target, tmp_path: Path) -> None:
    adapter = small_adapter(target.decoder)
    record = save(tmp_path, adapter, TargetIdentity.of(target))
    stored = load_file(tmp_path / "adapter.safetensors")
    assert "vocabulary" not in stored
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert record["bytes"] == (tmp_path / "adapter.safetensors").stat().st_size
    loaded = load_adapter(tmp_path, target).module
    assert loaded.vocabulary.tolist() == list(range(target.config.vocab_size))
    assert "Not measured." in (tmp_path / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "measured",
    [
        MEASURED,
        {"predicted mean acceptance length": {"tree": 2.5, "by source": {"": 2.5}}, "accuracy by stream": {"x": [0.5]}},
        *(read_record(path.parent)["measured"] for path in folders.SHIPPED.glob("*/adapter_config.json")),
    ],
)
def test_a_card_shows_every_value_under_a_name(measured: dict[str, Any], target: Target, tmp_path: Path) -> None:
    save(tmp_path, small_adapter(target.decoder), TargetIdentity.of(target), measured=measured)
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    rows = [row.strip("| ").split(" | ") for row in text.split("## Measured")[1].splitlines() if row.startswith("| ")]

    def values(of: dict[str, Any]) -> int:
        return sum(values(value) if isinstance(value, dict) else 1 for value in of.values())

    assert len(rows) == 1 + values(measured)
    assert all(not name.rstrip().endswith(":") for name, _ in rows)


def test_the_card_says_what_one_must_know(target: Target, saved: Path) -> None:
    text = (saved / "README.md").read_text(encoding="utf-8")
    record = read_record(saved)
    for part in ("poems", "1,200", "CC0-1.0", TRAINING["command"], "2.5", record["sha256"], target.fingerprint):
        assert str(part) in text
    assert 'anabranch.load("toy", drafter="streams"' in text
    assert "# Speculative Streaming for toy" in text
    assert "- 3 streams through the top 2 layers, " in text


def test_a_path_of_this_machine_is_not_stored(tmp_path: Path, target: Target) -> None:
    place = tmp_path / "my-model"
    place.mkdir()
    assert TargetIdentity.of(replace(target, name=str(place))).name == "my-model"
    assert TargetIdentity.of(replace(target, name="org/model")).name == "org/model"
    assert TargetIdentity.of(target, "other").name == "other"


def test_a_second_save_replaces_the_first_and_leaves_nothing_else(target: Target, saved: Path) -> None:
    before = read_record(saved)["sha256"]
    adapter = small_adapter(target.decoder, StreamConfig(num_stream_layers=1, pruning_rank=0))
    save(saved, adapter, TargetIdentity.of(target))
    assert read_record(saved)["sha256"] != before
    assert sorted(path.name for path in saved.iterdir()) == ["README.md", "adapter.safetensors", "adapter_config.json"]


def test_a_crash_between_the_files_is_refused_later(
    target: Target, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, moved = os.replace, []

    def crash(source: Path, goal: Path) -> None:
        if moved:
            raise KeyboardInterrupt
        moved.append(goal)
        real(source, goal)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        adapter = small_adapter(target.decoder, StreamConfig(num_stream_layers=1))
        with pytest.raises(KeyboardInterrupt):
            save(saved, adapter, TargetIdentity.of(target))
    with pytest.raises(AdapterError, match="SHA-256"):
        load_adapter(saved, target)
    assert len(list(saved.iterdir())) == 3


def test_a_folder_that_cannot_be_written(target: Target, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot be written"):
        save(tmp_path / "file", small_adapter(small()), TargetIdentity.of(target))


def edit(**changes: Any) -> Callable[[Path], None]:
    """Change fields of a record; None removes one."""

    def apply(folder: Path) -> None:
        path = folder / "adapter_config.json"
        record = json.loads(path.read_text(encoding="utf-8"))
        for field, value in changes.items():
            record.update({field: value}) if value is not None else record.pop(field)
        path.write_text(json.dumps(record), encoding="utf-8")

    return apply


def reseal(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    """Other weights with a digest that fits them: only the shapes can tell."""

    def apply(folder: Path) -> None:
        path = folder / "adapter.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)
        edit(sha256=hashlib.sha256(path.read_bytes()).hexdigest())(folder)

    return apply


def truncate(folder: Path) -> None:
    path = folder / "adapter.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def flip(folder: Path) -> None:
    path = folder / "adapter.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def no_safetensors(folder: Path) -> None:
    (folder / "adapter.safetensors").write_bytes(b"not tensors")
    edit(sha256=hashlib.sha256(b"not tensors").hexdigest())(folder)


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (lambda f: (f / "adapter_config.json").unlink(), "has no adapter_config.json"),
    "no weights": (lambda f: (f / "adapter.safetensors").unlink(), "has no adapter.safetensors"),
    "no JSON": (lambda f: (f / "adapter_config.json").write_text("{"), "is not JSON"),
    "not UTF-8": (lambda f: (f / "adapter_config.json").write_bytes(b"\xff\xfe\x00"), "cannot be read as UTF-8"),
    "a list": (lambda f: (f / "adapter_config.json").write_text("[]"), "is not a JSON object"),
    "another format": (edit(format="peft"), "does not describe an adapter"),
    "a newer version": (edit(version=3), "format version 3, and this anabranch reads 2"),
    "a version that is no number": (edit(version=True), "format version True"),
    "no digest": (edit(sha256=None), "lacks 'sha256'"),
    "a malformed config": (edit(config=[]), "lacks 'config'"),
    "no fingerprint": (edit(target={"name": "toy"}), "which target"),
    "an unknown option": (edit(config={**RICH.to_dict(), "later": 1}), "'later'"),
    "a bad option": (edit(config={**RICH.to_dict(), "num_streams": -1}), "num_streams"),
    "too many layers": (edit(config={**RICH.to_dict(), "num_stream_layers": 9}), "only 3 layers"),
    "other shapes": (edit(config={**RICH.to_dict(), "adapter_rank": 4}), r"mlp.down with the shape \(3, 32\)"),
    "another target": (edit(target={"name": "elsewhere", "fingerprint": "f" * 64}), "elsewhere.*ffffffffffff.*toy"),
    "truncated": (truncate, "truncated or was changed"),
    "tampered": (flip, "truncated or was changed"),
    "no safetensors": (no_safetensors, "no safetensors file"),
    "a missing tensor": (reseal(lambda t: t.pop("embeddings") is None), "embeddings with the shape None"),
    "an extra tensor": (reseal(lambda t: t.update(more=torch.zeros(2))), "more with the shape"),
    "an unsorted vocabulary": (reseal(lambda t: t.update(vocabulary=WORDS.flip(0).int().clone())), "rising list"),
    "whole numbers as weights": (
        reseal(lambda t: t.update({"embeddings": t["embeddings"].to(torch.int32)})),
        "stores embeddings as int32",
    ),
    "all weights as whole numbers": (
        reseal(lambda t: t.update({name: value.to(torch.int32) for name, value in t.items()})),
        "as int32, and an adapter has weights in float32",
    ),
    "a draft vocabulary of fractions": (
        reseal(lambda t: t.update(vocabulary=WORDS.float())),
        "draft vocabulary as float32",
    ),
    "no draft vocabulary": (
        reseal(lambda t: t.pop("vocabulary") is None),
        "names a draft vocabulary of 5 tokens, and adapter.safetensors has 19",
    ),
    "another draft vocabulary": (edit(draft_vocabulary=8192), "names a draft vocabulary of 8192 tokens.* has 5"),
    "a draft vocabulary as text": (edit(draft_vocabulary="5"), "draft vocabulary of '5' tokens"),
    "not a number": (
        reseal(lambda t: t["embeddings"][0].fill_(float("nan"))),
        "embeddings that are not finite numbers",
    ),
    "infinity": (reseal(lambda t: t["root.up"][0].fill_(-float("inf"))), r"root\.up that are not finite numbers"),
    "too many streams": (edit(config={**RICH.to_dict(), "num_streams": 2000}), "num_streams must be .* 1 to 256"),
    "a huge rank": (edit(config={**RICH.to_dict(), "adapter_rank": 10**15}), "adapter_rank must be"),
    "an angle as text": (edit(config={**RICH.to_dict(), "rotation_step": "wide"}), "rotation_step must be an angle"),
    "a choice as a list": (edit(config={**RICH.to_dict(), "position": ["embedding"]}), "position must be one of"),
    "a number that is none": (lambda f: (f / "adapter_config.json").write_text('{"version": NaN}'), "the value NaN"),
    "nested too deeply": (lambda f: (f / "adapter_config.json").write_text("[" * 100_000), "nested too deeply"),
    "ids beyond the target": (reseal(lambda t: t.update(vocabulary=WORDS.int() + 9)), "below 19"),
    "an unknown method": (
        edit(method="grafting"),
        "for the method 'grafting', which is not known here; methods with adapters are streams",
    ),
    "a method without adapters": (edit(method="none"), "for the method 'none', which is not known here"),
    "no method": (edit(method=None), "lacks 'method'"),
    "a method as a list": (edit(method=["streams"]), "lacks 'method'"),
    "no config of the module": (edit(config=None), "lacks 'config'"),
    "the first version's format": (edit(format="anabranch streams"), "does not describe an adapter"),
    "a format that is no text": (edit(format=7), "does not describe an adapter"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_folders(name: str, saved: Path, target: Target) -> None:
    spoil, message = BAD[name]
    spoil(saved)
    with pytest.raises(AdapterError, match=message) as caught:
        load_adapter(saved, target)
    assert "\n" not in str(caught.value)


def test_values_that_the_targets_type_cannot_hold(saved: Path, target: Target) -> None:
    reseal(lambda t: t["embeddings"][0].fill_(1e6))(saved)
    half = replace(target, decoder=build_decoder(target.config, device="cpu", dtype=torch.float16))
    with pytest.raises(AdapterError, match="embeddings that float16 cannot hold; use bfloat16 or float32"):
        load_adapter(saved, half)


def test_rotation_tables_hold_as_many_streams_as_there_may_be() -> None:
    assert MOST_STREAMS < MARGIN


def test_no_folder(tmp_path: Path, target: Target) -> None:
    with pytest.raises(AdapterError, match="no adapter folder"):
        load_adapter(tmp_path / "nowhere", target)
    with pytest.raises(AdapterError, match="no adapter folder"):
        read_record(tmp_path / "nowhere")


def test_the_adapter_that_ships_is_found_by_fingerprint(
    saved: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "SHIPPED", saved.parent)
    (found,) = find_adapters(target)
    assert found.method.name == "streams"
    assert find_adapters(as_target(small("gpt2"))) == ()
    with pytest.raises(AdapterError, match="was trained for"):
        find_adapters(as_target(small("gpt2")), [saved])


def test_an_adapter_that_is_given_goes_before_the_shipped_one_of_its_method(
    saved: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "SHIPPED", saved.parent)
    given = tmp_path / "elsewhere" / "b"
    save(given, small_adapter(target.decoder), TargetIdentity.of(target))
    (found,) = find_adapters(target, [given])
    assert found.record == read_record(given) != read_record(saved)


def test_one_target_has_adapters_of_several_methods(
    saved: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(METHOD, name="brooks")
    monkeypatch.setattr(registry, "_registry", (*registry.methods(), other))
    brooks = tmp_path / "b"
    save_adapter(
        brooks, small_adapter(target.decoder), method=other, target=TargetIdentity.of(target), training={}, measured={}
    )
    found = find_adapters(target, [brooks, saved])
    assert [loaded.method.name for loaded in found] == ["brooks", "streams"]
    monkeypatch.setattr(folders, "SHIPPED", saved.parent)  # both lie in this folder
    assert [loaded.method.name for loaded in find_adapters(target, [brooks])] == ["brooks", "streams"]
    with pytest.raises(InputError, match=r"both hold an adapter for the method 'brooks'; give one per method"):
        find_adapters(target, [brooks, saved, brooks])


@pytest.mark.parametrize("path", sorted(folders.SHIPPED.glob("*/adapter_config.json")), ids=lambda p: p.parent.name)
def test_shipped_adapters_are_complete_and_small(path: Path) -> None:
    record = read_record(path.parent)
    weights = path.with_name("adapter.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == record["sha256"]
    assert {4, 8, 16} <= predicted_lengths(record).keys()
    assert len(weights) <= (8 if path.parent.name == "smollm2-135m-instruct" else 16) * 10**6
    assert StreamConfig.from_dict(record["config"]).to_dict() == {**StreamConfig().to_dict(), **record["config"]}
    assert json.loads(path.read_text(encoding="utf-8")) == record, "written in the current version"
    assert path.with_name("README.md").read_text(encoding="utf-8") == card(record)
