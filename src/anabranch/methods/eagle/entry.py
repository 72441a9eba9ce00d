"""EAGLE (Li et al. 2024): one autoregressive layer on the target's features drafts; and the method's entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from anabranch.drafting.autoregressive import Shape
from anabranch.drafting.drafter import Drafter, Method, numbered, sized
from anabranch.drafting.settings import Settings
from anabranch.errors import CapabilityError, InputError
from anabranch.methods.eagle.counting import COUNTS
from anabranch.methods.eagle.drafter import STATIC_NODES, EagleDrafter
from anabranch.methods.eagle.module import EagleModule
from anabranch.methods.eagle.trained import TRAINED
from anabranch.model.decoder import Decoder

__all__ = ["METHOD", "EagleSettings"]

TREES = ("best", "static", "chain", "auto")
MOST = 24  # nodes of a tree whose size the load decides, unless ``nodes`` says otherwise
BUDGETS = (3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
# tokens per step and speedup on MT-Bench, for Vicuna, as Speculative Streaming's paper quotes them (ACL tables 6 and 1)
PUBLISHED = {"Llama-2-7B": (3.94, 2.90), "Llama-2-13B": (3.98, 3.07), "Vicuna-33B": (3.68, 2.95)}


@dataclass(frozen=True)
class EagleSettings(Settings):
    """Settings of ``eagle:...``.

    tree       best (EAGLE-2: the nodes of the highest joint probability), static (EAGLE-1's tree), chain, auto (best,
               and the load decides how many nodes), or a number: best with so many nodes
    nodes      node budget, root included; 0: 16, with tree=auto 24, with tree=static all 26
    depth      tokens on a path at most
    k          children of a node at most
    threshold  nodes of a lower joint probability are left out
    """

    tree: str = "best"
    nodes: int = 0
    depth: int = 5
    k: int = 10
    threshold: float = 0.0

    def __post_init__(self) -> None:
        if self.tree not in TREES:
            raise InputError(f"tree must be a number of nodes or one of {', '.join(TREES)}, got {self.tree!r}")
        if self.nodes < 0 or self.nodes == 1:
            raise InputError(f"nodes must be at least 2 (the root and one draft), got {self.nodes}")
        if self.nodes and self.tree == "chain":
            raise InputError(f"nodes is the budget of a tree, got it with tree={self.tree}; use depth there")
        if self.depth < 1:
            raise InputError(f"depth must be at least 1, got {self.depth}")
        _ = self.shape

    @classmethod
    def alias(cls, key: str, value: str) -> tuple[str, str]:
        """``tree=32`` is short for ``nodes=32``. Refuses a zero that would stand for the default."""
        if key == "tree" and value.isdigit():
            key = "nodes"
        if key == "nodes" and value.isdigit() and int(value) == 0:
            raise InputError(f"nodes must be at least 2 (the root and one draft), got {value}")
        return key, value

    @classmethod
    def under_load(cls) -> EagleSettings:
        """``tree=auto``."""
        return cls(tree="auto")

    @property
    def adaptive(self) -> bool:
        """Whether ``tree=auto``."""
        return self.tree == "auto"

    @property
    def budget(self) -> int:
        """The most nodes of a tree."""
        return self.shape.size

    @property
    def shape(self) -> Shape:
        """The shape of the trees; the static tree is cut to it."""
        tree: Any = "chain" if self.tree == "chain" else "best"
        nodes = self.nodes or {"auto": MOST, "static": STATIC_NODES}.get(self.tree, 16)
        return Shape(tree, self.depth, nodes, (self.k,), self.threshold)


def _build(target: Decoder, settings: EagleSettings, module: nn.Module | None) -> Drafter:
    if module is None:
        raise CapabilityError(
            "the drafter 'eagle' needs a head that was trained for this target, and there is none; give one with "
            "adapter=FOLDER, train one with 'anabranch train eagle', or use drafter='prompt_lookup'"
        )
    assert isinstance(module, EagleModule)
    return EagleDrafter(target, module, settings.shape, static=settings.tree == "static", adaptive=settings.adaptive)


METHOD = Method(
    name="eagle",
    summary="EAGLE: one autoregressive layer on the target's features drafts; needs a trained head",
    settings=EagleSettings,
    build=_build,
    trained=TRAINED,
    variants=("", "tree=auto", "tree=chain", "tree=static"),
    candidates=sized(EagleSettings, BUDGETS),
    order=numbered("eagle"),
    counts=COUNTS,
    published=PUBLISHED,
)
