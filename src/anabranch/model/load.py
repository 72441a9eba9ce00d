"""Load a target by name: the default model, a folder, a .gguf file or a hub id."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from anabranch.errors import CapabilityError, DeviceError, FetchError, FileError, InputError, ModelWarning
from anabranch.model.check import token_ids
from anabranch.model.checkpoint import AGAIN, read_checkpoint
from anabranch.model.config import ModelConfig, needed
from anabranch.model.decoder import Decoder
from anabranch.model.families import model_config
from anabranch.model.fused import split_fused
from anabranch.model.generation_config import GenerationDefaults, read_defaults
from anabranch.model.lora import with_lora
from anabranch.model.peft import read_lora, read_settings
from anabranch.model.quantize import Quantization, quantize_decoder, rounding_of
from anabranch.model.stored import Checkpoint
from anabranch.model.text import foreign_errors
from anabranch.model.weights import build_decoder, fill_decoder, stored_dtype
from anabranch.support.foreign import why_no_model
from anabranch.support.jsonfiles import read_json
from anabranch.support.log import LOGGER, warn
from anabranch.support.memory import give_back
from anabranch.support.nearest import hint
from anabranch.support.processor import set_threads

if TYPE_CHECKING:
    from anabranch.model.as_stored import Packing, StoredModel

__all__ = [
    "Target",
    "base_name",
    "build_decoder",
    "describe",
    "load_target",
    "locate",
    "name_tokenizer",
    "resolve_device",
    "resolve_dtype",
    "tokenizer_of",
]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# Pickled copies and other frameworks' weights are not downloaded.
_HUB_FILES = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
# Tokenizer classes that can be loaded without looking at the model.
_GENERAL = ("PreTrainedTokenizerFast", "TokenizersBackend")
_tokenizers: WeakKeyDictionary[Decoder, Any] = WeakKeyDictionary()


@dataclass(frozen=True)
class Target:
    """A loaded model, whose output decoding reproduces.

    decoder      frozen and in eval mode
    tokenizer    the transformers tokenizer
    path         the folder or file that it was loaded from
    fingerprint  the identity of the stored weights with the LoRA merged into them, if there is one, before ``quantize``
                 (``weights.fingerprint``)
    lora         the folder of the merged LoRA
    quantize     "none", "int8", "int4", or "stored": packed in formats of GGUF files
    formats      these formats, that of the most bytes first; empty unless it is stored
    generation   the defaults of its generation config
    needs        the method whose adapter is part of the model (``model.config``); empty: none
    """

    decoder: Decoder
    tokenizer: Any
    config: ModelConfig
    name: str
    path: Path | None
    fingerprint: str
    quantize: Quantization = "none"
    lora: Path | None = None
    generation: GenerationDefaults = field(default=GenerationDefaults())
    needs: str = ""
    formats: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The name of model and LoRA, for messages."""
        return self.name if self.lora is None else f"{self.name} with the LoRA {self.lora.name}"

    def check_decoder_only(self, what: str) -> None:
        """Raise CapabilityError for an encoder-decoder model, of which ``what`` is not supported."""
        if self.config.encoder is not None:
            raise CapabilityError(
                f"{what} is for decoder-only models, and {self.title} reads a source; use another model"
            )


