"""Open the files of a model, whatever their format: safetensors, quantised or not, GGUF, or CTranslate2's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from anabranch.model.ctranslate2 import is_ctranslate2, read_ctranslate2
from anabranch.model.stored import Checkpoint, load_safetensors_dir
from anabranch.support.jsonfiles import read_json

__all__ = ["AGAIN", "read_checkpoint"]

AGAIN = "fetch or copy it again"


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a GGUF file or a folder. Raises FileError and ModelError."""
    if path.is_file():
        from anabranch.model.gguf import read_gguf

        # the dequantised values, so that the fingerprint does not depend on the dtype
        return read_gguf(path, dtype=torch.float32)
    described = read_json(path / "config.json", AGAIN)
    if is_ctranslate2(path, described):
        return read_ctranslate2(path)
    tensors, inner = load_safetensors_dir(path), described.get("text_config")
    stated = described.get("quantization_config") or (isinstance(inner, Mapping) and inner.get("quantization_config"))
    if not stated:
        return Checkpoint(described, tensors)
    from anabranch.model.quantized_files import read_quantized  # which imports the formats of GGUF files

    return read_quantized(described, stated, tensors)
