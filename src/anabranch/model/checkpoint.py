"""The config and the tensors of a model's folder, under the names of an unquantised one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from anabranch.model.ctranslate2 import is_ctranslate2, read_ctranslate2
from anabranch.model.stored import SafetensorsDir, load_safetensors_dir
from anabranch.support.jsonfiles import read_json

if TYPE_CHECKING:
    from anabranch.model.quantized_files import QuantizedFiles

__all__ = ["Checkpoint", "read_checkpoint"]


class Checkpoint(NamedTuple):
    """A folder with ``config.json`` and safetensors, or CTranslate2's ``model.bin``.

    quantized  None if the weights of safetensors are not quantised
    tokenizer  of a layout with rules of its own; None: transformers loads the folder's
    """

    config: Mapping[str, Any]
    tensors: SafetensorsDir
    quantized: QuantizedFiles | None
    tokenizer: Any = None


def read_checkpoint(path: Path, advice: str) -> Checkpoint:
    """Open a model's folder; ``advice`` ends the message about its config. Raises FileError and ModelError."""
    described = read_json(path / "config.json", advice)
    if is_ctranslate2(path, described):
        converted = read_ctranslate2(path)
        return Checkpoint(converted.config, converted.tensors, None, converted.tokenizer)
    tensors = load_safetensors_dir(path)
    inner = described.get("text_config")
    stated = described.get("quantization_config") or (isinstance(inner, Mapping) and inner.get("quantization_config"))
    if not stated:
        return Checkpoint(described, tensors, None)
    from anabranch.model.quantized_files import read_quantized  # which imports the formats of GGUF files

    found = read_quantized(described, stated, tensors)
    return Checkpoint(found.config, found.tensors, found)
