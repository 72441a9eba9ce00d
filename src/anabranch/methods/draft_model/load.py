"""Load a draft model for a target, and compare their vocabularies."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from anabranch.errors import CapabilityError
from anabranch.model.config import EncoderConfig
from anabranch.model.decoder import Decoder
from anabranch.model.load import load_target, locate, tokenizer_of
from anabranch.model.native_linear import NativeLinear
from anabranch.model.pack import pack_decoder
from anabranch.model.quantize import check_quantization
from anabranch.support.jsonfiles import read_json

__all__ = ["SHIPPED", "check_vocabulary", "identify", "identity_of", "load_draft", "shipped_draft"]

NAMED = 3  # differing tokens that a message names
SHIPPED = Path(__file__).with_name("shipped")  # a folder for each draft model that comes with the package
_loaded: WeakValueDictionary[tuple[str, ...], Decoder] = WeakValueDictionary()
_identities: WeakKeyDictionary[Decoder, str] = WeakKeyDictionary()


def load_draft(name: str, target: Decoder, *, quantize: str = "auto") -> Decoder:
    """The draft model of a name in the target's type, on its device, packed where the target is.

    ``name`` is whatever ``anabranch.load`` takes. Drafters of one draft model share it. Raises what loading a target
    raises, and CapabilityError where it reads other things than the target, or the vocabularies differ by more than
    padding.
    """
    check_quantization(quantize)
    path = locate(name).resolve()
    packed = target.backend.kernels is not None or isinstance(target.head, NativeLinear)
    key = (str(path), quantize, str(target.dtype), str(target.device), str(packed))
    model = _loaded.get(key)
    if model is None:
        # a dtype that is asked for is one to dequantise to
        free = quantize == "auto" and packed and target.dtype == torch.bfloat16
        loaded = load_target(
            str(path), dtype="auto" if free else target.dtype, device=str(target.device), quantize=quantize
        )
        model = loaded.decoder if loaded.quantize == "stored" else loaded.decoder.to(target.dtype)
        identify(model, f"{loaded.fingerprint} {loaded.quantize}")
        if packed:
            pack_decoder(model)
        _loaded[key] = model
    check_sides(target, model)  # whose sentence says more than that about the vocabularies
    theirs, own = tokenizer_of(target), tokenizer_of(model)
    if theirs is not None and own is not None:
        check_vocabulary(theirs.get_vocab(), own.get_vocab(), name)
    return model


def identify(model: Decoder, identity: str) -> None:
    """Record the identity of a draft model's weights: packed ones have none that could be computed."""
    _identities[model] = identity


def identity_of(model: Decoder) -> str | None:
    """The recorded identity of a draft model's weights; None if it is not known."""
    return _identities.get(model)


def shipped_draft(target: Decoder) -> Path | None:
    """The folder of the draft model that comes with the package and has the target's token ids; None without one."""
    tokenizer = tokenizer_of(target)
    words = {} if tokenizer is None else tokenizer.get_vocab()
    own = hash(frozenset(words.items()))
    for path in sorted(SHIPPED.glob("*/tokenizer.json")) if words else ():
        if _hash_of_vocabulary(path) == own:
            return path.parent
    return None


@cache
def _hash_of_vocabulary(path: Path) -> int:
    """Hash of the token ids in a tokenizer's file, which takes a few tenths of a second to read."""
    record = read_json(path, "install the package again")
    added = {token["content"]: token["id"] for token in record["added_tokens"]}
    return hash(frozenset((record["model"]["vocab"] | added).items()))


def check_vocabulary(target: Mapping[str, int], draft: Mapping[str, int], name: str) -> None:
    """Compare two tokenizers' token ids; ids that no token has are padding. Raises CapabilityError."""
    if target == draft:
        return
    theirs, own = ({number: token for token, number in words.items()} for words in (target, draft))
    wrong = [number for number in sorted({*theirs, *own}) if theirs.get(number) != own.get(number)]
    if not wrong:
        return
    named = ", ".join(f"{number} is {_told(theirs, number)} and {_told(own, number)}" for number in wrong[:NAMED])
    more = f", and {len(wrong) - NAMED:,} more differ" if len(wrong) > NAMED else ""
    raise CapabilityError(
        f"the draft model {name} has another vocabulary than the target: token id {named}{more}; use a draft model "
        "with the target's tokenizer"
    )


def _told(words: Mapping[int, str], number: int) -> str:
    return ascii(words[number]) if number in words else "no token"


def check_sides(target: Decoder, model: Decoder) -> None:
    """Raise CapabilityError for a draft model that reads other things than the target."""
    reads = [_reading(encoder) for encoder in (target.config.encoder, model.config.encoder)]
    if reads[0] != reads[1]:
        raise CapabilityError(
            f"the draft model reads {reads[1]} and the target reads {reads[0]}; use a draft model of the target's kind"
        )


def _reading(encoder: EncoderConfig | None) -> str:
    if encoder is None:
        return "no source"
    return f"sound in {encoder.channels} mel bins" if encoder.channels else "a source text"
