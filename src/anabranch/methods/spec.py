"""The specification of a drafter: parsed once and printed back to the same text.

none
prompt_lookup:tokens=10,ngram=3
streams:tree=32,prune=16
streams:tree=auto                  the number of drafted and verified nodes follows the load and may be zero
streams+prompt_lookup              their trees, merged under one node budget
auto                               all default methods whose trained module is available, following the load
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
NODES = 32  # budget of a merged tree, if no part has a preference


@dataclass(frozen=True)
class Part:
    """One method with its settings."""

    method: Method
    settings: Settings

    def __str__(self) -> str:
        """The text of this part."""
        settings = str(self.settings)
        return f"{self.method.name}:{settings}" if settings else self.method.name


@dataclass(frozen=True)
class Spec:
    """One or several methods; an empty one stands for "auto", which ``resolve`` replaces."""

    parts: tuple[Part, ...] = ()

    def __str__(self) -> str:
        """The text that ``parse`` reads."""
        return "+".join(map(str, self.parts)) or AUTO

    @property
    def auto(self) -> bool:
        """Whether this is "auto" and still has to be resolved."""
        return not self.parts

    @property
    def plain(self) -> bool:
        """Whether this is plain decoding."""
        return len(self.parts) == 1 and not self.parts[0].method.combines and not fields(self.parts[0].settings)


def parse(text: str | Spec, registry: Sequence[Method]) -> Spec:
    """Parse a specification. Raises InputError for a name or a setting that does not exist."""
    if isinstance(text, Spec):
        return text
    if not isinstance(text, str):
        raise InputError(f"a drafter must be a string such as 'streams' or 'prompt_lookup', got {text!r}")
    if text.strip() == AUTO:
        return Spec()
    parts = tuple(_part(part, registry) for part in text.split("+"))
    if len({part.method.name for part in parts}) < len(parts):
        raise InputError(f"the drafter {text!r} names a method twice; name each once")
    if len(parts) > 1 and (separate := [part.method.name for part in parts if not part.method.combines]):
        raise InputError(f"the drafter {separate[0]!r} cannot be combined with others; use it by itself")
    return Spec(parts)


def _part(text: str, registry: Sequence[Method]) -> Part:
    name, _, rest = text.partition(":")
    name = name.strip()
    method = next((method for method in registry if method.name == name), None)
    if method is None:
        if name == AUTO:
            raise InputError(f"the drafter {AUTO!r} takes no settings and cannot be combined; use it by itself")
        known = ", ".join(method.name for method in registry)
        raise InputError(f"there is no drafter {name!r}; drafters are {known}, combined with '+', and {AUTO}")
    return Part(method, method.settings.parse(rest, name))


def module_of(method: Method, modules: Sequence[nn.Module | None]) -> nn.Module | None:
    """The trained module of a method among several, or None."""
    trained = method.trained or method.reads
    return None if trained is None else next((found for found in modules if isinstance(found, trained.module)), None)


def resolve(spec: Spec, modules: Sequence[nn.Module | None], registry: Sequence[Method]) -> Spec:
    """Resolve "auto", given the trained modules; other specifications are returned unchanged."""
    if not spec.auto:
        return spec
    usable = [m for m in registry if m.default and (m.trained is None or module_of(m, modules) is not None)]
    return Spec(tuple(Part(method, method.settings.under_load()) for method in usable))


def build(spec: Spec, target: Decoder, modules: Sequence[nn.Module | None]) -> Drafter:
    """Build the drafter of a resolved specification. Raises CapabilityError for one that is not supported here."""
    assert not spec.auto, "auto is resolved first"
    drafters = [part.method.build(target, part.settings, module_of(part.method, modules)) for part in spec.parts]
    if len(drafters) == 1:
        return drafters[0]
    budgets = [part.settings.budget for part in spec.parts]
    nodes = next((budget for budget in budgets if budget is not None), NODES)
    return CombinedDrafter(drafters, nodes=nodes, adaptive=any(part.settings.adaptive for part in spec.parts))
