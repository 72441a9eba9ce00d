"""Load weights (a mapping of Hugging Face names to tensors) into our decoder; fingerprints.

Tensors are read one at a time, concatenated where the decoder fuses them, and copied into place, so that the model is
never in memory twice.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from anabranch.errors import DeviceError, ModelError, ModelWarning, NumericsError
from anabranch.model.backends import backend_for
from anabranch.model.checkpoint import read_checkpoint
from anabranch.model.config import ModelConfig
from anabranch.model.decoder import Decoder
from anabranch.model.families import FAMILIES, model_config, module_rows, weight_source
from anabranch.model.fused import split_fused
from anabranch.model.stored import LazyTensors, dtype_name, is_finite, some_names
from anabranch.support.memory import free_memory

__all__ = [
    *("Identity", "assemble", "build_decoder", "check_finite", "check_memory", "described_decoder", "fill_decoder"),
    *("fingerprint", "fingerprint_of", "not_finite", "put", "random_decoder", "stored_dtype"),
]

# Values per tensor in a fingerprint: enough to distinguish trained models, few enough for 10 ms per GB.
_SAMPLES = 4096
# Masks and tables in older files, which the decoder computes itself.
_BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
_FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


def stored_dtype(config: ModelConfig, tensors: LazyTensors, stated: torch.dtype | None = None) -> torch.dtype:
    """The type of the stored weights: float32, bfloat16 or float16.

    If they differ, it is the one ``stated`` in the config, or else float32.
    """
    _check_layers(config, tensors)  # before a decoder is built
    sources = [weight_source(config, parameter) for parameter, _ in build_decoder(config).named_parameters()]
    used = {name for source in sources for names in source.tensors for name in names}
    kinds = {_FLOATS[kind] for name, kind in tensors.kinds.items() if name in used and kind in _FLOATS}
    kinds = {torch.float32 if kind == torch.float64 else kind for kind in kinds}
    if len(kinds) == 1:
        return kinds.pop()
    return torch.float32 if stated is None else stated


def build_decoder(
    config: ModelConfig, *, device: str | torch.device = "meta", dtype: torch.dtype = torch.float32
) -> Decoder:
    """A decoder without trained weights: on ``meta`` only shapes (no memory), else with PyTorch's initial values."""
    with torch.device(device):
        return Decoder(config).to(dtype).eval().requires_grad_(False)


def fill_decoder(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
    share: bool = False,
) -> tuple[Decoder, str]:
    """A decoder with the weights of ``tensors`` (Hugging Face names) in ``dtype`` on ``device``, and their fingerprint.

    share  do not copy tensors that have the decoder's type, device and layout; tensors read from a file must be copied,
           since they may be views that are valid only while it is open

    ``tied_head`` of the decoder's config follows from the tensors. The fingerprint is taken before the cast to
    ``dtype``, so that it identifies the stored weights. Unused tensors are named in a ModelWarning.
    """
    tensors = split_fused(config, tensors)
    decoder = described_decoder(config, tensors, dtype=dtype)
    config, parameters = decoder.config, sorted(decoder.named_parameters())
    # check the shapes first: a damaged config may ask for any amount of memory
    assemble(config, tensors, "embedding.weight", decoder.embedding.weight.shape)
    check_memory(sum(parameter.numel() for _, parameter in parameters) * dtype.itemsize, device)
    identity = Identity(config)
    for name, parameter in parameters:
        stored = assemble(config, tensors, name, parameter.shape)
        identity.add(name, stored)
        value = stored.to(device, dtype).contiguous() if share else _empty(stored.shape, dtype, device).copy_(stored)
        check_finite(config, name, stored, value)
        put(decoder, name, value)
    decoder.backend = backend_for(device)
    return decoder, identity.fingerprint


def described_decoder(config: ModelConfig, tensors: Mapping[str, Tensor], *, dtype: torch.dtype) -> Decoder:
    """The decoder of a config and the names of its tensors, on ``meta``.

    Raises ModelError if they do not belong together, and warns of unused tensors (ModelWarning).
    """
    _check_layers(config, tensors)
    config = _with_head(config, tensors)
    decoder = build_decoder(config, dtype=dtype)
    _check_names(config, tensors, sorted(name for name, _ in decoder.named_parameters()))
    return decoder


def check_finite(config: ModelConfig, name: str, stored: Tensor, value: Tensor) -> None:
    """Raise NumericsError for weights that are not finite; reads a tensor that is still in the CPU's caches."""
    if is_finite(value):
        return
    named = " + ".join(names[0] for names in weight_source(config, name).tensors)
    if is_finite(stored):
        kind = dtype_name(value.dtype)
        raise NumericsError(f"{named} has values out of the range of {kind}; load the model in bfloat16 or float32")
    raise not_finite(named)


def not_finite(name: str) -> NumericsError:
    """The error of weights that are not finite numbers."""
    return NumericsError(f"{name} has values that are not finite numbers (NaN or infinity); fetch the weights again")


