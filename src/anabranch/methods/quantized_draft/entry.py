"""Quantised self-speculation: a 4-bit copy of the target drafts, alone or in front of streams; the method's entry."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from anabranch.drafting.drafter import Drafter, Method
from anabranch.drafting.settings import Settings
from anabranch.methods.quantized_draft.copy import COPY
from anabranch.methods.quantized_draft.drafter import QuantizedDrafter
from anabranch.methods.quantized_draft.lead import LeadStreamDrafter
from anabranch.methods.streams.draft import StreamSettings
from anabranch.methods.streams.entry import METHOD as STREAMS
from anabranch.methods.streams.entry import TRAINED
from anabranch.model.decoder import Decoder

__all__ = ["METHOD", "QuantizedSettings"]

MOST = 8  # tokens


@dataclass(frozen=True)
class QuantizedSettings(Settings):
    """Settings of ``quantized_draft:...``.

    tokens  tokens that the copy drafts, from 1 to 8; auto: alone as many as pay under the load, in front of streams one
            where one row is decoded and none for several
    """

    load = "tokens"
    tokens: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_count("tokens", 1, MOST)


def _build(target: Decoder, settings: QuantizedSettings, module: nn.Module | None) -> Drafter:
    tokens = MOST if settings.adaptive else int(settings.tokens)
    return QuantizedDrafter(target, tokens, adaptive=settings.adaptive)


def _before_streams(
    target: Decoder, settings: QuantizedSettings, streams: StreamSettings, module: nn.Module | None
) -> Drafter:
    tokens = None if settings.adaptive else int(settings.tokens)
    return LeadStreamDrafter(target, TRAINED.require(module, STREAMS.name), streams, tokens=tokens)


METHOD = Method(
    name="quantized_draft",
    summary="quantised self-speculation: a 4-bit copy of the target drafts; needs bf16 weights on the native kernels",
    settings=QuantizedSettings,
    build=_build,
    variants=("", "tokens=4"),
    labels=(COPY,),
    pairs={STREAMS.name: _before_streams},
)
