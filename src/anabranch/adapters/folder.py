"""The adapter folder: what a training leaves behind and a user hands on.

    FOLDER/adapter_config.json     shape, target, recipe, measurements, and the SHA-256 of the weights
    FOLDER/adapter.safetensors     the weights
    FOLDER/README.md               a card for people, written from the config

An adapter belongs to one target: its fingerprint is stored and checked. Files are written beside and moved into
place, the config last; a crash between the two moves leaves a config whose SHA-256 does not fit, which is refused.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from anabranch.adapters.card import card
from anabranch.errors import AdapterError, FileError, InputError, one_line
from anabranch.files import write_atomically
from anabranch.foreign import peft_advice
from anabranch.jsonfiles import is_whole, read_json, shown
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.config import StreamConfig
from anabranch.model.config import ModelConfig
from anabranch.model.load import Target
from anabranch.model.weights import is_finite

__all__ = [
    "SHIPPED",
    "LoadedAdapter",
    "TargetIdentity",
    "find_adapter",
    "load_adapter",
    "read_record",
    "save_adapter",
    "shipped",
]

FORMAT = "anabranch streams"
VERSION = 1
CONFIG, WEIGHTS, CARD = "adapter_config.json", "adapter.safetensors", "README.md"
# adapters that come with the package, one folder each
SHIPPED = Path(__file__).resolve().parent / "shipped"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# without these a record is of no use; the card and ``anabranch info`` read them too
_FIELDS: dict[str, type] = {"target": dict, "streams": dict, "sha256": str, "training": dict, "measured": dict}


@dataclass(frozen=True)
class TargetIdentity:
    """Which target an adapter belongs to. ``shape`` are the sizes that its weights follow from."""

    name: str
    fingerprint: str
    family: str
    shape: dict[str, int]

    @staticmethod
    def of(target: Target, name: str | None = None) -> TargetIdentity:
        """Of a loaded target; a folder or file is named by its last part, so that no path of a machine is stored."""
        own = Path(target.name).name if Path(target.name).expanduser().exists() else target.name
        return TargetIdentity(name or own, target.fingerprint, target.config.family, _shape(target.config))


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter in the target's type and on its device, and the record that came with it (adapter_config.json)."""

    adapter: StreamAdapter
    record: dict[str, Any]


