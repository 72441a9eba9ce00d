"""Comparison of a transformers model's structure with that of a new one: its modules, their attributes and their code.

The decoder is built from a model's config and weights. Its owner may change more than these: a ``scaling``, an epsilon,
an activation, the order of layers, a method. So the model is compared with a new one of the same config,
without weights, and the code of its classes with transformers' own. A difference is refused by name.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from anabranch.errors import CapabilityError

__all__ = ["Structure", "check_code", "check_hooks"]

KNOWN = ("torch.nn.modules.", "transformers.")  # where the classes of a model's modules may come from
_PACKAGES = {*sys.stdlib_module_names, "transformers", "torch", "huggingface_hub"}
# Mixins whose methods do not compute a forward pass, and which users do extend
_MIXINS = ("transformers.modeling_utils", "transformers.generation.")
# Attributes that no forward pass in eval mode reads, that say what tensors have as shape, or that follow the text
_UNREAD = frozenset(
    {
        *("training", "generation_config", "name_or_path", "loss_type", "gradient_checkpointing", "kernel_config"),
        *("vocab_size", "padding_idx", "sparse", "scale_grad_by_freq", "norm_type", "all_tied_weights_keys"),
        *("attention_dropout", "dropout", "layerdrop", "max_seq_len_cached", "original_max_seq_len"),
        "attention_scaling",  # of rotary modules, read with their frequencies (target.py)
    }
)
_SIMPLE = (bool, int, float, str, tuple, list, type(None), torch.dtype, BuiltinFunctionType, FunctionType)
_CONFIG = "the model's own config"


@dataclass(frozen=True)
class _Part:
    """A module: its class, the names of its parameters, and the attributes that its forward may read."""

    kind: type
    parameters: frozenset[str]
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class Structure:
    """The modules of a model by name, as its class makes them from its config."""

    parts: Mapping[str, _Part]

    @staticmethod
    def of(model: Any) -> Structure:
        """The structure that a model of this config has."""
        config = copy.deepcopy(model.config)
        with torch.device("meta"):
            made: nn.Module = type(model)(config)
        return Structure({name: _part(module, config) for name, module in made.named_modules()})

    def check(self, model: Any) -> None:
        """Raise CapabilityError where the model differs."""
        modules: dict[str, nn.Module] = dict(model.named_modules())
        for name in (*(self.parts.keys() - modules.keys()), *(modules.keys() - self.parts.keys())):
            _differs(name, "is missing, or there twice" if name in self.parts else "was added")
        for name, module in modules.items():
            expected = self.parts[name]
            if type(module) is not expected.kind:
                _differs(name, f"is a {type(module).__name__} instead of a {expected.kind.__name__}")
            if (names := _parameters(module)) != expected.parameters:
                _differs(".".join((name, min(names ^ expected.parameters))).lstrip("."), "was added or removed")
            for key, value in expected.attributes.items():
                here = _value(module.__dict__.get(key), model.config)
                if here != value or type(here) is not type(value):
                    _differs(".".join((name, key)).lstrip("."), f"is {_short(here)} instead of {_short(value)}")


def _differs(name: str, how: str) -> NoReturn:
    raise CapabilityError(
        f"{name} of the model {how}, unlike in a model of its config, which is what anabranch computes; undo the "
        "change or make it in the config, or generate without custom_generate"
    )


def _short(value: Any) -> str:
    text = getattr(value, "__qualname__", None) or repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _part(module: nn.Module, config: Any) -> _Part:
    read = {key: value for key, value in module.__dict__.items() if key[0] != "_" and key not in _UNREAD}
    return _Part(type(module), _parameters(module), {key: _value(value, config) for key, value in read.items()})


def _parameters(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, parameter in module._parameters.items() if parameter is not None)


def _value(value: Any, config: Any) -> Any:
    """An attribute in a form that is equal for two models of one config."""
    if value is config:
        return _CONFIG
    if isinstance(value, partial):
        return value.func, value.args, tuple(sorted(value.keywords.items()))
    return value if isinstance(value, _SIMPLE) else type(value)


# -- code --------------------------------------------------------------------------------------------
def check_hooks(model: Any) -> None:
    """Raise CapabilityError for hooks, and for methods that an instance has instead of those of its class."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        raise CapabilityError(
            "PyTorch has global forward hooks, which anabranch would not run; remove them, or generate without "
            "custom_generate"
        )
    for name, module in model.named_modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if any(not getattr(hook, "__module__", "").startswith("transformers.") for hook in hooks) or _has_methods(
            module
        ):
            raise CapabilityError(
                f"the module {name or type(model).__name__} has forward hooks or a method of its own, which anabranch "
                "would not run; remove them, or generate without custom_generate"
            )


def _has_methods(module: nn.Module) -> bool:
    """Return whether an instance has a method instead of one of its class that takes part in the forward pass."""
    kind = type(module)
    for key, value in module.__dict__.items():
        if callable(value) and isinstance(function := getattr(kind, key, None), FunctionType):
            owner = next(base for base in kind.__mro__ if key in vars(base))
            computes = owner is not nn.Module and not owner.__module__.startswith(_MIXINS)
            if computes and getattr(value, "__func__", None) is not function:
                return True
    return False


def check_code(model: Any) -> None:
    """Raise CapabilityError for a class or an attention whose code is not transformers' or PyTorch's own."""
    kinds = dict.fromkeys(type(module) for module in model.modules())
    own = next((kind for kind in kinds if not f"{kind.__module__}.".startswith(KNOWN)), None)
    if own is not None:
        raise CapabilityError(
            f"the model has modules of {own.__module__}.{own.__qualname__}, whose computation anabranch does not know; "
            "merge adapters into the model (merge_and_unload), load it unquantised, or generate without custom_generate"
        )
    for where, function in _functions(kinds, model):
        if _is_foreign(function):
            raise CapabilityError(
                f"{where} was replaced by code that is not transformers' own, which anabranch would not run; restore "
                "it, or generate without custom_generate"
            )


def _functions(kinds: Mapping[type, None], model: Any) -> Iterator[tuple[str, Any]]:
    """The functions that may take part in a forward pass, by name."""
    for kind in kinds:
        for name in ("forward", "__call__"):
            yield f"{kind.__name__}.{name}", getattr(kind, name)
    owners = {base for kind in kinds for base in kind.__mro__ if base.__module__.startswith("transformers.")}
    for base in owners:
        if not base.__module__.startswith(_MIXINS):
            for name, value in vars(base).items():
                yield f"{base.__name__}.{name}", getattr(value, "fget", None) or getattr(value, "__func__", value)
    for module in {base.__module__ for base in owners if ".models." in base.__module__}:
        for name, value in vars(sys.modules[module]).items():
            yield f"{module}.{name}", value
    attention = getattr(model.config, "_attn_implementation", None)
    if attention in ALL_ATTENTION_FUNCTIONS:
        yield f"the attention {attention!r}", ALL_ATTENTION_FUNCTIONS[attention]


def _is_foreign(value: Any) -> bool:
    """Return whether a function, or one that it wraps, was defined outside of transformers and its dependencies.

    The globals of a function tell where it was defined; its ``__module__`` may be copied from another.
    """
    while isinstance(value, FunctionType):
        package = str(value.__globals__.get("__name__")).partition(".")[0]
        if package not in _PACKAGES:
            return True
        value = getattr(value, "__wrapped__", None)
    return False
