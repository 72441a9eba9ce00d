"""Read GGUF files as Hugging Face checkpoints: config, tensors under Hugging Face names, tokenizer.

    contents = read_gguf("model.gguf")                           # or any part of a split file
    contents.config["model_type"]                                # "llama"
    contents.tensors["model.layers.0.self_attn.q_proj.weight"]   # dequantised on access
    contents.matrices["model.layers.0.self_attn.q_proj.weight"]  # the same as the file stores it
    contents.tokenizer("12345")

llama.cpp's converter does more than rename tensors: it reorders or shifts some of them, which is undone here (rotary
rows of Llama, the ``+ 1`` of Gemma's norms, the transposes of GPT-2). Tensors that llama.cpp would use and that are not
supported raise an error, since ignoring them would silently change the output; others are named in one warning.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import TENSOR_NAMES, GGMLQuantizationType, GGUFReader, GGUFValueType
from gguf.quants import dequantize
from numpy.typing import NDArray

from anabranch.errors import FileError, ModelError, ModelWarning
from anabranch.model.families import FAMILIES
from anabranch.model.gguf_config import ARCHITECTURES, ATTENTION, MLP, Architecture, config_of
from anabranch.model.gguf_tokenizer import build_tokenizer, unused_keys
from anabranch.model.matrix import Matrix
from anabranch.model.stored import Checkpoint, LazyTensors, dtype_name
from anabranch.support.log import warn

__all__ = ["read_gguf", "unpermute_rotary"]

Metadata = Mapping[str, Any]

PIECE = 1 << 20  # bytes that are dequantised at a time

# The GGUF names of the modules that make up each part of our blocks; _FUSED where a family has one module for them.
_LEAVES = {
    "norm_in": ("attn_norm",), "qkv": ("attn_q", "attn_k", "attn_v"), "out": ("attn_output",),
    "q_norm": ("attn_q_norm",), "k_norm": ("attn_k_norm",), "norm_after_attention": ("post_attention_norm",),
    "norm_mlp": ("ffn_norm",), "mlp.up": ("ffn_gate", "ffn_up"), "mlp.down": ("ffn_down",),
    "norm_after_mlp": ("post_ffw_norm",), "sinks": ("attn_sinks",), "mlp.router": ("ffn_gate_inp",),
    "mlp.experts.up": ("ffn_gate_exps", "ffn_up_exps"), "mlp.experts.down": ("ffn_down_exps",),
}  # fmt: skip
_FUSED = {"qkv": ("attn_qkv",), "mlp.up": ("ffn_up",)}
_OTHERS = {"gpt_oss": {"norm_mlp": ("post_attention_norm",)}}  # of single families


@dataclass(frozen=True)
class _Names:
    """The Hugging Face names of an architecture's modules by their GGUF names: in layer ``layers``.N, and outside.

    In the names of an expert's modules, ``{}`` stands for its number: GGUF has one tensor for all experts of a layer.
    ``transposed`` weights are stored as in ``nn.Linear`` by GGUF, and transposed by Hugging Face.
    """

    layers: str
    block: Mapping[str, str]
    ends: Mapping[str, str]
    transposed: frozenset[str]


def _names_of(name: str) -> _Names:
    """The names of a family."""
    family = FAMILIES[name]
    block: dict[str, str] = {}
    transposed: set[str] = set()
    known = {**_LEAVES, **_OTHERS.get(name, {})}
    for part, modules in family.block.items():
        leaves = known[part] if len(modules) == len(known[part]) else _FUSED[part]
        block |= dict(zip(leaves, modules, strict=True))
        transposed |= set(leaves) if family.layouts.get(part) == "transposed" else set()
    outer = family.prefixes[0]
    ends = {"token_embd": outer + family.embedding, "output_norm": outer + family.norm, "output": family.heads[0]}
    ends |= {"position_embd": outer + family.positions} if family.positions else {}
    return _Names(outer + family.layers, block, ends, frozenset(transposed))


# Tables of rotary frequencies: those that belong to the config, and one that llama.cpp does not use.
_ROPE_TABLES = re.compile(r"rope_(freqs|factors_short|factors_long)\.weight|blk\.\d+\.attn_rot_embd\.weight")
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_END_NAME = re.compile(r"(\w+)\.(weight|bias)")
_PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
# The types of stored weights that are computed in as they are; others are quantised.
_FLOATS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


def read_gguf(path: str | Path, *, dtype: torch.dtype | None = None) -> Checkpoint:
    """Open a GGUF file, or all parts of a split one.

    Tensors are dequantised to float32 and rounded once to ``dtype``; None: the dtype of the file, which is float32,
    float16 or bfloat16 if most weights are stored in it, else bfloat16.

    Raises:
        FileError: the file or a part of it is missing, truncated or malformed.
        ModelError: the architecture, the tokenizer or a feature of the file is not supported.

    Warns (ModelWarning) of tensors and settings that are not used.
    """
    path = _first_part(Path(path))
    metadata, stored = _read(path)
    try:
        config = config_of(path, metadata, stored)
        known = ARCHITECTURES[metadata["general.architecture"]]
        loaders, matrices, unused = _loaders(known, config, stored, path=path)
    except KeyError as error:
        raise FileError(
            f"{path} lacks the metadata field {error} and so is not a complete model; fetch it again"
        ) from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise FileError(f"{path} has inconsistent metadata ({error}); fetch it again") from error
    tokenizer = build_tokenizer(path, metadata)
    if unused := [*unused, *unused_keys(metadata)]:
        more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
        warn(f"{path} has {', '.join(unused[:5])}{more}, not used here", ModelWarning, stacklevel=2)
    native = _stored_dtype(stored)
    dtype = native if dtype is None else dtype
    config["dtype"] = dtype_name(dtype)
    tensors = LazyTensors({name: partial(_rounded, loader, dtype) for name, loader in loaders.items()})
    return Checkpoint(config, tensors, tokenizer, native, matrices, tuple(_parts(path, metadata)))


def _rounded(loader: Callable[[], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return loader().to(dtype)


def unpermute_rotary(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Reorder the rows of a q or k projection from interleaved pairs to the two halves that Hugging Face rotates.

    Args:
        rows: (heads * E, ...), in which each head's channels are stored in the order 0, E/2, 1, E/2 + 1, ...
        heads: number of heads in ``rows``.

    One head of E = 4: file rows ``[0 2 1 3]`` (pairs 0-2 and 1-3) -> ``[0 1 2 3]``.
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    halves: np.ndarray[Any, Any] = pairs.swapaxes(1, 2).reshape(rows.shape)
    return halves


class _Reader(GGUFReader):  # type: ignore[misc]  # gguf has no type annotations
    """The reader of the ``gguf`` package, with a check that reads stay inside the file, and arrays decoded at once.

    The original silently slices past the end, so a damaged array length makes it loop for hours. It also makes two
    arrays of numpy for every token and merge: 7 seconds and 500 MB for a vocabulary of 150,000.
    """

    def __init__(self, path: Path) -> None:
        self._arrays: dict[int, list[Any]] = {}  # by the offset of the value
        super().__init__(path)

    def _get(self, offset: int, dtype: Any, count: int = 1, *args: Any, **kwargs: Any) -> Any:
        self._inside(int(offset) + np.dtype(dtype).itemsize * int(count))
        return super()._get(offset, dtype, count, *args, **kwargs)

    def _inside(self, end: int) -> None:
        if end > self.data.size:
            raise ValueError(f"it ends at byte {self.data.size}, but byte {end} is needed")

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        kind = GGUFValueType(raw_type)
        if kind != GGUFValueType.ARRAY or self.byte_order == "S":
            return super()._get_field_parts(orig_offs, raw_type)
        of = GGUFValueType(self._get(orig_offs, np.uint32)[0])
        count, first = int(self._get(orig_offs + 4, np.uint64)[0]), orig_offs + 12
        if of == GGUFValueType.STRING:
            self._arrays[orig_offs], end = self._strings(first, count)
        elif (number := self.gguf_scalar_to_np.get(of)) is not None:
            values = self._get(first, number, count)
            self._arrays[orig_offs], end = values.tolist(), first + values.nbytes
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        return end - orig_offs, [self.data[orig_offs:end]], [0], [kind, of]

    def _strings(self, first: int, count: int) -> tuple[list[str], int]:
        self._inside(first + 8 * count)
        data, size_at, at = memoryview(self.data), struct.Struct("<Q").unpack_from, first
        strings = []
        try:
            for _ in range(count):
                end = at + 8 + size_at(data, at)[0]
                strings.append(str(data[at + 8 : end], "utf-8"))
                at = end
        except struct.error:  # there is no size at this place
            self._inside(at + 8)
        self._inside(at)
        return strings, at

    def contents(self, field: Any) -> Any:
        """The value of a field."""
        value_at = field.offset + sum(int(part.nbytes) for part in field.parts[:3])
        values = self._arrays.get(value_at)
        return field.contents() if values is None else values


def _open(path: Path) -> Any:
    if not path.is_file():
        raise FileError(f"there is no GGUF file at {path}; give the path of an existing file")
    try:
        reader = _Reader(path)
    except (ValueError, KeyError, IndexError, OverflowError, TypeError, OSError) as error:
        detail = str(error).strip().rstrip(".")
        raise FileError(f"{path} is not a GGUF file, or is truncated or damaged ({detail}); fetch it again") from error
    if reader.byte_order == "S":
        raise ModelError(f"{path} has the opposite byte order; convert it to this machine's byte order")
    return reader


def _first_part(path: Path) -> Path:
    """The first part of a split file, from the name of any; it has the metadata."""
    part = _PART_NAME.fullmatch(path.name)
    return _part(path, 1, int(part[3])) if part else path


def _part(path: Path, number: int, count: int) -> Path:
    """A part of a split file, from the name of any."""
    named = _PART_NAME.fullmatch(path.name)
    assert named is not None
    return path.with_name(f"{named[1]}-{number:05}-of-{count:05}.gguf")


def _read(path: Path) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """The metadata, and the tensors of all parts by their GGUF names."""
    reader = _open(path)
    metadata = _fields(path, reader)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    count = metadata.get("split.count", 1)
    if count == 1 or not isinstance(count, int):
        return metadata, stored
    named = _PART_NAME.fullmatch(path.name)
    if named is None or int(named[3]) != count:
        raise FileError(
            f"{path} is one of {count} parts of a split file; give all parts their names NAME-00001-of-{count:05}.gguf"
        )
    for number, part in enumerate(_parts(path, metadata)[1:], 2):
        other = _open(part)
        if _fields(part, other).get("split.no") != number - 1:
            raise FileError(f"{part} is not part {number} of {path.name}; fetch it again")
        stored |= {tensor.name: tensor for tensor in other.tensors}
    if len(stored) != metadata.get("split.tensors.count", len(stored)):
        expected = metadata["split.tensors.count"]
        raise FileError(f"the parts of {path} have {len(stored)} of {expected} tensors; fetch them again")
    return metadata, stored


def _parts(path: Path, metadata: Mapping[str, Any]) -> list[Path]:
    """All parts of a file, of which ``path`` is the first."""
    count = metadata.get("split.count", 1)
    if count == 1 or not isinstance(count, int):
        return [path]
    return [_part(path, number, count) for number in range(1, count + 1)]


def _fields(path: Path, reader: Any) -> dict[str, Any]:
    try:
        return {name: reader.contents(field) for name, field in reader.fields.items()}
    except (ValueError, IndexError) as error:
        raise FileError(f"{path} is a damaged GGUF file ({error}); fetch it again") from error


def _stored_dtype(stored: Mapping[str, Any]) -> torch.dtype:
    """The type in which most of the matrices' values are stored; bfloat16 for quantised ones."""
    sizes: Counter[Any] = Counter()
    for tensor in stored.values():
        if len(tensor.shape) >= 2:
            sizes[tensor.tensor_type] += int(tensor.n_elements)
    return _FLOATS.get(max(sizes, key=lambda kind: sizes[kind]), torch.bfloat16) if sizes else torch.bfloat16


