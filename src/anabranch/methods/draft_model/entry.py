"""A separate small model drafts (Leviathan et al. 2023); and the method's entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from anabranch.drafting.autoregressive import Shape
from anabranch.drafting.drafter import Drafter, Method, numbered, sized
from anabranch.drafting.settings import Settings
from anabranch.errors import CapabilityError, InputError
from anabranch.methods.draft_model.drafter import DraftModelDrafter
from anabranch.methods.draft_model.load import load_draft, shipped_draft
from anabranch.methods.draft_model.module import DraftModule, decoder_of
from anabranch.methods.draft_model.trained import TRAINED
from anabranch.model.decoder import Decoder
from anabranch.model.quantize import check_quantization
from anabranch.support.nearest import hint

__all__ = ["METHOD", "DraftModelSettings", "draft_of"]

TREES = ("best", "chain", "iid", "without", "auto")
MOST = 24  # nodes of a tree whose size the load decides, unless ``nodes`` says otherwise
LONGEST = 10  # tokens of a draft whose length the load decides
BUDGETS = (3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)


@dataclass(frozen=True)
class DraftModelSettings(Settings):
    """Settings of ``draft_model:...``; ``Shape`` says what each means.

    model      folder, .gguf file or hub id of the draft model; empty: the adapter that was trained for the target, or
               without one, the draft model that comes with the package for the target's vocabulary, if there is one
    tree       best, chain, iid, without, auto (best, and the load decides how many nodes), or a number: its nodes
    tokens     depth at most, or auto: up to 10, as the load decides
    nodes      node budget of a best-first tree, root included; 0: 16, or with tree=auto 24
    k          children of a node, or of nodes by depth: 3/2/1; empty: 2, in a best-first tree 16
    threshold  joint probability below which a node is not drafted; a chain ends there
    quantize   none, int8 or int4 weights of the draft model
    """

    paths = ("model",)
    model: str = ""
    tree: str = "best"
    tokens: str = "5"
    nodes: int = 0
    k: str = ""
    threshold: float = 0.0
    quantize: str = "none"

    def __post_init__(self) -> None:
        if self.tree not in TREES:
            raise InputError(f"tree must be one of {', '.join(TREES)}, got {self.tree!r}{hint(self.tree, TREES)}")
        if self.tokens != "auto" and not self.tokens.isdigit():
            raise InputError(f"tokens must be a whole number of at least 1, or auto, got {self.tokens!r}")
        if self.nodes < 0 or self.nodes == 1:
            raise InputError(f"nodes must be at least 2 (the root and one draft), got {self.nodes}")
        if self.nodes and self.tree not in ("best", "auto"):
            raise InputError(f"nodes is the budget of tree=best, got it with tree={self.tree}; use tokens and k there")
        if self.k and not all(width.isdigit() for width in self.k.split("/")):
            raise InputError(f"k must be a whole number, or several by depth as in 3/2/1, got {self.k!r}")
        check_quantization(self.quantize)
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
    def under_load(cls) -> DraftModelSettings:
        """``tree=auto``."""
        return cls(tree="auto")

    @property
    def adaptive(self) -> bool:
        """Whether ``tree=auto`` or ``tokens=auto``."""
        return "auto" in (self.tree, self.tokens)

    @property
    def budget(self) -> int | None:
        """The most nodes of a best-first tree."""
        return self.shape.nodes if self.shape.tree == "best" else None

    @property
    def shape(self) -> Shape:
        """The shape of the trees."""
        tree: Any = "best" if self.tree == "auto" else self.tree
        tokens = LONGEST if self.tokens == "auto" else int(self.tokens)
        nodes = self.nodes or (MOST if self.tree == "auto" else 16)
        widths = tuple(map(int, self.k.split("/"))) if self.k else (16,) if tree == "best" else (2,)
        return Shape(tree, tokens, nodes, widths, self.threshold)


def draft_of(target: Decoder, settings: DraftModelSettings, method: str, module: nn.Module | None = None) -> Decoder:
    """The draft model that the settings of a method name, else the trained one, else one that comes with the package.

    Raises CapabilityError if there is none of these.
    """
    if not settings.model:
        if isinstance(module, DraftModule):
            return decoder_of(module, target)
        if (folder := shipped_draft(target)) is not None:
            return load_draft(str(folder), target, quantize=settings.quantize)
        raise CapabilityError(
            f"the drafter {method!r} needs a draft model with the target's vocabulary, and none is named; name one "
            f"with {method}:model=FOLDER, train one with 'anabranch train draft-model', or use drafter='prompt_lookup'"
        )
    return load_draft(settings.model, target, quantize=settings.quantize)


def _build(target: Decoder, settings: DraftModelSettings, module: nn.Module | None) -> Drafter:
    model = draft_of(target, settings, "draft_model", module)
    return DraftModelDrafter(target, model, settings.shape, adaptive=settings.adaptive)


METHOD = Method(
    name="draft_model",
    summary="a separate small model with the same vocabulary drafts; needs model=FOLDER or a trained adapter",
    settings=DraftModelSettings,
    build=_build,
    trained=TRAINED,
    variants=("", "tree=chain", "tree=auto", "tokens=auto", "tree=iid", "tree=without"),
    candidates=sized(DraftModelSettings, BUDGETS),
    order=numbered("draft"),
)
