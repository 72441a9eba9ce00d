"""A transformers model as a target of anabranch.

The decoder shares the model's tensors where it can: all of them but fused projections (q, k and v; gate and up), which
are concatenated once. Where the native kernels run the layers, they keep a packed copy of the matrices instead. What
was made of a model is kept as long as the model lives.

A model belongs to its owner, who may change it between two calls in ways that PyTorch does not count, such as through
``.data`` or NumPy. So every call reads all weights once (13 ms for 270 MB on two cores, as much as one or two tokens
take), and what was made of the model is made again when a value or the config has changed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from anabranch.adapters.folder import find_adapters
from anabranch.api import Model
from anabranch.errors import CapabilityError
from anabranch.integrations.transformers.structure import Structure, check_code, check_hooks
from anabranch.model.config import ModelConfig
from anabranch.model.families import model_config
from anabranch.model.load import Target
from anabranch.model.pack import pack_decoder
from anabranch.model.rope import rope_frequencies
from anabranch.model.weights import fill_decoder

__all__ = ["model_of", "release"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The number of sums over the words of a tensor. A prime that is no size of a tensor, so that values which change places
# go to other sums; and the odd factor of each, so that no single change is lost.
LANES = 1021
_FACTORS = 2 * torch.randint(-(2**62), 2**62, (LANES,), generator=torch.Generator().manual_seed(0)) + 1
_CHANGING = ("dynamic", "longrope")  # rotary variants whose forward writes to their frequencies


@dataclass(frozen=True)
class _Marks:
    """Signature of a model that changes with any edit: its config, and the address, type and sum of each tensor."""

    config: str
    tensors: Mapping[str, tuple[Any, ...]]

    @staticmethod
    def of(model: Any) -> _Marks:
        tensors = {**dict(model.named_parameters()), **_buffers(model)}
        marks = {name: (t.data_ptr(), t.shape, t.dtype, *_sums(t.detach())) for name, t in tensors.items()}
        scales = {name: getattr(module, "attention_scaling", None) for name, module in model.named_modules()}
        return _Marks(_content(model), marks | {name: (scale,) for name, scale in scales.items() if scale is not None})


def _content(model: Any) -> str:
    return json.dumps(model.config.to_dict(), default=repr)


def _buffers(model: Any) -> dict[str, Tensor]:
    """The buffers by name that only the owner writes to."""
    buffers = dict(model.named_buffers())
    if (rotary := _rotary(model)) is not None and rotary[1].rope_type in _CHANGING:
        buffers.pop(f"{rotary[0]}.inv_freq", None)
    return buffers


def _rotary(model: Any) -> tuple[str, Any] | None:
    """The module with the rotary frequencies, and its name."""
    return next(((name, m) for name, m in model.named_modules() if name.endswith("rotary_emb")), None)


def _sums(tensor: Tensor) -> tuple[int, ...]:
    """Sums of a tensor's bits, which change with any of its values, and when two values change places.

    Integers, since a float's change can be lost in a sum; NumPy's, since PyTorch's threads wait for busy processors.
    """
    flat = tensor.reshape(-1).view(torch.uint8)
    whole = len(flat) // 8 * 8
    if flat.storage_offset() % 8:
        flat = flat.clone()
    words: Any = flat[:whole].view(torch.int64)
    rest: Any = flat[whole:].long()
    factors: Any = _FACTORS.to(tensor.device)
    if tensor.device.type == "cpu":
        words, rest, factors = words.numpy(), rest.numpy(), factors.numpy()
    rows = len(words) // LANES
    sums, last = words[: rows * LANES].reshape(rows, LANES).sum(0), words[rows * LANES :]
    return (
        int((sums * factors).sum()),
        int((last * factors[: len(last)]).sum()),
        int((rest * factors[: len(rest)]).sum()),
    )


@dataclass
class _Kept:
    """Our counterparts of a model of transformers; ``models`` by their adapter folders."""

    marks: _Marks
    structure: Structure
    target: Target
    models: dict[tuple[Path, ...], Model] = field(default_factory=dict)


_kept: WeakKeyDictionary[Any, _Kept] = WeakKeyDictionary()
_lock = threading.Lock()


def model_of(model: Any, adapters: Sequence[Path] = ()) -> Model:
    """The target with the weights of a transformers model, and its adapters: those given, else those that ship for it.

    Raises CapabilityError for a model that would not be decoded as transformers does it, ModelError for an unsupported
    family or option, AdapterError for an adapter of another target, and NumericsError for weights that are not finite.
    """
    _check(model)
    with _lock:
        kept, marks = _kept.get(model), _Marks.of(model)
        alike = kept is not None and kept.marks.config == marks.config
        structure = kept.structure if kept is not None and alike else Structure.of(model)
        structure.check(model)
        if kept is None or kept.marks != marks:
            kept = _kept[model] = _Kept(marks, structure, _target(model))
        key = tuple(adapters)
        if key not in kept.models:
            kept.models[key] = Model(kept.target, find_adapters(kept.target, key))
        return kept.models[key]


def release(model: Any) -> None:
    """Free what is kept for a transformers model: its decoder and KV cache."""
    with _lock:
        kept = _kept.pop(model, None)
    for made in () if kept is None else kept.models.values():
        made.close()


def _target(model: Any) -> Target:
    config = _followed(model, model_config(model.config.to_dict(), family=model.config.model_type))
    parameter = next(model.parameters())
    tensors: Mapping[str, Tensor] = model.state_dict()
    decoder, identity = fill_decoder(config, tensors, dtype=parameter.dtype, device=parameter.device, share=True)
    pack_decoder(decoder)
    name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
    return Target(decoder, None, decoder.config, name, None, identity)


def _followed(model: Any, config: ModelConfig) -> ModelConfig:
    """The config with what the model's buffers say instead: rotary frequencies, and the scale of embeddings.

    They differ from the config where the owner wrote to them, and after ``model.half()``, which rounds them too.
    """
    scale = getattr(model.get_input_embeddings(), "embed_scale", None)
    if isinstance(scale, Tensor) and scale.cpu() != torch.tensor(config.embedding_scale).to(scale.dtype):
        config = replace(config, embedding_scale=float(scale))
    if config.position != "rope" or (rotary := _rotary(model)) is None:
        return config
    name, rotary = rotary
    if isinstance(rotary.rope_type, dict):  # frequencies for each kind of layers
        _check_frequencies(name, rotary, config)
        return config
    changing = rotary.rope_type in _CHANGING
    inv_freq = rotary.original_inv_freq if changing else rotary.inv_freq
    expected, factor = rope_frequencies(config.rope, torch.tensor([1]))
    stated, scaling = inv_freq.detach().float().cpu(), float(rotary.attention_scaling)
    if stated.shape == expected[0].shape and torch.equal(stated, expected[0]) and scaling == factor:
        return config
    if changing or stated.shape != expected[0].shape:
        raise _other_frequencies(name, "and change with the length of a text")
    return replace(config, rope=replace(config.rope, stated=(tuple(stated.tolist()), scaling)))


def _check_frequencies(name: str, rotary: nn.Module, config: ModelConfig) -> None:
    """Raise CapabilityError if the frequencies of a kind of layers are not those of the config."""
    for kind, rope in {"full_attention": config.rope, "sliding_attention": config.sliding_rope or config.rope}.items():
        stated = getattr(rotary, f"{kind}_original_inv_freq", None)
        if isinstance(stated, Tensor) and not torch.equal(
            stated.detach().float().cpu(), rope_frequencies(rope, torch.tensor([1]))[0][0]
        ):
            raise _other_frequencies(name, f"in the layers of {kind}")


def _other_frequencies(name: str, how: str) -> CapabilityError:
    return CapabilityError(
        f"the frequencies of {name} are not those of the model's config, {how}; load the model in its type (dtype=) "
        "instead of converting it, or generate without custom_generate"
    )


# -- what cannot be decoded as transformers does it --------------------------------------------------
def _check(model: Any) -> None:
    """Raise CapabilityError if the model computes something that its config and weights do not say."""
    check_code(model)
    if getattr(model.config, "is_encoder_decoder", False):
        raise CapabilityError(
            "custom_generate is for decoder-only models; load this one with anabranch.load to generate from a source"
        )
    if any(module.training for module in model.modules()):
        raise CapabilityError(
            "the model or a part of it is in training mode, in which dropout is active; call model.eval() first"
        )
    check_hooks(model)
    parameters = list(model.parameters())
    kinds = {type(p.data) for p in parameters} - {Tensor, nn.Parameter}
    if kinds:
        raise CapabilityError(f"the model's weights are of the class {kinds.pop().__name__}; load it unquantised")
    devices, dtypes = ({getattr(p, name) for p in parameters} for name in ("device", "dtype"))
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        raise CapabilityError(
            f"the model's weights are on {', '.join(sorted(map(str, devices)))}; put them all on one CPU or CUDA device"
        )
    if len(dtypes) > 1 or next(iter(dtypes)) not in DTYPES:
        named = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise CapabilityError(f"the model's weights are of type {named}; use one of float32, bfloat16 and float16")
    if torch.is_autocast_enabled(next(iter(devices)).type):
        raise CapabilityError("anabranch does not decode under autocast; load the model in that type instead")