def _loaders(
    known: Architecture, config: Mapping[str, Any], stored: Mapping[str, Any], *, path: Path
) -> tuple[dict[str, Callable[[], torch.Tensor]], dict[str, Matrix], list[str]]:
    """One loader for each parameter, the matrices, and the names of the tensors that are not used.

    Raises FileError if a block is missing, ModelError for a tensor that llama.cpp would use in another way.
    """
    family, layers = config["model_type"], int(config.get("num_hidden_layers", config.get("n_layer", 0)))
    names = _names_of(family)
    loaders: dict[str, Callable[[], torch.Tensor]] = {}
    matrices: dict[str, Matrix] = {}
    blocks: set[int] = set()
    unused: list[str] = []
    for name, tensor in stored.items():
        block, leaf, kind, module = 0, name, "", None
        if match := _BLOCK_NAME.fullmatch(name):
            block, leaf, kind = int(match[1]), match[2], match[3]
            blocks.add(block)
            module = f"{names.layers}.{block}.{names.block[leaf]}" if leaf in names.block else None
        elif match := _END_NAME.fullmatch(name):
            leaf, kind = match[1], match[2]
            module = names.ends.get(leaf)
        if _ROPE_TABLES.fullmatch(name) and family not in ("gpt2", "gpt_neox", "phi"):
            continue
        if block < layers and module is not None and (kind == "weight" or leaf in known.biased):
            transposed = kind == "weight" and leaf in names.transposed
            # sinks are a parameter of the layer itself
            suffix = "" if leaf == "attn_sinks" else f".{kind}"
            for part, own in _parts_of(tensor, config, path, f"{module}{suffix}"):
                loaders[own] = partial(_load, part, known, config, path, leaf=leaf, transposed=transposed)
                if len(part.shape) == 2:
                    by_head = family == "gpt_neox"  # our rows of q, k and v are in the file's order
                    order = None if by_head else _rotary_order(part, known, config, path, leaf=leaf)
                    rows = part.data.view(np.uint8)
                    shape = len(rows), int(part.shape[0])
                    matrices[own] = Matrix(part.tensor_type, shape, partial(np.asarray, rows), order)
        elif block < layers and _known_tensors().fullmatch(name):
            raise ModelError(
                f"{path} has the tensor {name}, and {family} models with it are not supported; use the model's "
                "safetensors folder instead"
            )
        else:
            unused.append(name)
    if not blocks.issuperset(range(layers)) or f"{names.ends['token_embd']}.weight" not in loaders:
        raise FileError(f"{path} should contain {layers} blocks but has {len(blocks)}; fetch it again")
    return _without_bias(names, known, config, stored, layers) | loaders, matrices, unused


