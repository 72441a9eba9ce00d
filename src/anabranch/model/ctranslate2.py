"""Read Whisper models in CTranslate2's layout as Hugging Face checkpoints: config, tensors, tokenizer.

    contents = read_ctranslate2(Path("whisper-base"))               # model.bin, config.json and tokenizer.json
    contents.config["model_type"]                                   # "whisper"
    contents.tensors["model.encoder.layers.0.self_attn.q_proj.weight"]

``model.bin`` is a list of variables, each a name, a shape, a type and little-endian data, then aliases of names:

    u32 version 6, string "WhisperSpec", u32 revision, u32 count,
    count of (string name, u8 rank, u32 dimensions[rank], u8 type, u32 bytes, data), u32 aliases of (string, string)

where a string is a u16 length, its bytes and a zero. Queries, keys and values are one matrix there, and keys have a
bias, which adds the same to all scores of a query and so is left out, as in Hugging Face's Whisper. Weights in int8 and
int16 are dequantised.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anabranch.errors import FileError, ModelError
from anabranch.model.stored import Checkpoint, LazyTensors
from anabranch.model.text import foreign_errors
from anabranch.support.jsonfiles import is_whole, read_json

__all__ = ["is_ctranslate2", "read_ctranslate2"]

WEIGHTS, TOKENIZER, AGAIN = "model.bin", "tokenizer.json", "fetch or copy it again"
VERSION, SPEC, REVISION = 6, "WhisperSpec", 3
# The types by their numbers; "bfloat16" has none in numpy and is read as its bits.
TYPES = ("float32", "int8", "int16", "int32", "float16", "bfloat16")
ACTIVATIONS = {0: "relu", 3: "gelu"}
RANK = 4  # dimensions of the largest tensor
START, END = "<|startoftranscript|>", "<|endoftext|>"
TIMES = 1501  # timestamps of a window of 30 s


class _Variable(NamedTuple):
    """A variable of the file: its data are ``size`` bytes at ``offset``."""

    shape: tuple[int, ...]
    kind: str
    offset: int
    size: int


def is_ctranslate2(folder: Path, described: Mapping[str, Any]) -> bool:
    """True for a folder with ``model.bin`` whose config (``described``) names no family."""
    return (folder / WEIGHTS).is_file() and "model_type" not in described


def read_ctranslate2(folder: Path) -> Checkpoint:
    """Open a Whisper model in CTranslate2's layout; tensors are read on access.

    Its config has the suppressed tokens, which Hugging Face too kept there before it had ``generation_config.json``.

    Raises FileError for a file that is missing, truncated or malformed, ModelError for another kind of model.
    """
    path = folder / WEIGHTS
    variables = _read_index(path)
    words = variables.get("decoder/embeddings/weight")
    tokenizer = _tokenizer(folder, words.shape[0] if words is not None and words.shape else 0)
    ids = [tokenizer.convert_tokens_to_ids(name) for name in (START, END)]
    if None in ids:
        raise FileError(f"{folder / TOKENIZER} lacks the token {START} or {END} of Whisper; {AGAIN}")
    try:
        config = _config(path, variables, *ids)
        loaders = _loaders(path, variables, config)
    except KeyError as error:
        raise FileError(f"{path} lacks the variable {error} and so is not a complete model; {AGAIN}") from error
    # float16 is to be computed in float32, which has all its values: CPUs are slow in float16
    dtype = torch.bfloat16 if variables["decoder/embeddings/weight"].kind == "bfloat16" else torch.float32
    return Checkpoint({**config, **_suppressed(folder)}, LazyTensors(loaders), tokenizer, dtype)


def _read_index(path: Path) -> dict[str, _Variable]:
    """The variables of a file by name, aliases included, without their data."""
    try:
        with path.open("rb") as file:
            return _Index(file, path).variables()
    except OSError as error:
        raise FileError(f"{path} cannot be read ({error.strerror}); {AGAIN}") from error


class _Index:
    """Reads the list of variables, and never beyond the end of the file."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path = file, path
        self.size = path.stat().st_size

    def variables(self) -> dict[str, _Variable]:
        """All variables by name. Raises FileError or ModelError."""
        if (version := self.number("I")) != VERSION:
            raise ModelError(
                f"{self.path} has version {version} of CTranslate2's layout, and only {VERSION} is supported; convert "
                "the model again with ct2-transformers-converter"
            )
        spec, revision = self.string(), self.number("I")
        if spec != SPEC or revision != REVISION:
            raise ModelError(
                f"{self.path} is a model of {spec[:40]!r}, revision {revision}; of CTranslate2's models only {SPEC}, "
                f"revision {REVISION}, is supported"
            )
        variables: dict[str, _Variable] = {}
        for _ in range(self.number("I")):
            name, variable = self.string(), self.variable()
            if name in variables:
                raise self.broken(f"it has {name} twice")
            variables[name] = variable
        for _ in range(self.number("I")):
            alias, name = self.string(), self.string()
            if name not in variables:
                raise self.broken(f"{alias} stands for {name}, which is not there")
            variables[alias] = variables[name]
        return variables

    def variable(self) -> _Variable:
        """The shape, type and place of one variable; the file is then behind its data."""
        rank = self.number("B")
        if rank > RANK:
            raise self.broken(f"it has a tensor of {rank} dimensions")
        shape = tuple(self.number("I") for _ in range(rank))
        kind, size = self.number("B"), self.number("I")
        if kind >= len(TYPES):
            raise self.broken(f"it has a tensor of the unknown type {kind}")
        offset = self.file.tell()
        if size != math.prod(shape) * _dtype(TYPES[kind]).itemsize:
            raise self.broken(f"it has a tensor of shape {shape} in {size} bytes")
        if offset + size > self.size:
            raise self.broken(f"it ends at byte {self.size}, but byte {offset + size} is needed")
        self.file.seek(size, 1)
        return _Variable(shape, TYPES[kind], offset, size)

    def number(self, kind: str) -> int:
        """An unsigned integer: of one (B), two (H) or four bytes (I)."""
        return int(struct.unpack(f"<{kind}", self.taken(struct.calcsize(kind)))[0])

    def string(self) -> str:
        """A text that ends in a zero."""
        data = self.taken(self.number("H"))
        try:
            return data.removesuffix(b"\0").decode()
        except UnicodeDecodeError as error:
            raise self.broken("a name is not text") from error

    def taken(self, count: int) -> bytes:
        """The next bytes."""
        data = self.file.read(count)
        if len(data) < count:
            raise self.broken(f"it ends at byte {self.size}")
        return data

    def broken(self, why: str) -> FileError:
        """The error of a malformed file."""
        return FileError(f"{self.path} is truncated or not a CTranslate2 model ({why}); {AGAIN}")


