"""Values of options that Tab completes in a shell; none of them imports torch. Paths are completed by the shell."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import typer

__all__ = ["drafters", "one_of", "recipes", "shipped", "shipped_or_default", "starts"]

Complete = Callable[[str], list[str]]


def one_of(*values: str) -> Complete:
    """Completes one of these."""

    def complete(incomplete: str) -> list[str]:
        return _starting(values, incomplete)

    return complete


def drafters(incomplete: str) -> list[str]:
    """The name of a drafter, also after a plus sign or a label."""
    from anabranch.cli.help import methods

    at = max(incomplete.rfind(sign) for sign in "+=") + 1 if ":" not in incomplete.rpartition("+")[2] else -1
    if at < 0:  # inside settings
        return []
    before, names = incomplete[:at], [name for name, _ in methods()]
    return _starting([before + name for name in (names if "+" in before else ["auto", *names])], incomplete)


def shipped(incomplete: str) -> list[str]:
    """The name of an adapter that comes with the package."""
    folder = Path(__file__).parents[1] / "adapters" / "shipped"
    return _starting(sorted(path.name for path in folder.iterdir() if path.is_dir()), incomplete)


def starts(incomplete: str) -> list[str]:
    """Start points of a training: the shipped adapter for the model, one by name, or fresh weights."""
    return [*_starting(["default", "none"], incomplete), *shipped(incomplete)]


def recipes(ctx: typer.Context, incomplete: str) -> list[str]:
    """The recipes of the command that is completed."""
    from anabranch.methods import TRAININGS, training

    name = str(ctx.info_name)
    return _starting(training(name).recipes if name in TRAININGS else (), incomplete)


def shipped_or_default(incomplete: str) -> list[str]:
    """Complete the names that ``info`` describes: the default model, or an adapter by name."""
    return [*_starting(["default"], incomplete), *shipped(incomplete)]


def _starting(values: Iterable[str], incomplete: str) -> list[str]:
    return [value for value in values if value.startswith(incomplete)]
