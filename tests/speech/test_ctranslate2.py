"""Whisper in CTranslate2's layout: the tensors of Hugging Face's, and one sentence for files that are broken."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from toy_whisper import TIMES, write_ctranslate2

from anabranch.errors import AnabranchError, FileError, ModelError
from anabranch.model.ctranslate2 import read_ctranslate2
from anabranch.model.load import load_target

Oracle = tuple[Any, Any]


@pytest.mark.parametrize(("dtype", "error"), [("float32", 0.0), ("float16", 1e-3), ("int8", 0.02)])
def test_all_tensors_have_the_values_and_names_of_transformers(
    oracle: Oracle, tmp_path: Path, dtype: str, error: float
) -> None:
    hf, _ = oracle
    contents = read_ctranslate2(write_ctranslate2(oracle, tmp_path / "model", dtype=dtype))
    state = {name: value for name, value in hf.state_dict().items() if name != "proj_out.weight"}
    assert set(contents.tensors) == set(state)
    for name, value in state.items():
        torch.testing.assert_close(contents.tensors[name].float(), value, rtol=error, atol=error, msg=name)
    assert contents.dtype == torch.float32


def test_rounded_weights_choose_the_type_that_the_kernels_take(oracle: Oracle, tmp_path: Path) -> None:
    """The file leaves the type open; one that is given is kept."""
    folder = str(write_ctranslate2(oracle, tmp_path / "model"))
    types = {
        kind: load_target(folder, device="cpu", quantize=kind).decoder.dtype
        for kind in ("auto", "none", "int8", "int4")
    }
    rounded = dict.fromkeys(("int8", "int4"), torch.bfloat16)
    assert types == {"auto": torch.float32, "none": torch.float32, **rounded}
    assert load_target(folder, device="cpu", quantize="int8", dtype="float32").decoder.dtype == torch.float32


def test_the_config_is_that_of_transformers(oracle: Oracle, tmp_path: Path) -> None:
    hf, tokenizer = oracle
    contents = read_ctranslate2(write_ctranslate2(oracle, tmp_path / "model"))
    given = hf.config.to_dict()
    suppressed = {name: getattr(hf.generation_config, name) for name in ("suppress_tokens", "begin_suppress_tokens")}
    assert {name: contents.config[name] for name in suppressed} == suppressed
    for name, value in contents.config.items():
        assert name in suppressed or given[name] == value, name
    assert contents.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert contents.tokenizer.decode([72, *tokenizer.convert_tokens_to_ids(TIMES[:2])], skip_special_tokens=True) == (
        tokenizer.decode([72])
    )


def test_a_file_cut_off_anywhere_is_one_sentence(oracle: Oracle, tmp_path: Path) -> None:
    folder = write_ctranslate2(oracle, tmp_path / "model")
    data = (folder / "model.bin").read_bytes()
    for length in (*range(60), *range(60, len(data), len(data) // 50), len(data) - 1):
        (folder / "model.bin").write_bytes(data[:length])
        with pytest.raises(FileError, match="truncated") as raised:
            read_ctranslate2(folder)
        assert "\n" not in str(raised.value)


def _huge(variables: dict[str, NDArray[Any]]) -> None:
    del variables["decoder/layer_norm/beta"]


def _flat(variables: dict[str, NDArray[Any]]) -> None:
    variables["encoder/conv1/weight"] = variables["encoder/conv1/weight"].reshape(-1)


def _relu6(variables: dict[str, NDArray[Any]]) -> None:
    variables["decoder/activation"] = np.array(2, np.int8)


def _scaled(variables: dict[str, NDArray[Any]]) -> None:
    variables["decoder/scale_embeddings"] = np.array(1, np.int8)


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (_huge, FileError, "lacks the variable 'decoder/layer_norm/beta'"),
        (_flat, FileError, "encoder/conv1/weight of shape"),
        (_relu6, ModelError, "no usual Whisper"),
        (_scaled, ModelError, "scaled embeddings"),
    ],
)
def test_another_model_is_refused(
    oracle: Oracle, tmp_path: Path, change: Callable[[dict[str, Any]], None], kind: type[AnabranchError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        read_ctranslate2(write_ctranslate2(oracle, tmp_path / "model", change=change))


@pytest.mark.parametrize(
    ("place", "data", "kind", "said"),
    [
        (0, struct.pack("<I", 7), ModelError, "version 7"),
        (6, b"TransformerSpec"[:11], ModelError, "Transformer"),
        (18, struct.pack("<I", 9), ModelError, "revision 9"),
        (22, b"\xff\xff\xff\xff", FileError, "truncated or not"),
        (28, b"\xff\xfe", FileError, "a name is not text"),
    ],
)
def test_a_damaged_header_is_one_sentence(
    oracle: Oracle, tmp_path: Path, place: int, data: bytes, kind: type[AnabranchError], said: str
) -> None:
    folder = write_ctranslate2(oracle, tmp_path / "model")
    whole = bytearray((folder / "model.bin").read_bytes())
    whole[place : place + len(data)] = data
    (folder / "model.bin").write_bytes(whole)
    with pytest.raises(kind, match=said):
        read_ctranslate2(folder)


def test_huge_dimensions_allocate_nothing(oracle: Oracle, tmp_path: Path) -> None:
    folder = write_ctranslate2(oracle, tmp_path / "model")
    whole = bytearray((folder / "model.bin").read_bytes())
    at = whole.index(b"decoder/embeddings/weight\0") + len("decoder/embeddings/weight\0") + 1
    whole[at : at + 8] = struct.pack("<II", 2**32 - 1, 2**32 - 1)
    (folder / "model.bin").write_bytes(whole)
    with pytest.raises(FileError, match=r"of shape \(4294967295, 4294967295\) in \d+ bytes"):
        read_ctranslate2(folder)


def test_other_files_of_the_folder_are_checked(oracle: Oracle, tmp_path: Path) -> None:
    folder = write_ctranslate2(oracle, tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({"suppress_ids": ["a"]}))
    with pytest.raises(FileError, match="suppress_ids that are not token ids"):
        read_ctranslate2(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(FileError, match="no readable"):
        read_ctranslate2(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileError, match=r"has no tokenizer\.json"):
        read_ctranslate2(folder)
