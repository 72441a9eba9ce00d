"""Retrieval-based drafts (REST): He et al. 2024, "REST: Retrieval-Based Speculative Decoding"."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.drafting.drafter import Drafter, Method, sized
from anabranch.drafting.settings import BUDGETS
from anabranch.drafting.tables import Tables, TableSettings, find_tables
from anabranch.errors import InputError
from anabranch.methods.rest.datastore import Datastore
from anabranch.methods.rest.drafter import RestDrafter
from anabranch.methods.rest.recipes import TRAINING
from anabranch.methods.rest.suffixes import WIDTH, build
from anabranch.model.decoder import Decoder

__all__ = ["METHOD", "Datastore", "RestDrafter", "RestSettings"]


@dataclass(frozen=True)
class RestSettings(TableSettings):
    """Settings of ``rest:...``, besides those of ``TableSettings``.

    ngram    maximum length of a match
    depth    maximum number of drafted tokens of a continuation
    matches  maximum number of continuations read per match, evenly spread over all of them
    """

    ngram: int = 16
    depth: int = 10
    matches: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.ngram <= WIDTH:
            raise InputError(f"ngram must be from 1 to {WIDTH}, got {self.ngram}")
        for name in ("depth", "matches"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")


def _build(target: Decoder, settings: RestSettings, module: object) -> Drafter:
    assert METHOD.tables is not None
    return RestDrafter(
        Datastore(find_tables(METHOD.tables, METHOD.name, target, settings.data)),
        nodes=settings.nodes,
        ngram=settings.ngram,
        depth=settings.depth,
        matches=settings.matches,
        adaptive=settings.adaptive,
    )


METHOD = Method(
    name="rest",
    summary="continuations of the longest match in a datastore of text; needs one (anabranch train datastore)",
    settings=RestSettings,
    with_source=True,
    build=_build,
    tables=Tables(
        command="datastore",
        training=TRAINING,
        build=build,
    ),
    variants=("", "tree=auto"),
    candidates=sized(RestSettings, BUDGETS[:8]),
    detached=True,
    order=lambda source: 1 if source == "rest" else None,
)
