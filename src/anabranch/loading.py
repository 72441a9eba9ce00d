"""Load a target with its adapters, and pack its weights.

Importing this module is cheap: torch and transformers are imported by ``check`` and ``load``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from anabranch.declared import Option
from anabranch.errors import AdapterError, CapabilityError, InputError
from anabranch.support.log import LOGGER

if TYPE_CHECKING:
    import torch
    from torch import nn

    from anabranch.adapters.folder import LoadedAdapter
    from anabranch.model.as_stored import Packing
    from anabranch.model.load import Target

__all__ = ["LoadConfig", "Loaded", "check", "load"]


@dataclass(frozen=True)
class LoadConfig:
    """The model to load and how, as ``api.load`` describes it. The command line offers fields with an ``Option``.

    adapters  adapter folders; for all other methods, the adapter shipped for this target is used
    loras     LoRA folders by name, which requests choose from; the weights stay as they are
    choices   adapter folders by name, which requests choose from; a LoRA that was trained with one comes along
    """

    model: Annotated[
        str, Option("load this model: default, a folder, a .gguf file or a hub id", values=("default",))
    ] = "default"
    adapters: Annotated[
        tuple[Path, ...],
        Option("load this adapter instead of the shipped one; repeatable", flags=("--adapter",), metavar="FOLDER"),
    ] = ()
    dtype: Annotated[
        str | torch.dtype,
        Option(
            "compute in auto (as stored), float32, bfloat16 or float16",
            values=("auto", "float32", "bfloat16", "float16"),
        ),
    ] = "auto"
    device: Annotated[str, Option("run on auto, cpu, cuda or cuda:N", values=("auto", "cpu", "cuda"))] = "auto"
    quantize: Annotated[
        str,
        Option(
            "decode the weights as stored (auto), dequantised (none), or rounded to int8 or int4; the result is the "
            "target",
            values=("auto", "none", "int8", "int4"),
        ),
    ] = "auto"
    revision: Annotated[str | None, Option("take this branch, tag or commit of a hub id")] = None
    threads: Annotated[int | None, Option("use this many CPU threads (default: all allowed)")] = None
    lora: Annotated[Path | None, Option("merge this LoRA (PEFT's format) into the model", metavar="FOLDER")] = None
    kv: Annotated[
        str,
        Option(
            "keep keys and values in the type of the weights (auto) or in int8, for which the result is the target",
            values=("auto", "int8"),
        ),
    ] = "auto"
    cache: Annotated[bool, Option("keep packed weights in the cache directory", flags=("--cache/--no-cache",))] = True
    loras: tuple[tuple[str, Path], ...] = ()
    choices: tuple[tuple[str, Path], ...] = ()


@dataclass(frozen=True)
class Loaded:
    """A target ready for decoding, its adapters, and the seconds that loading and packing took.

    choices  adapters by name, which requests choose from
    """

    target: Target
    adapters: tuple[LoadedAdapter, ...]
    load_seconds: float = 0.0
    pack_seconds: float = 0.0
    choices: Mapping[str, LoadedAdapter] = field(default_factory=dict)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The trained modules of the adapters, for ``methods.make_drafter``."""
        return tuple(adapter.module for adapter in self.adapters)


def check(config: LoadConfig) -> None:
    """Check everything that can be checked before weights are read.

    Raises InputError for an invalid value, AdapterError for a folder that is not an adapter or not a LoRA, DeviceError
    for a device that does not exist, CapabilityError for a LoRA or an adapter that cannot be chosen by requests.
    """
    from anabranch.adapters.folder import read_record
    from anabranch.model.cache import check_kind
    from anabranch.model.load import resolve_device, resolve_dtype
    from anabranch.model.peft import read_settings
    from anabranch.model.quantize import check_quantization

    if not isinstance(config.model, str):
        raise InputError(f"model must be a string, got {type(config.model).__name__}")
    if config.threads is not None and (not isinstance(config.threads, int) or config.threads < 1):
        raise InputError(f"threads must be at least 1, got {config.threads!r}")
    check_quantization(config.quantize)
    check_kind(config.kv)
    resolve_dtype(config.dtype)
    resolve_device(config.device)
    for folder in config.adapters:
        read_record(folder.expanduser())
    loras = _loras(config)
    if config.lora is not None and loras:
        raise InputError("give either a LoRA to merge (lora=) or several to choose from (loras=, adapters=)")
    if not all(name for name, _ in (*config.loras, *config.choices)):
        raise InputError("a LoRA or an adapter to choose from has an empty name; give it one to choose it by")
    for folder in (*(() if config.lora is None else (config.lora,)), *loras.values()):
        settings = read_settings(folder.expanduser())
        if settings.needs and folder != config.lora:
            raise CapabilityError(
                f"the LoRA {folder} needs the adapter that was trained with it, which requests cannot choose; merge it "
                "(lora=) and give the adapter (adapter=)"
            )


