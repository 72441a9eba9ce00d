"""Read and write LoRA folders in the file format of PEFT, without PEFT.

    FOLDER/adapter_config.json          settings: rank, alpha, which modules
    FOLDER/adapter_model.safetensors    for each module lora_A [r, I] and lora_B [O, r]

Settings under which PEFT computes anything but ``W + scale * B @ A`` are refused, also those of later versions.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from anabranch.errors import AdapterError, FileError, one_line
from anabranch.model.config import NEEDS, ModelConfig, needed
from anabranch.model.lora import Lora, Place, Term, places
from anabranch.model.stored import UNREADABLE, check_trained
from anabranch.support.files import write_atomically
from anabranch.support.jsonfiles import is_number, is_whole, read_json, shown

__all__ = ["CONFIG", "WEIGHTS", "PeftSettings", "read_lora", "read_settings", "write_lora"]

T = TypeVar("T")

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
_AGAIN = "save or copy the LoRA again"
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
# the fields of adapter_config.json that are supported, and those that do not change PEFT's results
_READ = {
    *("peft_type", "base_model_name_or_path", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "bias", "init_lora_weights"),
    NEEDS,
}
_IGNORED = {
    *("task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "lora_dropout"),
    *("megatron_config", "megatron_core", "eva_config", "corda_config", "loftq_config", "lora_ga_config"),
    *("qalora_group_size", "runtime_config", "ensure_weight_tying", "fan_in_fan_out"),
}
_PATTERNS = 10_000  # most entries of rank_pattern and alpha_pattern
_REPEATS = 3  # most repeats in a regular expression
_END = r"(.*\.)?({})$"  # PEFT's expression for a key of rank_pattern and alpha_pattern
_ALL = "all-linear"  # a shorthand in target_modules
# initial values that leave the base model's weights as they are; others, such as PiSSA's, change them
_INITIAL = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class PeftSettings:
    """The fields of adapter_config.json that define a LoRA.

    base        the model it was trained for, as its author named it; may be empty
    rank        r of the modules that ``ranks`` does not name; ``alpha`` and ``alphas`` likewise
    rslora      divide alpha by the root of the rank (Kalajdzievski 2023) instead of the rank
    ranks       regular expressions of module names or their ends, with their rank; the first that matches counts
    modules     names of modules or their ends, or a regular expression of whole names
    excluded    modules that are left out nevertheless, in the same form
    layers      only modules of these layers, unless ``modules`` has their whole name; empty: all
    stacks      regular expressions of the name before a layer's number; empty: any name
    needs       the method whose adapter is part of the tuned model; empty: none
    """

    base: str
    rank: int
    alpha: float
    rslora: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    modules: str | tuple[str, ...]
    excluded: str | tuple[str, ...]
    layers: tuple[int, ...]
    stacks: tuple[str, ...]
    needs: str = ""

    def selects(self, module: str) -> bool | None:
        """True if a module has a term; None if telling would evaluate an expression that may be slow."""
        excluded, included = _matches(self.excluded, module), _matches(self.modules, module)
        if excluded or excluded is None:
            return None if excluded is None else False
        if included and self.layers and isinstance(self.modules, tuple) and module not in self.modules:
            return self._layer(module) in self.layers
        return included

    def _layer(self, module: str) -> int | None:
        """The number of a module's layer, by PEFT's rule."""
        patterns = [rf"(?:^|.*?\.){stack}" for stack in self.stacks] or [r".*?\.[^.]*"]
        matches = (_compiled(rf"{pattern}\.(?P<layer>\d+)\.").match(module) for pattern in patterns)
        return next((int(match["layer"]) for match in matches if match), None)

    def rank_of(self, module: str) -> int:
        """The rank of a module's term."""
        return _of_pattern(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """The factor of a module's term."""
        rank = self.rank_of(module)
        return _of_pattern(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.rslora else rank)


def _matches(names: str | tuple[str, ...], module: str) -> bool | None:
    """PEFT's rule: a regular expression matches the whole name; a listed name is a module's, or its end after a dot.

    None for a shorthand, and for an expression that is not evaluated because its author could make it slow.
    """
    if isinstance(names, tuple):
        return any(module == name or module.endswith(f".{name}") for name in names)
    if names.lower() == _ALL or _is_slow(names):
        return None
    return _compiled(names).fullmatch(module) is not None


def _of_pattern(patterns: Mapping[str, T], module: str, otherwise: T) -> T:
    """The value of the first pattern that matches a module, by PEFT's ``get_pattern_key``.

    The name is matched from its start, so that ``^k_proj`` matches no module that is inside another.
    """
    matching = (value for key, value in patterns.items() if _compiled(_END.format(key)).match(module))
    return next(matching, patterns.get(module, otherwise))


_compiled = cache(re.compile)  # re itself keeps 512 expressions, fewer than a large model has modules


# -- reading -----------------------------------------------------------------------------------------
def read_settings(folder: Path) -> PeftSettings:
    """Read and check the settings of a LoRA folder, without its weights.

    Raises AdapterError if the folder or its config is missing or malformed, and for settings that are not supported.
    """
    path = folder / CONFIG
    if not folder.is_dir():
        raise AdapterError(f"there is no LoRA folder {folder}; give a folder with {CONFIG} and {WEIGHTS}")
    if not path.is_file():
        raise AdapterError(f"the folder {folder} has no {CONFIG}; it is no LoRA, or its copy is incomplete")
    record = read_json(path, _AGAIN, error=AdapterError)
    if "peft_type" not in record:
        own = str(record.get("format", "")).startswith("anabranch")
        hint = "it is an adapter of anabranch: give it as the adapter" if own else "give a folder that PEFT saved"
        raise AdapterError(f"{path} is not PEFT's: {hint}")
    _refuse(path, record)
    if record.get("target_modules") is None:
        raise AdapterError(f"{path} names no target_modules; {_AGAIN}")
    base, fields = record.get("base_model_name_or_path"), _Fields(path, record)
    return PeftSettings(
        base=base if isinstance(base, str) else "",
        rank=fields.get("r", lambda value: is_whole(value, 1), "a whole number of at least 1"),
        alpha=float(fields.get("lora_alpha", is_number, "a number")),
        rslora=bool(fields.get("use_rslora", lambda value: isinstance(value, bool | None), "true or false")),
        ranks=fields.patterns("rank_pattern", lambda value: is_whole(value, 1)),
        alphas=fields.patterns("alpha_pattern", is_number),
        modules=fields.modules("target_modules"),
        excluded=fields.modules("exclude_modules"),
        layers=fields.layers("layers_to_transform"),
        stacks=fields.stacks("layers_pattern"),
        needs=needed(record),
    )


def _refuse(path: Path, record: Mapping[str, Any]) -> None:
    """Raise AdapterError for settings that are not supported."""
    use = "merge it with peft's merge_and_unload and load the result"
    if record["peft_type"] != "LORA":
        kind = shown(record["peft_type"])
        raise AdapterError(f"{path} describes a PEFT adapter of the type {kind}, and only LoRA is read; {use}")
    if record.get("bias", "none") != "none":
        raise AdapterError(f"{path} trains biases (bias={shown(record['bias'])}), which is not supported; {use}")
    if record.get("init_lora_weights") not in _INITIAL:
        raise AdapterError(
            f"{path} changes the base model's weights (init_lora_weights={shown(record['init_lora_weights'])}), which "
            f"is not supported; convert it to a plain LoRA with peft's save_pretrained, or {use}"
        )
    for name, value in record.items():
        if name not in _READ and name not in _IGNORED and value:
            raise AdapterError(f"{path} sets {name} to {shown(value)}, which is not supported; {use}")


@dataclass(frozen=True)
class _Fields:
    """The fields of an adapter_config.json. Each method raises AdapterError for a malformed value."""

    path: Path
    record: Mapping[str, Any]

    def get(self, name: str, right: Callable[[Any], bool], wanted: str) -> Any:
        if not right(value := self.record.get(name)):
            raise AdapterError(f"{name} in {self.path} must be {wanted}, got {shown(value)}; {_AGAIN}")
        return value

    def layers(self, name: str) -> tuple[int, ...]:
        def right(value: Any) -> bool:
            several = isinstance(value, list | tuple) and all(is_whole(layer, 0) for layer in value)
            return value is None or is_whole(value, 0) or several

        value = self.get(name, right, "layer numbers")
        return (value,) if isinstance(value, int) else tuple(value or ())

    def patterns(self, name: str, right: Callable[[Any], bool]) -> dict[str, Any]:
        def holds(value: Any) -> bool:
            value = value or {}
            return isinstance(value, dict) and len(value) <= _PATTERNS and all(map(right, value.values()))

        patterns = self.get(name, holds, "numbers by module name") or {}
        for key in patterns:
            self._check_expression(name, key, _END)
        return patterns

    def modules(self, name: str) -> str | tuple[str, ...]:
        def right(value: Any) -> bool:
            value = value or ()
            return isinstance(value, str | list | tuple) and all(isinstance(each, str) for each in value)

        modules = self.get(name, right, "module names or a regular expression") or ()
        if not isinstance(modules, str):
            return tuple(modules)
        self._check_compiles(name, modules)
        return modules

    def stacks(self, name: str) -> tuple[str, ...]:
        stacks = self.modules(name)
        stacks = (stacks,) if isinstance(stacks, str) else stacks
        for stack in stacks:
            self._check_expression(name, stack)
        return stacks

    def _check_expression(self, name: str, expression: str, form: str = "{}") -> None:
        """Check that an expression, put into ``form``, is valid and can be matched in a short time."""
        self._check_compiles(name, expression, form)
        if _is_slow(expression):
            raise AdapterError(
                f"{name} in {self.path} has {shown(expression)}, with more than {_REPEATS} repeats or a repeated "
                "group, which may take forever to match; name the modules instead"
            )

    def _check_compiles(self, name: str, expression: str, form: str = "{}") -> None:
        try:
            re.compile(form.format(expression))
        except (re.error, RecursionError, OverflowError) as error:
            why = f"which is no regular expression ({one_line(error)}); {_AGAIN}"
            raise AdapterError(f"{name} in {self.path} has {shown(expression)}, {why}") from error


def _is_slow(expression: str) -> bool:
    """True if matching may take exponential time (repeated groups) or a high power of the name's length."""
    return bool(re.search(r"\)[*+{]", expression)) or len(re.findall(r"[*+{]", expression)) > _REPEATS


def read_lora(folder: Path, config: ModelConfig) -> Lora:
    """The terms of a LoRA folder for a model, in float32.

    Raises AdapterError if a file is missing, truncated or malformed, for settings that are not supported, and for
    terms of modules or shapes that the model does not have.
    """
    settings = read_settings(folder)
    if config.encoder is not None:
        raise AdapterError(
            f"LoRAs of {config.family} models are not read; merge it with peft's merge_and_unload and load the result"
        )
    known = places(config)
    ours = {name: module for module, place in known.items() for name in place.names}
    named = {module: module for module in known}  # as in the file, whose patterns are matched with its own names
    sides: dict[str, dict[str, Tensor]] = {}
    for name, value in _tensors(folder).items():
        match = _TENSOR.fullmatch(name)
        module = None if match is None else ours.get(match["module"])
        if match is None or module is None:
            raise AdapterError(
                f"{folder / WEIGHTS} has {_name(name)}, and of a {config.family} model only LoRA of {_kinds(known)} is "
                "read; merge it with peft's merge_and_unload and load the result"
            )
        check_trained(name, value, folder / WEIGHTS, _AGAIN)
        sides.setdefault(module, {})[match["side"]] = value.float()
        named[module] = match["module"]
    chosen = {module: settings.selects(name) for module, name in named.items()}
    selected = [module for module in known if chosen[module] or (chosen[module] is None and module in sides)]
    if lacking := [module for module in selected if set(sides.get(module, ())) != {"A", "B"}]:
        raise AdapterError(
            f"{folder / WEIGHTS} lacks the terms of {lacking[0]}, which {CONFIG} selects; its copy is incomplete, or "
            f"it was trained for another model{_base(settings)}"
        )
    if other := sorted(set(sides) - set(selected)):
        raise AdapterError(f"{folder / WEIGHTS} has terms of {other[0]}, which {CONFIG} does not select; {_AGAIN}")
    if not selected:
        raise AdapterError(
            f"{folder} has no term for any linear layer of a {config.family} model; use the model that it was trained "
            f"for{_base(settings)}"
        )
    return Lora({m: _term(folder, settings, named[m], known[m], sides[m]) for m in selected})


def _tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    if not path.is_file():
        if (folder / _PICKLED).is_file():
            raise AdapterError(
                f"{folder} has only pickled weights ({_PICKLED}), which can run code when loaded; save them as "
                "safetensors with peft's save_pretrained"
            )
        raise AdapterError(f"the folder {folder} has no {WEIGHTS}; its copy is incomplete")
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except UNREADABLE as error:
        raise AdapterError(f"{path} is truncated or not a safetensors file ({one_line(error)}); {_AGAIN}") from error
    return tensors


def _term(folder: Path, settings: PeftSettings, module: str, place: Place, sides: Mapping[str, Tensor]) -> Term:
    rank = settings.rank_of(module)
    for side, wanted in (("A", (rank, place.width)), ("B", (place.outputs, rank))):
        if tuple(sides[side].shape) != wanted:
            raise AdapterError(
                f"{folder / WEIGHTS} has lora_{side} of {module} with the shape {tuple(sides[side].shape)}, but this "
                f"model and rank {rank} require {wanted}; use the model that it was trained for{_base(settings)}"
            )
    return Term(sides["A"], sides["B"], settings.scale_of(module))


def _base(settings: PeftSettings) -> str:
    return f" ({shown(settings.base)})" if settings.base else ""


def _name(name: str) -> str:
    return name if name.isprintable() and len(name) < 150 else ascii(name)[:150]


def _kinds(known: Mapping[str, Place]) -> str:
    """The last parts of the modules' names, each once."""
    return ", ".join(dict.fromkeys(module.rpartition(".")[2] for module in known))


# -- writing -----------------------------------------------------------------------------------------
def write_lora(folder: Path, lora: Lora, *, base: str, needs: str = "") -> None:
    """Write a LoRA as a folder that PEFT and ``read_lora`` read.

    base   the model that it belongs to, a hub id or a folder's name
    needs  the method whose adapter is part of the tuned model; empty: none

    Raises FileError if the folder cannot be written.
    """
    terms = lora.terms
    assert terms, "a LoRA has terms"
    ranks = [term.rank for term in terms.values()]
    alphas = [_alpha(term) for term in terms.values()]
    rank, alpha = max(set(ranks), key=ranks.count), max(set(alphas), key=alphas.count)
    record: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        # whole names, so that nothing else is selected, whichever modules have terms
        "target_modules": sorted(terms),
        "rank_pattern": {re.escape(name): term.rank for name, term in terms.items() if term.rank != rank},
        "alpha_pattern": {re.escape(name): _alpha(term) for name, term in terms.items() if _alpha(term) != alpha},
        **({NEEDS: needs} if needs else {}),
    }
    tensors: dict[str, Tensor] = {}
    for name, term in terms.items():
        for side, value in (("A", term.down_RI), ("B", term.up_OR)):
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = value.detach().to("cpu", torch.float32).clone()
    try:
        write_atomically(folder / WEIGHTS, save(tensors, metadata={"format": "pt"}))
        write_atomically(folder / CONFIG, json.dumps(record, indent=2) + "\n")
    except OSError as error:
        raise FileError(f"the LoRA cannot be written to {folder} ({error.strerror}); use another folder") from error


def _alpha(term: Term) -> float:
    alpha = term.scale * term.rank
    return int(alpha) if alpha == int(alpha) else alpha
