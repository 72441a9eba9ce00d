"""Load a target from a GGUF file as it is stored: the kernels multiply the file's own values, without rounding them.

The weights of a product have exactly the file's values. Its inputs are rounded to int8 with a scale for every 32
values, products of 32 values are summed exactly in int32, and these sums are added in float32. If no weight of the
layers is quantised, as in an F16 file, the inputs are bf16 instead, and products are those of float32. Embeddings are
looked up in the file's format too. Norms and biases keep their values; embeddings of positions are rounded to bf16,
as the kernels read them in the type of keys and values.

Weights are packed one after another, and the file's pages are given back, so that the model is in memory only once.
Packed weights are kept for the next load (``packed_file``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from anabranch.errors import ModelError
from anabranch.model.blocks import Block
from anabranch.model.config import ModelConfig
from anabranch.model.decoder import Decoder
from anabranch.model.experts import Experts
from anabranch.model.families import module_rows, weight_source
from anabranch.model.kernel_use import products_for, warn_about_kernels, why_not_native
from anabranch.model.matrix import Matrix, forget_made, formats_of
from anabranch.model.native_backend import backend_of
from anabranch.model.native_linear import NativeLinear, RowTable, StoredWeight
from anabranch.model.packed_file import PackedFile, PackedWriter, key_of
from anabranch.model.weights import Identity, assemble, check_finite, check_memory, described_decoder, not_finite, put
from anabranch.native import library as native
from anabranch.native.arguments import BLOCK, FLOATS, STORED_TYPES

__all__ = ["NotStoredError", "Packing", "StoredModel", "describe_stored", "fill_as_stored"]

Packing: TypeAlias = Callable[[int, int], None]
"""A callback (done, total) in bytes, called after each weight that was packed."""

EXPERT = ".experts."  # in the names of the weights of experts
LAYOUT = 1  # version of the layout of packed weights
EMBEDDING, HEAD, PLACES, LAST_NORM = "embedding.weight", "head.weight", "positions.weight", "norm.weight"


class NotStoredError(Exception):
    """The reason why a file is not loaded as it is stored.

    surprising  the user could not expect it: the file has weights that other tools decode as they are stored
    """

    def __init__(self, why: str, *, surprising: bool = False) -> None:
        super().__init__(why)
        self.surprising = surprising


class _Run(NamedTuple):
    """Rows (None: all) of a matrix, packed from block ``first`` on, into every ``every``-th block."""

    name: str
    matrix: Matrix
    rows: NDArray[np.int64] | None
    first: int
    every: int = 1

    @property
    def blocks(self) -> int:
        count = self.matrix.shape[0] if self.rows is None else len(self.rows)
        return -(-count // BLOCK)

    def pieces(self) -> Iterator[NDArray[np.uint8]]:
        """The rows [n, bytes of a row], some at a time, whose pages are given back after use."""
        return self.matrix.pieces(self.rows, BLOCK)


@dataclass(frozen=True)
class _Weight:
    """The weight of one of the decoder's linear layers, or its embedding: matrices whose rows are its outputs.

    gated  its two halves, gate and up, are interleaved block by block
    kind   of ``native.IN_FILE_FORMATS``
    """

    name: str
    parts: tuple[tuple[str, Matrix], ...]
    gated: bool = False
    kind: Literal["stored", "floats"] = "stored"

    @property
    def quantized(self) -> bool:
        """True if any of its blocks is quantised."""
        return any(matrix.kind.name not in FLOATS for _, matrix in self.parts)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return sum(matrix.shape[0] for _, matrix in self.parts), self.parts[0][1].width

    def runs(self) -> list[_Run]:
        """The parts in the order in which they are packed."""
        if not self.gated:
            first, runs = 0, []
            for name, matrix in self.parts:
                runs.append(_Run(name, matrix, matrix.order, first))
                first += runs[-1].blocks
            return runs
        if len(self.parts) == 2:
            return [_Run(name, matrix, matrix.order, half, 2) for half, (name, matrix) in enumerate(self.parts)]
        ((name, matrix),) = self.parts
        order = np.arange(matrix.shape[0]) if matrix.order is None else matrix.order
        return [_Run(name, matrix, rows, half, 2) for half, rows in enumerate(np.split(order, 2))]

    def types(self) -> list[int]:
        """The format of each block of 32 outputs."""
        runs = self.runs()
        types = np.empty(sum(run.blocks for run in runs), np.int64)
        for run in runs:
            types[run.first : run.first + run.blocks * run.every : run.every] = int(run.matrix.kind)
        return [int(kind) for kind in types]

    def sample(self) -> Tensor:
        """The dequantised values that are part of the fingerprint (``Identity``)."""
        outputs, width = self.shape
        sampled = Identity.sampled(outputs * width)
        flat, values, first = np.arange(sampled.start, sampled.stop, sampled.step), [], 0
        for _, matrix in self.parts:
            size = matrix.shape[0] * width
            values.append(matrix.values(flat[(flat >= first) & (flat < first + size)] - first))
            first += size
        return torch.from_numpy(np.concatenate(values))

    def pack(self, kernels: native.Library) -> StoredWeight:
        """The weight in packed blocks. Raises NumericsError for a scale that is not finite."""
        packed, memory = kernels.stored(self.types(), *self.shape, kind=self.kind)
        for run in self.runs():
            kind, block = int(run.matrix.kind), run.first
            for rows in run.pieces():
                finite = kernels.pack_stored(packed, block, kind, rows, every=run.every)
                if not finite:
                    raise not_finite(run.name)
                block += len(rows) // BLOCK * run.every
        return StoredWeight(packed, memory)


class _Packed(NamedTuple):
    """The packed weights of all linear layers, the rows of the embedding, and the fingerprint."""

    weights: Mapping[str, StoredWeight]
    rows: Tensor
    fingerprint: str


def fill_as_stored(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    matrices: Mapping[str, Matrix],
    files: Sequence[Path],
    *,
    keep: bool = True,
    progress: Packing | None = None,
) -> tuple[Decoder, str]:
    """A packed decoder for the native kernels, and its fingerprint: that of the dequantised weights.

    tensors   all parameters by their Hugging Face names, dequantised on access
    matrices  the matrices among them, as the file stores them
    files     the parts of the file
    keep      use the packed weights of an earlier load, and keep them for the next one

    Raises NotStoredError where the kernels cannot multiply these weights as they are stored; ModelError, NumericsError
    and DeviceError as ``fill_decoder``.
    """
    kernels, decoder, weights = _planned(config, tensors, matrices)
    others = [name for name, _ in sorted(decoder.named_parameters()) if name not in weights]
    for name in others:
        shape = decoder.get_parameter(name).shape
        value = assemble(decoder.config, tensors, name, shape)
        made = value.to(torch.bfloat16) if name == PLACES else value.float()
        check_finite(decoder.config, name, value, made)
        put(decoder, name, made.clone())
    parameters = [name for name, _ in sorted(decoder.named_parameters())]
    packed = _found(kernels, weights, files) if keep else None
    if packed is None:
        try:
            packed = _pack(decoder, kernels, weights, parameters, files, keep=keep, progress=progress)
        finally:
            forget_made()
    _replace(decoder, kernels, weights, packed)
    warn_about_kernels(decoder, stacklevel=2)
    return decoder, packed.fingerprint


@dataclass(frozen=True)
class StoredModel:
    """A model that can be decoded as it is stored, before it is loaded.

    read         bytes of weights that a token reads
    resident     bytes of packed weights and of the embedding
    fingerprint  as of the loaded model
    pytorch      the reason why PyTorch runs the layers, and the kernels their products only; empty: it does not
    """

    config: ModelConfig
    parameters: int
    read: int
    resident: int
    fingerprint: str
    pytorch: str = ""


def describe_stored(
    config: ModelConfig, tensors: Mapping[str, Tensor], matrices: Mapping[str, Matrix], files: Sequence[Path]
) -> StoredModel:
    """Describe a model without packing it; the arguments are those of ``fill_as_stored``. Raises NotStoredError."""
    kernels, decoder, weights = _planned(config, tensors, matrices)
    why = why_not_native(decoder)
    sizes = {name: kernels.stored_bytes(w.types(), w.shape[1]) for name, w in weights.items() if name != EMBEDDING}
    resident, read = sum(sizes.values()) + weights[EMBEDDING].parts[0][1].nbytes, sum(sizes.values())
    if (experts := decoder.config.experts) is not None:
        inside = sum(size for name, size in sizes.items() if EXPERT in name)
        read -= inside - inside * experts.chosen // experts.count
    count = sum(parameter.numel() for parameter in decoder.parameters())
    kept = PackedFile.find(files, key_of(files, _layout()))
    if kept is not None:
        return StoredModel(decoder.config, count, read, resident, str(kept.facts["fingerprint"]), why)
    identity = Identity(decoder.config)
    for name, parameter in sorted(decoder.named_parameters()):
        if name in weights:
            identity.add_sample(name, parameter.shape, weights[name].sample())
        else:
            identity.add(name, assemble(decoder.config, tensors, name, parameter.shape))
    forget_made()
    return StoredModel(decoder.config, count, read, resident, identity.fingerprint, why)


def _planned(
    config: ModelConfig, tensors: Mapping[str, Tensor], matrices: Mapping[str, Matrix]
) -> tuple[native.Library, Decoder, dict[str, _Weight]]:
    """The kernels, a decoder on ``meta`` but for its last norm, and what is packed. Raises NotStoredError."""
    kinds = formats_of(matrices)
    if not kinds or (FLOATS.issuperset(kinds) and kinds[0] != "F16"):
        raise NotStoredError("the file is neither quantised nor in F16")
    if (kernels := native.library()) is None:
        raise NotStoredError(native.why_not())
    decoder = described_decoder(config, tensors, dtype=torch.bfloat16)
    decoder.of_rows = torch.bfloat16
    put(decoder, LAST_NORM, assemble(decoder.config, tensors, LAST_NORM, decoder.norm.weight.shape).float())
    why = why_not_native(decoder)  # which asks for the device of this norm
    if why and not products_for(decoder):
        raise NotStoredError(why)
    return kernels, decoder, _weights(decoder, matrices, whole=not why)


# -- the weights of a decoder ----------------------------------------------------------------------
def _weights(decoder: Decoder, matrices: Mapping[str, Matrix], *, whole: bool) -> dict[str, _Weight]:
    """The parameters that are packed: the embedding, and the weights of all linear layers.

    whole  the kernels run whole layers, which have rows of one type
    """
    named = {module: name for name, module in decoder.named_modules()}
    layers = [f"{named[module]}.{name}.weight" for block in decoder.blocks for module, name in _linears(block)]
    weights = {name: _weight(decoder, name, matrices, whole=whole) for name in (EMBEDDING, *layers, HEAD)}
    together = [name for name in layers if EXPERT not in name] if whole else []
    quantized = any(weights[name].quantized for name in together)
    for name, weight in weights.items():
        if not (weight.quantized or (quantized and name in together)):
            weights[name] = replace(weight, kind="floats")
    return weights


def _linears(block: nn.Module) -> tuple[tuple[nn.Module, str], ...]:
    assert isinstance(block, Block)
    return block.linears()


def _weight(decoder: Decoder, name: str, matrices: Mapping[str, Matrix], *, whole: bool) -> _Weight:
    """The matrices of a parameter.

    Raises NotStoredError if the kernels cannot multiply them, ModelError if the config requires other shapes.
    """
    config = decoder.config
    outputs, width = decoder.get_parameter(name).shape
    source = weight_source(config, EMBEDDING if name == HEAD and config.tied_head else name)
    parts = []
    for rows, names in zip(module_rows(config, len(source.tensors), outputs), source.tensors, strict=True):
        stored = next((each for each in names if each in matrices), None)
        if stored is None:
            raise NotStoredError(f"{names[0]} is not a matrix", surprising=True)
        matrix = matrices[stored]
        if matrix.kind.name not in STORED_TYPES:
            raise NotStoredError(f"{stored} is stored as {matrix.kind.name}, which has no kernels", surprising=True)
        if matrix.shape != (rows, width):
            raise ModelError(
                f"{stored} has the shape {matrix.shape}, but the config requires {(rows, width)}; config and weights "
                "do not belong together"
            )
        parts.append((stored, matrix))
    gated = whole and name.endswith("mlp.up.weight") and config.gated_mlp
    divides = all(matrix.shape[0] % (BLOCK * (1 + gated)) == 0 for _, matrix in parts[: None if gated else -1])
    if not divides or width % BLOCK:
        raise NotStoredError(f"{parts[0][0]} does not divide into blocks of {BLOCK} outputs", surprising=True)
    return _Weight(name, tuple(parts), gated)


def _replace(decoder: Decoder, kernels: native.Library, weights: Mapping[str, _Weight], packed: _Packed) -> None:
    """Replace linear layers, embedding and backend by those over packed weights."""
    for name, weight in packed.weights.items():
        stem = name.removesuffix(".weight")
        linear = decoder.get_submodule(stem)
        assert isinstance(linear, nn.Linear)
        # the outputs of experts are added in float32
        made = NativeLinear(weight, linear.bias, gated=weights[name].gated, wide=name == HEAD or EXPERT in name)
        parent, _, leaf = stem.rpartition(".")
        setattr(decoder.get_submodule(parent), leaf, made)
    ((_, matrix),) = weights[EMBEDDING].parts
    decoder.embedding = RowTable(kernels, int(matrix.kind), packed.rows, matrix.width)
    for block in decoder.blocks:
        if isinstance(block, Block) and isinstance(block.mlp, Experts):
            router: Any = block.mlp.router
            block.mlp.router = NativeLinear(router.weight, router.bias, wide=True)
    decoder.backend = backend_of(decoder, kernels)


# -- packing, or the packed weights of an earlier load ---------------------------------------------
@cache
def _layout() -> str:
    """The layout of packed weights: also the source of it, where it is at hand."""
    source = Path(native.__file__).with_name("stored.h")
    return f"{LAYOUT} {hashlib.sha256(source.read_bytes()).hexdigest() if source.is_file() else ''}"


def _found(kernels: native.Library, weights: Mapping[str, _Weight], files: Sequence[Path]) -> _Packed | None:
    """The packed weights of an earlier load; None if there are none that fit."""
    entry = PackedFile.find(files, key_of(files, _layout()))
    if entry is None:
        return None
    check_memory(entry.nbytes, torch.device("cpu"))
    try:
        parts, made = entry.parts(), {}
        for name, weight in weights.items():
            if name != EMBEDDING:
                made[name] = StoredWeight(kernels.adopt(parts[name], *weight.shape, kind=weight.kind), parts[name])
        ((_, table),) = weights[EMBEDDING].parts
        return _Packed(made, parts[EMBEDDING].view(table.shape[0], -1), str(entry.facts["fingerprint"]))
    except OSError:
        return None
    except (AssertionError, KeyError, ValueError, RuntimeError):
        entry.remove()
        return None


def _copied(table: Matrix) -> Tensor:
    rows, first = torch.empty((table.shape[0], table.nbytes // table.shape[0]), dtype=torch.uint8), 0
    for piece in table.pieces():
        rows[first : first + len(piece)] = torch.from_numpy(np.array(piece))
        first += len(piece)
    return rows


def _pack(
    decoder: Decoder,
    kernels: native.Library,
    weights: Mapping[str, _Weight],
    parameters: Sequence[str],
    files: Sequence[Path],
    *,
    keep: bool,
    progress: Packing | None,
) -> _Packed:
    """Pack all weights; the parameters in the order in which they enter the fingerprint."""
    ((name, table),) = weights[EMBEDDING].parts
    if not table.finite():
        raise not_finite(name)
    total = sum(matrix.nbytes for weight in weights.values() for _, matrix in weight.parts)
    check_memory(total, torch.device("cpu"))
    writer = PackedWriter(files, key_of(files, _layout()), total) if keep else None
    identity, made, done = Identity(decoder.config), {}, 0
    try:
        for name in [*parameters, *({HEAD} - set(parameters))]:
            if name not in weights:
                identity.add(name, decoder.get_parameter(name))
                continue
            weight = weights[name]
            if name in parameters:
                identity.add_sample(name, weight.shape, weight.sample())
            if name != EMBEDDING:
                made[name] = weight.pack(kernels)
            if writer is not None:
                writer.add(name, table.pieces() if name == EMBEDDING else [made[name].memory.numpy()])
            done += sum(matrix.nbytes for _, matrix in weight.parts)
            if progress is not None:
                progress(done, total)
        if writer is not None:
            writer.commit({"fingerprint": identity.fingerprint})
    finally:
        if writer is not None:
            writer.discard()
    # a copy, since the file may be replaced while the model is in use
    return _Packed(made, _copied(table), identity.fingerprint)