def load(
    config: LoadConfig,
    *,
    pack: bool = True,
    stored: bool = False,
    adapters: bool = True,
    fetch: Callable[[], object] = lambda: None,
    progress: Packing | None = None,
) -> Loaded:
    """Set the threads, load the target, find its adapters, and pack its weights for the native kernels.

    pack      whether to pack the weights; packed weights have no gradients, so not for most trainings
    stored    without ``pack``: still pack a quantised GGUF file as it is stored
    adapters  whether to load adapters
    fetch     downloads the default model if it is missing, and shows the progress; called before that model is loaded
    progress  called while the weights of a GGUF file are packed

    Raises what ``check`` raises, and FetchError, FileError, ModelError and CapabilityError.
    """
    from anabranch.support.plain_torch import plain_torch

    check(config)
    if config.model == "default":
        fetch()
    with plain_torch():
        return _load(config, pack=pack, stored=stored, adapters=adapters, progress=progress)


def _load(config: LoadConfig, *, pack: bool, stored: bool, adapters: bool, progress: Packing | None) -> Loaded:
    from anabranch.adapters.folder import find_adapters, load_choice
    from anabranch.model.load import load_target
    from anabranch.model.pack import pack_decoder
    from anabranch.model.peft import read_lora
    from anabranch.support.processor import set_threads

    set_threads(config.threads)
    began = time.perf_counter()
    target = load_target(
        config.model,
        dtype=config.dtype,
        device=config.device,
        # weights as they are stored are packed, and packed weights have no gradients
        quantize="none" if config.quantize == "auto" and not (pack or stored) else config.quantize,
        revision=config.revision,
        lora=None if config.lora is None else config.lora.expanduser(),
        keep=config.cache,
        progress=progress,
    )
    for name, folder in _loras(config).items():
        target.decoder.add_lora(name, read_lora(folder.expanduser(), target.config))
    folders = [folder.expanduser() for folder in config.adapters]
    trained = find_adapters(target, folders) if adapters else ()
    choices = {name: load_choice(folder.expanduser(), target, name) for name, folder in config.choices}
    if target.needs and target.decoder.rider is None:
        raise AdapterError(
            f"{target.title} was tuned together with its {target.needs}, which its main rows attend to, and is another "
            "model without them; give the adapter that was trained with it: --adapter FOLDER, or adapter=FOLDER"
        )
    read = time.perf_counter()
    if pack:
        pack_decoder(target.decoder)
    if config.kv == "int8":
        if not pack:
            raise CapabilityError(
                "kv='int8' is for decoding with packed weights, and these stay as they are; leave kv out"
            )
        target.decoder.quantize_cache()
    loaded = Loaded(target, trained, read - began, time.perf_counter() - read, choices)
    dtype = str(target.decoder.dtype).removeprefix("torch.")
    LOGGER.info(
        "loaded %s in %.1f s, packed in %.1f s: %s on %s, quantize=%s, kv=%s, adapters of %s",
        *(
            target.title,
            loaded.load_seconds,
            loaded.pack_seconds,
            dtype,
            target.decoder.device,
            target.quantize,
            config.kv,
        ),
        ", ".join(adapter.method.name for adapter in trained) or "no method",
    )
    return loaded


def _loras(config: LoadConfig) -> dict[str, Path]:
    """The LoRAs that requests choose from by name, those that were trained together with an adapter among them."""
    from anabranch.adapters.folder import own_lora

    bundled = {name: own_lora(folder.expanduser()) for name, folder in config.choices}
    return {name: lora for name, lora in bundled.items() if lora is not None} | dict(config.loras)