class _Expert(NamedTuple):
    """One expert's part of a tensor: the attributes of gguf's ``ReaderTensor`` that are read here."""

    name: str
    tensor_type: Any
    shape: Any
    data: Any


def _parts_of(tensor: Any, config: Mapping[str, Any], path: Path, name: str) -> Iterator[tuple[Any, str]]:
    """A tensor and its Hugging Face name; of a tensor with the experts of a layer, each of them. Raises FileError."""
    if "{}" not in name:
        yield tensor, name
        return
    count = int(config.get("num_experts") or config["num_local_experts"])
    if len(tensor.shape) < 2 or tensor.shape[-1] != count:
        raise FileError(
            f"{path} has {tensor.name} in the shape {tensor.shape.tolist()[::-1]}, but {count} experts; fetch it again"
        )
    for expert in range(count):
        yield _Expert(tensor.name, tensor.tensor_type, tensor.shape[:-1], tensor.data[expert]), name.format(expert)


@cache
def _known_tensors() -> re.Pattern[str]:
    """The names of all tensors that llama.cpp uses in some architecture."""
    names = (re.escape(name).replace(r"\{bid\}", r"\d+") for name in TENSOR_NAMES.values())
    return re.compile(rf"(?:{'|'.join(names)})\..+")


def _without_bias(
    names: _Names, known: Architecture, config: Mapping[str, Any], stored: Mapping[str, Any], layers: int
) -> dict[str, Callable[[], torch.Tensor]]:
    """Biases of zeros where the file has none: in transformers, all modules of a kind have a bias or none."""
    leaves = {
        *(ATTENTION if config.get("attention_bias") else ()),
        *(MLP if config.get("mlp_bias") else ()),
        *(known.biased if config["model_type"] == "qwen2" else ()),
    }
    zeros: dict[str, Callable[[], torch.Tensor]] = {}
    for block in range(layers):
        for leaf in sorted(leaves):
            if (weight := stored.get(f"blk.{block}.{leaf}.weight")) is not None:
                name = f"{names.layers}.{block}.{names.block[leaf]}.bias"
                zeros[name] = partial(torch.zeros, int(weight.shape[-1]))
    return zeros