def random_decoder(config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A decoder with arbitrary weights, for timing."""
    decoder = build_decoder(config, dtype=dtype)
    parameters = sorted(decoder.named_parameters())
    check_memory(sum(parameter.numel() for _, parameter in parameters) * dtype.itemsize, device)
    # repeat the same numbers: drawing billions takes minutes, and timings do not depend on the values
    noise = (0.02 * torch.randn(2**20 + 1)).to(device, dtype)
    for name, parameter in parameters:
        if parameter.dim() == 1:
            put(decoder, name, torch.full(parameter.shape, float(name.endswith("weight")), dtype=dtype, device=device))
            continue
        value = _empty(parameter.shape, dtype, device)
        for part in torch.split(value.view(-1), len(noise)):
            part.copy_(noise[: len(part)])
        put(decoder, name, value)
    decoder.backend = backend_for(device)
    return decoder


def put(decoder: Decoder, name: str, value: Tensor) -> None:
    """Make ``value`` the parameter of a name; with a tied head, the embedding's is the head's too."""
    stem, _, kind = name.rpartition(".")
    setattr(decoder.get_submodule(stem), kind, nn.Parameter(value, requires_grad=False))
    if name == "embedding.weight" and decoder.config.tied_head:
        decoder.head.weight = decoder.embedding.weight


def _empty(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate a weight. Raises DeviceError."""
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except RuntimeError as error:
        raise DeviceError(
            f"no memory left on {device} for the weights; use a smaller model, dtype='bfloat16' or another device"
        ) from error


def check_memory(needed: int, device: torch.device) -> None:
    """Raise DeviceError if weights of ``needed`` bytes do not fit into the memory that is free."""
    free = free_memory(device)
    if free is not None and needed > free:
        raise DeviceError(
            f"the weights need {needed / 2**30:.1f} GiB and {device} has {free / 2**30:.1f} GiB free; "
            "use a smaller model, dtype='bfloat16' or another device"
        )


# -- from Hugging Face tensors to ours -------------------------------------------------------------
def _check_layers(config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
    """Check the number of layers before any is built: a damaged config may ask for a million."""
    layer = re.compile(rf"(?:.*\.)?{re.escape(FAMILIES[config.family].layers)}\.(\d{{1,9}})\..*")
    encoder, sides = config.encoder, {"": config.num_layers}
    if encoder is not None:
        sides = {"encoder.": encoder.layers.num_layers, "decoder.": config.num_layers}
    for side, count in sides.items():
        stored = {int(match[1]) for name in tensors if side in name and (match := layer.fullmatch(name))}
        if count > len(stored):
            raise ModelError(
                f"the config has {count} {side.replace('.', ' ')}layers but the weights have {len(stored)}; "
                "config.json and weights do not belong together or the copy is incomplete"
            )


def _check_names(config: ModelConfig, tensors: Mapping[str, Tensor], parameters: list[str]) -> None:
    """Check that all tensors are present; warn of those that are not used, as transformers does."""
    wanted: set[str] = set()
    missing: list[str] = []
    for parameter in parameters:
        for names in weight_source(config, parameter).tensors:
            wanted.update(names)
            if not any(name in tensors for name in names):
                missing.append(names[0])
    if missing:
        raise ModelError(
            f"the weights lack {some_names(missing)}, which a {config.family} model of this config has; "
            "config.json and weights do not belong together or the copy is incomplete"
        )
    extra = sorted(name for name in tensors if name not in wanted and not name.endswith(_BUFFERS))
    if extra:
        warnings.warn(
            f"the weights contain {some_names(extra)}, which a {config.family} model of this config does not have; "
            "they are not used",
            ModelWarning,
            stacklevel=4,
        )


def _with_head(config: ModelConfig, tensors: Mapping[str, Tensor]) -> ModelConfig:
    """The config with an untied head if the tensors have one that differs from the embedding.

    transformers too ignores the config and ties the two only if they are equal or one is missing.
    """
    if not config.tied_head:
        return config
    (head,) = weight_source(config, "head.weight").tensors
    (table,) = weight_source(replace(config, tied_head=False), "embedding.weight").tensors
    stored = [next((name for name in names if name in tensors), None) for names in (head, table)]
    both = [tensors[name] for name in stored if name is not None]
    return replace(config, tied_head=len(both) < 2 or _same(*both))


def _same(one: Tensor, other: Tensor) -> bool:
    """True if two stored tensors have the same values; without a copy if their types are equal."""
    if one.shape != other.shape or not {one.dtype, other.dtype} <= set(_FLOATS.values()):
        return False
    if one.dtype == other.dtype:
        return one.data_ptr() == other.data_ptr() or torch.equal(one, other)
    parts = zip(torch.split(one, 1024), torch.split(other, 1024), strict=True)
    return all(torch.equal(a.double(), b.double()) for a, b in parts)


def _fetch(config: ModelConfig, tensors: Mapping[str, Tensor], parameter: str) -> dict[str, Tensor]:
    """The tensors of a parameter by their names in the file."""
    fetched: dict[str, Tensor] = {}
    for names in weight_source(config, parameter).tensors:
        present = [name for name in names if name in tensors]
        if not present:
            raise ModelError(f"the weights lack {names[0]}; config.json and weights do not belong together")
        tensor = tensors[present[0]]
        if tensor.dtype not in _FLOATS.values():
            raise ModelError(f"{present[0]} is stored as {tensor.dtype}; use weights in float32, bfloat16 or float16")
        if other := [name for name in present[1:] if not _same(tensor, tensors[name])]:
            raise ModelError(f"the weights contain {present[0]} and {other[0]}, which differ; fetch the weights again")
        fetched[present[0]] = tensor
    return fetched


def assemble(config: ModelConfig, tensors: Mapping[str, Tensor], parameter: str, shape: torch.Size) -> Tensor:
    """One of our parameters, by its name in the decoder, from tensors with Hugging Face names, in their dtype.

    Raises ModelError if tensors are missing or do not have this ``shape``.
    """
    layout = weight_source(config, parameter).layout
    modules = _fetch(config, tensors, parameter)
    parts = []
    for rows, (name, tensor) in zip(module_rows(config, len(modules), shape[0]), modules.items(), strict=True):
        wanted = (rows, *shape[1:])
        stored = wanted[::-1] if layout == "transposed" else wanted
        if tensor.shape != stored:
            raise ModelError(
                f"{name} has the shape {tuple(tensor.shape)}, but the config requires {stored}; config.json and "
                "weights do not belong together"
            )
        parts.append(tensor.t() if layout == "transposed" else tensor)
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    if layout == "by_head":
        tail = whole.shape[1:]
        by_head = whole.view(config.num_heads, 3, config.head_dim, *tail)
        whole = by_head.transpose(0, 1).reshape(-1, *tail)
    return whole


# -- identity --------------------------------------------------------------------------------------
def fingerprint(weights: Decoder | Path) -> str:
    """The identity of weights, stored in adapters and result files: a SHA-256 in hex.

    It covers the config's shapes and 4096 evenly spaced values of every parameter in our layout, rounded to bfloat16.
    So it takes milliseconds, and is the same for a folder and for the decoder loaded from it in float32 or bfloat16 on
    any device. It distinguishes trained models but does not detect a single changed value. A float16 decoder's may
    differ from its folder's, since values may underflow: ``fill_decoder`` therefore returns that of the stored weights.
    """
    if isinstance(weights, Decoder):
        return fingerprint_of(weights.config, weights)
    checkpoint = read_checkpoint(weights)
    config = model_config(checkpoint.config)
    tensors = split_fused(config, checkpoint.tensors)
    config = _with_head(config, tensors)
    identity = Identity(config)
    for name, parameter in sorted(build_decoder(config).named_parameters()):
        identity.add(name, assemble(config, tensors, name, parameter.shape))
    return identity.fingerprint


def fingerprint_of(config: ModelConfig, module: nn.Module) -> str:
    """The identity of the parameters of a module of this shape, computed as ``fingerprint`` computes a decoder's."""
    identity = Identity(config)
    for name, parameter in sorted(module.named_parameters()):
        identity.add(name, parameter.detach())
    return identity.fingerprint


class Identity:
    """A fingerprint in the making: parameters are added in the order of their names."""

    def __init__(self, config: ModelConfig) -> None:
        # an explicit list, so that a new field of ModelConfig does not invalidate every adapter
        c = config
        heads = (c.num_heads, c.num_kv_heads, c.head_dim)
        fields = (c.family, c.vocab_size, c.hidden_size, c.num_layers, *heads, c.intermediate_size, c.tied_head)
        self._digest = hashlib.sha256(repr(fields).encode())

    @property
    def fingerprint(self) -> str:
        """In hex."""
        return self._digest.hexdigest()

    @staticmethod
    def sampled(count: int) -> range:
        """The values of a flattened tensor of ``count`` that are part of the fingerprint."""
        # an odd step visits all columns of a matrix, not only one
        return range(0, count, (count // _SAMPLES) | 1)[:_SAMPLES]

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a parameter."""
        flat = tensor.reshape(-1)
        sampled = self.sampled(len(flat))
        self.add_sample(name, tensor.shape, flat[:: sampled.step][: len(sampled)])

    def add_sample(self, name: str, shape: Sequence[int], sample: Tensor) -> None:
        """Add a parameter of this shape by its ``sampled`` values."""
        self._digest.update(f"{name}{tuple(shape)}".encode())
        self._digest.update(sample.to(torch.bfloat16).cpu().contiguous().view(torch.int16).numpy().tobytes())
