"""Speculative Streaming: adapter, multi-stream attention, pruning, scoring, drafting, and the method's entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from anabranch.errors import CapabilityError, InputError
from anabranch.methods.base import Drafter, Method, numbered, sized
from anabranch.methods.settings import Settings
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.counting import COUNTS
from anabranch.methods.streams.draft import DraftOptions
from anabranch.methods.streams.drafter import StreamDrafter
from anabranch.methods.streams.recipes import TRAINED
from anabranch.model.decoder import Decoder

__all__ = ["METHOD", "StreamSettings"]

TREES = ("best", "product", "chain", "auto")
MOST = 24  # default node budget if the size of trees follows the load
BUDGETS = (3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
# tokens per step and speedup of lossless Speculative Streaming on MT-Bench, for Vicuna (ACL tables 6 and 1)
PUBLISHED = {"Llama-2-7B": (3.52, 3.08), "Llama-2-13B": (3.63, 3.21), "Vicuna-33B": (3.75, 3.24)}


@dataclass(frozen=True)
class StreamSettings(Settings):
    """Settings of ``streams:...``; see ``DraftOptions`` and ``StreamDrafter`` for those not described here.

    tree   best, product, chain, auto (best, with a size that follows the load), or a number: best with so many nodes
    nodes  node budget, counting the root; 0: 16, or with tree=auto 24
    k      maximum number of children of a node; 0: 16, or in a product tree 3
    """

    tree: str = "best"
    nodes: int = 0
    k: int = 0
    depth: int = 0
    frontier: int = 12
    threshold: float = 0.0
    shortlist: int = 0
    condition: bool = True
    prune: int = 0
    placement: str = "auto"

    def __post_init__(self) -> None:
        if self.tree not in TREES:
            raise InputError(f"tree must be a number of nodes or one of {', '.join(TREES)}, got {self.tree!r}")
        if self.nodes < 0 or self.nodes == 1:
            raise InputError(f"nodes must be at least 2 (the root and one draft), got {self.nodes}")
        if self.k < 0:
            raise InputError(f"k must be at least 1, got {self.k}")
        _ = self.options

    @classmethod
    def alias(cls, key: str, value: str) -> tuple[str, str]:
        """``tree=32`` is short for ``nodes=32``."""
        if key == "tree" and value.isdigit():
            if int(value) < 2:
                raise InputError(f"nodes must be at least 2 (the root and one draft), got {value}")
            return "nodes", value
        if key in ("nodes", "k") and value.isdigit() and int(value) == 0:
            raise InputError(f"{key} must be at least {2 if key == 'nodes' else 1}, got {value}")
        return key, value

    @classmethod
    def under_load(cls) -> StreamSettings:
        """``tree=auto``."""
        return cls(tree="auto")

    @property
    def adaptive(self) -> bool:
        """Whether ``tree=auto``."""
        return self.tree == "auto"

    @property
    def budget(self) -> int:
        """The maximum number of nodes of a tree."""
        return self.options.nodes

    @property
    def options(self) -> DraftOptions:
        """The options that turn stream states into a tree."""
        nodes = self.nodes or (MOST if self.adaptive else 16)
        k = self.k or (3 if self.tree == "product" else 16)
        tree: Any = "best" if self.adaptive else self.tree
        return DraftOptions(tree, nodes, k, self.depth, self.frontier, self.threshold, self.shortlist, self.condition)


def _build(target: Decoder, settings: StreamSettings, module: nn.Module | None) -> Drafter:
    if module is None:
        raise CapabilityError(
            "the drafter 'streams' needs an adapter that was trained for this target, and there is none; give one "
            "with adapter=FOLDER, train one with 'anabranch train streams', or use drafter='prompt_lookup'"
        )
    assert isinstance(module, StreamAdapter)
    placement: Any = settings.placement
    return StreamDrafter(
        target, module, settings.options, prune=settings.prune, placement=placement, adaptive=settings.adaptive
    )


METHOD = Method(
    name="streams",
    summary="Speculative Streaming: the model's own streams draft; needs a trained adapter",
    settings=StreamSettings,
    build=_build,
    trained=TRAINED,
    candidates=sized(StreamSettings, BUDGETS),
    default=True,
    order=numbered("stream"),
    counts=COUNTS,
    published=PUBLISHED,
)
