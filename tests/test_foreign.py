"""Folders of adapters in the wrong place: the error names their type and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import anabranch
from anabranch.errors import AdapterError, FileError
from toy_text import ToyFolders


@pytest.fixture
def peft(tmp_path: Path) -> Path:
    """As ``save_pretrained`` of peft leaves it."""
    folder = tmp_path / "lora"
    folder.mkdir()
    record = {"peft_type": "LORA", "base_model_name_or_path": "acme/tiny", "r": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(record))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


def test_a_peft_folder_is_named_as_such(peft: Path, toys: ToyFolders) -> None:
    words = r"PEFT LORA folder.*load its base model acme/tiny and give the folder as the LoRA \(lora=FOLDER"
    with pytest.raises(AdapterError, match=words):
        anabranch.load(toys.model, adapter=peft)
    with pytest.raises(FileError, match=words):
        anabranch.load(peft)
    (peft / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    with pytest.raises(FileError, match=r"PEFT IA3 folder.*into its base model with peft's merge_and_unload"):
        anabranch.load(peft)


def test_a_stream_adapter_is_no_model(toys: ToyFolders) -> None:
    with pytest.raises(FileError, match=r"is an adapter, not a model; .*\(toy\) as the model"):
        anabranch.load(toys.adapter)


@pytest.mark.parametrize("text", ["", "[]", '{"format": 3}', "[" * 100_000])
def test_other_files_of_that_name_are_nothing_special(tmp_path: Path, text: str) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(FileError, match=r"has no config\.json"):
        anabranch.load(tmp_path)