def save_adapter(
    folder: Path,
    adapter: StreamAdapter,
    *,
    target: TargetIdentity,
    training: dict[str, Any],
    measured: dict[str, Any],
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Write the folder and return its record.

    training  what it was made from: "command", "data" (a list of {"source", "examples", "licence"}), "options", ...
    measured  what it reaches: "mean acceptance length" by tree and whatever else, JSON values
    dtype     of the stored weights; the draft vocabulary is stored as int32, and not at all where it is the whole

    Raises FileError if the folder cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    for name, value in adapter.state_dict().items():
        if name != "vocabulary":
            tensors[name] = value.detach().to("cpu", dtype).contiguous()
        elif len(value) < adapter.model.vocab_size:
            tensors[name] = value.detach().to("cpu", torch.int32)
    weights = save(tensors, metadata={"format": "pt"})
    record: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "target": asdict(target),
        "streams": adapter.config.to_dict(),
        "parameters": adapter.num_parameters(),
        "draft_vocabulary": len(adapter.vocabulary),
        "dtype": str(dtype).removeprefix("torch."),
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


def read_record(folder: Path) -> dict[str, Any]:
    """The record of an adapter folder, without its weights.

    Raises AdapterError where the folder or its config is missing, malformed, or of a newer format.
    """
    path = folder / CONFIG
    if not folder.is_dir():
        raise AdapterError(f"there is no adapter folder {folder}; give a folder with {CONFIG} and {WEIGHTS}")
    if not path.is_file():
        raise AdapterError(f"the folder {folder} has no {CONFIG}; it is no adapter, or its copy is incomplete")
    record = read_json(path, "copy or train the adapter again", error=AdapterError)
    if sentence := peft_advice(folder, record):
        raise AdapterError(sentence)
    if record.get("format") != FORMAT:
        raise AdapterError(f"{path} does not describe an adapter of anabranch; give a folder that 'train' wrote")
    if record.get("version") != VERSION:
        raise AdapterError(
            f"{path} has the format version {shown(record.get('version'))}, and this anabranch reads {VERSION}; "
            "update anabranch or train the adapter again"
        )
    for name, kind in _FIELDS.items():
        if not isinstance(record.get(name), kind):
            raise AdapterError(f"{path} lacks {name!r} or has it malformed; copy or train the adapter again")
    named = [record["target"].get(key) for key in ("name", "fingerprint")]
    if not all(isinstance(name, str) and name.isprintable() and len(name) < 500 for name in named):
        raise AdapterError(f"{path} does not say which target it belongs to; copy or train the adapter again")
    return record


def load_adapter(folder: Path, target: Target) -> LoadedAdapter:
    """Load an adapter for ``target``: in its type, on its device, frozen.

    Raises AdapterError where a file is missing, truncated or tampered with, where the tensors are not those that the
    config describes, and where the adapter was trained for other weights.
    """
    record = read_record(folder)
    trained = record["target"]
    if trained["fingerprint"] != target.fingerprint:
        raise AdapterError(
            f"the adapter in {folder} was trained for {trained['name']} (fingerprint "
            f"{trained['fingerprint'][:12]}), but the target is {target.name} (fingerprint "
            f"{target.fingerprint[:12]}); use that target, or train an adapter for this one"
        )
    tensors = _read_weights(folder, str(record["sha256"]))
    config = StreamConfig.from_dict(record["streams"])
    vocabulary = _vocabulary(folder, tensors, target.config.vocab_size, record)
    try:
        with torch.device("meta"):
            adapter = StreamAdapter(target.config, config, vocabulary)
    except InputError as error:
        raise AdapterError(f"the adapter in {folder} does not fit {target.name}: {error}") from error
    wanted = {name: tuple(value.shape) for name, value in adapter.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in tensors.items()}
    if wanted != found:
        name = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))[0]
        named = name if name.isprintable() else ascii(name)
        raise AdapterError(
            f"{folder / WEIGHTS} has {named} with the shape {found.get(name)} where {CONFIG} asks for "
            f"{wanted.get(name)}; copy or train the adapter again"
        )
    for name, value in tensors.items():
        if name != "vocabulary" and value.dtype not in _FLOATS:
            raise AdapterError(
                f"{folder / WEIGHTS} stores {name} as {str(value.dtype).removeprefix('torch.')}, and an adapter has "
                "weights in float32, bfloat16 or float16; copy or train the adapter again"
            )
    adapter.load_state_dict(tensors, assign=True)
    adapter.to(device=target.decoder.device, dtype=target.decoder.dtype).eval().requires_grad_(False)
    for name, value in adapter.named_parameters():
        if not is_finite(value):
            why = "that are not finite numbers; copy or train the adapter again"
            if is_finite(tensors[name]):
                why = f"that {str(value.dtype).removeprefix('torch.')} cannot hold; use bfloat16 or float32"
            raise AdapterError(f"{folder / WEIGHTS} has values in {name} {why}")
    return LoadedAdapter(adapter, record)


def find_adapter(target: Target, folder: Path | None = None) -> LoadedAdapter | None:
    """The adapter in ``folder``; without one, the adapter that ships for this target, or None if there is none."""
    if folder is not None:
        return load_adapter(folder, target)
    for path in shipped():
        if read_record(path)["target"]["fingerprint"] == target.fingerprint:
            return load_adapter(path, target)
    return None


def shipped() -> list[Path]:
    """The folders of the adapters that come with the package; a folder's name is the adapter's."""
    return [path.parent for path in sorted(SHIPPED.glob(f"*/{CONFIG}"))]


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
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise AdapterError(
            f"{path} is no safetensors file ({one_line(error)}); copy or train the adapter again"
        ) from error
    return tensors


def _vocabulary(folder: Path, tensors: dict[str, Tensor], vocab_size: int, record: dict[str, Any]) -> Tensor:
    """The draft vocabulary [Vd], int64; put in its place among ``tensors``."""
    stored = tensors.get("vocabulary")
    if stored is not None and stored.dtype not in (torch.int32, torch.int64):
        raise AdapterError(
            f"{folder / WEIGHTS} stores the draft vocabulary as {str(stored.dtype).removeprefix('torch.')}, not as "
            "int32; copy or train the adapter again"
        )
    # files of all versions say how many tokens they draft; a whole vocabulary is not stored
    stated, found = record.get("draft_vocabulary"), vocab_size if stored is None else stored.numel()
    if stated is not None and (not is_whole(stated) or stated != found):
        raise AdapterError(
            f"{CONFIG} in {folder} names a draft vocabulary of {shown(stated)} tokens, and {WEIGHTS} has {found}; "
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
