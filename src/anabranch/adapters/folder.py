"""The adapter folder, which training writes and users share. One format for all methods.

    FOLDER/adapter_config.json     method, config, target, recipe, measurements, and the SHA-256 of the weights
    FOLDER/adapter.safetensors     the weights
    FOLDER/README.md               a card for people, written from the config

An adapter belongs to one target: its fingerprint is stored and checked. Files are written to temporary names and
renamed, the config last; a crash in between leaves a config with a wrong SHA-256, which is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from anabranch.adapters.record import CONFIG, FORMAT, VERSION, card, method_of, read_record, title_of
from anabranch.drafting.trained import TrainedModule
from anabranch.errors import AdapterError, CapabilityError, FileError, InputError, one_line
from anabranch.methods import Method
from anabranch.model.config import ModelConfig
from anabranch.model.load import Target, base_name
from anabranch.model.passes import Rider
from anabranch.model.stored import UNREADABLE, dtype_name, is_finite
from anabranch.support.files import write_atomically
from anabranch.support.jsonfiles import is_whole, shown

__all__ = [
    "CONFIG",
    "SHIPPED",
    "LoadedAdapter",
    "TargetIdentity",
    "find_adapters",
    "load_adapter",
    "load_choice",
    "own_lora",
    "read_record",
    "save_adapter",
    "shipped",
]

WEIGHTS, CARD = "adapter.safetensors", "README.md"
LORA = "lora"  # the LoRA that was trained together with an adapter
# adapters that come with the package, one folder each
SHIPPED = Path(__file__).resolve().parent / "shipped"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class TargetIdentity:
    """The target that an adapter belongs to. ``shape`` has the sizes that determine its weights.

    lora  the name of the LoRA that was merged into it; empty: none
    """

    name: str
    fingerprint: str
    family: str
    shape: dict[str, int]
    lora: str = ""

    @staticmethod
    def of(target: Target, name: str | None = None) -> TargetIdentity:
        """The identity of a loaded target; of a path only the last part is stored."""
        shape, lora = _shape(target.config), "" if target.lora is None else target.lora.name
        return TargetIdentity(name or base_name(target), target.fingerprint, target.config.family, shape, lora)


@dataclass(frozen=True)
class LoadedAdapter:
    """A trained module in the target's type and on its device, the record that came with it, and its method."""

    module: TrainedModule
    record: dict[str, Any]
    method: Method


def save_adapter(
    folder: Path,
    module: TrainedModule,
    *,
    method: Method,
    target: TargetIdentity,
    training: dict[str, Any],
    measured: dict[str, Any],
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Write the folder and return its record.

    training  "command", "data" (a list of {"source", "examples", "licence"}), "options", ...
    measured  measurements as JSON values: "mean acceptance length" by tree, ...
    dtype     of the stored weights; the draft vocabulary is stored as int32, or omitted if it is the target's

    Raises FileError if the folder cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    for name, value in module.state_dict().items():
        if name != "vocabulary":
            tensors[name] = value.detach().to("cpu", dtype).contiguous()
        elif len(value) < target.shape["vocab_size"]:
            tensors[name] = value.detach().to("cpu", torch.int32)
    weights = save(tensors, metadata={"format": "pt"})
    record: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "method": method.name,
        "target": {name: value for name, value in asdict(target).items() if value != ""},
        "config": module.config.to_dict(),
        "parameters": module.num_parameters(),
        "draft_vocabulary": len(module.vocabulary),
        "dtype": dtype_name(dtype),
        "bytes": len(weights),
        "sha256": hashlib.sha256(weights).hexdigest(),
        "training": training,
        "measured": measured,
    }
    try:
        write_atomically(folder / WEIGHTS, weights)
        write_atomically(folder / CARD, card(record))
        write_atomically(folder / CONFIG, json.dumps(record, indent=2) + "\n")
    except OSError as error:
        raise FileError(f"the adapter cannot be written to {folder} ({error.strerror}); use another folder") from error
    return record


