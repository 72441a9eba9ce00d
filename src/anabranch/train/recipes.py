"""Recipes: functions that return a typed config. The command line picks one and overrides single options.

paper-lossless     ACL section 2, lossless mode: stream adapters of rank 8 in place of the MLP, no conditioning
small              a first adapter in minutes, to see that everything works
default-adapter    the one that ships for the default model
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from anabranch.errors import InputError
from anabranch.methods.streams.config import StreamConfig
from anabranch.train.objective import LossOptions
from anabranch.train.trainer import TrainOptions

__all__ = ["OPTIONS", "RECIPES", "Recipe", "recipe", "recipe_with"]


@dataclass(frozen=True)
class Recipe:
    """All that decides what a training yields, besides target and data.

    draft_vocabulary  drafts are made of that many tokens, the most frequent of the answers; 0: of all
    held_out          examples that are evaluated on and not trained on
    max_tokens        longer examples are cut there
    """

    streams: StreamConfig = field(default_factory=StreamConfig)
    options: TrainOptions = field(default_factory=TrainOptions)
    draft_vocabulary: int = 0
    held_out: int = 64
    max_tokens: int = 1024

    def __post_init__(self) -> None:
        for name, low in (("draft_vocabulary", 0), ("held_out", 0), ("max_tokens", 16)):
            if getattr(self, name) < low:
                raise InputError(f"{name} must be at least {low}, not {getattr(self, name)}")


def paper_lossless() -> Recipe:
    """The paper's lossless mode with gamma = 4, N_s = 4: the text's tokens alone are learned, all streams alike."""
    return Recipe(StreamConfig(), TrainOptions(loss=LossOptions(decay=1.0, soft=0.0, unconditioned=0.0)))


def small() -> Recipe:
    """Four layers, token-conditioned scoring by the parent, a small draft vocabulary, one epoch."""
    streams = StreamConfig(
        stream_mlp="mlp+adapter", adapter_rank=16, attention_rank=16, conditioning="parent", conditioning_rank=64
    )
    return Recipe(streams, TrainOptions(epochs=1.0), draft_vocabulary=4096, held_out=32, max_tokens=512)


def default_adapter() -> Recipe:
    """The adapter that ships: twelve layers, frozen MLP with deltas, told the root, scoring conditioned on the path."""
    streams = StreamConfig(
        num_streams=5,
        num_stream_layers=12,
        stream_mlp="mlp+adapter",
        adapter_rank=32,
        attention_rank=32,
        conditioning="path",
        conditioning_rank=512,
        root_width=512,
    )
    options = TrainOptions(epochs=3.0, lr=1.5e-3, batch_tokens=2048, keep_states=True)
    return Recipe(streams, options, draft_vocabulary=8192, held_out=96)


RECIPES: dict[str, Callable[[], Recipe]] = {
    "paper-lossless": paper_lossless,
    "small": small,
    "default-adapter": default_adapter,
}


def recipe(name: str) -> Recipe:
    """The recipe of a name; InputError names those that exist."""
    if name not in RECIPES:
        raise InputError(f"there is no recipe {name!r}; recipes are {', '.join(RECIPES)}")
    return RECIPES[name]()


# single options by their names on the command line, and where a recipe keeps them
_STREAMS = {
    "num_streams": "num_streams",
    "stream_layers": "num_stream_layers",
    "stream_mlp": "stream_mlp",
    "adapter_rank": "adapter_rank",
    "attention_rank": "attention_rank",
    "conditioning": "conditioning",
    "conditioning_rank": "conditioning_rank",
    "root_width": "root_width",
    "pruning_rank": "pruning_rank",
}
_LOSS = ("soft", "unconditioned", "decay")
_TRAINING = (
    *("epochs", "lr", "batch_tokens", "schedule", "warmup", "segment", "keep_states", "seed"),
    *("evaluate_every", "checkpoint_every"),
)
_RECIPE = ("draft_vocabulary", "held_out", "max_tokens")
OPTIONS = (*_STREAMS, *_LOSS, *_TRAINING, *_RECIPE)


def recipe_with(name: str, given: Mapping[str, Any]) -> Recipe:
    """The recipe of a name with those of ``OPTIONS`` that are ``given`` in place of its own."""
    plan = recipe(name)
    shape = {field: given[option] for option, field in _STREAMS.items() if option in given}
    if shape.get("conditioning") == "none":
        shape.setdefault("conditioning_rank", 0)
    loss = replace(plan.options.loss, **{option: given[option] for option in _LOSS if option in given})
    options = replace(plan.options, loss=loss, **{option: given[option] for option in _TRAINING if option in given})
    rest = {option: given[option] for option in _RECIPE if option in given}
    return replace(plan, streams=replace(plan.streams, **shape), options=options, **rest)
