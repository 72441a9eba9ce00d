"""Who takes part: ``LABEL=SPEC`` read from the command line, checked before anything is loaded, and opened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from anabranch.bench.contenders import Contender, Ours
from anabranch.bench.peers import open_peer, parse_peer
from anabranch.drafters import check_spec, make_drafter
from anabranch.errors import InputError
from anabranch.model.load import Target
from anabranch.sampling import SamplingParams
from anabranch.streams.adapter import StreamAdapter

__all__ = ["PLAIN", "Entry", "open_entry", "read_entries"]

PLAIN = "none"


@dataclass(frozen=True)
class Entry:
    """One contender as asked for: ``name`` in tables, ``spec`` of a drafter of ours or of a peer."""

    name: str
    spec: str
    kind: Literal["ours", "peer"] = "ours"


def read_entries(methods: Sequence[str], peers: Sequence[str]) -> list[Entry]:
    """Entries of ``[LABEL=]SPEC`` texts, plain decoding among them: all is compared with it.

    A label ends at the first "=" if no ":" comes before it: ``wide=streams:nodes=32``, but ``streams:nodes=32``.
    Raises InputError for an unknown method, peer or setting, or for a name that two contenders would have.
    """
    entries: list[Entry] = []
    for text in methods:
        name, spec = _label(text)
        check_spec(spec)
        entries.append(Entry(name, spec))
    for text in peers:
        name, spec = _label(text)
        parse_peer(spec)
        entries.append(Entry(name, spec, "peer"))
    if all(entry.spec != PLAIN for entry in entries):
        entries.insert(0, Entry(PLAIN, PLAIN))
    names = [entry.name for entry in entries]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"two contenders are named {twice[0]!r}; name one of them, as in again={twice[0]}")
    return entries


def _label(text: str) -> tuple[str, str]:
    label, equals, spec = text.partition("=")
    if not equals or ":" in label:
        return text.strip(), text.strip()
    if not label.strip() or not spec.strip():
        raise InputError(f"{text!r} names nothing; write LABEL=SPEC, as in wide=streams:nodes=32")
    return label.strip(), spec.strip()


def open_entry(
    entry: Entry,
    target: Target,
    adapter: StreamAdapter | None,
    *,
    sampling: SamplingParams,
    threads: int,
    capacity: int,
) -> Contender:
    """Make the contender ready to decode; a peer starts its process and loads its weights here."""
    if entry.kind == "ours":
        drafter = make_drafter(entry.spec, target.decoder, adapter)
        return Ours(entry.name, target, drafter, capacity=capacity, sampling=sampling)
    return open_peer(entry.spec, target, sampling=sampling, threads=threads, capacity=capacity)