def load_adapter(folder: Path, target: Target) -> LoadedAdapter:
    """Load an adapter for ``target``: in its type, on its device, frozen.

    If the target's main rows attend to rows of the adapter, these become part of the target (``Decoder.rider``), for
    plain decoding and all drafters.

    Raises AdapterError if a file is missing, truncated or tampered with, if the tensors do not fit the config, if the
    method is not known, and if the adapter was trained for other weights.
    """
    loaded = _load(folder, target, lora=False)
    rider = _rider(loaded, target)
    if rider is not None:
        target.decoder.rider = rider
    return loaded


def own_lora(folder: Path) -> Path | None:
    """The folder of the LoRA that was trained together with an adapter; None: there is none.

    Raises AdapterError if there is no adapter.
    """
    lora = folder / LORA
    return lora if read_record(folder)["target"].get("lora") == LORA and lora.is_dir() else None


def load_choice(folder: Path, target: Target, name: str) -> LoadedAdapter:
    """Load an adapter that requests choose by ``name``, for the target itself or for its LoRA of that name.

    Raises what ``load_adapter`` raises, and CapabilityError for an adapter whose streams are part of its target.
    """
    loaded = _load(folder, target, lora=name in target.decoder.loras.names)
    if _rider(loaded, target) is not None:
        raise CapabilityError(
            f"the streams of the adapter in {folder} are part of its target, which requests cannot choose; load that "
            "target with it alone (adapter=)"
        )
    return loaded


def _rider(loaded: LoadedAdapter, target: Target) -> Rider | None:
    """The rows of an adapter that are part of its target; None: it has none."""
    trained = loaded.method.trained
    assert trained is not None
    return trained.rider(target.decoder, loaded.module)


def _load(folder: Path, target: Target, *, lora: bool) -> LoadedAdapter:
    """The module and the method of a folder.

    lora  whether an adapter for the target with a LoRA is taken too, which only its shape can tell: the weights that it
          was trained for, with the LoRA merged, are nowhere. Drafts never change the output
    """
    record = read_record(folder)
    belongs = record["target"]
    tuned = lora and "lora" in belongs and belongs.get("shape") == _shape(target.config)
    if belongs["fingerprint"] != target.fingerprint and not tuned:
        raise AdapterError(
            f"the adapter in {folder} was trained for {title_of(belongs)} (fingerprint "
            f"{belongs['fingerprint'][:12]}), but the target is {target.title} (fingerprint "
            f"{target.fingerprint[:12]}); use that target, or train an adapter for this one"
        )
    method, trained = method_of(record)
    tensors = _read_weights(folder, record["sha256"])
    config = trained.config.from_dict(record["config"])
    vocabulary = _vocabulary(folder, tensors, target.config.vocab_size, record)
    try:
        with torch.device("meta"):
            module = trained.make(target.config, config, vocabulary)
    except InputError as error:
        raise AdapterError(f"the adapter in {folder} does not fit {target.name}: {error}") from error
    _check_tensors(folder, module, tensors)
    module.load_state_dict(tensors, assign=True)
    module.to(device=target.decoder.device, dtype=target.decoder.dtype).eval().requires_grad_(False)
    for name, value in module.named_parameters():
        if not is_finite(value):
            why = "that are not finite numbers; copy or train the adapter again"
            if is_finite(tensors[name]):
                why = f"that {dtype_name(value.dtype)} cannot hold; use bfloat16 or float32"
            raise AdapterError(f"{folder / WEIGHTS} has values in {name} {why}")
    return LoadedAdapter(module, record, method)


