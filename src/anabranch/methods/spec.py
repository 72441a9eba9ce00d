"""A drafter's specification as a value: parsed once where text comes in, printed back to the same text.

none
prompt_lookup:tokens=10,ngram=3
streams:tree=32,prune=16
streams:tree=auto                  the load decides how many nodes are drafted and verified, none at all included
streams+prompt_lookup              their trees merged under one node budget
auto                               every method that is a default and has its trained module, as the load decides
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from torch import nn

from anabranch.errors import InputError
from anabranch.methods.base import Drafter, Method
from anabranch.methods.combined import CombinedDrafter
from anabranch.methods.settings import Settings
from anabranch.model.decoder import Decoder

__all__ = ["AUTO", "Part", "Spec", "build", "parse", "resolve"]

AUTO = "auto"
NODES = 32  # of a merged tree, where no part says how many


@dataclass(frozen=True)
class Part:
    """One method with its settings."""

    method: Method
    settings: Settings

    def __str__(self) -> str:
        """As users write it."""
        settings = str(self.settings)
        return f"{self.method.name}:{settings}" if settings else self.method.name


@dataclass(frozen=True)
class Spec:
    """One or several methods; none at all stands for "auto", which ``resolve`` replaces."""

    parts: tuple[Part, ...] = ()

    def __str__(self) -> str:
        """What ``parse`` reads."""
        return "+".join(map(str, self.parts)) or AUTO

    @property
    def auto(self) -> bool:
        """Whether this still has to be resolved for a target and what is trained for it."""
        return not self.parts

    @property
    def plain(self) -> bool:
        """Whether this is plain decoding."""
        return len(self.parts) == 1 and not self.parts[0].method.combines and not fields(self.parts[0].settings)


def parse(text: str | Spec, registry: Sequence[Method]) -> Spec:
    """Read a specification. Raises InputError for a name or a setting that does not exist."""
    if isinstance(text, Spec):
        return text
    if not isinstance(text, str):
        raise InputError(f"a drafter must be a string such as 'streams' or 'prompt_lookup', got {text!r}")
    if text.strip() == AUTO:
        return Spec()
    parts = tuple(_part(part, registry) for part in text.split("+"))
    if len({part.method.name for part in parts}) < len(parts):
        raise InputError(f"the drafter {text!r} names a method twice; name each once")
    if len(parts) > 1 and (alone := [part.method.name for part in parts if not part.method.combines]):
        raise InputError(f"the drafter {alone[0]!r} cannot be combined with others; name it alone")
    return Spec(parts)


def _part(text: str, registry: Sequence[Method]) -> Part:
    name, _, rest = text.partition(":")
    name = name.strip()
    method = next((method for method in registry if method.name == name), None)
    if method is None:
        known = ", ".join(method.name for method in registry)
        raise InputError(f"there is no drafter {name!r}; drafters are {known}, combined with '+', and {AUTO}")
    return Part(method, method.settings.parse(rest, name))


def module_of(method: Method, modules: Sequence[nn.Module | None]) -> nn.Module | None:
    """The one of some trained modules that a method decodes with."""
    if method.trained is None:
        return None
    return next((module for module in modules if isinstance(module, method.trained.module)), None)


def resolve(spec: Spec, modules: Sequence[nn.Module | None], registry: Sequence[Method]) -> Spec:
    """What "auto" stands for where these modules are there; other specifications are returned as they are."""
    if not spec.auto:
        return spec
    usable = [m for m in registry if m.default and (m.trained is None or module_of(m, modules) is not None)]
    return Spec(tuple(Part(method, method.settings.under_load()) for method in usable))


def build(spec: Spec, target: Decoder, modules: Sequence[nn.Module | None]) -> Drafter:
    """The drafter of a resolved specification. Raises CapabilityError for one that cannot be had here."""
    assert not spec.auto, "auto is resolved first"
    drafters = [part.method.build(target, part.settings, module_of(part.method, modules)) for part in spec.parts]
    if len(drafters) == 1:
        return drafters[0]
    budgets = [part.settings.budget for part in spec.parts]
    nodes = next((budget for budget in budgets if budget is not None), NODES)
    return CombinedDrafter(drafters, nodes=nodes, adaptive=any(part.settings.adaptive for part in spec.parts))
