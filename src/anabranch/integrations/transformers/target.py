"""A transformers model as a target of anabranch.

The decoder shares the model's tensors where it can: all of them but fused projections (q, k and v; gate and up), which
are concatenated once. Where the native kernels run the layers, they keep a packed copy of the matrices instead. What
was made of a model is kept as long as the model lives, and made again when its weights changed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from anabranch.adapters.folder import find_adapters
from anabranch.api import Model
from anabranch.errors import CapabilityError
from anabranch.model.families import model_config
from anabranch.model.load import Target
from anabranch.model.pack import pack_decoder
from anabranch.model.weights import fill_decoder

__all__ = ["model_of", "release"]

SAMPLES = 8  # values per tensor that are compared to find changes that PyTorch does not count
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KNOWN = ("torch.nn.modules.", "transformers.")  # where the classes of a model's modules may come from


@dataclass(frozen=True)
class _Marks:
    """What tells a model's weights from what they were: places, PyTorch's counts of writes, and a few values."""

    places: tuple[tuple[Any, ...], ...]
    values: Tensor

    @staticmethod
    def of(model: nn.Module) -> _Marks:
        parameters = [parameter.detach() for parameter in model.parameters()]
        places = tuple((p.data_ptr(), 0 if p.is_inference() else p._version, p.shape, p.dtype) for p in parameters)
        picked = []
        for parameter in parameters:
            flat = parameter.reshape(-1)
            picked.append(flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].float())
        return _Marks(places, torch.cat(picked))

    def same(self, other: _Marks) -> bool:
        """Whether nothing seems to have changed."""
        return self.places == other.places and torch.equal(self.values, other.values)


@dataclass
class _Kept:
    """What was made of a model; ``models`` by their adapter folders."""

    marks: _Marks
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
        if kept is None or not kept.marks.same(marks):
            kept = _kept[model] = _Kept(marks, _target(model))
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
    config = model_config(model.config.to_dict(), family=model.config.model_type)
    parameter = next(model.parameters())
    tensors: Mapping[str, Tensor] = model.state_dict()
    decoder, identity = fill_decoder(config, tensors, dtype=parameter.dtype, device=parameter.device, share=True)
    pack_decoder(decoder)
    name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
    return Target(decoder, None, decoder.config, name, None, identity)


# -- what cannot be decoded as transformers does it --------------------------------------------------
def _check(model: Any) -> None:
    """Raise CapabilityError if the model computes something that its config and weights do not say."""
    own = next(_foreign_modules(model), None)
    if own is not None:
        raise CapabilityError(
            f"the model has modules of {own}, whose computation anabranch does not know; merge adapters into the "
            "model (merge_and_unload), load it unquantised, or generate without custom_generate"
        )
    if model.training:
        raise CapabilityError("the model is in training mode, in which dropout is active; call model.eval() first")
    if (hooked := next(_hooked(model), None)) is not None:
        raise CapabilityError(
            f"the module {hooked or type(model).__name__} has forward hooks or a forward of its own, which anabranch "
            "would not run; remove them, or generate without custom_generate"
        )
    parameters = list(model.parameters())
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


def _foreign_modules(model: Any) -> Iterator[str]:
    """The classes of modules that are neither PyTorch's nor transformers'."""
    for module in model.modules():
        where = type(module).__module__
        if not where.startswith(KNOWN):
            yield f"{where}.{type(module).__qualname__}"


def _hooked(model: Any) -> Iterator[str]:
    """The names of modules whose computation was changed, other than by transformers to capture outputs."""
    for name, module in model.named_modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        own = any(not getattr(hook, "__module__", "").startswith("transformers.") for hook in hooks)
        forward = getattr(module.forward, "__func__", None)
        if own or forward is not type(module).forward:
            yield name