def _dequantized(stored: NDArray[Any], kind: GGMLQuantizationType) -> NDArray[np.float32]:
    """The values of a tensor, pieces of its rows in parallel; gguf takes sixteen rows at a time, in one thread."""
    if stored.dtype != np.uint8:
        floats: NDArray[np.float32] = dequantize(stored, kind)
        return floats
    rows = stored.reshape(-1, stored.shape[-1])
    pieces = np.array_split(rows, min(len(rows), 1 + rows.nbytes // PIECE))
    with ThreadPoolExecutor() as pool:  # a piece as one row, which gguf does not cut
        made = list(pool.map(lambda piece: dequantize(piece.reshape(1, -1), kind), pieces))
    return np.concatenate(made, axis=1).reshape(*stored.shape[:-1], -1)


def _load(
    tensor: Any, known: Architecture, config: Mapping[str, Any], path: Path, *, leaf: str, transposed: bool
) -> torch.Tensor:
    """Dequantise one tensor to float32, and undo the changes of llama.cpp's converter."""
    try:
        values = _dequantized(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        kind = getattr(tensor.tensor_type, "name", tensor.tensor_type)
        raise ModelError(
            f"{path} stores {tensor.name} as {kind}, which cannot be dequantised; use a file in another format"
        ) from error
    order = _rotary_order(tensor, known, config, path, leaf=leaf)
    values = values if order is None else values[order]
    if known.shifted and leaf.endswith("norm"):
        values = values - np.float32(1)
    # a copy, since the file is mapped read-only and may be replaced while the model is in use
    return torch.from_numpy(np.array(values.T if transposed else values, dtype=np.float32, order="C"))


def _rotary_order(
    tensor: Any, known: Architecture, config: Mapping[str, Any], path: Path, *, leaf: str
) -> NDArray[np.int64] | None:
    """The file's row of each row of a projection that llama.cpp's converter reordered; None for other tensors.

    Raises FileError if the rows are not those of whole heads.
    """
    rows = int(tensor.shape[-1])
    if config["model_type"] == "gpt_neox" and leaf == "attn_qkv":  # q, k and v of each head in turn
        heads = int(config["num_attention_heads"])
        if rows % (3 * heads):
            raise FileError(f"{path} has {rows} rows in {tensor.name} for {heads} heads; fetch it again")
        by_head: NDArray[np.int64] = np.arange(rows).reshape(3, heads, -1).swapaxes(0, 1).reshape(-1)
        return by_head
    if not known.permuted or leaf not in {"attn_q", "attn_k"}:
        return None
    heads = int(config["num_attention_heads" if leaf == "attn_q" else "num_key_value_heads"])
    if heads < 1 or rows % (2 * heads):
        raise FileError(f"{path} has {rows} rows in {tensor.name} for {heads} heads; fetch it again")
    return unpermute_rotary(np.arange(rows), heads)
