"""Speculative Streaming: adapter, multi-stream attention, pruning, scoring, drafting, and the method's entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from anabranch.drafting.drafter import Drafter, Method, numbered, sized
from anabranch.errors import CapabilityError
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.copying import COPIED
from anabranch.methods.streams.counting import COUNTS
from anabranch.methods.streams.draft import DraftOptions
from anabranch.methods.streams.drafter import StreamDrafter
from anabranch.methods.streams.settings import TreeSettings
from anabranch.methods.streams.trained import TRAINED
from anabranch.model.decoder import Decoder

__all__ = ["METHOD", "StreamSettings", "adapter_of"]

LAST = 99  # rank of what is copied among the sources
BUDGETS = (3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
# tokens per step and speedup of lossless Speculative Streaming on MT-Bench, for Vicuna (ACL tables 6 and 1)
PUBLISHED = {"Llama-2-7B": (3.52, 3.08), "Llama-2-13B": (3.63, 3.21), "Vicuna-33B": (3.75, 3.24)}


@dataclass(frozen=True)
class StreamSettings(TreeSettings):
    """Settings of ``streams:...``, besides those of trees.

    shortlist  number of each stream's best tokens whose conditioned scores are computed; 0: the whole draft vocabulary
    condition  use the adapter's conditioning, if it has any
    copy       mix in what followed earlier matches in the text (greedy rows, best-first trees, native kernels)
    prune      number of nodes that the early-exit layer keeps; 0: no pruning
    placement  ride in the target's pass (the paper), trail it, or auto: trail on a CPU and with an adapter that
               conditions its streams on the emitted token, otherwise ride
    """

    shortlist: int = 0
    condition: bool = True
    copy: bool = False
    prune: int = 0
    placement: str = "auto"

    @classmethod
    def in_auto(cls) -> StreamSettings:
        """``tree=auto,copy=yes``."""
        return cls(tree="auto", copy=True)

    @property
    def additions(self) -> Mapping[str, bool]:
        """``copy``, if it is on."""
        return {"copy": True} if self.copy else {}

    @property
    def options(self) -> DraftOptions:
        """The options that turn stream states into a tree."""
        return replace(super().options, shortlist=self.shortlist, condition=self.condition, copy=self.copy)


def adapter_of(module: nn.Module | None) -> StreamAdapter:
    """The stream adapter that was trained for a target. Raises CapabilityError if there is none."""
    if module is None:
        raise CapabilityError(
            "the drafter 'streams' needs an adapter that was trained for this target, and there is none; give one "
            "with adapter=FOLDER, train one with 'anabranch train streams', or use drafter='prompt_lookup'"
        )
    assert isinstance(module, StreamAdapter)
    return module


def _build(target: Decoder, settings: StreamSettings, module: nn.Module | None) -> Drafter:
    return StreamDrafter(
        *(target, adapter_of(module), settings.options),
        prune=settings.prune,
        placement=settings.placement,
        adaptive=settings.adaptive,
    )


def _order(source: str) -> int | None:
    return numbered("stream")(source) or (LAST if source == COPIED else None)


METHOD = Method(
    name="streams",
    summary="Speculative Streaming: the model's own streams draft; needs a trained adapter",
    settings=StreamSettings,
    build=_build,
    trained=TRAINED,
    variants=("", "tree=chain", "tree=auto", "tree=product", "tree=chain,prune=3", "placement=ride"),
    candidates=sized(StreamSettings, BUDGETS),
    default=True,
    order=_order,
    counts=COUNTS,
    published=PUBLISHED,
)
