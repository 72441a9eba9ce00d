"""Staged speculative decoding (Spector & Re 2023): the draft model's own decoding is drafted for, too.

    inner drafter  guesses what the draft model will draft
    draft model    judges these guesses in one pass and drafts a tree, shaped by probability under a node budget
    target         verifies the tree

The tree is the one that the draft model drafts without the inner drafter; it takes fewer passes of the draft model. The
inner drafter may be a smaller draft model, with an inner drafter of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from anabranch.drafting.drafter import Drafter, Method, sized
from anabranch.drafting.settings import BUDGETS
from anabranch.errors import InputError
from anabranch.methods import prompt_lookup, suffix
from anabranch.methods.draft_model import entry as draft_model
from anabranch.methods.draft_model.drafter import GUESSES, DraftModelDrafter, DraftModelSettings
from anabranch.methods.draft_model.entry import TRAINED, draft_of
from anabranch.methods.ngram import entry as ngram
from anabranch.methods.rest import entry as rest
from anabranch.methods.spec import Spec, build, parse
from anabranch.model.decoder import Decoder
from anabranch.support.nearest import hint

__all__ = ["METHOD", "StagedDrafter", "StagedSettings"]


class StagedDrafter(DraftModelDrafter):
    """A draft model with an inner drafter."""

    name = "staged"


@dataclass(frozen=True)
class StagedSettings(DraftModelSettings):
    """Settings of ``staged:...``: those of ``draft_model``, and the inner drafter.

    inner    its specification, with ; between settings: inner=prompt_lookup:tokens=4;ngram=2. draft_model or staged put
             a second, smaller draft model inside, and staged a drafter inside that
    guesses  of the inner drafter in one pass of the draft model, at most
    """

    inner: str = "prompt_lookup"
    guesses: int = GUESSES

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.guesses < 1:
            raise InputError(f"guesses must be at least 1, got {self.guesses}")
        known = [method.name for method in _inner()]
        if (name := self.inner.partition(":")[0].strip()) not in known:
            raise InputError(f"inner must be one of {', '.join(known)}, got {name!r}{hint(name, known)}")
        _ = self.guesser

    @property
    def guesser(self) -> Spec:
        """The specification of the inner drafter."""
        return parse(self.inner.replace(";", ","), _inner())


def _inner() -> tuple[Method, ...]:
    """The methods that may guess a draft model's tokens."""
    return prompt_lookup.METHOD, suffix.METHOD, ngram.METHOD, rest.METHOD, draft_model.METHOD, METHOD


def _build(target: Decoder, settings: StagedSettings, module: nn.Module | None) -> Drafter:
    model = draft_of(target, settings, "staged", module)
    inner = build(settings.guesser, model, [])
    return StagedDrafter(target, model, settings, inner=inner, guesses=settings.guesses)


METHOD = Method(
    name="staged",
    summary="a draft model whose own tokens are drafted for in turn; needs the same",
    settings=StagedSettings,
    with_source=True,
    build=_build,
    reads=TRAINED,
    variants=("", "tree=auto", "tree=chain", "tree=iid", "tree=without"),
    candidates=sized(StagedSettings, BUDGETS),
)