def _dtype(kind: str) -> np.dtype[Any]:
    stored: np.dtype[Any] = np.dtype("int16" if kind == "bfloat16" else kind).newbyteorder("<")
    return stored


def _values(path: Path, variable: _Variable) -> Tensor:
    """A variable's data. Raises FileError."""
    try:
        data = np.fromfile(path, _dtype(variable.kind), math.prod(variable.shape), offset=variable.offset)
        tensor = torch.from_numpy(data.astype(data.dtype.newbyteorder("="), copy=False)).reshape(variable.shape)
    except (OSError, ValueError) as error:
        raise FileError(f"{path} changed while it was read; {AGAIN}") from error
    return tensor.view(torch.bfloat16) if variable.kind == "bfloat16" else tensor


def _scalar(path: Path, variables: Mapping[str, _Variable], name: str) -> int:
    variable = variables[name]
    if variable.shape or variable.kind in ("float32", "float16", "bfloat16"):
        raise FileError(f"{path} has {name} of shape {variable.shape} instead of a whole number; {AGAIN}")
    return int(_values(path, variable))


def _config(path: Path, variables: Mapping[str, _Variable], start: int, end: int) -> dict[str, Any]:
    """The fields of transformers' ``WhisperConfig``."""
    scalar = partial(_scalar, path, variables)

    def shape(name: str, rank: int = 2) -> tuple[int, ...]:
        sizes = variables[name].shape
        if len(sizes) != rank:
            raise FileError(f"{path} has {name} of shape {sizes} instead of {rank} dimensions; {AGAIN}")
        return sizes

    words, width = shape("decoder/embeddings/weight")
    activation = scalar("decoder/activation")
    usual = {"decoder/pre_norm": 1, "decoder/alibi": 0, "decoder/scale_embeddings": 0}
    if activation not in ACTIVATIONS or any(scalar(name) != value for name, value in usual.items()):
        raise ModelError(
            f"{path} is no usual Whisper: another activation, norms behind the layers, ALiBi, or scaled embeddings"
        )
    layers = {
        side: len({name.split("/")[1] for name in variables if name.startswith(f"{side}/layer_") and "/ffn/" in name})
        for side in ("encoder", "decoder")
    }
    return {
        "model_type": "whisper",
        "vocab_size": words,
        "num_mel_bins": shape("encoder/conv1/weight", 3)[1],
        "d_model": width,
        "encoder_layers": layers["encoder"],
        "encoder_attention_heads": scalar("encoder/num_heads"),
        "encoder_ffn_dim": shape("encoder/layer_0/ffn/linear_0/weight")[0],
        "decoder_layers": layers["decoder"],
        "decoder_attention_heads": scalar("decoder/num_heads"),
        "decoder_ffn_dim": shape("decoder/layer_0/ffn/linear_0/weight")[0],
        "max_source_positions": shape("encoder/position_encodings/encodings")[0],
        "max_target_positions": shape("decoder/position_encodings/encodings")[0],
        "activation_function": ACTIVATIONS[activation],
        "tie_word_embeddings": True,
        "is_encoder_decoder": True,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end),
        "decoder_start_token_id": start,
    }


