"""The contenders: parse and check ``LABEL=SPEC`` before anything is loaded, and open them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Literal

from anabranch.bench.peers import open_peer, parse_peer
from anabranch.bench.peers.environments import find_python
from anabranch.bench.run import Contender, Ours
from anabranch.control.profiles import settle
from anabranch.declared import Keywords
from anabranch.drafting.settings import pieces
from anabranch.errors import InputError
from anabranch.loading import Loaded
from anabranch.methods import AUTO, make_drafter, parse_spec, resolve_spec
from anabranch.methods import methods as known_methods
from anabranch.model.quantize import ROUNDINGS, Rounding, rounding_of
from anabranch.options import sampling_params
from anabranch.support.files import without_folders

__all__ = [
    "PLAIN",
    "Entry",
    "check_installed",
    "listed",
    "open_entry",
    "plain_of",
    "quantised",
    "read_entries",
    "split_weights",
]

PLAIN = "none"


@dataclass(frozen=True)
class Entry:
    """One contender as requested.

    name     its label in tables
    spec     of a drafter of ours, or of a peer
    weights  the target's weights as loaded ("none"), or quantised: another target, with its own plain decoding
    """

    name: str
    spec: str
    kind: Literal["ours", "peer"] = "ours"
    weights: Rounding = "none"


def read_entries(methods: Sequence[str], peers: Sequence[str]) -> list[Entry]:
    """Entries of ``[LABEL=]SPEC[@int8|@int4]`` texts, and of plain decoding with each kind of weights.

    A label ends at the first "=" unless a ":" comes before it: ``wide=NAME:nodes=32``, but ``NAME:nodes=32``.
    Contenders are compared with plain decoding of the same weights; peers, with the weights as loaded. Raises
    InputError for an unknown method, peer or setting, or for two contenders with the same label.
    """
    entries: list[Entry] = []
    for text in methods:
        name, whole = _label(text)
        spec, weights = split_weights(whole)
        parse_spec(spec)
        entries.append(Entry(name, spec, weights=rounding_of(weights)))
    for text in peers:
        name, spec = _label(text)
        parse_peer(spec)
        entries.append(Entry(name, spec, "peer"))
    for place, weights in enumerate(ROUNDINGS):
        used = weights == "none" or any(entry.weights == weights for entry in entries)
        if used and plain_of(entries, weights) is None:
            entries.insert(place, Entry(PLAIN if weights == "none" else f"{PLAIN}@{weights}", PLAIN, weights=weights))
    names = [entry.name for entry in entries]
    if twice := [entry for entry in entries if names.count(entry.name) > 1]:
        name = twice[0].name
        other = [entry for entry in twice if entry.name == name][-1]
        label = "again" if "again" not in names else f"{name}-2"
        spec = other.spec if other.weights == "none" else f"{other.spec}@{other.weights}"
        raise InputError(f"two contenders are named {name!r}; label one of them, as in {label}={spec}")
    return entries


def check_installed(entries: Sequence[Entry]) -> None:
    """Raise CapabilityError for a peer that is not installed."""
    for entry in entries:
        if entry.kind == "peer":
            environment = parse_peer(entry.spec)[0].environment
            if environment is not None:
                find_python(environment)


def plain_of(entries: Sequence[Entry], weights: Rounding) -> str | None:
    """The name of the plain decoding of these weights."""
    names = (e.name for e in entries if e.kind == "ours" and e.spec == PLAIN and e.weights == weights)
    return next(names, None)


def listed(text: str) -> list[str]:
    """The contenders of a list separated by commas; a comma before a setting or inside a path separates nothing.

    >>> listed("auto,fast=suffix:nodes=8,tree=auto,none")
    ['auto', 'fast=suffix:nodes=8,tree=auto', 'none']
    """
    names = {AUTO, *(method.name for method in known_methods())}
    settings = {field.name for method in known_methods() for field in fields(method.settings)}

    def continues(before: str, after: str) -> bool:
        label, equals, spec = after.partition("=")
        word = spec if equals and label.strip().isidentifier() else after
        starts = re.split("[:+@]", word, maxsplit=1)[0].strip() in names
        return ":" in before and (not starts or label.strip() in settings)

    return pieces(text, ",", continues)


def quantised(text: str, kind: Rounding) -> str:
    """The contender, with this kind of weights unless it names one or ``kind`` is "none"."""
    return text if kind == "none" or split_weights(text)[1] != "none" else f"{text}@{kind}"


def split_weights(text: str) -> tuple[str, str]:
    """The specification and the kind of weights of ``SPEC[@KIND]``; an @ before a slash, as in a path, is no kind."""
    match = re.fullmatch(r"(.*)@(\w+)", text, re.DOTALL)
    return (text, "none") if match is None else (match[1], match[2])


def _label(text: str) -> tuple[str, str]:
    label, equals, spec = text.partition("=")
    if not equals or ":" in label:
        return without_folders(text.strip()), text.strip()
    if not label.strip() or not spec.strip():
        raise InputError(f"a contender must be SPEC or LABEL=SPEC, as in fast=auto, got {text!r}")
    return label.strip(), spec.strip()


def open_entry(
    entry: Entry,
    loaded: Loaded,
    *,
    call: Keywords,
    threads: int,
    capacity: int,
) -> Contender:
    """Prepare the contender for decoding with the options ``call``; starts a peer's process and loads its weights."""
    if entry.kind == "peer":
        return open_peer(entry.spec, loaded.target, sampling=sampling_params(call), threads=threads, capacity=capacity)
    target = loaded.target
    spec = resolve_spec(entry.spec, *loaded.modules)
    drafter = make_drafter(spec, target.decoder, *loaded.modules)
    controller = None
    if drafter.adaptive:
        controller = partial(settle(target, loaded.adapters).controller, target.decoder)
    return Ours(target, drafter, capacity=capacity, call=call, spec=str(spec), controller=controller)
