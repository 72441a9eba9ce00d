"""Safetensors checkpoints whose weights are quantised: compressed-tensors, AutoAWQ, GPTQ, and FP8 by blocks.

A weight [N, D] is integers times a scale for each group of an output's inputs:

    compressed-tensors  weight_packed [N, D / 8] int32, weight_scale [N, G], weight_zero_point [N / 8, G] int32
                        or weight [N, D] int8 and weight_scale
    GPTQ                qweight [D / 8, N] int32, scales [G, N], qzeros [G, N / 8] int32 (less by one in version 1)
    AWQ                 qweight [D, N / 8] int32, scales [G, N], qzeros [G, N / 8] int32; eight columns in another order

Formats of GGUF files have the same values: Q4_0 holds symmetric weights of four bits, Q5_0 those with zero points, as
the difference of two integers of four bits has five, and Q8_0 symmetric ones of eight bits, if scales have values of
halves, and groups are 32 neighbours or a multiple. Other weights, among them all of FP8, are dequantised in float32 and
rounded once to the decoder's type. Inputs of products are not rounded as a scheme may ask.

N outputs, D inputs, G groups.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGMLQuantizationType
from numpy.typing import NDArray
from torch import Tensor

from anabranch.errors import AnabranchError, FileError, ModelError, one_line
from anabranch.model.matrix import Matrix
from anabranch.model.stored import Checkpoint, LazyTensors, SafetensorsDir
from anabranch.support.jsonfiles import shown

__all__ = ["read_quantized"]

GROUP = 32  # values of a GGUF file's block that have one scale
BLOCK = 128  # outputs and inputs of FP8 that have one scale
_INSTEAD = "use unquantised safetensors or a GGUF file instead"
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place of each of eight columns in an int32
_STORED = {(4, True): GGMLQuantizationType.Q4_0, (4, False): GGMLQuantizationType.Q5_0}
_STORED[8, True] = GGMLQuantizationType.Q8_0
_FLOATS = {"F32": GGMLQuantizationType.F32, "F16": GGMLQuantizationType.F16, "BF16": GGMLQuantizationType.BF16}
_PARTS = re.compile(
    r"(.+)\.(weight_packed|weight_scale(?:_inv)?|weight_shape|weight_zero_point|weight_g_idx|input_scale"
    r"|qweight|qzeros|scales|g_idx)"
)


@dataclass(frozen=True)
class _Scheme:
    """The form of quantised weights, as the config states it.

    kind  "packed" (compressed-tensors), "int8" (the same, not packed), "gptq", "awq" or "fp8"
    less  the number by which zero points are stored too small
    """

    kind: str
    bits: int = 8
    symmetric: bool = True
    less: int = 0


class _Integers(NamedTuple):
    """A weight: integers without their zero points [N, D] int16, scales [N, G], the group of each input or None."""

    values: NDArray[np.int16]
    scale: Tensor
    group: Tensor | None

    def dense(self) -> Tensor:
        """The weight in float32, in which the products are exact."""
        values = torch.from_numpy(self.values).float()
        scale = self.scale.float()
        if self.group is not None:
            return values * scale[:, self.group.long()]
        return (values.view(*scale.shape, -1) * scale[:, :, None]).view(values.shape)

    def rows(self, kind: GGMLQuantizationType) -> NDArray[np.uint8]:
        """Rows of blocks of a GGUF file. Raises FileError for integers that the format does not have."""
        count, width = self.values.shape
        low = {"Q4_0": -8, "Q5_0": -16, "Q8_0": -128}[kind.name]
        if self.values.min(initial=0) < low or self.values.max(initial=0) >= -low:
            raise FileError("zero points of weights that the config calls symmetric are not all the same")
        blocks = self.values.reshape(-1, GROUP)
        scale = self.scale.half().numpy().repeat(width // self.scale.shape[1] // GROUP, axis=1).reshape(-1, 1)
        parts: list[NDArray[np.uint8]] = [np.ascontiguousarray(scale).view(np.uint8)]
        if kind.name == "Q8_0":
            parts.append(blocks.astype(np.int8).view(np.uint8))
        else:
            codes = (blocks - low).astype(np.uint8)
            if kind.name == "Q5_0":
                parts.append(np.packbits(codes >> 4, axis=1, bitorder="little"))
            low_bits = codes & np.uint8(15)
            parts.append((low_bits[:, :16] | (low_bits[:, 16:] << np.uint8(4))).astype(np.uint8))
        rows: NDArray[np.uint8] = np.concatenate(parts, axis=1).reshape(count, -1)
        return rows


def read_quantized(described: Mapping[str, Any], stated: Any, tensors: SafetensorsDir) -> Checkpoint:
    """The checkpoint of a config whose ``quantization_config`` is ``stated``.

    Its matrices are the weights that formats of GGUF files hold exactly, and matrices of floats; ``kinds`` of its
    tensors are the types of the scales of quantised weights.

    Raises ModelError for schemes that are not supported, FileError for incomplete tensors.
    """
    scheme = _scheme(stated)
    parts: dict[str, dict[str, str]] = {}
    for name in tensors:
        if match := _PARTS.fullmatch(name):
            parts.setdefault(match[1], {})[match[2]] = name
    parts = {stem: names for stem, names in parts.items() if not {*names} <= {"input_scale"}}
    loaders: dict[str, Callable[[], Tensor]] = {}
    kinds, matrices, reasons = {}, {}, []
    for stem, names in parts.items():
        scale = next((names[part] for part in ("weight_scale", "weight_scale_inv", "scales") if part in names), None)
        if scale is None:
            raise FileError(f"the weights lack the scales of {stem}; fetch or copy them again")
        loaders[f"{stem}.weight"] = partial(_dense, tensors, scheme, stem, names)
        kinds[f"{stem}.weight"] = tensors.kinds[scale]
        with _fitting(stem):
            matrix = _matrix(tensors, scheme, stem, names, scale)
        if isinstance(matrix, str):
            reasons.append(matrix)
        else:
            matrices[f"{stem}.weight"] = matrix
    for name, kind in tensors.kinds.items():
        if _PARTS.fullmatch(name) or name in loaders:
            continue
        loaders[name], kinds[name] = partial(tensors.__getitem__, name), kind
        if kind in _FLOATS and len(shape := tensors.shape(name)) == 2:
            matrices[name] = Matrix(_FLOATS[kind], (shape[0], shape[1]), partial(_bytes, tensors, name))
    plain = {name: value for name, value in described.items() if name != "quantization_config"}
    if isinstance(inner := described.get("text_config"), Mapping):
        plain["text_config"] = {name: value for name, value in inner.items() if name != "quantization_config"}
    shards = sorted({*tensors.shards.values()})
    files = (*shards, shards[0].with_name("config.json")) if shards else ()
    why_not = reasons[0] if reasons else ""
    return Checkpoint(plain, LazyTensors(loaders, kinds), matrices=matrices, files=files, why_not=why_not)


# -- what the config says --------------------------------------------------------------------------
def _scheme(stated: Any) -> _Scheme:
    if not isinstance(stated, Mapping):
        raise ModelError(f"quantization_config in the model's config must be an object, got {shown(stated)}")
    method = stated.get("quant_method")
    if method == "compressed-tensors":
        return _compressed(stated)
    if method == "fp8":
        if (size := stated.get("weight_block_size")) not in (None, [BLOCK, BLOCK]):
            raise _refused("weight_block_size", size)
        return _Scheme("fp8")
    bits = stated.get("bits", stated.get("w_bit"))
    if method == "gptq" and bits in (4, 8):
        form = stated.get("checkpoint_format", "gptq")
        if form not in ("gptq", "gptq_v2"):
            raise _refused("checkpoint_format", form)
        return _Scheme("gptq", bits, stated.get("sym") is True, less=int(form == "gptq"))
    if method == "awq" and bits == 4:
        if (version := str(stated.get("version", "gemm")).lower()) != "gemm":
            raise _refused("version", version)
        return _Scheme("awq", bits, symmetric=False)
    raise _refused("quant_method", method) if method not in ("gptq", "awq") else _refused("bits", bits)


def _compressed(stated: Mapping[str, Any]) -> _Scheme:
    groups = stated.get("config_groups")
    weights = [group.get("weights") for group in groups.values()] if isinstance(groups, Mapping) else []
    if not weights or not all(isinstance(each, Mapping) and each == weights[0] for each in weights):
        raise ModelError(f"the groups of the model's quantization_config differ, or there are none; {_INSTEAD}")
    (bits, kind), form = (weights[0].get("num_bits"), weights[0].get("type")), stated.get("format")
    if form == "float-quantized" and (bits, kind) == (8, "float"):
        return _Scheme("fp8")
    symmetric = weights[0].get("symmetric", True) is True
    if form == "pack-quantized" and kind == "int" and bits in (4, 8):
        return _Scheme("packed", bits, symmetric)
    if form == "int-quantized" and (bits, kind) == (8, "int") and symmetric:
        return _Scheme("int8")
    raise _refused("format", form if kind == "int" and bits in (4, 8) else f"{form} of {bits} bits")


def _refused(field: str, value: Any) -> ModelError:
    return ModelError(f"the weights are quantised with {field} {shown(value)}, which is not supported; {_INSTEAD}")


# -- the tensors of a weight -----------------------------------------------------------------------
@contextmanager
def _fitting(stem: str) -> Iterator[None]:
    """Raise FileError for tensors of a weight that are missing or do not fit together."""
    try:
        yield
    except AnabranchError:
        raise
    except (KeyError, ValueError, IndexError, RuntimeError, TypeError) as error:
        raise FileError(
            f"the tensors of {stem} do not fit together ({one_line(error)}); fetch or copy the weights again"
        ) from error


def _read(tensors: SafetensorsDir, scheme: _Scheme, stem: str, names: Mapping[str, str]) -> _Integers:
    """A weight of integers. Raises FileError if its tensors do not fit together."""
    with _fitting(stem):
        part = {name: tensors[stored] for name, stored in names.items()}
        if scheme.kind == "int8":
            return _checked(tensors[f"{stem}.weight"].to(torch.int16).numpy(), None, part["weight_scale"], None)
        if scheme.kind == "packed":
            outputs, width = (int(size) for size in part["weight_shape"])
            values = _unpacked(part["weight_packed"], scheme.bits)[:, :width]
            zero: NDArray[np.int16] | int = 1 << (scheme.bits - 1)  # half of their range is added to integers
            if not scheme.symmetric or "weight_zero_point" in part:
                zero = _unpacked(part["weight_zero_point"].t(), scheme.bits)[:, :outputs].T
            return _checked(values[:outputs], zero, part["weight_scale"], part.get("weight_g_idx"))
        scale, codes = part["scales"].t().contiguous(), part["qweight"]
        zeros = (_unpacked(part["qzeros"], scheme.bits).T + scheme.less) & ((1 << scheme.bits) - 1)
        if scheme.kind == "gptq":
            return _checked(_unpacked(codes.t(), scheme.bits), zeros, scale, part.get("g_idx"))
        return _checked(_in_order(_unpacked(codes, 4).T), _in_order(zeros), scale, None)


def _unpacked(words: Tensor, bits: int) -> NDArray[np.int16]:
    """Unsigned integers [n, K * 32 / bits] of int32 [n, K], the lowest bits first."""
    if words.dtype != torch.int32:
        raise ValueError(f"integers are packed in {words.dtype}")
    codes = np.ascontiguousarray(words.numpy()).view(np.uint8)
    if bits == 4:
        codes = np.stack((codes & 15, codes >> 4), axis=-1).reshape(len(codes), -1)
    return codes.astype(np.int16)


def _in_order(values: NDArray[np.int16]) -> NDArray[np.int16]:
    """AWQ's rows [N, n] in the order of outputs."""
    return values.reshape(-1, 8, values.shape[1])[:, _AWQ_ORDER].reshape(values.shape)