def _loaders(
    path: Path, variables: Mapping[str, _Variable], config: Mapping[str, Any]
) -> dict[str, Callable[[], Tensor]]:
    """The readers of all parameters, by their names in transformers' ``WhisperForConditionalGeneration``."""
    made: dict[str, Callable[[], Tensor]] = {}

    def matrix(name: str, module: str, parts: int = 1, part: int = 0, *, bias: bool = True) -> None:
        """A linear layer, or the ``part``-th of ``parts`` that are fused into one."""
        made[f"{name}.weight"] = partial(_part, path, variables, f"{module}/weight", parts, part)
        if bias:
            made[f"{name}.bias"] = partial(_part, path, variables, f"{module}/bias", parts, part)
        for kind in ("weight", "bias"):
            variables[f"{module}/{kind}"]  # missing ones are reported before the first is read

    def norm(name: str, module: str) -> None:
        for kind, stored in (("weight", "gamma"), ("bias", "beta")):
            made[f"{name}.{kind}"] = partial(_values, path, variables[f"{module}/{stored}"])

    for side in ("encoder", "decoder"):
        made[f"model.{side}.embed_positions.weight"] = partial(
            _values, path, variables[f"{side}/position_encodings/encodings"]
        )
        norm(f"model.{side}.layer_norm", f"{side}/layer_norm")
        for number in range(config[f"{side}_layers"]):
            name, module = f"model.{side}.layers.{number}", f"{side}/layer_{number}"
            for part, each in enumerate(("q_proj", "k_proj", "v_proj")):
                fused = f"{module}/self_attention/linear_0"
                matrix(f"{name}.self_attn.{each}", fused, 3, part, bias=each != "k_proj")
            matrix(f"{name}.self_attn.out_proj", f"{module}/self_attention/linear_1")
            norm(f"{name}.self_attn_layer_norm", f"{module}/self_attention/layer_norm")
            for fc, linear in (("fc1", "linear_0"), ("fc2", "linear_1")):
                matrix(f"{name}.{fc}", f"{module}/ffn/{linear}")
            norm(f"{name}.final_layer_norm", f"{module}/ffn/layer_norm")
            if side == "encoder":
                continue
            cross = f"{module}/attention"
            matrix(f"{name}.encoder_attn.q_proj", f"{cross}/linear_0")
            matrix(f"{name}.encoder_attn.k_proj", f"{cross}/linear_1", 2, 0, bias=False)
            matrix(f"{name}.encoder_attn.v_proj", f"{cross}/linear_1", 2, 1)
            matrix(f"{name}.encoder_attn.out_proj", f"{cross}/linear_2")
            norm(f"{name}.encoder_attn_layer_norm", f"{cross}/layer_norm")
    for conv in ("conv1", "conv2"):
        matrix(f"model.encoder.{conv}", f"encoder/{conv}")
    made["model.decoder.embed_tokens.weight"] = partial(_part, path, variables, "decoder/embeddings/weight", 1, 0)
    return made


def _part(path: Path, variables: Mapping[str, _Variable], name: str, parts: int, part: int) -> Tensor:
    """The ``part``-th of ``parts`` equal shares of a variable's rows, dequantised."""
    stored = variables[name]
    values = _values(path, stored)
    if not values.is_floating_point():
        scale = _values(path, variables[f"{name}_scale"]).float()
        values = values.float() / (scale.reshape(-1, *[1] * (values.dim() - 1)) if scale.dim() else scale)
    rows = len(values) // parts
    return values[part * rows : (part + 1) * rows]


def _tokenizer(folder: Path, words: int) -> Any:
    """The folder's tokenizer for ``words`` tokens. Raises FileError."""
    from transformers import PreTrainedTokenizerFast

    def unreadable(why: str) -> FileError:
        return FileError(f"{folder} has no readable {TOKENIZER} ({why}); copy that of the model there")

    if not (folder / TOKENIZER).is_file():
        raise FileError(f"{folder} has no {TOKENIZER}; copy that of the model there")
    with foreign_errors(unreadable):
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / TOKENIZER), clean_up_tokenization_spaces=False)
        if 0 < (times := words - len(tokenizer)) <= TIMES:  # files of CTranslate2 end before the timestamps
            tokenizer.add_tokens([f"<|{each / 50:.2f}|>" for each in range(times)], special_tokens=True)
    return tokenizer


def _suppressed(folder: Path) -> dict[str, Any]:
    """The suppressed tokens, as transformers names them."""
    described = read_json(folder / "config.json", AGAIN)
    suppressed: dict[str, Any] = {}
    for theirs, name in (("suppress_ids", "suppress_tokens"), ("suppress_ids_begin", "begin_suppress_tokens")):
        ids = described.get(theirs) or []
        if not isinstance(ids, list) or not all(is_whole(each, -1, 1 << 31) for each in ids):
            raise FileError(f"{folder / 'config.json'} has {theirs} that are not token ids; {AGAIN}")
        suppressed[name] = [each for each in ids if each >= 0]
    return suppressed
