"""N-gram drafts: a Katz back-off model over token ids (Katz 1987), as in staged speculative decoding.

Spector and Ré 2023 draft for their draft model with a trigram model, counted from 120M tokens that it wrote; unigrams
and bigrams are the trivial approximation models of Leviathan et al. 2023, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.drafting.drafter import Drafter, Method, sized
from anabranch.drafting.settings import BUDGETS
from anabranch.drafting.tables import Tables, TableSettings, find_tables
from anabranch.errors import InputError
from anabranch.methods.ngram.counts import build
from anabranch.methods.ngram.drafter import NGramDrafter
from anabranch.methods.ngram.model import NGramModel
from anabranch.methods.ngram.recipes import TRAINING
from anabranch.model.decoder import Decoder

__all__ = ["METHOD", "NGramDrafter", "NGramModel", "NGramSettings"]


@dataclass(frozen=True)
class NGramSettings(TableSettings):
    """Settings of ``ngram:...``, besides those of ``TableSettings``.

    tree   also chain: one continuation, which can be verified by rejection too
    order  length of the n-grams: 3, 2 or 1
    """

    trees = budgeted = ("best", "auto", "chain")
    order: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.order <= 3:
            raise InputError(f"order must be 1, 2 or 3, got {self.order}")


def _build(target: Decoder, settings: NGramSettings, module: object) -> Drafter:
    assert METHOD.tables is not None
    opened = find_tables(METHOD.tables, METHOD.name, target, settings.data)
    model = NGramModel(opened, settings.order)
    return NGramDrafter(model, nodes=settings.nodes, chain=settings.tree == "chain", adaptive=settings.adaptive)


METHOD = Method(
    name="ngram",
    summary="a trigram model of token ids; needs a table of counts (anabranch train ngram)",
    settings=NGramSettings,
    with_source=True,
    build=_build,
    tables=Tables(
        command="ngram",
        training=TRAINING,
        build=build,
    ),
    variants=("", "tree=auto", "tree=chain"),
    candidates=sized(NGramSettings, BUDGETS[:8]),
    detached=True,
    order=lambda source: 1 if source == "ngram" else None,
)