def _checked(
    values: NDArray[np.int16], zeros: NDArray[np.int16] | int | None, scale: Tensor, group: Tensor | None
) -> _Integers:
    """Subtract the zero points [N, G] of integers [N, D]; ``group`` [D] is None if groups are neighbours."""
    scale = scale.reshape(-1, 1) if scale.dim() < 2 else scale
    count, width = values.shape
    if len(scale) != count or width % scale.shape[1]:
        raise ValueError(f"scales have the shape {tuple(scale.shape)}, integers {values.shape}")
    neighbours = torch.arange(width) // (width // scale.shape[1])
    group = None if group is None or torch.equal(group.long(), neighbours) else group.long()
    if isinstance(zeros, np.ndarray):
        if zeros.shape != tuple(scale.shape):
            raise ValueError(f"zero points have the shape {zeros.shape}, scales {tuple(scale.shape)}")
        zeros = zeros[:, (neighbours if group is None else group).numpy()]
    return _Integers(values if zeros is None else (values - zeros).astype(np.int16), scale, group)


def _dense(tensors: SafetensorsDir, scheme: _Scheme, stem: str, names: Mapping[str, str]) -> Tensor:
    """A weight in float32."""
    if scheme.kind != "fp8":
        return _read(tensors, scheme, stem, names).dense()
    with _fitting(stem):
        values = tensors[f"{stem}.weight"]
        scale = tensors[names.get("weight_scale_inv") or names["weight_scale"]].float()
        if values.dtype != torch.float8_e4m3fn:
            raise ModelError(f"{stem}.weight is stored as {values.dtype}, not in FP8 (E4M3); {_INSTEAD}")
        scale = scale.reshape(-1, 1) if scale.dim() < 2 else scale
        for dim, (size, count) in enumerate(zip(values.shape, scale.shape, strict=True)):
            each = 1 if count == size else size if count == 1 else BLOCK  # the last block may be cut
            if -(-size // each) != count:
                raise ValueError(f"{count} scales for {size} values")
            scale = scale.repeat_interleave(each, dim).narrow(dim, 0, size)
        return values.float() * scale


def _matrix(tensors: SafetensorsDir, scheme: _Scheme, stem: str, names: Mapping[str, str], scale: str) -> Matrix | str:
    """A weight in a format of GGUF files that has its values; or the reason why there is none."""
    kind = _STORED.get((scheme.bits, scheme.symmetric))
    if scheme.kind == "fp8" or kind is None:
        what = "FP8" if scheme.kind == "fp8" else f"{scheme.bits} bits with zero points"
        return f"weights in {what} have no kernels"
    scales = tensors[scale].float()
    if not torch.equal(scales.half().float(), scales):
        return f"scales of {stem} are not halves"
    if scheme.kind == "packed":
        outputs, width = (int(size) for size in tensors[names["weight_shape"]])
        groups = scales.shape[1]
    elif scheme.kind == "int8":
        (outputs, width), groups = tensors.shape(f"{stem}.weight"), scales.numel() // max(1, len(scales))
    else:
        first, second = tensors.shape(names["qweight"])
        outputs, width = (second, first * 32 // scheme.bits) if scheme.kind == "gptq" else (second * 8, first)
        groups = len(scales)
    if groups < 1 or width % groups or width // groups % GROUP:
        return f"groups of {stem} are not of a multiple of {GROUP} inputs"
    index = names.get("g_idx", names.get("weight_g_idx"))
    if index is not None and not torch.equal(tensors[index].long(), torch.arange(width) // (width // groups)):
        return f"groups of {stem} are not neighbours (act-order)"
    return Matrix(kind, (outputs, width), partial(_rows, tensors, scheme, stem, names, kind))


def _rows(
    tensors: SafetensorsDir, scheme: _Scheme, stem: str, names: Mapping[str, str], kind: GGMLQuantizationType
) -> NDArray[np.uint8]:
    return _read(tensors, scheme, stem, names).rows(kind)


def _bytes(tensors: SafetensorsDir, name: str) -> NDArray[np.uint8]:
    rows: NDArray[np.uint8] = tensors[name].contiguous().view(torch.uint8).numpy()
    return rows
