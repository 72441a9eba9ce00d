"""Recipes: frozen records that determine a training run, with the shape of the trained module and the options of users.

Nothing here imports torch, and neither do the modules of methods that hold recipes: ``--help`` shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from anabranch.errors import AdapterError, InputError
from anabranch.support.jsonfiles import is_whole, shown

__all__ = [
    "COMMON",
    "HELD_OUT",
    "MOST_RANK",
    "MOST_WIDTH",
    "RECOMPUTE",
    "LossWeights",
    "Option",
    "Recipe",
    "Shape",
    "TrainOptions",
    "Training",
]

WARMUP, HELD_OUT = 50, 64  # at most, where a run does not say how many
MOST_RANK = 1024  # of terms that tune a target
MOST_WIDTH = 1 << 16
S = TypeVar("S", bound="Shape")


@dataclass(frozen=True)
class TrainOptions:
    """Length, batch size, schedule and memory of a training run.

    batch_tokens      padded text tokens of a step
    warmup            steps until the peak learning rate; None: a tenth of the steps, at most ``WARMUP``
    accumulate        parts that a step's batch is split into; their gradients are added, which bounds the memory
    lr                peak learning rate
    segment           positions trained at a time; bounds the memory
    target_format     stored: the target as it was loaded; int8: products with its layers in int8 while training, faster
                      on a CPU that is slow in bf16; nf4: its layers in 4 bits while training (QLoRA), less memory
    recompute         keep each layer's input only, and compute the layer again for its gradient
    keep_states       run the frozen target over each example only once and keep its states: "exact", or in 8 bits
                      ("int8"); "none": do not. On a CPU they are in a file in the run's folder, on a GPU in its memory
                      as they are
    evaluate_every    steps between evaluations; 0: six evaluations per run, but every 10 to 200 steps
    evaluate_rows     held-out examples in each of these evaluations; the final one uses all
    checkpoint_every  steps between checkpoints
    patience          stop after this many evaluations without gain and keep the best evaluation's weights; 0: train to
                      the end and keep the last weights
    """

    epochs: float = 3.0
    batch_tokens: int = 2048
    lr: float = 1e-3
    warmup: int | None = None
    schedule: Literal["cosine", "linear"] = "cosine"
    weight_decay: float = 0.0
    clip: float = 1.0
    segment: int = 128
    keep_states: Literal["none", "exact", "int8"] = "none"
    seed: int = 0
    evaluate_every: int = 0
    evaluate_rows: int = 48
    checkpoint_every: int = 100
    accumulate: int = 1
    recompute: bool = False
    target_format: Literal["stored", "int8", "nf4"] = "stored"
    patience: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "lr", "clip"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} must be greater than 0, got {getattr(self, name)}")
        lowest = {"batch_tokens": 1, "segment": 1, "warmup": 0, "evaluate_every": 0, "checkpoint_every": 1}
        lowest |= {"accumulate": 1, "patience": 0}
        for name, low in lowest.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise InputError(f"{name} must be at least {low}, got {value}")
        if self.schedule not in ("cosine", "linear"):
            raise InputError(f"schedule must be cosine or linear, got {self.schedule!r}")
        if self.keep_states not in ("none", "exact", "int8"):
            raise InputError(f"keep_states must be none, exact or int8, got {self.keep_states!r}")
        if self.target_format not in ("stored", "int8", "nf4"):
            raise InputError(f"target_format must be stored, int8 or nf4, got {self.target_format!r}")

    def warmup_of(self, steps: int) -> int:
        """The steps until the peak learning rate, in a run of so many."""
        return min(WARMUP, steps // 10) if self.warmup is None else self.warmup


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the result of a training run, besides target and data.

    config            the method's config: the shape of its module
    loss              the method's loss weights
    draft_vocabulary  size of the draft vocabulary, the most frequent tokens of the completions; 0: all tokens
    held_out          number of examples for evaluation only; None: a tenth of them, at most ``HELD_OUT``
    max_tokens        maximum length of an example; longer ones are cut
    init              "shipped": start from the adapter that ships for the target, if there is one, and take its shape;
                      "": start from fresh weights
    given             fields of ``config`` that the user has set: they are kept where a shape is taken from an adapter
    """

    config: Any
    loss: Any
    options: TrainOptions = field(default_factory=TrainOptions)
    draft_vocabulary: int = 0
    held_out: int | None = None
    max_tokens: int = 1024
    init: Literal["", "shipped"] = ""
    given: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name, low in (("draft_vocabulary", 0), ("held_out", 0), ("max_tokens", 16)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise InputError(f"{name} must be at least {low}, got {value}")

    def held_out_of(self, examples: int) -> int:
        """The number of held-out examples among so many."""
        if self.held_out is not None:
            return self.held_out
        return min(HELD_OUT, max(1, examples // 10)) if examples > 1 else 0

    def changed(self, options: Mapping[str, Option], given: Mapping[str, Any]) -> Recipe:
        """A copy with the ``given`` values of ``options``. Raises InputError."""
        if unknown := [name for name in given if name not in options]:
            raise InputError(f"there is no option {unknown[0]!r}; options are {', '.join(options)}")
        parts: dict[str, dict[str, Any]] = {"config": {}, "loss": {}, "options": {}, "": {}}
        for name, value in given.items():
            option = options[name]
            parts[option.part][option.field or name] = value
        whole = parts.pop("")
        whole["given"] = self.given.union(parts["config"])
        return replace(self, **whole, **{name: replace(getattr(self, name), **part) for name, part in parts.items()})


@dataclass(frozen=True)
class Option:
    """A value of a recipe that users can override.

    kind   type of the value
    help   one line of help
    part   the part of the recipe that has it: ``config``, ``loss`` or ``options``, or "" for the recipe itself
    field  its name there, if different
    """

    kind: type[int] | type[float] | type[bool] | type[str]
    help: str
    part: Literal["config", "loss", "options", ""] = "options"
    field: str = ""

    def of(self, recipe: Recipe, name: str) -> Any:
        """The value that a recipe has for this option, which is called ``name``."""
        return getattr(self._record(recipe), self.field or name)

    def choices(self, recipe: Recipe, name: str) -> tuple[str, ...]:
        """The values that this option can have; empty where they are not a few texts."""
        hint = get_type_hints(type(self._record(recipe)))[self.field or name]
        return get_args(hint) if get_origin(hint) is Literal else ()

    def _record(self, recipe: Recipe) -> Any:
        return getattr(recipe, self.part) if self.part else recipe


@dataclass(frozen=True)
class Training:
    """A command of ``anabranch train``: recipes, the first of which is the default, and what users can override.

    title    what is trained, in adapter cards and help texts
    options  by name; a command that builds tables has options and no recipes
    adjust   (values by name) -> the same with values that follow from them
    """

    title: str
    options: Mapping[str, Option]
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    adjust: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda given: given

    def recipe(self, name: str | None = None, given: Mapping[str, Any] | None = None) -> Recipe:
        """The recipe of a name (default: the first) with the ``given`` values. Raises InputError."""
        chosen = next(iter(self.recipes)) if name is None else name
        if chosen not in self.recipes:
            raise InputError(f"there is no recipe {chosen!r}; recipes are {', '.join(self.recipes)}")
        return self.recipes[chosen].changed(self.options, self.adjust(given or {}))


# the options of every recipe
COMMON: dict[str, Option] = {
    "epochs": Option(float, "passes over the data"),
    "lr": Option(float, "peak learning rate"),
    "batch_tokens": Option(int, "padded tokens per step"),
    "schedule": Option(str, "cosine or linear"),
    "warmup": Option(int, "steps until the peak learning rate (default: a tenth of the steps, at most 50)"),
    "segment": Option(int, "positions trained at a time; fewer need less memory"),
    "keep_states": Option(
        str,
        "keep the target's states for later epochs, on a CPU in a file in the run's folder: none, exact, or int8, in "
        "half the space",
    ),
    "seed": Option(int, "seed of the initial weights and the order of batches"),
    "evaluate_every": Option(int, "steps between evaluations; 0: six per run"),
    "checkpoint_every": Option(int, "steps between checkpoints"),
    "accumulate": Option(int, "split each batch into this many parts and add their gradients; needs less memory"),
    "target_format": Option(
        str,
        "stored; int8: multiply by the target's layers in int8 (faster on a CPU that is slow in bf16); "
        "nf4: hold them in 4 bits",
    ),
    "patience": Option(int, "stop after this many evaluations without gain and keep the best weights; 0: never"),
    "draft_vocabulary": Option(int, "draft only this many tokens, the most frequent ones; 0: all", ""),
    "held_out": Option(int, "examples set aside for evaluation (default: a tenth, at most 64)", ""),
    "max_tokens": Option(int, "cut longer examples to this many tokens", ""),
}

# an option of the methods whose training passes through several layers
RECOMPUTE: dict[str, Option] = {
    "recompute": Option(bool, "compute layers again for their gradients instead of keeping them; needs less memory"),
}


@dataclass(frozen=True)
class LossWeights:
    """The base class of the weights of a loss; ``decay`` and ``soft`` mean the same in all that have them.

    least  the least values of others
    """

    least: ClassVar[tuple[tuple[str, float], ...]] = ()

    def __post_init__(self) -> None:
        decay, soft = getattr(self, "decay", 1.0), getattr(self, "soft", 0.0)
        if not 0 < decay <= 1:
            raise InputError(f"decay must be greater than 0 and at most 1, got {decay}")
        if not 0 <= soft <= 1:
            raise InputError(f"soft must be from 0 to 1, got {soft}")
        for name, low in self.least:
            if not getattr(self, name) >= low:
                raise InputError(f"{name} must be at least {low}, got {getattr(self, name)}")


@dataclass(frozen=True)
class Shape:
    """The base class of shapes of trained modules, which are stored as JSON with the weights.

    Fields are whole numbers, choices (``Literal``), true or false, or texts.

    ranges  the least and the greatest value of each whole number
    """

    ranges: ClassVar[Mapping[str, tuple[int, int]]] = {}

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for name in (each.name for each in fields(self)):
            hint, value = hints[name], getattr(self, name)
            if get_origin(hint) is Literal and value not in (allowed := get_args(hint)):
                raise InputError(f"{name} must be one of {', '.join(allowed)}, got {shown(value)}")
            if hint is bool and not isinstance(value, bool):
                raise InputError(f"{name} must be true or false, got {shown(value)}")
            if hint is int and not is_whole(value, *(limits := self.ranges[name])):
                raise InputError(f"{name} must be a whole number from {limits[0]} to {limits[1]}, got {shown(value)}")

    def to_dict(self) -> dict[str, Any]:
        """As stored in adapter_config.json."""
        return asdict(self)

    @classmethod
    def from_dict(cls: type[S], record: Any) -> S:
        """From adapter_config.json. Raises AdapterError for unknown or malformed fields."""
        known = {each.name for each in fields(cls)}
        if unknown := sorted(set(record) - known):
            raise AdapterError(
                f"adapter_config.json has the unknown field {shown(unknown[0])}; it may come from a newer anabranch"
            )
        try:
            return cls(**record)
        except (InputError, TypeError) as error:
            raise AdapterError(f"adapter_config.json is malformed: {error}") from error
