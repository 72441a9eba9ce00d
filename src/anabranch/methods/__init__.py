"""Methods, each in its own folder or file, and their registry. The rest of the library reads the entries (``Method``).

The registry is imported when one of its names is first used: it imports torch, and ``--help`` does without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anabranch.methods.registry import (
        AUTO,
        Drafter,
        Method,
        Observation,
        Row,
        Spec,
        Taps,
        load_plugin,
        make_drafter,
        methods,
        parse_spec,
        register,
        resolve_spec,
    )

__all__ = [
    "AUTO",
    "Drafter",
    "Method",
    "Observation",
    "Row",
    "Spec",
    "Taps",
    "load_plugin",
    "make_drafter",
    "methods",
    "parse_spec",
    "register",
    "resolve_spec",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from anabranch.methods import registry

        return getattr(registry, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
