"""Recipes: what a training yields follows from one frozen record. A recipe is a function that returns one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from anabranch.errors import InputError

__all__ = ["COMMON", "Option", "Recipe", "TrainOptions"]


@dataclass(frozen=True)
class TrainOptions:
    """How long and how fast.

    batch_tokens      padded text tokens of a step
    lr                peak learning rate
    segment           positions trained at a time; bounds the memory
    keep_states       run the frozen target over each batch once and keep what the objective needs of it, on a CPU in an
                      unnamed file in the run's folder, on a GPU in its memory: later epochs cost half. Batches then
                      have the same members in every epoch, in another order
    evaluate_every    steps between evaluations; 0: six evaluations a run, but every 10 to 200 steps
    evaluate_rows     held-out examples of each of these evaluations; the last one is of all
    checkpoint_every  steps between checkpoints
    """

    epochs: float = 3.0
    batch_tokens: int = 2048
    lr: float = 1e-3
    warmup: int = 50
    schedule: Literal["cosine", "linear"] = "cosine"
    weight_decay: float = 0.0
    clip: float = 1.0
    segment: int = 128
    keep_states: bool = False
    seed: int = 0
    evaluate_every: int = 0
    evaluate_rows: int = 48
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        for name in ("epochs", "lr", "clip"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} must be greater than 0, got {getattr(self, name)}")
        lowest = {"batch_tokens": 1, "segment": 1, "warmup": 0, "evaluate_every": 0, "checkpoint_every": 1}
        for name, low in lowest.items():
            if getattr(self, name) < low:
                raise InputError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if self.schedule not in ("cosine", "linear"):
            raise InputError(f"schedule must be cosine or linear, got {self.schedule!r}")


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a training yields, besides target and data.

    config            the method's config: the shape of its module
    loss              the method's weights of the loss
    draft_vocabulary  number of tokens that drafts are made of, the most frequent of the completions; 0: all
    held_out          examples that are evaluated on and not trained on
    max_tokens        longer examples are cut there
    """

    config: Any
    loss: Any
    options: TrainOptions = field(default_factory=TrainOptions)
    draft_vocabulary: int = 0
    held_out: int = 64
    max_tokens: int = 1024

    def __post_init__(self) -> None:
        for name, low in (("draft_vocabulary", 0), ("held_out", 0), ("max_tokens", 16)):
            if getattr(self, name) < low:
                raise InputError(f"{name} must be at least {low}, got {getattr(self, name)}")

    def changed(self, options: Mapping[str, Option], given: Mapping[str, Any]) -> Recipe:
        """The same with the ``given`` values of ``options`` in place of its own. Raises InputError."""
        if unknown := [name for name in given if name not in options]:
            raise InputError(f"there is no option {unknown[0]!r}; options are {', '.join(options)}")
        parts: dict[str, dict[str, Any]] = {"config": {}, "loss": {}, "options": {}, "": {}}
        for name, value in given.items():
            option = options[name]
            parts[option.part][option.field or name] = value
        whole = parts.pop("")
        return replace(self, **whole, **{name: replace(getattr(self, name), **part) for name, part in parts.items()})


@dataclass(frozen=True)
class Option:
    """A single value of a recipe that users may override.

    kind   type of its value
    help   one line
    part   where a recipe keeps it: in its ``config``, ``loss`` or ``options``, or itself ("")
    field  its name there, if another
    """

    kind: type[int] | type[float] | type[bool] | type[str]
    help: str
    part: Literal["config", "loss", "options", ""] = "options"
    field: str = ""


# what every method's recipe has
COMMON: dict[str, Option] = {
    "epochs": Option(float, "passes over the data"),
    "lr": Option(float, "peak learning rate"),
    "batch_tokens": Option(int, "padded tokens per step"),
    "schedule": Option(str, "cosine or linear"),
    "warmup": Option(int, "steps until the peak learning rate"),
    "segment": Option(int, "positions trained at a time; bounds the memory"),
    "keep_states": Option(
        bool, "keep the target's states: on a CPU in an unnamed file in the run's folder, on a GPU in its memory"
    ),
    "seed": Option(int, "seed of the initial weights and the order of batches"),
    "evaluate_every": Option(int, "steps between evaluations"),
    "checkpoint_every": Option(int, "steps between checkpoints"),
    "draft_vocabulary": Option(int, "number of tokens that drafts are made of; 0: all", ""),
    "held_out": Option(int, "examples to evaluate on instead of training on them", ""),
    "max_tokens": Option(int, "cut longer examples there", ""),
}