def find_adapters(target: Target, folders: Sequence[Path] = ()) -> tuple[LoadedAdapter, ...]:
    """Load the adapters in ``folders``, and for every other method the one that ships for this target, if any.

    Raises AdapterError as ``load_adapter`` does, and InputError if two folders hold adapters of one method.
    """
    adapters: dict[str, tuple[Path, LoadedAdapter]] = {}
    for folder in folders:
        loaded = load_adapter(folder, target)
        name = loaded.method.name
        if name in adapters:
            raise InputError(
                f"{adapters[name][0]} and {folder} both hold an adapter for the method {name!r}; give one per method"
            )
        adapters[name] = folder, loaded
    for path in shipped():
        record = read_record(path)
        if record["target"]["fingerprint"] == target.fingerprint and record["method"] not in adapters:
            adapters[record["method"]] = path, load_adapter(path, target)
    return tuple(loaded for _, loaded in adapters.values())


def shipped() -> list[Path]:
    """The folders of the adapters that come with the package; a folder's name is the adapter's."""
    return [path.parent for path in sorted(SHIPPED.glob(f"*/{CONFIG}"))]


def _check_tensors(folder: Path, module: TrainedModule, tensors: dict[str, Tensor]) -> None:
    """Raise AdapterError unless ``tensors`` have the names and shapes of ``module`` and dtypes of weights."""
    wanted = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    stored = {name: tuple(value.shape) for name, value in tensors.items()}
    if wanted != stored:
        name = sorted(name for name in {*wanted, *stored} if wanted.get(name) != stored.get(name))[0]
        named = name if name.isprintable() else ascii(name)
        raise AdapterError(
            f"{folder / WEIGHTS} has {named} with the shape {stored.get(name)} where {CONFIG} asks for "
            f"{wanted.get(name)}; copy or train the adapter again"
        )
    for name, value in tensors.items():
        if name != "vocabulary" and value.dtype not in _FLOATS:
            raise AdapterError(
                f"{folder / WEIGHTS} stores {name} as {dtype_name(value.dtype)}, and an adapter has "
                "weights in float32, bfloat16 or float16; copy or train the adapter again"
            )


def _read_weights(folder: Path, sha256: str) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    if not path.is_file():
        raise AdapterError(f"the folder {folder} has no {WEIGHTS}; its copy is incomplete")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise AdapterError(f"{path} cannot be read ({error.strerror})") from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise AdapterError(
            f"{path} is truncated or was changed: its SHA-256 is not the one in {CONFIG}; copy or train it again"
        )
    try:
        tensors: dict[str, Tensor] = load(data)
    except UNREADABLE as error:
        raise AdapterError(
            f"{path} is no safetensors file ({one_line(error)}); copy or train the adapter again"
        ) from error
    return tensors


def _vocabulary(folder: Path, tensors: dict[str, Tensor], vocab_size: int, record: dict[str, Any]) -> Tensor:
    """The draft vocabulary [Vd], int64, which is also put into ``tensors``."""
    stored = tensors.get("vocabulary")
    if stored is not None and stored.dtype not in (torch.int32, torch.int64):
        raise AdapterError(
            f"{folder / WEIGHTS} stores the draft vocabulary as {dtype_name(stored.dtype)}, not as int32; copy or "
            "train the adapter again"
        )
    # the config states its size; the target's whole vocabulary is not stored
    stated, size = record.get("draft_vocabulary"), vocab_size if stored is None else stored.numel()
    if stated is not None and (not is_whole(stated) or stated != size):
        raise AdapterError(
            f"{CONFIG} in {folder} names a draft vocabulary of {shown(stated)} tokens, and {WEIGHTS} has {size}; "
            "copy or train the adapter again"
        )
    ids = torch.arange(vocab_size) if stored is None else stored.long()
    rising = ids.dim() == 1 and len(ids) > 0 and bool((ids[1:] > ids[:-1]).all())
    if not rising or not 0 <= int(ids[0]) <= int(ids[-1]) < vocab_size:
        raise AdapterError(
            f"{folder / WEIGHTS} has a draft vocabulary that is not a rising list of token ids below {vocab_size}; "
            "copy or train the adapter again"
        )
    tensors["vocabulary"] = ids
    return ids


def _shape(config: ModelConfig) -> dict[str, int]:
    names = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
    return {name: int(getattr(config, name)) for name in names}