def load_target(
    name: str = "default",
    *,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    quantize: str = "auto",
    revision: str | None = None,
    lora: Path | None = None,
    keep: bool = True,
    progress: Packing | None = None,
) -> Target:
    """Load a target by name: ``default``, a folder, a ``.gguf`` file, or a hub id (at ``revision``).

    dtype     auto (as stored; bfloat16 where files of CTranslate2 or GGUF are rounded on a CPU), float32, bfloat16 or
              float16
    device    auto (cuda if available), cpu, cuda or cuda:N
    quantize  auto, none, int8 or int4 (``model.quantize``): the quantised model is then the target. With auto, a
              quantised GGUF file, or a folder of quantised safetensors whose values its formats have
              (``model.quantized_files``), is packed for the native kernels as it is stored, and passes no gradients; it
              is dequantised where a dtype is given, on a GPU, with a ``lora``, and where the kernels cannot run it,
              which a ModelWarning explains
    lora      a folder in PEFT's format that is merged into the weights first
    keep      keep packed weights in the user's cache directory, and use those of an earlier load
    progress  called while weights are packed
    """
    rounding = rounding_of(quantize)
    wanted, place = resolve_dtype(dtype), resolve_device(device)
    set_threads(None)
    path = locate(name, revision=revision)
    checkpoint = read_checkpoint(path)
    generation, stated = (
        read_defaults(path, checkpoint.config, AGAIN) if path.is_dir() else (GenerationDefaults(), None)
    )
    config = model_config(checkpoint.config)
    ends = config.eos_token_ids
    if stated is not None:
        ends = token_ids(stated, "eos_token_id", config.vocab_size, "generation_config.json")
    give_back()  # making a tokenizer leaves holes
    kind: Quantization = rounding
    filled, needs = None, needed(checkpoint.config)
    if quantize == "auto" and wanted is None and place.type == "cpu" and lora is None:
        filled = _as_stored(path, config, checkpoint, keep=keep, progress=progress)
    if filled is None:
        tensors: Mapping[str, Tensor] = checkpoint.tensors
        if wanted is None and (wanted := checkpoint.dtype) is None:
            named = _DTYPES.get(str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")))
            wanted = stored_dtype(config, checkpoint.tensors, named)
        elif dtype == "auto" and rounding != "none" and place.type == "cpu":
            wanted = torch.bfloat16  # the file leaves the type open, and kernels multiply rounded weights in bf16 only
        if lora is not None:
            tensors = with_lora(tensors, read_lora(lora, config), config)
            needs = needs or read_settings(lora).needs
        filled = fill_decoder(config, tensors, dtype=wanted, device=place)
        quantize_decoder(filled[0], rounding)
    else:
        kind = "stored"
    decoder, identity = filled
    # the tokenizer last, so that errors in the config or the weights come before the second that transformers takes
    tokenizer = _tokenizer(path) if checkpoint.tokenizer is None else checkpoint.tokenizer
    tokenizer.model_max_length = sys.maxsize  # no warning from transformers: the engine checks lengths
    decoder.config = replace(decoder.config, eos_token_ids=_eos(ends, tokenizer))
    name_tokenizer(decoder, tokenizer)
    give_back()
    return Target(
        *(decoder, tokenizer, decoder.config, name, path, identity, kind, lora, generation),
        needs=needs,
        formats=_formats(checkpoint) if kind == "stored" else (),
    )


def _as_stored(
    path: Path, config: ModelConfig, checkpoint: Checkpoint, *, keep: bool, progress: Packing | None
) -> tuple[Decoder, str] | None:
    """The decoder of quantised files as they are stored, and its fingerprint; None for others."""
    if not (checkpoint.matrices or checkpoint.why_not):
        return None
    from anabranch.model.as_stored import NotStoredError, fill_as_stored

    try:
        if checkpoint.why_not:
            raise NotStoredError(checkpoint.why_not, surprising=True)
        tensors = split_fused(config, checkpoint.tensors)
        return fill_as_stored(*(config, tensors, checkpoint.matrices, checkpoint.files), keep=keep, progress=progress)
    except NotStoredError as reason:
        if reason.surprising:
            warn(f"the weights of {path} are dequantised: {reason}", ModelWarning, stacklevel=3)
        else:
            LOGGER.info("%s is not decoded as it is stored: %s", path, reason)
    return None


def _formats(checkpoint: Checkpoint) -> tuple[str, ...]:
    from anabranch.model.matrix import formats_of  # which imports the formats of GGUF files

    return formats_of(checkpoint.matrices)


def describe(path: Path) -> tuple[Checkpoint, StoredModel, GenerationDefaults] | None:
    """Describe a GGUF file, or a folder of quantised safetensors, that can be decoded as it is stored; None for others.

    Raises NotStoredError, and what ``load_target`` does.
    """
    checkpoint = read_checkpoint(path)
    if not (checkpoint.matrices or checkpoint.why_not):
        return None
    from anabranch.model.as_stored import NotStoredError, describe_stored

    if checkpoint.why_not:
        raise NotStoredError(checkpoint.why_not)
    generation, _ = read_defaults(path, checkpoint.config, AGAIN)
    config = model_config(checkpoint.config)
    tensors = split_fused(config, checkpoint.tensors)
    return checkpoint, describe_stored(config, tensors, checkpoint.matrices, checkpoint.files), generation


def base_name(target: Target) -> str:
    """The model's name for shared files: only the last part of a path, so that no path is stored."""
    return Path(target.name).name if Path(target.name).expanduser().exists() else target.name


def name_tokenizer(decoder: Decoder, tokenizer: Any) -> None:
    """Record the tokenizer of a decoder, for ``tokenizer_of``."""
    _tokenizers[decoder] = tokenizer


def tokenizer_of(decoder: Decoder) -> Any:
    """The tokenizer that a decoder was loaded with; None if it is not known."""
    return _tokenizers.get(decoder)


def resolve_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """The torch dtype of a name; None for ``auto``. Raises InputError."""
    if dtype == "auto":
        return None
    known = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if known not in _DTYPES.values():
        raise InputError(
            f"the dtype {str(dtype)!r} is not known{hint(dtype, ('auto', *_DTYPES))}; "
            f"use auto, float32, bfloat16 or float16"
        )
    return known


def resolve_device(device: str) -> torch.device:
    """The torch device of a name. Raises DeviceError if it does not exist."""
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    if device == "cpu":
        return torch.device("cpu")
    match = re.fullmatch(r"cuda(?::(\d+))?", device)
    if match is None:
        raise DeviceError(
            f"the device {device!r} is not known{hint(device, ('auto', 'cpu', 'cuda'))}; use auto, cpu, cuda or cuda:N"
        )
    if not cuda:
        raise DeviceError("there is no CUDA device here; use device='cpu' or a CUDA build of torch")
    number = torch.cuda.current_device() if match[1] is None else int(match[1])
    if number >= cuda:
        raise DeviceError(f"there is no device {device!r}; the CUDA devices are cuda:0 to cuda:{cuda - 1}")
    return torch.device("cuda", number)


def locate(name: str, *, revision: str | None = None) -> Path:
    """The folder or .gguf file of a name, downloaded if necessary."""
    if name == "default":
        from anabranch.model.fetch import default_model_dir

        return default_model_dir()
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise FileError(f"there is no file {name}; give the path of a GGUF file")
        return path
    if name and path.is_dir():
        return _model_folder(path, name)
    if name and path.exists():
        raise FileError(f"{name} is neither a folder nor a .gguf file; give one of these or a hub id")
    if not _HUB_ID.fullmatch(name):
        raise FileError(f"there is no folder {name}; give an existing folder, a .gguf file, a hub id or 'default'")
    return _model_folder(_from_hub(name, revision), name)


def _model_folder(folder: Path, name: str) -> Path:
    if not (folder / "config.json").is_file():
        raise FileError(
            why_no_model(folder, name)
            or f"the folder {name} has no config.json; give a folder with config, weights and tokenizer"
        )
    return folder


def _from_hub(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    by_hand = (
        "copy its config.json, safetensors and tokenizer files into a folder and give that folder's path, "
        "or use 'default', which needs no hub"
    )
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_HUB_FILES))
    except GatedRepoError as error:
        raise FetchError(f"{name} requires an account that accepted its terms; log in, or {by_hand}") from error
    except RepositoryNotFoundError as error:
        raise FetchError(f"there is no folder {name} and no such repository on the hub; {by_hand}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise FetchError(f"there is no folder {name} and the hub cannot be reached; {by_hand}") from error


def _tokenizer(folder: Path) -> Any:
    def unreadable(why: str) -> FileError:
        return FileError(f"{folder} has no readable tokenizer ({why}); copy its tokenizer.json there again")

    with foreign_errors(unreadable):
        loaded = _tokenizer_class(folder).from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        check_tokenizer(loaded)
    return loaded


def check_tokenizer(tokenizer: Any) -> None:
    """Check the attributes of a tokenizer that are used later. Raises TypeError."""
    if not isinstance(getattr(tokenizer, "chat_template", None), str | dict | None):
        raise TypeError("its chat template is not a string")
    if not isinstance(tokenizer.eos_token_id, int | None):
        raise TypeError("its end token is not a single token")
    tokenizer.decode([])


def _tokenizer_class(folder: Path) -> Any:
    """The class that loads a folder's tokenizer.

    AutoTokenizer also looks at the model and so imports PyTorch's compiler, which takes 110 MB and a second. It is not
    needed for a folder that names the generic class.
    """
    described = folder / "tokenizer_config.json"
    named = read_json(described, AGAIN).get("tokenizer_class") if described.is_file() else None
    if named in _GENERAL and (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _eos(stated: tuple[int, ...], tokenizer: Any) -> tuple[int, ...]:
    """All end tokens: those in the configs and the tokenizer's own."""
    own = getattr(tokenizer, "eos_token_id", None)
    return tuple(dict.fromkeys((*stated, *(() if own is None else (own,)))))
