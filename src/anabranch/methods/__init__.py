"""Methods, each in its own folder or file, and their registry. The rest of the library reads the entries (``Method``).

The registry is imported when one of its names is first used: it imports torch, and ``--help`` does without it.
Modules called ``recipes``, ``lora`` and ``tables`` import no torch: they say what can be trained (``training``).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anabranch.learning.recipe import Training
    from anabranch.methods.registry import (
        AUTO,
        Drafter,
        Method,
        Needs,
        Observation,
        Row,
        Spec,
        load_plugin,
        make_drafter,
        methods,
        parse_spec,
        register,
        resolve_spec,
    )

__all__ = [
    "AUTO",
    "TRAININGS",
    "Drafter",
    "Method",
    "Needs",
    "Observation",
    "Row",
    "Spec",
    "load_plugin",
    "make_drafter",
    "methods",
    "parse_spec",
    "register",
    "resolve_spec",
    "training",
]

# the commands of ``anabranch train`` that make what methods need: the method, and where its ``Training`` is
TRAININGS = {
    "datastore": ("rest", "tables.DATASTORE"),
    "draft-model": ("draft_model", "draft_model.recipes.TRAINING"),
    "eagle": ("eagle", "eagle.recipes.TRAINING"),
    "hydra": ("hydra", "hydra.recipes.TRAINING"),
    "lora": ("", "lora.TRAINING"),
    "medusa": ("medusa", "medusa.recipes.TRAINING"),
    "medusa2": ("medusa2", "medusa.recipes.TUNING"),
    "ngram": ("ngram", "tables.NGRAMS"),
    "space": ("space", "space.recipes.TRAINING"),
    "streams": ("streams", "streams.recipes.TRAINING"),
}


def training(command: str) -> Training:
    """The options and recipes of ``anabranch train COMMAND``; the command is one of ``TRAININGS``."""
    module, _, name = TRAININGS[command][1].rpartition(".")
    recipe: Training = getattr(import_module(f"{__name__}.{module}"), name)
    return recipe


def __getattr__(name: str) -> Any:
    if name in __all__:
        from anabranch.methods import registry

        return getattr(registry, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
